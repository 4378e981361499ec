"""When somebody should look at a run: figures against limits."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertLimits:
    """What is still in order; None watches for nothing. Each is the key ``telemetry.alert_<name>``."""

    single_loss_survival: float | None = None
    """Lowest probability that every expert has a copy left when one failure domain is lost."""
    stall_share: float | None = None
    """Largest share of iterations' time that training waits for captures."""
    windows_behind: float | None = None
    """Most windows that may be due without one being committed."""
    free_disk_share: float | None = None
    """Lowest share of the run's file system that is free."""
    slowest_rank_over_median: float | None = None
    """Most that the slowest rank may take for the same work, over what the median rank takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertFigures:
    """How a run is; None where that is not known."""

    single_loss_survival: float | None = None
    stall_share: float | None = None
    windows_behind: float | None = None
    free_disk_share: float | None = None
    slowest_rank_over_median: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One figure beside its limit."""

    name: str
    """As in ``AlertLimits``."""
    value: float
    limit: float
    is_beyond: bool
    """Whether the figure is beyond the limit; at the limit it is not."""


_LOWEST = ("single_loss_survival", "free_disk_share")
"""Figures whose limit is the lowest that is in order."""
NAMES = ("single_loss_survival", "stall_share", "windows_behind", "free_disk_share", "slowest_rank_over_median")
"""All figures that are watched."""


def judge(limits: AlertLimits, figures: AlertFigures) -> Iterator[Alert]:
    """Every figure that is known and has a limit."""
    for name in NAMES:
        limit: float | None = getattr(limits, name)
        value: float | None = getattr(figures, name)
        if limit is not None and value is not None:
            is_beyond = value < limit if name in _LOWEST else value > limit
            yield Alert(name=name, value=value, limit=limit, is_beyond=is_beyond)


def windows_behind(iteration: int, *, since_iteration: int, interval_iterations: int) -> float:
    """Windows that were due after the newest that was committed; in a calm run they come to 1 and start again at 0.

    Args:
        iteration: newest of the run.
        since_iteration: when a window was committed last, or when the plan of windows came into force.
        interval_iterations: from the start of a window to the start of the next.
    """
    assert interval_iterations >= 1, f"a window every {interval_iterations} iterations"
    return max(0, iteration - since_iteration) / interval_iterations
