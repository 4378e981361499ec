"""Durable files: checksums are computed during writing; files are renamed only when they are on disk.

All bytes of a checkpoint pass ``_write``, so that a test can make any single write call fail.
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

CHUNK_BYTES = 1 << 20
"""Bytes read at a time when a file is hashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint as its manifest lists it."""

    name: str
    """Path below the checkpoint directory, with ``/``."""
    num_bytes: int
    """Size."""
    xxh3_128: str
    """Hexadecimal checksum of the content."""


def _write(descriptor: int, data: memoryview) -> int:
    return os.write(descriptor, data)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError: system calls on descriptors do not name their file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(path)
        raise


class HashedFile(io.RawIOBase):
    """A new file that counts and hashes the bytes written to it.

    Refuses to replace an existing file. :meth:`commit` makes the content durable. ``failure`` keeps the first failed
    write, for writers that replace it by an error of their own.
    """

    def __init__(self, directory: Path, name: str) -> None:
        super().__init__()
        self.name = name
        self.path = directory / name
        self.num_bytes = 0
        self.failure: OSError | None = None
        self._hash = xxhash.xxh3_128()
        # Without following a link, which could lead the write out of the folder.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        self._descriptor = os.open(self.path, flags, 0o644)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.num_bytes

    def write(self, data: Any) -> int:
        """Write all of ``data`` (any buffer) or raise OSError."""
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
        return len(view)

    def commit(self) -> FileEntry:
        """Flush to the device, close, and return the entry of the file."""
        with naming(self.path):
            # Delayed writing may fail only now (a network file system, a quota), and then there is nothing to describe.
            os.fsync(self._descriptor)
        self.close()
        return FileEntry(name=self.name, num_bytes=self.num_bytes, xxh3_128=self._hash.hexdigest())

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def fsync_directory(directory: Path) -> None:
    """Make names durable that were created in or moved into ``directory``."""
    with naming(directory):
        fsync_folder(directory)


def write_atomically(directory: Path, name: str, content: bytes | Iterable[bytes | memoryview]) -> FileEntry:
    """Write ``content``, whole or in chunks, to ``name``: readers see the old file or the new one, never a mixture.

    Raises OSError and leaves the old file unchanged when the disk is full or fails; errors of the chunks are passed on.
    """
    temporary = f".{name}.{os.getpid()}.tmp"
    (directory / temporary).unlink(missing_ok=True)
    try:
        with HashedFile(directory, temporary) as file:
            for chunk in (content,) if isinstance(content, bytes) else content:
                file.write(chunk)
            entry = file.commit()
        # The content is on the device before its name is: after a crash the name has all of it or does not exist.
        os.rename(directory / temporary, directory / name)
    except BaseException:
        (directory / temporary).unlink(missing_ok=True)
        raise
    fsync_directory(directory)
    return replace(entry, name=name)


def write_file(directory: Path, name: str, content: bytes) -> FileEntry:
    """Write a new durable file ``name`` and return its entry."""
    with HashedFile(directory, name) as file:
        file.write(content)
        return file.commit()


def hash_file(file: IO[bytes]) -> str:
    """Return the checksum of the rest of ``file``."""
    digest = xxhash.xxh3_128()
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()
