"""Seconds of work on a device."""

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """The result of ``call``, and the seconds it took with its work on the device."""
    synchronize(device)
    began = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - began


def seconds_of(call: Callable[[], object], device: torch.device, *, repeats: int = 5) -> float:
    """Median seconds of ``call`` with its work on the device, after one call that is not counted."""
    rows = [timed(call, device)[1] for _ in range(repeats + 1)]
    return statistics.median(rows[1:])
