"""Record of a conversion that can be continued: the source of the conversion, and the files that are complete.

A conversion between a checkpoint and a Hugging Face folder, in either direction, updates the record after each file. An
interrupted conversion continues from the record. In a finished folder, the record lists the files' checksums.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ft.errors import CheckpointError, ConfigError
from megatron_ft.serde import decode, encode, parse_json
from megatron_ft.snapshot.storage.files import FileEntry, entry_of, write_atomically

RECORD = "megatron_ft_conversion.json"
"""Name of the file with the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenTensor:
    """Description of one tensor in a file of a checkpoint that contains only weights."""

    name: str
    dtype: str
    """Name of the dtype in torch, e.g. ``bfloat16``."""
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """File that a conversion has completed."""

    entry: FileEntry
    tensors: tuple[WrittenTensor, ...] = ()
    """Tensors in a file of a checkpoint, with their offsets. Empty for a file of another kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    source: dict[str, Any]
    files: tuple[WrittenFile, ...]


@dataclass(kw_only=True)
class ConversionRecord:
    """Record of a conversion. It is stored in the folder that the conversion writes."""

    folder: Path
    source: Mapping[str, Any]
    """Source of the conversion: a JSON object with everything that determines the content of the files."""
    files: list[WrittenFile] = field(default_factory=list)
    """Files that the conversion has completed."""

    @classmethod
    def read(cls, folder: Path) -> "ConversionRecord | None":
        """Return the conversion's record in ``folder``, or None. Raise CheckpointError if it is damaged."""
        path = folder / RECORD
        if not os.path.lexists(path):
            return None
        try:
            found: _Content = decode(_Content, parse_json(path.read_bytes()), "record")
            names = [file.entry.name for file in found.files]
            if len(set(names)) < len(names) or not all(Path(name).name == name for name in names):
                raise ValueError("files: must be names of files in this folder, each only once")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        return cls(folder=folder, source=found.source, files=list(found.files))

    def write(self) -> None:
        """Write the record to its folder. Raise OSError if this fails."""
        content = {"source": self.source, "files": encode(self.files)}
        write_atomically(self.folder, RECORD, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())

    def add(self, file: WrittenFile) -> None:
        """Add a file that the conversion has completed, and write the record. Raise OSError if the write fails."""
        self.files.append(file)
        self.write()

    def names(self) -> set[str]:
        """Return the names of the complete files."""
        return {file.entry.name for file in self.files}

    def check(self, directory: Path) -> None:
        """Compare the files in ``directory`` with their recorded checksums. Raise CheckpointError if one is damaged."""
        for file in self.files:
            if not _is_intact(directory, file.entry):
                raise CheckpointError(
                    f"{directory / file.entry.name}: damaged: its checksum differs from the one in {RECORD}"
                )


def _is_intact(directory: Path, entry: FileEntry) -> bool:
    path = directory / entry.name
    if path.is_symlink() or not path.is_file() or path.stat().st_size != entry.num_bytes:
        return False
    return entry_of(directory, entry.name) == entry


@contextlib.contextmanager
def continued(folder: Path, source: Mapping[str, Any], *, files: Path, out: Path) -> Iterator[ConversionRecord]:
    """Begin a conversion in ``folder``, or continue an interrupted one, and yield its record. Verify the files of the
    interrupted conversion: damaged files no longer count as complete, and unfinished files are deleted.

    The folder is created if it does not exist, and is locked until the end of the ``with`` block or of the process. If
    the block ends with an error before any file is complete, everything that was created is removed.

    Args:
        source: JSON object that identifies everything on which the content of the files depends.
        files: directory of the files: ``folder``, or a directory in it.
        out: path that the user named, for messages.

    Raises:
        CheckpointError: the record is damaged.
        ConfigError: the folder contains other files, or was begun by another conversion, or another process is writing
            to it.
        OSError: a file cannot be read or written.
    """
    source, is_new = json.loads(json.dumps(source)), not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, out):
        record = _begun(folder, source, out)
        files.mkdir(exist_ok=True)
        for path in (*folder.glob(".*.tmp"), *files.glob(".*.tmp")):
            path.unlink(missing_ok=True)
        record.files = [file for file in record.files if _is_intact(files, file.entry)]
        try:
            yield record
        except BaseException:
            if not record.files:
                (folder / RECORD).unlink(missing_ok=True)
                if files != folder:
                    _remove_if_empty(files)
                if is_new:
                    _remove_if_empty(folder)
            raise


def _begun(folder: Path, source: Mapping[str, Any], out: Path) -> ConversionRecord:
    """Return the record of the conversion in ``folder``. If the folder is empty, write a new record."""
    try:
        record = ConversionRecord.read(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; delete {folder} to begin again") from error
    if record is None:
        # A process that was killed may have left the unfinished file of a record.
        if present := sorted(path.name for path in folder.iterdir() if not path.name.endswith(".tmp")):
            raise ConfigError.of(
                "out",
                str(out),
                f"must be new, empty or begun by the same conversion, but {folder} contains {present[0]}; choose "
                "another directory",
            )
        record = ConversionRecord(folder=folder, source=source)
        record.write()
    elif record.source != source:
        raise ConfigError.of(
            "out",
            str(out),
            f"must be new, empty or begun by the same conversion, but {folder} was begun by another conversion; "
            "delete it to begin again, or choose another directory",
        )
    return record


def _remove_if_empty(path: Path) -> None:
    if not any(path.iterdir()):
        path.rmdir()


@contextlib.contextmanager
def _locked(folder: Path, out: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError.of("out", str(out), "is being written by another process; wait until it ends") from None
        yield
    finally:
        os.close(descriptor)
