"""Measures the duration of work on a device."""

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def synchronize(device: torch.device) -> None:
    """Wait until the device has completed its queued work. Return at once if the device is a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """Call ``call``. Return its result and its duration in seconds, up to the end of its work on the device."""
    synchronize(device)
    began = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - began


def seconds_of(call: Callable[[], object], device: torch.device, *, repeats: int = 5) -> float:
    """Return the median duration of ``call`` in seconds, up to the end of its work on the device. A first call is not
    measured."""
    rows = [timed(call, device)[1] for _ in range(repeats + 1)]
    return statistics.median(rows[1:])
