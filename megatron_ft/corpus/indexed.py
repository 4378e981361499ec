"""Megatron's indexed dataset, a ``.bin`` file of tokens with an ``.idx`` file: writer, and reader of the index.

Layout of ``.idx``, little endian, as ``megatron.core.datasets.indexed_dataset`` (megatron-core 0.16.1) reads it: 9
bytes magic, ``uint64`` version 1, ``uint8`` code of the token format, ``uint64`` number S of sequences, ``uint64``
number D of entries of the document table; then ``int32[S]`` lengths in tokens, ``int64[S]`` byte offsets into ``.bin``,
and ``int64[D]`` the document table: the index of each document's first sequence, and S as the last of the D entries.
"""

import json
import os
import struct
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedWriter
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from megatron_ft.durable import fsync_folder
from megatron_ft.errors import DataError
from megatron_ft.serde import parse_json

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype] = {
    code: np.dtype(name) for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()
}
"""Integer formats of tokens, by their code in the header of ``.idx``. Codes 6 and 7 are floating-point formats."""
CHUNK = 1 << 20
"""Number of entries of the index that are read or written at a time."""
MAX_SEQUENCE_TOKENS = np.iinfo(np.int32).max


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the token format that Megatron's tools use: ``uint16`` for a vocabulary below 65,500, else ``int32``."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def bin_path(prefix: str | Path) -> Path:
    """Return the path of the dataset's file with the tokens."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return the path of the dataset's index file."""
    return Path(f"{prefix}.idx")


def tokenizer_path(prefix: str | Path) -> Path:
    """Return the path of the file with the fingerprint of the dataset's tokenizer. Only this project writes it."""
    return Path(f"{prefix}.tokenizer.json")


def check_tokenizer(prefix: str | Path, fingerprint: str) -> None:
    """Check that a job's tokenizer (``fingerprint``) is the one that wrote the dataset, if the dataset records it.

    Raises:
        DataError: the tokenizers differ, or the record of the tokenizer cannot be read.
    """
    path = tokenizer_path(prefix)
    try:
        stored = parse_json(path.read_bytes())["fingerprint"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: must contain the fingerprint of a tokenizer: {error}; write the dataset again"
        ) from None
    if stored != fingerprint:
        raise DataError(
            f"{prefix}: was written with another tokenizer (fingerprint {str(stored)[:40]}) than data.tokenizer "
            f"(fingerprint {fingerprint}). Set data.tokenizer and its files to the tokenizer of the dataset, or write "
            "the dataset again with tools/preprocess_data.py"
        )


class IndexedWriter:
    """Writes an indexed dataset, document by document. At the end of the ``with`` block, ``.bin`` and ``.idx`` appear.

    Until then both files have temporary names. They are deleted if the block raises an exception. ``.idx`` is renamed
    last, so if ``.idx`` exists, both files are complete.

    Raises:
        DataError: the files exist and ``overwrite`` is false, a file cannot be written, a token does not fit
            ``dtype``, or no document was added.
    """

    def __init__(
        self, prefix: str | Path, dtype: np.dtype, *, overwrite: bool = False, tokenizer: str | None = None
    ) -> None:
        """Open a dataset for writing. ``tokenizer`` is the fingerprint of the tokenizer, which is recorded unless None.
        A job compares the recorded fingerprint with that of its own tokenizer."""
        self.prefix = Path(prefix)
        self._tokenizer = tokenizer
        self.dtype = np.dtype(dtype)
        codes = [code for code, known in DTYPES.items() if known == self.dtype]
        assert codes, f"{self.dtype} is not a token format of the indexed dataset"
        self._code = codes[0]
        # An array needs four bytes per document. A list would need an object for each of perhaps a billion documents.
        self._lengths = array("i")
        self.num_tokens = 0
        existing = [str(path) for path in (bin_path(prefix), idx_path(prefix)) if path.exists()]
        if existing and not overwrite:
            raise DataError(f"{existing[0]}: already exists; choose another --output-prefix, or add --overwrite")

    @property
    def num_documents(self) -> int:
        """Number of documents added so far."""
        return len(self._lengths)

    def __enter__(self) -> "IndexedWriter":
        # The files are renamed in this order. ``.idx`` is last: readers consider a dataset complete when it exists.
        paths = [bin_path(self.prefix), idx_path(self.prefix)]
        if self._tokenizer is not None:
            paths.insert(0, tokenizer_path(self.prefix))
        self._partial = {path: Path(f"{path}.tmp-{os.getpid()}") for path in paths}
        with _writing(self.prefix):
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._stream = BufferedWriter(open(self._partial[bin_path(self.prefix)], "wb", buffering=0), 1 << 20)
        return self

    def add_document(self, tokens: np.ndarray) -> None:
        """Append one document: ``tokens [length]`` of any integer dtype. Raise a DataError for an empty document."""
        if not 0 < tokens.size <= MAX_SEQUENCE_TOKENS:
            raise DataError(f"{self.prefix}: document of {tokens.size} tokens: must have 1 to {MAX_SEQUENCE_TOKENS}")
        # A conversion would change a token that does not fit to another token, without an error.
        bounds = np.iinfo(self.dtype)
        if tokens.dtype != self.dtype and (tokens.min() < bounds.min or tokens.max() > bounds.max):
            raise DataError(f"{self.prefix}: token id {tokens.max()}: must fit into {self.dtype.name}")
        with _writing(bin_path(self.prefix)):
            self._stream.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        self._lengths.append(tokens.size)
        self.num_tokens += int(tokens.size)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            for path in self._partial.values():
                path.unlink(missing_ok=True)
            # Drop what is still buffered: after an error of the disk, writing it would fail again.
            self._stream.raw.close()

    def _finish(self) -> None:
        if not self.num_tokens:
            raise DataError(f"{self.prefix}: cannot be written without tokens: the input contains no text")
        with _writing(bin_path(self.prefix)):
            _flush(self._stream)
        header = HEADER.pack(MAGIC, VERSION, self._code, self.num_documents, self.num_documents + 1)
        self._write(idx_path(self.prefix), chain([header], (part.data for part in self._index())))
        if self._tokenizer is not None:
            record = json.dumps({"fingerprint": self._tokenizer}).encode() + b"\n"
            self._write(tokenizer_path(self.prefix), [record])
        with _writing(self.prefix):
            self._publish()

    def _write(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        with _writing(path), open(self._partial[path], "wb", buffering=1 << 20) as stream:
            stream.writelines(parts)
            _flush(stream)

    def _index(self) -> Iterator[np.ndarray]:
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        yield lengths.astype("<i4")
        end = 0
        for start in range(0, lengths.size, CHUNK):
            ends = end + np.cumsum(lengths[start : start + CHUNK], dtype=np.int64)
            yield (np.concatenate(([end], ends[:-1])) * self.dtype.itemsize).astype("<i8")
            end = int(ends[-1])
        yield np.arange(lengths.size + 1, dtype="<i8")

    def _publish(self) -> None:
        # An old ``.idx`` is durably removed first, because it must never describe a new ``.bin``.
        idx_path(self.prefix).unlink(missing_ok=True)
        tokenizer_path(self.prefix).unlink(missing_ok=True)
        fsync_folder(self.prefix.parent)
        for path, partial in self._partial.items():
            os.replace(partial, path)
            fsync_folder(self.prefix.parent)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise a DataError that names ``path`` if the ``with`` block raises an OSError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from error


def _flush(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexInfo:
    """Token format and sizes of an indexed dataset whose index was checked."""

    prefix: str
    dtype: np.dtype
    num_sequences: int
    num_documents: int
    num_tokens: int

    @classmethod
    def read(cls, prefix: str | Path) -> "IndexInfo":
        """Check ``prefix.idx``, and compare its sizes with ``prefix.bin``. Memory use does not depend on their size.

        Raises:
            DataError: a file is missing or its content violates the format. The message names the file.
        """
        path, sizes = idx_path(prefix), _file_sizes(prefix)
        with open(path, "rb") as stream:
            head = stream.read(HEADER.size)
            dtype, num_sequences, num_entries = _parse_header(path, head, sizes[path])
            num_tokens = _check_lengths_and_pointers(path, stream, num_sequences, dtype.itemsize)
            _check_documents(path, stream, num_sequences, num_entries)
        wanted_bytes = num_tokens * dtype.itemsize
        if (found_bytes := sizes[bin_path(prefix)]) != wanted_bytes:
            raise _bad(bin_path(prefix), "bytes", found_bytes, f"must be {wanted_bytes} according to {path}")
        if not num_tokens:
            raise _bad(path, "tokens", 0, "must be at least 1")
        return cls(
            prefix=str(prefix),
            dtype=dtype,
            num_sequences=num_sequences,
            num_documents=num_entries - 1,
            num_tokens=num_tokens,
        )


def read_dtype(prefix: str | Path) -> np.dtype:
    """Return the dtype of a dataset's tokens. Only the header of ``prefix.idx`` is read.

    Raises:
        DataError: a file is missing, or the header is invalid.
    """
    path, sizes = idx_path(prefix), _file_sizes(prefix)
    with open(path, "rb") as stream:
        dtype, *_ = _parse_header(path, stream.read(HEADER.size), sizes[path])
    return dtype


def _bad(path: Path, what: str, value: object, constraint: str) -> DataError:
    return DataError(f"{path}: {what}={value}: {constraint}")


def _file_sizes(prefix: str | Path) -> dict[Path, int]:
    sizes = {}
    for path in (idx_path(prefix), bin_path(prefix)):
        if not path.is_file():
            hint = " (give the path without .bin or .idx)" if Path(prefix).suffix in (".bin", ".idx") else ""
            raise DataError(f"{path}: no such file{hint}")
        if not os.access(path, os.R_OK):
            raise DataError(f"{path}: cannot be read: no permission")
        sizes[path] = path.stat().st_size
    return sizes


def _parse_header(path: Path, head: bytes, size_bytes: int) -> tuple[np.dtype, int, int]:
    if len(head) < HEADER.size:
        raise _bad(path, "bytes", size_bytes, f"must be at least {HEADER.size}, the size of the header")
    magic, version, code, num_sequences, num_entries = HEADER.unpack(head)
    if magic != MAGIC:
        raise _bad(path, "magic", magic, f"must be {MAGIC!r}: this is not the index of an indexed dataset")
    if version != VERSION:
        raise _bad(path, "version", version, f"must be {VERSION}")
    if code not in DTYPES:
        raise _bad(path, "dtype code", code, f"must be an integer format, one of {sorted(DTYPES)}")
    # This check comes before the lists are read, because damaged counts could demand any amount of memory.
    wanted_bytes = HEADER.size + 12 * num_sequences + 8 * num_entries
    if size_bytes != wanted_bytes:
        counts = f"{num_sequences} sequences and {num_entries} document entries"
        constraint = f"must be {wanted_bytes} for {counts}: the file is truncated or has another format"
        raise _bad(path, "bytes", size_bytes, constraint)
    if num_entries < 1:
        raise _bad(path, "document entries", num_entries, "must be at least 1")
    return DTYPES[code], num_sequences, num_entries


def _chunks(stream: BinaryIO, offset: int, dtype: str, count: int) -> Iterator[np.ndarray]:
    itemsize = np.dtype(dtype).itemsize
    for start in range(0, count, CHUNK):
        stream.seek(offset + start * itemsize)
        # Sums of lengths exceed 32 bits.
        yield np.frombuffer(stream.read(min(CHUNK, count - start) * itemsize), dtype=dtype).astype(np.int64)


def _check_lengths_and_pointers(path: Path, stream: BinaryIO, num_sequences: int, itemsize: int) -> int:
    # Check that byte offsets are the running sum of the lengths; return the number of tokens.
    total, first = 0, 0
    all_lengths = _chunks(stream, HEADER.size, "<i4", num_sequences)
    all_pointers = _chunks(stream, HEADER.size + 4 * num_sequences, "<i8", num_sequences)
    for lengths, pointers in zip(all_lengths, all_pointers, strict=True):
        if lengths.min() < 0:
            at = int(np.argmax(lengths < 0))
            raise _bad(path, f"length of sequence {first + at}", lengths[at], "must not be negative")
        ends = total + np.cumsum(lengths)
        wanted = (ends - lengths) * itemsize
        if not np.array_equal(pointers, wanted):
            at = int(np.argmax(pointers != wanted))
            constraint = f"must be {wanted[at]}, the number of bytes of all previous sequences"
            raise _bad(path, f"pointer of sequence {first + at}", pointers[at], constraint)
        total, first = int(ends[-1]), first + lengths.size
    return total


def _check_documents(path: Path, stream: BinaryIO, num_sequences: int, num_entries: int) -> None:
    # Check the document table: starts at 0, never falls, ends at the number of sequences.
    last = 0
    for number, entries in enumerate(_chunks(stream, HEADER.size + 12 * num_sequences, "<i8", num_entries)):
        if number == 0 and entries[0] != 0:
            raise _bad(path, "document entry 0", entries[0], "must be 0")
        falls = np.diff(entries, prepend=last) < 0
        if falls.any():
            at = int(np.argmax(falls))
            constraint = "must be at least the previous entry"
            raise _bad(path, f"document entry {number * CHUNK + at}", entries[at], constraint)
        last = int(entries[-1])
    if last != num_sequences:
        raise _bad(path, "last document entry", last, f"must be {num_sequences}, the number of sequences")
