"""Writes files that survive a power failure. A file is hashed while it is written, and renamed after it is synced.

All bytes of checkpoints are written by ``_write``, so that a test can make any single write fail.
"""

import contextlib
import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import xxhash

from megatron_ft.durable import fsync_folder

CHUNK_BYTES = 256 << 10
"""Number of bytes that one read returns when a file is hashed or copied. They fit into a core's second-level cache."""
_WRITE_BACK_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Entry of a checkpoint's manifest for one file."""

    name: str
    """Path of the file below the checkpoint directory, with ``/`` as separator."""
    num_bytes: int
    """Size of the file in bytes."""
    xxh3_128: str
    """Hexadecimal checksum of the content."""


def _write(descriptor: int, data: memoryview) -> int:
    return os.write(descriptor, data)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError of the ``with`` block that has no path, such as an error of a file descriptor call."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(path)
        raise


class HashedFile(io.RawIOBase):
    """A new file that hashes and counts the bytes written to it.

    The constructor fails if the file exists. :meth:`commit` syncs the content. ``failure`` is the error of a failed
    write. It is stored because a library between caller and file may replace this error by another exception. With
    ``writes_back``, the disk begins to write before :meth:`commit`, so the sync is short.
    """

    def __init__(self, directory: Path, name: str, *, writes_back: bool = False) -> None:
        super().__init__()
        self.name = name
        self.path = directory / name
        self.num_bytes = 0
        self.failure: OSError | None = None
        self._hash = xxhash.xxh3_128()
        self._writes_back, self._num_written_back = writes_back and hasattr(os, "posix_fadvise"), 0
        # Do not follow a link, which could point outside the folder.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        self._descriptor = os.open(self.path, flags, 0o644)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.num_bytes

    def write(self, data: Any) -> int:
        """Write all bytes of ``data``, which may be any buffer. Raises OSError if this fails."""
        view = memoryview(data).cast("B")
        written = 0
        try:
            with naming(self.path):
                # write(2) takes at most 2 GiB at a time, and less when the disk is nearly full.
                while written < len(view):
                    written += _write(self._descriptor, view[written:])
        except OSError as error:
            self.failure = error
            raise
        self._hash.update(view)
        self.num_bytes += len(view)
        if self._writes_back and self.num_bytes - self._num_written_back >= _WRITE_BACK_BYTES:
            # This makes Linux start to write these dirty pages to disk, and does not wait for the disk.
            start, self._num_written_back = self._num_written_back, self.num_bytes
            os.posix_fadvise(self._descriptor, start, self.num_bytes - start, os.POSIX_FADV_DONTNEED)
        return len(view)

    def commit(self) -> FileEntry:
        """Sync and close the file, and return its manifest entry."""
        with naming(self.path):
            # On a network file system or with a quota, a write may fail only here. Then no entry must be returned.
            os.fsync(self._descriptor)
        self.close()
        return FileEntry(name=self.name, num_bytes=self.num_bytes, xxh3_128=self._hash.hexdigest())

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def fsync_directory(directory: Path) -> None:
    """Sync a directory, so that files created in it or moved into it survive a power failure."""
    with naming(directory):
        fsync_folder(directory)


def write_atomically(directory: Path, name: str, content: bytes | Iterable[bytes | memoryview]) -> FileEntry:
    """Write ``content``, bytes or an iterator of chunks, atomically to the file ``name``: readers see the old or the
    new content. Raises OSError if the disk is full or fails, or an error of the iterator. After an error, an existing
    file is unchanged."""
    temporary, entry = write_temporary(directory, name, content)
    try:
        # Rename after the content is synced, so that a crash leaves the complete new file or the former state.
        os.rename(temporary, directory / name)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(directory)
    return entry


def write_temporary(
    directory: Path, name: str, content: bytes | Iterable[bytes | memoryview]
) -> tuple[Path, FileEntry]:
    """Write and sync ``content`` (bytes, or an iterator of chunks) to a temporary file. Return the path of this file,
    which the caller renames to ``name``, and the manifest entry of ``name``. Raises OSError if the disk is full or
    fails, and all errors of the iterator. After an error, there is no temporary file."""
    temporary = f".{name}.{os.getpid()}.tmp"
    (directory / temporary).unlink(missing_ok=True)
    try:
        with HashedFile(directory, temporary) as file:
            for chunk in (content,) if isinstance(content, bytes) else content:
                file.write(chunk)
            entry = file.commit()
    except BaseException:
        (directory / temporary).unlink(missing_ok=True)
        raise
    return directory / temporary, replace(entry, name=name)


def write_file(directory: Path, name: str, content: bytes) -> FileEntry:
    """Write and sync a new file ``name``, and return its manifest entry."""
    with HashedFile(directory, name) as file:
        file.write(content)
        return file.commit()


def entry_of(directory: Path, name: str) -> FileEntry:
    """Return the manifest entry of a file that other code has written. Raises OSError if it cannot be read."""
    with (directory / name).open("rb", buffering=0) as file:
        return FileEntry(name=name, num_bytes=os.fstat(file.fileno()).st_size, xxh3_128=hash_file(file))


def hash_file(file: IO[bytes]) -> str:
    """Return the checksum of ``file``, which is open in binary mode, from its present position to its end."""
    digest = xxhash.xxh3_128()
    for chunk in read_chunks(file):
        digest.update(chunk)
    return digest.hexdigest()


def read_chunks(file: IO[bytes], num_bytes: int | None = None) -> Iterator[memoryview]:
    """Yield chunks of ``file`` from its present position: ``num_bytes`` bytes, or all bytes up to the end of the file.

    All chunks share one buffer, so a chunk is valid only until the next chunk is read. New memory for each chunk would
    cost more time than the reading. If the file ends early, fewer bytes are yielded.
    """
    view = memoryview(bytearray(CHUNK_BYTES if num_bytes is None else min(CHUNK_BYTES, num_bytes)))
    left = num_bytes
    while left != 0:
        count = file.readinto(view if left is None else view[:left])  # type: ignore[attr-defined]
        if not count:
            return
        yield view[:count]
        left = None if left is None else left - count
