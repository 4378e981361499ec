"""Storage of snapshot windows: in a local folder, or in an object store or file system that fsspec opens by URL.

Readers never see an incomplete file. In a local folder, a file is written under a temporary name, synced and renamed,
and the directory is synced. In an object store (``ATOMIC_PUTS``), one put writes the whole object, which readers see
only when it is complete. In other file systems, a file is written under a temporary name and then moved.
"""

import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_ft.errors import CheckpointError, MegatronFtError
from megatron_ft.snapshot.storage.files import fsync_directory, naming, write_atomically

ATOMIC_PUTS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory")
"""URL protocols of object stores, in which an object appears completely or not at all."""

TRASH_PREFIX = ".deleted_"
"""Prefix of the names of directories that are being deleted."""

Chunks = Iterable[bytes | memoryview]


class LocalBackend:
    """Storage in a folder of a local or mounted file system.

    In all methods, ``directory`` is the name of a directory in the folder, or empty for the folder itself.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def describe(self, directory: str, name: str = "") -> str:
        """Return the full path of a directory or file, for error messages."""
        return str(self.folder / directory / name)

    def write(self, directory: str, name: str, chunks: Chunks) -> None:
        """Write a file atomically: readers see its former or new content. Raises OSError, or an error of ``chunks``."""
        write_atomically(self._make(directory), name, chunks)

    def exists(self, directory: str, name: str) -> bool:
        """Return whether a file, directory or link with this name exists, even a link without a target."""
        return os.path.lexists(self.folder / directory / name)

    def open(self, directory: str, name: str) -> "_LocalSource":
        """Open a regular file; links are not followed. Raises OSError, or CheckpointError for other kinds of files."""
        return _LocalSource(self.folder / directory / name)

    def list_directories(self) -> list[str]:
        """Return the names of all directories in the folder, but not of links. Empty if the folder does not exist."""
        if not self.folder.is_dir():
            return []
        return sorted(entry.name for entry in os.scandir(self.folder) if entry.is_dir(follow_symlinks=False))

    def move(self, directory: str, target: str) -> None:
        """Rename a directory. Raises OSError if this fails."""
        os.rename(self.folder / directory, self.folder / target)
        fsync_directory(self.folder)

    def delete(self, directory: str) -> None:
        """Delete a directory. After a crash, remaining files do not count as a window. Raises OSError if this fails."""
        # Rename first, so that a crash leaves no partly deleted window. Also delete remains of earlier crashes.
        self._empty_trash()
        self.move(directory, TRASH_PREFIX + directory)
        self._empty_trash()

    def _empty_trash(self) -> None:
        for name in self.list_directories():
            if name.startswith(TRASH_PREFIX):
                shutil.rmtree(self.folder / name)

    def _make(self, directory: str) -> Path:
        path = self.folder / directory
        self.folder.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=True)
        # ``exist_ok`` also accepts a link to a directory, through which the window would be written to another folder.
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise CheckpointError(f"{path}: is a link, not a directory")
        for parent in (self.folder.parent, self.folder):
            fsync_directory(parent)
        return path


class _LocalSource:
    """A regular file that is read by position. It is not a memory map, in which a device error would cause a signal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Opening a named pipe without ``O_NONBLOCK`` would wait for a writer.
        flags = os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0)
        self._descriptor = os.open(path, flags)
        status = os.fstat(self._descriptor)
        self.num_bytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CheckpointError(f"{path}: must be a regular file")

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes from ``offset`` on. Raises OSError if the file ends first."""
        done = 0
        with naming(self._path):
            while done < len(target):
                count = os.preadv(self._descriptor, [target[done:]], offset + done)
                if count == 0:
                    raise OSError(f"{self._path}: ends too early, at byte {offset + done}")
                done += count

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


@contextmanager
def _client_errors(where: str) -> Iterator[None]:
    """Turn any error of an fsspec client in the ``with`` block into an OSError that names ``where``."""
    try:
        yield
    except (OSError, MegatronFtError):
        raise
    except Exception as error:
        # Errors of botocore, aiohttp and others derive directly from Exception.
        raise OSError(f"{where}: {type(error).__name__}: {error}") from error


class _RemoteBackend:
    """Storage at an fsspec URL: an object store or another file system. The methods are those of ``LocalBackend``."""

    def __init__(self, url: str) -> None:
        """Open the URL. Raises CheckpointError if its client is not installed, or refuses the URL."""
        import fsspec  # type: ignore[import-untyped]

        try:
            self._files, self._root = fsspec.core.url_to_fs(url.rstrip("/"))
        except Exception as error:
            raise CheckpointError(f"{url}: {error}") from error
        self._url = url.rstrip("/")
        self._atomic_puts = url.partition("://")[0] in ATOMIC_PUTS

    def describe(self, directory: str, name: str = "") -> str:
        return "/".join(part for part in (self._url, directory, name) if part)

    def write(self, directory: str, name: str, chunks: Chunks) -> None:
        # With atomic puts, one put writes the whole object. Otherwise the file is moved when it is complete.
        target, where = self._path(directory, name), self.describe(directory, name)
        temporary = target if self._atomic_puts else self._path(directory, f".{name}.tmp")
        with _client_errors(where):
            self._files.makedirs(self._path(directory), exist_ok=True)
        self._put(temporary, chunks, where)
        if temporary != target:
            with _client_errors(where):
                self._files.mv(temporary, target)

    def _put(self, path: str, chunks: Chunks, where: str) -> None:
        with _client_errors(where):
            file = self._files.open(path, "wb")
        try:
            # Errors of the iteration over ``chunks`` pass unchanged, because they are not errors of the client.
            for chunk in chunks:
                with _client_errors(where):
                    file.write(chunk)
        except BaseException:
            with _client_errors(where):
                self._abandon(file, path)
            raise
        with _client_errors(where):
            file.close()

    def _abandon(self, file: Any, path: str) -> None:
        # ``close`` would complete the upload with the written part. So discard this part and mark the file as closed.
        from fsspec.spec import AbstractBufferedFile  # type: ignore[import-untyped]

        if isinstance(file, AbstractBufferedFile):
            file.discard()
            file.closed = True
        else:
            file.close()
            self._files.rm(path)

    def exists(self, directory: str, name: str) -> bool:
        with _client_errors(self.describe(directory, name)):
            # fsspec caches listings, but other ranks may have written to the same prefix since then.
            self._files.invalidate_cache()
            return bool(self._files.exists(self._path(directory, name)))

    def open(self, directory: str, name: str) -> "_RemoteSource":
        where = self.describe(directory, name)
        with _client_errors(where):
            return _RemoteSource(self._files.open(self._path(directory, name), "rb"), where)

    def list_directories(self) -> list[str]:
        try:
            with _client_errors(self._url):
                self._files.invalidate_cache()
                entries = self._files.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory")

    def move(self, directory: str, target: str) -> None:
        # A store without a rename moves one object after the other. If a move is interrupted, the window is incomplete.
        with _client_errors(self.describe(directory)):
            self._files.mv(self._path(directory), self._path(target), recursive=True)

    def delete(self, directory: str) -> None:
        with _client_errors(self.describe(directory)):
            self._files.rm(self._path(directory), recursive=True)

    def _path(self, *parts: str) -> str:
        return "/".join([self._root, *(part for part in parts if part)])


class _RemoteSource:
    """A file or object at an fsspec URL that is read by position."""

    def __init__(self, file: Any, where: str) -> None:
        self._file = file
        self._where = where
        self.num_bytes = int(file.size)

    def read_into(self, offset: int, target: memoryview) -> None:
        with _client_errors(self._where):
            self._file.seek(offset)
            done = 0
            while done < len(target):
                chunk = self._file.read(len(target) - done)
                if not chunk:
                    raise OSError(f"{self._where}: ends too early, at byte {offset + done}")
                target[done : done + len(chunk)] = chunk
                done += len(chunk)

    def close(self) -> None:
        with _client_errors(self._where):
            self._file.close()


Backend = LocalBackend | _RemoteBackend
Source = _LocalSource | _RemoteSource


def open_backend(folder: Path | str) -> Backend:
    """Return the backend for a path or URL. Raises CheckpointError if no client for the URL's protocol is installed."""
    text = str(folder)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    return _RemoteBackend(text) if "://" in text else LocalBackend(Path(text))
