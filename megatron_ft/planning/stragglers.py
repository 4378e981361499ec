"""Which rank holds the others up: everybody's time for the same work, compared."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowest:
    """The rank that takes longest."""

    rank: int
    over_median: float
    """Its time over the median rank's; 1 where all take the same."""


def slowest(seconds: Sequence[float]) -> Slowest | None:
    """Of the ranks whose time is known; None where there are fewer than two of them.

    The median is the lower one, so that of two ranks the slower is compared with the faster.

    Args:
        seconds: by rank, what each took for the same work; 0 where that is not known.
    """
    known = [value for value in seconds if value > 0.0]
    if len(known) < 2:
        return None
    longest = max(known)
    return Slowest(rank=seconds.index(longest), over_median=longest / statistics.median_low(known))
