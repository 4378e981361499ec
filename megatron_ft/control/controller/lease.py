"""The lease of a run: a lock on a file in the run's folder, which one controller at a time can hold.

A controller holds the lock as long as it lives, so no other controller of the run can start. It writes an epoch into
the file that is higher than all earlier ones, and puts this epoch into every answer. Agents reject an answer with an
epoch below the highest that they have seen, and a controller reads the file again before it decides. Both fence an old
controller that was presumed dead.
"""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.errors import ControlError

_FILE = "epoch"
_MAX_BYTES = 20


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease of one controller. It ends with the process, or with ``release``."""

    epoch: int
    """Number of this controller, counted from 1 over all controllers of the run."""
    _path: Path
    _descriptor: int

    @property
    def is_stale(self) -> bool:
        """Whether a later controller has the lease."""
        try:
            # Read again each time: on a file system that has lost the lock a later controller has written its epoch.
            return _read(self._path) != self.epoch
        except FileNotFoundError:
            return True

    def release(self) -> None:
        """Release the lease, so that another controller can acquire it."""
        os.close(self._descriptor)

    @classmethod
    def acquire(cls, folder: Path) -> "Lease":
        """Acquire the lease of the run whose control folder is ``folder``.

        Raises:
            ControlError: another controller lives, or the file is damaged.
        """
        path = folder / _FILE
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ControlError(f"{path}: another controller of this run is alive; only one may run at a time") from None
        try:
            # In place: a renamed file would leave the lock on the old inode. Epochs rise, so no digit of the old one
            # stays.
            epoch = _read(path) + 1
            os.pwrite(descriptor, b"%d\n" % epoch, 0)
            os.fsync(descriptor)
        except BaseException:
            # On a full disk ``EssentialWrites`` tries again, and this lock would refuse it.
            os.close(descriptor)
            raise
        return cls(epoch, path, descriptor)


def _read(path: Path) -> int:
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES)
    text = content.strip()
    if text and not text.isdigit():
        raise ControlError(f"{path}: must contain a number, contains {content!r}")
    return int(text or b"0")
