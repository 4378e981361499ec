"""A page that is written again while its run goes on."""

import time
from collections.abc import Callable
from pathlib import Path

from megatron_ft.telemetry.read import EVENTS_FILE, METRICS_FILE

POLL_SECONDS = 0.5
"""From one look at the files to the next."""
SHARE = 0.1
"""Of the time, at most, that making pages takes."""

Sizes = tuple[int, ...]


def sizes(run_dir: Path) -> Sizes:
    """Bytes of the files that grow while a run goes on; 0 for one that is not there."""
    return tuple(_size(run_dir / name) for name in (EVENTS_FILE, METRICS_FILE))


def follow(
    run_dir: Path,
    write: Callable[[], bool],
    *,
    every_seconds: float,
    patience_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> bool:
    """Write the page now and whenever the run has reported more, until it has ended.

    Args:
        write: writes the page and says whether the run has ended.
        every_seconds: no sooner than this after the page before.
        patience_seconds: how long nothing new may come.

    Returns:
        Whether the run has ended; False where nothing new came for too long.
    """
    while True:
        seen, began = sizes(run_dir), clock()
        if write():
            return True
        due = clock() + max(every_seconds, (clock() - began) * (1 / SHARE - 1))
        until = max(due, clock() + patience_seconds)
        while clock() < due or sizes(run_dir) == seen:
            if clock() >= until:
                return False
            wait(POLL_SECONDS)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
