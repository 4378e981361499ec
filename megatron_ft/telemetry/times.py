"""Times and durations of records as far as they can be: what no wall clock shows is not known."""

_EARLIEST_SECONDS, _LATEST_SECONDS = 1e9, 1e11
_LONGEST_SECONDS = 1e9


def instant(seconds: float | None) -> float | None:
    """A time since 1970; None where a record has none, or one that no wall clock shows."""
    return seconds if seconds is not None and _EARLIEST_SECONDS <= seconds <= _LATEST_SECONDS else None


def duration(seconds: float | None) -> float | None:
    """Seconds that something took; None where that is not known, or cannot be."""
    return seconds if seconds is not None and 0.0 <= seconds <= _LONGEST_SECONDS else None
