"""Alerts: figures of a run against limits."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertLimits:
    """Limits of alerts, the values of ``telemetry.alert_<name>``; None turns an alert off."""

    single_loss_survival: float | None = None
    """Lowest probability that every expert has a replica left when one failure domain is lost."""
    stall_share: float | None = None
    """Largest share of iteration time that training waits for captures."""
    windows_behind: float | None = None
    """Largest number of windows that are due since the last commit."""
    free_disk_share: float | None = None
    """Lowest free share of the run's file system."""
    slowest_rank_over_median: float | None = None
    """Largest ratio of the slowest rank's time to the median rank's for the same work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertFigures:
    """Figures of a run; None where they are not known."""

    single_loss_survival: float | None = None
    stall_share: float | None = None
    windows_behind: float | None = None
    free_disk_share: float | None = None
    slowest_rank_over_median: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A figure and its limit."""

    name: str
    """Name in ``AlertLimits``."""
    value: float
    limit: float
    is_beyond: bool
    """Whether the figure is beyond its limit; a figure at its limit is not."""


_LOWEST = ("single_loss_survival", "free_disk_share")
"""Figures with a lower limit."""
NAMES = ("single_loss_survival", "stall_share", "windows_behind", "free_disk_share", "slowest_rank_over_median")
"""All figures with an alert."""


def judge(limits: AlertLimits, figures: AlertFigures) -> Iterator[Alert]:
    """Compare every figure that is known and has a limit."""
    for name in NAMES:
        limit: float | None = getattr(limits, name)
        value: float | None = getattr(figures, name)
        if limit is not None and value is not None:
            is_beyond = value < limit if name in _LOWEST else value > limit
            yield Alert(name=name, value=value, limit=limit, is_beyond=is_beyond)


def windows_behind(iteration: int, *, since_iteration: int, interval_iterations: int) -> float:
    """Return the number of windows that are due since the last commit: between 0 and 1 in normal operation.

    Args:
        iteration: newest iteration of the run.
        since_iteration: iteration of the last commit of a window, or of the plan of windows if that is newer.
        interval_iterations: iterations from the start of a window to the start of the next.
    """
    assert interval_iterations >= 1, f"a window every {interval_iterations} iterations"
    return max(0, iteration - since_iteration) / interval_iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowest:
    """The rank that takes longest."""

    rank: int
    over_median: float
    """Time of that rank over the time of the median rank; 1 if all ranks take the same time."""


def slowest(seconds: Sequence[float]) -> Slowest | None:
    """Find the slowest of the ranks whose time is known; None if there are fewer than two.

    The median is the lower one, so that of two ranks the slower is compared with the faster.

    Args:
        seconds: time of each rank for the same work; 0 where it is not known.
    """
    known = [value for value in seconds if value > 0.0]
    if len(known) < 2:
        return None
    longest = max(known)
    return Slowest(rank=seconds.index(longest), over_median=longest / statistics.median_low(known))
