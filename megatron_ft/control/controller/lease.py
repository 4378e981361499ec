"""Which controller of a run is obeyed: epochs, granted by a file in the run's folder.

A controller holds the lock of that file as long as it lives, so that no other one starts beside it, and has written a
higher number into it than all before. Every answer it gives bears that number. Agents take no answer below the highest
they have seen, so that one that was thought dead and wakes is not obeyed; it also looks at the file before it decides.
"""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.errors import ControlError

_FILE = "epoch"
_MAX_BYTES = 20


@dataclass(frozen=True, slots=True)
class Epoch:
    """One controller's time. Ends with its process, or with ``release``."""

    number: int
    """From 1, rising."""
    _path: Path
    _descriptor: int

    @property
    def is_over(self) -> bool:
        """Whether a later controller has begun its own."""
        try:
            return _read(self._path) != self.number
        except FileNotFoundError:
            return True

    def release(self) -> None:
        """Let another controller begin."""
        os.close(self._descriptor)


def begin_epoch(folder: Path) -> Epoch:
    """Be the one controller of the run whose control folder is ``folder``.

    Raises:
        ControlError: another one lives, or the file is damaged.
    """
    path = folder / _FILE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ControlError(f"{path}: another controller of this run lives; there is one at a time") from None
    try:
        number = _read(path) + 1
        os.pwrite(descriptor, b"%d\n" % number, 0)
        os.fsync(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return Epoch(number, path, descriptor)


def _read(path: Path) -> int:
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES)
    text = content.strip()
    if text and not text.isdigit():
        raise ControlError(f"{path}: must hold a number, holds {content!r}")
    return int(text or b"0")
