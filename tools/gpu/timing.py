"""Times work on a device."""

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def synchronize(device: torch.device) -> None:
    """Wait until the device has done its queued work; a CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """Return the result of ``call`` and its duration in seconds, including its work on the device."""
    synchronize(device)
    began = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - began


def seconds_of(call: Callable[[], object], device: torch.device, *, repeats: int = 5) -> float:
    """Return the median duration in seconds of ``call`` including its work on the device, after one uncounted call."""
    rows = [timed(call, device)[1] for _ in range(repeats + 1)]
    return statistics.median(rows[1:])
