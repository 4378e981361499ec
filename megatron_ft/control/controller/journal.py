"""Journal of a controller's inputs, and the files that the controller must write before it acts.

A new controller reads the journal and reaches the state of the earlier controller. Each line is a JSON object; the
first line contains the ``format``. An entry is written before it has any effect, so it survives the death of the
controller. ``sync`` makes an entry survive a power failure.

A controller acts only on what is on disk: its journal, its decisions and its epoch. On a full disk, the controller
waits, reports the wait, and continues as soon as space is free. Its clock stops during the wait, so the wait causes no
timeout. Training continues, but lost ranks or nodes are not replaced. If the run's folder was deleted or moved away,
the job ends, because a new controller could not find the journal. No other files (logs, metrics, events) cause a wait.
"""

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megatron_ft.control.membership.state import Outcome
from megatron_ft.durable import write_whole
from megatron_ft.errors import ControlError
from megatron_ft.framing import Message
from megatron_ft.serde import parse_json

_LOOK_SECONDS = 0.2
_FULL = (errno.ENOSPC, errno.EDQUOT)

Result = TypeVar("Result")


class CannotDecide(ControlError):
    """Raised if the controller can record no more decisions. The job then ends with the result ``outcome``."""

    def __init__(self, reason: str, outcome: Outcome = Outcome.FAILED) -> None:
        super().__init__(reason)
        self.outcome = outcome


class StandingClock:
    """A clock that can be stopped and continued. One thread stops it; any thread may read it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # One tuple that is replaced as a whole, because threads that serve calls read it without a lock.
        self._stopped: tuple[float | None, float] = (None, 0.0)
        """The time at which the clock was stopped (None while it runs), and the total seconds of earlier stops."""

    def __call__(self) -> float:
        """Return the time in seconds, without the time during which the clock was stopped."""
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
    """Carries out the writes of one thread in order. Repeats a write as long as the disk is full."""

    def __init__(self, run_dir: Path, on_wait: Callable[[str], None], on_go_on: Callable[[float], None]) -> None:
        """Remember the run's folder, so that its move or deletion can be detected later.

        Args:
            on_wait: called when a wait for disk space begins, with the run's folder and the error.
            on_go_on: called when a wait has ended, with its length in seconds.
        """
        self._run_dir = run_dir
        self._place = self._look()
        self._on_wait, self._on_go_on = on_wait, on_go_on
        self._end_requested = threading.Event()
        self.clock = StandingClock(time.monotonic)

    def request_end(self) -> None:
        """End all waits for disk space, because the job must end at once. May be called in any thread."""
        self._end_requested.set()

    def do(self, write: Callable[[], Result]) -> Result:
        """Call ``write``, and repeat the call while the disk is full. A call that fails must leave no partial effect.

        Raises:
            CannotDecide: the run's folder was moved or deleted, or the job must end while the disk is full.
            OSError: the disk fails in another way.
        """
        problem = self._try(write)
        if not isinstance(problem, OSError):
            return problem
        began = time.monotonic()
        # If the clock continued, every heartbeat and deadline would be overdue when space is free again.
        self.clock.stop()
        self._on_wait(f"{self._run_dir}: {problem}")
        while isinstance(problem, OSError):
            if self._end_requested.wait(_LOOK_SECONDS):
                raise CannotDecide("the job was asked to stop while it waited for disk space", Outcome.INTERRUPTED)
            problem = self._try(write)
        self.clock.go_on()
        self._on_go_on(time.monotonic() - began)
        return problem

    def _try(self, write: Callable[[], Result]) -> Result | OSError:
        # In a deleted folder, a write through an open descriptor succeeds, but no later process finds what was written.
        self.check_place()
        try:
            return write()
        except OSError as error:
            self.check_place()
            if error.errno not in _FULL:
                raise
            return error

    def check_place(self) -> None:
        """Raise CannotDecide if the run's folder is not at its path any more."""
        try:
            # The inode is compared, because another folder may be at the path now.
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


FORMAT = 2
"""Version of the format, increased when the meaning of an entry changes. A journal of another version is refused."""

Do = Callable[[Callable[[], None]], None]


def _at_once(write: Callable[[], None]) -> None:
    write()


class Journal:
    """Appends entries to one file. Only the controller that has the run's lease (a file lock, ``main``) may write."""

    def __init__(self, path: Path, do: Do = _at_once) -> None:
        """Open or create the journal at ``path``, remove an incomplete last line, and read the complete lines into
        ``entries``.

        Args:
            do: calls a function that writes, and calls it again while the disk is full, see ``EssentialWrites.do``.

        Raises:
            ControlError: a complete line is not a JSON object, or another version of this package wrote the journal.
        """
        content = path.read_bytes() if path.exists() else b""
        # The controller that wrote the incomplete line died before the line had any effect, so the line is dropped.
        whole = content[: content.rfind(b"\n") + 1]
        lines = [_parse(line, path, number) for number, line in enumerate(whole.splitlines(), start=1)]
        if lines and lines[0].get("format") != FORMAT:
            raise ControlError(
                f"{path}: format={lines[0].get('format', 1)}: must be {FORMAT}: another version of this package wrote "
                "it. Start the job again: the new job continues from the newest checkpoint"
            )
        self.entries = lines[1:]
        # Not O_APPEND: a write that failed in part is repeated at the same offset.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._descriptor, len(whole))
        self._num_bytes = len(whole)
        self._unsynced = b""
        """Bytes at the end of the file that may not be on disk yet."""
        self._do = do
        if not lines:
            self.append({"format": FORMAT})

    def first(self, name: str, value: float) -> float:
        """Return the value of ``name`` in the journal. If there is none, write and return ``value``."""
        for entry in self.entries:
            if name in entry:
                return float(entry[name])
        self.append({name: value})
        return value

    def append(self, entry: Message) -> None:
        """Write one entry. It then survives the death of this process, but not yet a power failure.

        Raises:
            OSError: the entry could not be written; no part of it is in the file.
        """
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        self._do(lambda: self._write(self._num_bytes, line))
        self._num_bytes += len(line)
        self._unsynced += line

    def _write(self, begin: int, content: bytes) -> None:
        try:
            os.lseek(self._descriptor, begin, os.SEEK_SET)
            write_whole(self._descriptor, content)
        except OSError:
            # On a full disk, a part of the line may have been written, which a reader would take for damage.
            os.ftruncate(self._descriptor, begin)
            raise

    def sync(self) -> None:
        """Force all entries to the disk.

        Raises:
            OSError: an entry cannot be written.
        """
        self._do(self._sync)
        self._unsynced = b""

    def _sync(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError:
            # The kernel reports a failure once and may drop the data that it could not write: write them again.
            self._write(self._num_bytes - len(self._unsynced), self._unsynced)
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _parse(line: bytes, path: Path, number: int) -> Message:
    try:
        entry = parse_json(line)
    except ValueError as error:
        raise ControlError(f"{path}, line {number}: is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ControlError(f"{path}, line {number}: must be a JSON object, not {type(entry).__name__}")
    return entry
