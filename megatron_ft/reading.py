"""Reading files that somebody else may have written: whatever goes wrong is one error that names the file."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_ft.errors import DataError, MegatronFtError


@contextmanager
def reading(
    path: Path | str, kind: type[MegatronFtError] = DataError, *, what: str = "cannot be read"
) -> Iterator[None]:
    """Make an error of ``kind`` that names ``path`` of whatever is raised inside; the project's own pass unchanged.

    Parsers raise far more than they document when bytes are damaged: MemoryError for a length, RecursionError for
    nesting, zlib.error, NotImplementedError... The panics of libraries in Rust are no ``Exception`` at all.
    """
    try:
        yield
    except MegatronFtError:
        raise
    except OSError as error:
        raise kind(f"{path}: {what}: {error.strerror or error}") from error
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error).strip()
        raise kind(f"{path}: {what}: {type(error).__name__}{f': {reason}' if reason else ''}") from error


def read_bytes(path: Path, *, max_bytes: int) -> bytes:
    """The content of a regular file; its size is looked at before memory is taken.

    Raises:
        DataError: it cannot be read, is no regular file, or is larger than ``max_bytes``.
    """
    with reading(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not hold the reader up
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{path}: must be a regular file")
            content = b"" if status.st_size > max_bytes else file.read(max_bytes + 1)
            if status.st_size > max_bytes or len(content) > max_bytes:
                raise DataError(f"{path}: {status.st_size} bytes: must be at most {max_bytes}")
            return content
