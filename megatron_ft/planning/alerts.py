"""Compares measured values of a run with configured limits. An alert is the result for one value."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertLimits:
    """Limits of the values in ``AlertFigures``, from the keys ``telemetry.alert_<name>``; None turns an alert off."""

    single_loss_survival: float | None = None
    """Smallest probability that every expert has a replica left after the loss of one failure domain."""
    stall_share: float | None = None
    """Largest share of an iteration's duration that training may spend waiting for the capture of a snapshot."""
    windows_behind: float | None = None
    """Largest time without a commit of a snapshot window. The unit is the time from one window's start to the next."""
    free_disk_share: float | None = None
    """Smallest allowed share of free space in the file system that contains the run."""
    slowest_rank_over_median: float | None = None
    """Largest ratio of the slowest rank's time to the median rank's time for the same work."""
    lost_token_share: float | None = None
    """Largest share of tokens whose expert updates were lost in recoveries, or would be lost in a recovery now."""

    def judge(self, figures: "AlertFigures") -> "Iterator[Alert]":
        """Compare each value in ``figures`` with its limit; values that are None or have no limit are left out."""
        for name in NAMES:
            limit: float | None = getattr(self, name)
            value: float | None = getattr(figures, name)
            if limit is not None and value is not None:
                is_beyond = value < limit if name in _LOWEST else value > limit
                yield Alert(name=name, value=value, limit=limit, is_beyond=is_beyond)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertFigures:
    """Measured values of a run that are compared with ``AlertLimits``; None if a value is unknown."""

    single_loss_survival: float | None = None
    stall_share: float | None = None
    windows_behind: float | None = None
    free_disk_share: float | None = None
    slowest_rank_over_median: float | None = None
    lost_token_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Result of comparing one value of ``AlertFigures`` with its limit in ``AlertLimits``."""

    name: str
    """Name of the compared value, which is a field of ``AlertFigures`` and ``AlertLimits``."""
    value: float
    limit: float
    is_beyond: bool
    """Whether ``value`` violates ``limit``; a value equal to its limit does not violate it."""


_LOWEST = ("single_loss_survival", "free_disk_share")
"""Names of the values whose limit is a minimum. The limits of all other values are maxima."""
NAMES = (
    "single_loss_survival",
    "stall_share",
    "windows_behind",
    "free_disk_share",
    "slowest_rank_over_median",
    "lost_token_share",
)
"""Names of all values that can have an alert."""


def windows_behind(iteration: int, *, since_iteration: int, interval_iterations: int) -> float:
    """Return the number of window intervals that have passed since the last commit of a snapshot window.

    Args:
        iteration: newest iteration of the run.
        since_iteration: iteration of the last commit, or the one in which the windows were planned if this is later.
        interval_iterations: iterations from the start of a window to the start of the next.
    """
    assert interval_iterations >= 1, f"interval_iterations={interval_iterations} must be at least 1"
    return max(0, iteration - since_iteration) / interval_iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowest:
    """Slowest rank, and the ratio of its time to the time of the median rank."""

    rank: int
    over_median: float
    """Time of the slowest rank divided by the time of the median rank; 1 if all ranks take the same time."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Slowest | None":
        """Return the slowest rank; None if the times of fewer than two ranks are known.

        The median of an even number of times is the lower of the two middle times.

        Args:
            seconds: time of each rank for the same work; 0 if it is not known.
        """
        known = [value for value in seconds if value > 0.0]
        if len(known) < 2:
            return None
        longest = max(known)
        return cls(rank=seconds.index(longest), over_median=longest / statistics.median_low(known))
