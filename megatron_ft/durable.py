"""What outlives the machine: names in a folder, and whole files, once they are on the disk."""

import os
from pathlib import Path


def fsync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable: a file that was created or renamed there is found after a power cut.

    Source: the manual page fsync(2): that a file is on the disk does not mean that its entry in the folder is.

    Raises:
        OSError: the disk refused.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file, which is made if there is none. It is on the disk when this returns; where it cannot be,
    nothing of it is in the file. One process at a time may append so.

    Raises:
        OSError: the disk refused.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        begin = os.fstat(descriptor).st_size
        try:
            write_whole(descriptor, line)
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, begin)
            raise
    finally:
        os.close(descriptor)


def write_whole(descriptor: int, content: bytes) -> None:
    """Write all bytes; a disk that becomes full takes a part before it refuses. Raises OSError."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def replace_file(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Put a file in the place of an earlier one, if there is one: whoever reads, also after a power cut, finds one of
    them whole. It is on the disk when this returns. One process at a time may write a file so.

    Args:
        mode: of the file, without what the process's umask takes away.

    Raises:
        OSError: the disk refused.
    """
    new = path.with_name(f"{path.name}.tmp")
    new.unlink(missing_ok=True)  # of a process that was killed
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    os.replace(new, path)
    fsync_folder(path.parent)
