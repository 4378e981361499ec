"""Writes that decisions rest on: they wait for room on a full disk, and end where the run's folder is gone.

A controller acts only upon what is on disk: its journal, the decisions, the epoch. On a full disk it waits, reports it,
and continues as soon as there is room; its clock is stopped meanwhile, so that nothing is late because of that.
Training continues, but nothing that happens to ranks or nodes is handled. In a folder that was deleted or moved away
nothing that is written would be found again: the job ends with that reason. Logs, metrics and events are not
essential: they never hold up a decision.
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
    """Nothing more can be decided: the job ends with ``outcome``."""

    def __init__(self, reason: str, outcome: Outcome = Outcome.FAILED) -> None:
        super().__init__(reason)
        self.outcome = outcome


class StandingClock:
    """A clock that can be stopped for a while and continues from there. One thread stops it, any may read it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # One tuple, replaced at once: threads that serve calls read it without a lock.
        self._stopped: tuple[float | None, float] = (None, 0.0)
        """Reading at which it was stopped, and how far it is behind."""

    def __call__(self) -> float:
        """Seconds."""
        stopped_at, behind = self._stopped
        return (self._clock() if stopped_at is None else stopped_at) - behind

    def stop(self) -> None:
        """Stand still."""
        self._stopped = (self._clock(), self._stopped[1])

    def go_on(self) -> None:
        """Run again."""
        stopped_at, behind = self._stopped
        assert stopped_at is not None, "stopped"
        self._stopped = (None, behind + self._clock() - stopped_at)


class EssentialWrites:
    """Carries out writes of one thread, in order."""

    def __init__(self, run_dir: Path, on_wait: Callable[[str], None], on_go_on: Callable[[float], None]) -> None:
        """Begin with the folder that there is now.

        Args:
            on_wait: called once for each wait with what cannot be written and why.
            on_go_on: called with the seconds that the wait took.
        """
        self._run_dir = run_dir
        self._place = self._look()
        self._on_wait, self._on_go_on = on_wait, on_go_on
        self._end_requested = threading.Event()
        self.clock = StandingClock(time.monotonic)

    def request_end(self) -> None:
        """Wait for room no longer: the job is to end at once. Safe in any thread."""
        self._end_requested.set()

    def do(self, write: Callable[[], Result]) -> Result:
        """Do ``write`` as often as it takes: what it has written in part must not count.

        Raises:
            CannotDecide: the run's folder is gone, or the job is to end while there is no room.
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
                raise CannotDecide("asked to end while the controller waited for room", Outcome.INTERRUPTED)
            problem = self._try(write)
        self.clock.go_on()
        self._on_go_on(time.monotonic() - began)
        return problem

    def _try(self, write: Callable[[], Result]) -> Result | OSError:
        """The result of ``write``, or why there is no room for it."""
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
        """Raise CannotDecide where the run's folder is gone."""
        try:
            # Compared by inode: another folder may have taken the path.
            is_there = self._look() == self._place
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise CannotDecide(
                f"the run's folder was deleted or moved away while the job ran: {self._run_dir}; how the job continues "
                "cannot be kept, so it ends; continue from a copy of its checkpoints, or start again"
            )

    def _look(self) -> tuple[int, int]:
        about = os.stat(self._run_dir)
        return about.st_dev, about.st_ino
