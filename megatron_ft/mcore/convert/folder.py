"""Hugging Face folders: ``config.json``, safetensors files of bounded size, and the index of all tensors.

Safetensors files contain no code, only a header with names, dtypes, shapes and offsets, and the bytes of the tensors.
Tensors are read one at a time, so a folder of any size needs little memory.
"""

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_ft.errors import CheckpointError, ConfigError
from megatron_ft.mcore.convert.streams import Span, StoredValues, Values, VerifiedFiles, chunks_of
from megatron_ft.serde import parse_json
from megatron_ft.snapshot.storage.files import write_atomically

CONFIG, INDEX, ONLY_FILE = "config.json", "model.safetensors.index.json", "model.safetensors"
_MOST_JSON_BYTES, _MOST_HEADER_BYTES = 64 << 20, 100 << 20
_PLAIN = "must be a regular file with a plain name that ends in .safetensors"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}\.safetensors")
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Names that dtypes have in safetensors files."""
DTYPES = {name: dtype for dtype, name in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """File, dtype and shape of a tensor in a folder, as the header of the file lists them."""

    file: str
    dtype: str
    """Name of the dtype in the file, e.g. ``BF16``."""
    shape: tuple[int, ...]
    offset: int | None
    """Offset of the tensor's first byte in the file; None if an earlier tensor in it has a dtype not in ``DTYPES``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A Hugging Face folder. ``tensors`` lists the tensors of all files, according to the files' headers."""

    path: Path
    config: Mapping[str, Any]
    """Content of ``config.json``."""
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, path: Path) -> "Folder":
        """Read ``config.json``, the index and the headers of all files.

        Raises:
            CheckpointError: a file is missing, damaged or not a plain file of the folder; a tensor is in no file, in
                several files, or in another file than the index says.
        """
        config = _read_json(path / CONFIG)
        index = _read_json(path / INDEX) if os.path.lexists(path / INDEX) else {"weight_map": {}}
        places = index.get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise CheckpointError(f"{path / INDEX}: weight_map must be an object of file names")
        for name in places.values():
            if not _FILE_NAME.fullmatch(name):
                raise CheckpointError(f"{path / INDEX}: {name!r:.100}: {_PLAIN}")
        tensors: dict[str, StoredTensor] = {}
        for name in sorted(set(places.values())) or [ONLY_FILE]:
            for tensor, stored in _headers(path, name):
                if tensor in tensors:
                    raise CheckpointError(f"{path}: {tensor!r:.100} is in two files: {tensors[tensor].file}, {name}")
                tensors[tensor] = stored
        for tensor in sorted(tensors.keys() | places.keys()) if places else ():
            stored_in = tensors[tensor].file if tensor in tensors else "no file"
            if stored_in != places.get(tensor):
                wanted = places.get(tensor, "none")
                raise CheckpointError(f"{path}: {tensor!r:.100} is in {stored_in}, but the index names {wanted}")
        return cls(path=path, config=config, tensors=tensors)

    def read(self, name: str) -> torch.Tensor:
        """Return the values of a tensor. Raise CheckpointError if they cannot be read."""
        path = self.path / self.tensors[name].file
        try:
            with safe_open(path, framework="pt") as file:
                found: torch.Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error}") from error
        return found

    def values(self, name: str) -> StoredValues:
        """Return where a tensor is stored. Its dtype, and the dtypes of all tensors before it in the file, must be in
        ``DTYPES``."""
        stored = self.tensors[name]
        dtype = DTYPES[stored.dtype]
        assert stored.offset is not None, f"{name} follows a tensor of another dtype"
        span = Span(path=self.path / stored.file, offset=stored.offset, num_bytes=prod(stored.shape) * dtype.itemsize)
        return StoredValues(dtype=dtype, shape=stored.shape, spans=(span,))


def _headers(folder: Path, name: str) -> Iterator[tuple[str, StoredTensor]]:
    path = folder / name
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(f"{path}: {_PLAIN}")
    try:
        with path.open("rb") as stream:  # checks the size of the header before ``safe_open`` maps the file
            length, size = int.from_bytes(stream.read(8), "little"), os.fstat(stream.fileno()).st_size
        if not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
            raise CheckpointError(f"{path}: is not a complete safetensors file: its header length, {length}, is wrong")
        offset: int | None = 8 + length
        with safe_open(path, framework="pt") as file:
            # The library has checked that the tensors follow one another without gaps.
            for tensor in file.offset_keys():
                part = file.get_slice(tensor)
                dtype, shape = part.get_dtype(), tuple(part.get_shape())
                yield tensor, StoredTensor(file=name, dtype=dtype, shape=shape, offset=offset)
                known = offset is not None and dtype in DTYPES
                offset = offset + prod(shape) * DTYPES[dtype].itemsize if known and offset is not None else None
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: is not a complete safetensors file: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would block, and a device has no end
            raise CheckpointError(f"{path}: must be a regular file")
        if path.stat().st_size > _MOST_JSON_BYTES:
            raise CheckpointError(f"{path}: has more than {_MOST_JSON_BYTES} bytes")
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must contain an object")
    return content


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """A safetensors file that will be written: its name, and its tensors in the order of the file."""

    name: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and shape of each tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderPlan:
    """Plan of a Hugging Face folder to write: its files with their tensors, and the dtype of all tensors."""

    dtype: torch.dtype
    files: tuple[PlannedFile, ...]

    @classmethod
    def of(
        cls, tensors: Sequence[tuple[str, tuple[int, ...]]], dtype: torch.dtype, most_file_bytes: int
    ) -> "FolderPlan":
        """Plan files of at most ``most_file_bytes`` for ``tensors``. A larger tensor gets a file of its own."""
        groups: list[list[tuple[str, tuple[int, ...]]]] = []
        room = 0
        for name, shape in tensors:
            size = prod(shape) * dtype.itemsize
            if not groups or size > room:
                groups.append([])
                room = most_file_bytes
            groups[-1].append((name, shape))
            room -= size
        names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
        files = [
            PlannedFile(name=name, tensors=tuple(group))
            for name, group in zip([ONLY_FILE] if len(groups) == 1 else names, groups, strict=True)
        ]
        plan = cls(dtype=dtype, files=tuple(files))
        plan.validate()
        return plan

    def validate(self) -> None:
        """Assert that the plan has tensors, each in only one file."""
        names = [name for file in self.files for name, _ in file.tensors]
        assert names and len(names) == len(set(names)), "a tensor is planned twice, or there is none"

    def bytes_of(self, file: PlannedFile) -> int:
        """Return the number of bytes of all tensors of a file, without the file's header."""
        return sum(prod(shape) * self.dtype.itemsize for _, shape in file.tensors)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all tensors in all files of the plan."""
        return sum(map(self.bytes_of, self.files))

    def summary(self) -> str:
        """Describe the plan in one line."""
        num_tensors = sum(len(file.tensors) for file in self.files)
        return f"{num_tensors} tensors, {self.num_bytes:,} bytes, {len(self.files)} files"

    def index(self) -> bytes:
        """Return the content of the folder's index, a JSON file that maps each tensor's name to its file."""
        places = {name: file.name for file in self.files for name, _ in file.tensors}
        content = {"metadata": {"total_size": self.num_bytes}, "weight_map": places}
        return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderWriter:
    """Writes the files of a ``FolderPlan`` into the folder ``path``."""

    path: Path
    plan: FolderPlan

    def write(self, file: PlannedFile, tensors: Iterable[tuple[str, Values]], files: VerifiedFiles) -> None:
        """Write ``file``. The object ``files`` verifies it in a thread, while the caller writes the next file.

        Args:
            tensors: name and values of exactly the tensors of ``file``, in the file's order and in the plan's dtype.

        Raises:
            CheckpointError: a tensor cannot be read, or the previous file does not contain what was written.
            OSError: a file cannot be written.
        """
        wanted = iter(file.tensors)
        with files.new(file.name) as target:
            target.write(self._header(file))
            for name, values in tensors:
                planned = next(wanted, None)
                assert (name, tuple(values.shape)) == planned and values.dtype == self.plan.dtype, (
                    f"{name} is {values.dtype} {tuple(values.shape)}: the plan has {planned}, {self.plan.dtype}"
                )
                for chunk in chunks_of(values):
                    target.write(chunk)
            assert next(wanted, None) is None, f"{file.name} lacks tensors"

    def _header(self, file: PlannedFile) -> bytes:
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name, shape in file.tensors:
            end = position + prod(shape) * self.plan.dtype.itemsize
            entries[name] = {"dtype": _DTYPES[self.plan.dtype], "shape": shape, "data_offsets": [position, end]}
            position = end
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)  # so that the values are aligned
        return len(header).to_bytes(8, "little") + header

    def finish(self, config: Mapping[str, Any]) -> None:
        """Write the index if there are several files. Write ``config.json`` last. Raise OSError on failure."""
        if len(self.plan.files) > 1:
            write_atomically(self.path, INDEX, self.plan.index())
        write_atomically(self.path, CONFIG, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise ConfigError if the file system of ``folder``, which must exist, has less than ``num_bytes`` free bytes."""
    free = free_bytes(folder)
    if num_bytes > free:
        raise ConfigError.of(
            "out", str(folder), f"needs {num_bytes:,} bytes, but its file system has only {free:,} free bytes"
        )


def free_bytes(path: Path) -> int:
    """Return the number of free bytes of the file system of ``path``, an existing directory."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize
