"""Writes on which decisions depend: they wait while the disk is full, and fail if the run's folder is gone.

A controller acts only on what is on disk: its journal, the decisions, the epoch. On a full disk it waits, reports that,
and continues as soon as space is free. Its clock is stopped meanwhile, so the wait causes no timeout. Training
continues, but losses of ranks or nodes are not handled. If the folder was deleted or moved away, nothing written there
could be found again, so the job ends with that reason. Logs, metrics and events are not essential: they never delay a
decision.
"""

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megatron_ft.control.membership.state import Outcome
from megatron_ft.errors import ControlError

_LOOK_SECONDS = 0.2
_FULL = (errno.ENOSPC, errno.EDQUOT)

Result = TypeVar("Result")


class CannotDecide(ControlError):
    """No more decisions are possible: the job ends with ``outcome``."""

    def __init__(self, reason: str, outcome: Outcome = Outcome.FAILED) -> None:
        super().__init__(reason)
        self.outcome = outcome


class StandingClock:
    """A clock that can be stopped and continued. One thread stops it; any thread may read it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # One tuple, replaced at once: threads that serve calls read it without a lock.
        self._stopped: tuple[float | None, float] = (None, 0.0)
        """Reading at which the clock was stopped, and how far it is behind."""

    def __call__(self) -> float:
        """Return the time in seconds."""
        stopped_at, behind = self._stopped
        return (self._clock() if stopped_at is None else stopped_at) - behind

    def stop(self) -> None:
        """Stop the clock."""
        self._stopped = (self._clock(), self._stopped[1])

    def go_on(self) -> None:
        """Let the clock run again."""
        stopped_at, behind = self._stopped
        assert stopped_at is not None, "stopped"
        self._stopped = (None, behind + self._clock() - stopped_at)


class EssentialWrites:
    """Carries out writes of one thread, in order."""

    def __init__(self, run_dir: Path, on_wait: Callable[[str], None], on_go_on: Callable[[float], None]) -> None:
        """Begin with the folder that exists now.

        Args:
            on_wait: called once for each wait, with the file and the error.
            on_go_on: called with the seconds that the wait took.
        """
        self._run_dir = run_dir
        self._place = self._look()
        self._on_wait, self._on_go_on = on_wait, on_go_on
        self._end_requested = threading.Event()
        self.clock = StandingClock(time.monotonic)

    def request_end(self) -> None:
        """End all waits for space, because the job must end at once. Safe in any thread."""
        self._end_requested.set()

    def do(self, write: Callable[[], Result]) -> Result:
        """Call ``write`` until it succeeds; a partial write must have no effect.

        Raises:
            CannotDecide: the run's folder is gone, or the job must end while the disk is full.
            OSError: the disk fails in another way.
        """
        problem = self._try(write)
        if not isinstance(problem, OSError):
            return problem
        began = time.monotonic()
        # Otherwise every heartbeat and deadline would be overdue when there is space again.
        self.clock.stop()
        self._on_wait(f"{self._run_dir}: {problem}")
        while isinstance(problem, OSError):
            if self._end_requested.wait(_LOOK_SECONDS):
                raise CannotDecide("asked to stop while the controller waited for free disk space", Outcome.INTERRUPTED)
            problem = self._try(write)
        self.clock.go_on()
        self._on_go_on(time.monotonic() - began)
        return problem

    def _try(self, write: Callable[[], Result]) -> Result | OSError:
        # A write through an open descriptor succeeds in a deleted folder, where no later process finds it.
        self.check_place()
        try:
            return write()
        except OSError as error:
            self.check_place()
            if error.errno not in _FULL:
                raise
            return error

    def check_place(self) -> None:
        """Raise CannotDecide if the run's folder is gone."""
        try:
            # Compared by inode: another folder may have taken the path.
            is_there = self._look() == self._place
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise CannotDecide(
                f"the run's folder {self._run_dir} was deleted or moved away while the job ran. The controller "
                "cannot record its decisions, so the job ends. Continue from a copy of the run's checkpoints, or "
                "start again"
            )

    def _look(self) -> tuple[int, int]:
        about = os.stat(self._run_dir)
        return about.st_dev, about.st_ino
