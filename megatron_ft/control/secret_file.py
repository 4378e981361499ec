"""Files that contain a job's token: owned by the job's user, mode 0600, replaced atomically."""

import os
import stat
from pathlib import Path

from megatron_ft.durable import replace_file
from megatron_ft.errors import ControlError

MAX_BYTES = 64 * 1024


def write_secret(path: Path, content: bytes) -> None:
    """Write a file with mode 0600, replace an earlier file, and return when the new file is on disk."""
    replace_file(path, content, mode=0o600)


def read_secret(path: Path) -> bytes:
    """Read a file that ``write_secret`` has written.

    Raises:
        FileNotFoundError: the file does not exist.
        ControlError: the file belongs to another user, other users can access it, or it is too large or not regular.
    """
    try:
        # The flags refuse a symbolic link, and prevent a wait for the writer if the file is a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ControlError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        # The open descriptor is checked, not the path, which may name another file now.
        _check(path, os.fstat(descriptor))
        content = os.read(descriptor, MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MAX_BYTES:
        raise ControlError(f"{path}: must have at most {MAX_BYTES} bytes")
    return content


def _check(path: Path, about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid():
        raise ControlError(f"{path}: must be a regular file that belongs to the user who started the job")
    if stat.S_IMODE(about.st_mode) & 0o077:
        raise ControlError(
            f"{path}: has mode {stat.S_IMODE(about.st_mode):04o}, which lets other users access it; must be 0600"
        )
