"""Seconds of work on a device."""

import statistics
import time
from collections.abc import Callable

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: torch.device, *, repeats: int = 5) -> float:
    """Median seconds of ``call`` with its work on the device, after one call that is not counted."""
    rows = []
    for _ in range(repeats + 1):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        rows.append(time.perf_counter() - began)
    return statistics.median(rows[1:])
