"""Formats durations, sizes, counts and names of tensors for readers."""

import math
from collections.abc import Collection


def seconds(duration: float) -> str:
    """Format a duration, e.g. ``0.42 s``, ``12.3 s``, ``4:07``, ``1:02:03`` or ``3d 04:05:06``."""
    if duration < 60 or not math.isfinite(duration):
        return f"{duration:.2f} s" if duration < 10 else f"{duration:.1f} s"
    return clock(duration)


def clock(duration: float) -> str:
    """Format a duration in the form of a clock, e.g. ``0:07``, ``4:07``, ``1:02:03`` or ``3d 04:05:06``."""
    minutes, second = divmod(int(duration), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}:{second:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 iteration``, ``2 iterations``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def every(iterations: int) -> str:
    """Format an interval: ``every iteration``, ``every 5 iterations``."""
    return "every iteration" if iterations == 1 else f"every {iterations:,} iterations"


def memory_size(num_bytes: float) -> str:
    """Format a size of memory: ``512 B``, ``1.5 GiB`` (powers of two)."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} PiB"


def size(num_bytes: float) -> str:
    """Format a size: ``512 B``, ``3.2 MB`` (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def unlike_tensors(missing: Collection[str], unexpected: Collection[str]) -> str:
    """Format names of tensors, at most three of a kind: ``missing tensors: ['a']; unexpected tensors: ['b']``."""
    kinds = {"missing tensors": sorted(missing), "unexpected tensors": sorted(unexpected)}
    shown = {f"{kind}: {names[:3]}": len(names) for kind, names in kinds.items() if names}
    return "; ".join(f"{text} (the first 3 of {count})" if count > 3 else text for text, count in shown.items())
