"""The built-in corpus ``python-stdlib``: source code and docstrings of the running Python's standard library.

This is real text that exists on every machine. Files are sorted by a digest of their paths and used until ``MAX_BYTES``
are reached, so that every part of the corpus is a mixture of the whole library.
"""

import fcntl
import hashlib
import os
import sysconfig
import time
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from platform import python_version

import numpy as np

from megatron_ft.corpus.indexed import IndexedWriter, idx_path, token_dtype
from megatron_ft.corpus.tokenizers import Tokenizer
from megatron_ft.errors import DataError

NAME = "python-stdlib"
MAX_BYTES = 4_000_000
"""Largest size of the built-in corpus in bytes."""
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
LOCK_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class _SourceFile:
    """A source file of the built-in corpus. ``name`` is its path relative to the standard library's folder."""

    name: str
    size_bytes: int


def library_folder() -> Path:
    """Return the folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


@lru_cache(maxsize=4)
def list_files(folder: Path, max_bytes: int = MAX_BYTES) -> tuple[_SourceFile, ...]:
    """List the files of the built-in corpus, in order. Raise a DataError if the library has no source files."""
    found = sorted(_walk(folder), key=lambda file: hashlib.blake2b(file.name.encode()).digest())
    chosen, total_bytes = [], 0
    for file in found:
        if total_bytes + file.size_bytes <= max_bytes:
            chosen.append(file)
            total_bytes += file.size_bytes
    if not chosen:
        raise DataError.of("data.train", NAME, f"needs .py files under {folder}, but there are none")
    return tuple(chosen)


def _walk(folder: Path) -> Iterator[_SourceFile]:
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS]
        for name in names:
            path = Path(root, name)
            if name.endswith(".py") and (size_bytes := path.stat().st_size):
                yield _SourceFile(path.relative_to(folder).as_posix(), size_bytes)


def corpus_prefix(cache_dir: str, tokenizer: Tokenizer) -> Path:
    """Return the path, without suffix, of the indexed corpus's files. It depends on source files and tokenizer."""
    listing = repr([(file.name, file.size_bytes) for file in list_files(library_folder())])
    digest = hashlib.blake2b(f"{tokenizer.fingerprint}\n{listing}".encode(), digest_size=8).hexdigest()
    return Path(cache_dir, f"{NAME}-{python_version()}-{digest}")


def ensure_corpus(cache_dir: str, tokenizer: Tokenizer) -> Path:
    """Index the built-in corpus unless this is done already. Return the path of its files without suffix.

    Raises:
        DataError: there are no source files, the cache cannot be written, or another process has the lock for too long.
    """
    prefix = corpus_prefix(cache_dir, tokenizer)
    if not idx_path(prefix).exists():
        with _locked(Path(f"{prefix}.lock")):
            # Another process may have written the corpus while this one waited for the lock.
            if not idx_path(prefix).exists():
                _remove_partial(prefix)
                _write(prefix, tokenizer)
    return prefix


def _remove_partial(prefix: Path) -> None:
    # Remove the files of a killed writer; the lock ensures that no other writer is alive.
    for path in prefix.parent.glob(f"{prefix.name}.*.tmp-*"):
        path.unlink()


def _write(prefix: Path, tokenizer: Tokenizer) -> None:
    folder, eod = library_folder(), np.asarray([tokenizer.eod])
    texts = [_read(folder / file.name) for file in list_files(folder)]
    with IndexedWriter(prefix, token_dtype(tokenizer.vocab_size), overwrite=True) as writer:
        for tokens in tokenizer.encode_many(texts):
            writer.add_document(np.concatenate((tokens, eod)))


def _read(path: Path) -> str:
    """Read a source file with the encoding that it declares (PEP 263)."""
    try:
        with tokenize.open(path) as stream:
            return stream.read()
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as Python source: {error}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # Lock the file ``path`` during the ``with`` block. If this process is killed, the kernel releases the lock.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Child processes must not inherit the descriptor: they would keep the lock after the end of this process.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise DataError.of("data.cache_dir", path.parent, f"must be writable: {error.strerror}") from error
    try:
        _acquire(descriptor, path)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
    while True:
        try:
            # flock(2) has no timeout. Without ``LOCK_NB`` a stopped owner would block this process for ever.
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                seconds = f"{LOCK_TIMEOUT_SECONDS:.0f} s"
                raise DataError(f"{path}: another process still holds this lock after {seconds}") from error
        time.sleep(0.02)
