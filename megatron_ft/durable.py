"""Durable writes: functions that write files and folder entries so that they survive a power failure."""

import os
from pathlib import Path

_CHUNK_BYTES = 1 << 16


def fsync_folder(folder: Path) -> None:
    """Make the entries of ``folder`` durable: a file that was created or renamed in it survives a power failure.

    Syncing a file does not sync its entry in the folder (manual page fsync(2)).

    Raises:
        OSError: the write failed.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file and sync the file. Create the file if it does not exist.

    If the write fails, no part of the line stays in the file. An incomplete last line, left by a writer that was
    killed, is removed first. Only one process at a time may append to a file with this function.

    Raises:
        OSError: the write failed.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        # Otherwise the new line would be joined to an incomplete last line, and both would be lost.
        cut_half_line(descriptor)
        begin = os.fstat(descriptor).st_size
        try:
            write_whole(descriptor, line)
            os.fsync(descriptor)
        except OSError:
            # On a full disk, a part of the line may be in the file; the next line must not be appended to this part.
            os.ftruncate(descriptor, begin)
            raise
    finally:
        os.close(descriptor)


def cut_half_line(descriptor: int) -> int:
    """Remove an incomplete last line from a file open for reading and writing. Return the number of removed bytes.

    Raises:
        OSError: the file cannot be read or shortened.
    """
    size = end = os.fstat(descriptor).st_size
    while end > 0:
        # The file is searched from its end, because the log of a long run is large.
        start = max(0, end - _CHUNK_BYTES)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        end = start if newline < 0 else start + newline + 1
        if newline >= 0:
            break
    if end < size:
        os.ftruncate(descriptor, end)
    return size - end


def write_whole(descriptor: int, content: bytes) -> None:
    """Write all bytes of ``content`` to a file descriptor, in several system calls if necessary.

    Raises:
        OSError: a system call failed, e.g. on a full disk; a part of the bytes may have been written.
    """
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def replace_file(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replace or create a file atomically and sync it. Even after a power failure, it has the old or the new content.

    Only one process at a time may write a file with this function.

    Args:
        mode: permissions of the file, before the umask.

    Raises:
        OSError: the write failed.
    """
    new = path.with_name(f"{path.name}.tmp")
    new.unlink(missing_ok=True)  # left by a process that was killed
    # A symbolic link with this name is an error: the content may be secret, and the link may lead anywhere.
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        # The sync comes before the rename; otherwise a power failure could leave an empty file with this name.
        os.fsync(descriptor)
    os.replace(new, path)
    # The rename is durable only after a sync of the folder.
    fsync_folder(path.parent)
