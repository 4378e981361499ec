"""Moves the values of tensors from files to files, in small pieces, and verifies the files that it writes.

A tensor that a conversion does not change is never in memory: ``StoredValues`` names its bytes in files, and these
bytes are copied. ``VerifiedFiles`` flushes a file and reads it again in a thread, while the next file is written.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import TracebackType

import torch

from megatron_ft.errors import CheckpointError
from megatron_ft.snapshot.storage.files import (
    CHUNK_BYTES,
    FileEntry,
    HashedFile,
    fsync_directory,
    hash_file,
    naming,
    read_chunks,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Range of bytes of a file."""

    path: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredValues:
    """Describes where files contain the values of a tensor. The byte ranges ``spans``, one after another, contain the
    values in row-major order and in this machine's byte order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        num_bytes = sum(span.num_bytes for span in self.spans)
        assert num_bytes == prod(self.shape) * self.dtype.itemsize, f"{num_bytes} bytes of a tensor {self.shape}"

    def first_rows(self, num_rows: int) -> "StoredValues":
        """Return the first ``num_rows`` rows. The tensor must have at least as many rows."""
        shape = (num_rows, *self.shape[1:])
        left, spans = prod(shape) * self.dtype.itemsize, list[Span]()
        for span in self.spans:
            spans.append(replace(span, num_bytes=min(left, span.num_bytes)))
            left -= spans[-1].num_bytes
        return replace(self, shape=shape, spans=tuple(spans))

    def at(self, index: tuple[int, ...]) -> "StoredValues":
        """Return the elements with the given indices in the first dimensions. ``spans`` must have one byte range."""
        (span,), shape, position = self.spans, self.shape[len(index) :], 0
        for size, number in zip(self.shape, index, strict=False):
            position = position * size + number
        num_bytes = prod(shape) * self.dtype.itemsize
        span = replace(span, offset=span.offset + position * num_bytes, num_bytes=num_bytes)
        return replace(self, shape=shape, spans=(span,))

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes in pieces, each valid until the next piece is requested. Raise CheckpointError on failure."""
        for span in self.spans:
            left = span.num_bytes
            try:
                with span.path.open("rb", buffering=0) as file:
                    file.seek(span.offset)
                    for chunk in read_chunks(file, left):
                        left -= len(chunk)
                        yield chunk
            except OSError as error:
                raise CheckpointError(f"{span.path}: cannot be read: {error}") from error
            if left:
                raise CheckpointError(f"{span.path}: ends {left} bytes before the end of a tensor")

    def load(self) -> torch.Tensor:
        """Read the tensor into memory. Raise CheckpointError if the values cannot be read."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        view, position = bytes_of(whole), 0
        for chunk in self.chunks():
            view[position : position + len(chunk)] = chunk
            position += len(chunk)
        return whole


Values = torch.Tensor | StoredValues
"""Values of a tensor, in memory or in files. Both forms have ``shape`` and ``dtype``."""


def tensor_of(values: Values) -> torch.Tensor:
    """Return the values as a tensor in memory. Raise CheckpointError if they cannot be read."""
    return values.load() if isinstance(values, StoredValues) else values


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, without copying it."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def chunks_of(values: Values) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in pieces, row after row. A piece is valid until the next piece is requested."""
    if isinstance(values, StoredValues):
        yield from values.chunks()
        return
    view = bytes_of(values.contiguous())
    for start in range(0, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


class VerifiedFiles:
    """Writes and verifies the files of a folder, one after the other. A thread flushes each file, reads it again, and
    gives it its final name if the content is correct. Meanwhile, the caller can write one further file.

    This class is a context manager. The end of its ``with`` block waits for the thread. The thread calls ``completed``
    for each file that has its final name.
    """

    def __init__(self, directory: Path, completed: Callable[[FileEntry], None]) -> None:
        self._directory, self._completed = directory, completed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verify-files")
        self._pending: Future[None] | None = None

    def __enter__(self) -> "VerifiedFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            # After an error, the thread still completes the file that it is verifying, so that this file can be kept.
            self._thread.shutdown()

    @contextlib.contextmanager
    def new(self, name: str) -> Iterator[HashedFile]:
        """Open the file ``name`` for writing. The end of the ``with`` block passes the file to the thread.

        Raises:
            CheckpointError: the previous file does not contain what was written.
            OSError: this file or the previous file cannot be written.
        """
        file = HashedFile(self._directory, f".{name}.{os.getpid()}.tmp", writes_back=True)
        try:
            yield file
            self.wait()
        except BaseException:
            file.close()
            file.path.unlink(missing_ok=True)
            raise
        self._pending = self._thread.submit(self._complete, file, name)

    def wait(self) -> None:
        """Wait until all files are verified and have their final names. Raise the same errors as ``new``."""
        if self._pending is not None:
            self._pending.result()

    def _complete(self, file: HashedFile, name: str) -> None:
        path = self._directory / name
        try:
            written = file.commit()
            with file.path.open("rb", buffering=0) as again, naming(path):
                if hash_file(again) != written.xxh3_128:
                    raise CheckpointError(
                        f"{path}: does not contain what was written; check the disk and the memory of this machine"
                    )
            file.path.rename(path)
        except BaseException:
            file.close()
            file.path.unlink(missing_ok=True)
            raise
        fsync_directory(self._directory)
        self._completed(replace(written, name=name))
