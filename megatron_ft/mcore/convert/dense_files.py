"""Reads single tensors of dense checkpoints, and writes checkpoints that contain only weights. It needs no ranks.

Files are in torch's distributed format, as ranks also write it (``mcore/checkpoint``). At most one tensor is in memory,
so checkpoints of any size can be converted on a small machine.
"""

import io
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ft.config.checks.model import valid_model
from megatron_ft.config.model import ModelConfig
from megatron_ft.errors import CheckpointError, ConfigError
from megatron_ft.mcore.checkpoint.files import BACKEND, BACKEND_VERSION, COMMON_NAME, FORMAT_NAME
from megatron_ft.mcore.checkpoint.metadata import METADATA_NAME, OPTIMIZER, describe, read_metadata
from megatron_ft.mcore.convert.streams import Span, StoredValues, Values, VerifiedFiles, chunks_of, tensor_of
from megatron_ft.snapshot.storage.files import FileEntry, HashedFile, entry_of, fsync_directory, write_file
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME, Manifest
from megatron_ft.snapshot.storage.run_settings import refuse_other_folder

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
EMBEDDING, ROUTER = "embedding.word_embeddings.weight", ".mlp.router.weight"
WEIGHTS_ONLY = "weights"
"""Group of settings in a manifest; its presence means that the checkpoint contains only weights."""


@dataclass(kw_only=True)
class DenseReader:
    """Reads tensors of a dense checkpoint by their names, from any parallel layout."""

    directory: Path
    manifest: Manifest | None
    """Verified manifest; None for a checkpoint of another project, which the user trusts."""
    metadata: Metadata

    @classmethod
    def open(cls, directory: Path, *, trust: bool = False) -> "DenseReader":
        """Verify the files of a checkpoint, then read the positions of its tensors.

        Args:
            trust: whether a directory without a manifest may be read. Its metadata is a pickle, which can run code.

        Raises:
            CheckpointError: the checkpoint is damaged, incomplete or has no manifest, its metadata cannot be read, or
                the directory is the folder of a run.
        """
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: must be a directory")
        has_manifest = (directory / MANIFEST_NAME).exists()
        if not has_manifest:
            refuse_other_folder(directory, str(directory))
        if not has_manifest and not trust:
            raise CheckpointError(
                f"{directory} has no {MANIFEST_NAME} of this project, so its pickle files, which can run code, cannot "
                "be verified; use --trust only if you trust the origin of this checkpoint"
            )
        manifest = Manifest.verified(directory) if has_manifest else None
        metadata = read_metadata(directory)
        return cls(directory=directory, manifest=manifest, metadata=metadata)

    def model(self) -> ModelConfig:
        """Return the model of the checkpoint. Raises CheckpointError if the manifest does not describe it."""
        recorded = {} if self.manifest is None else self.manifest.settings.get("model", {})
        keys = {key.removeprefix("model."): value for key, value in recorded.items() if key.startswith("model.")}
        if not keys:
            raise CheckpointError(
                f"{self.directory}: the manifest does not describe the model; only checkpoints of manifest "
                "format_version 2 can be converted"
            )
        where = f"{self.directory}: the manifest describes another kind of model"
        try:
            model = valid_model(keys)
        except ConfigError as error:
            raise CheckpointError(f"{where}: {error}") from None
        self._check_model(model, where)
        return model

    def _check_model(self, model: ModelConfig, where: str) -> None:
        layers = {int(found[1]) for found in map(_LAYER.match, self.weights) if found}
        if layers and layers != set(range(min(model.num_layers, len(layers) + 1))):
            raise CheckpointError(f"{where}: model.num_layers={model.num_layers}, but it has {len(layers)} layers")
        embedding = self.weights.get(EMBEDDING)
        shape = (model.vocab_size, model.hidden_size)
        if embedding is not None and tuple(embedding.size) != shape:
            raise CheckpointError(f"{where}: {EMBEDDING} has the shape {list(embedding.size)}, not {list(shape)}")
        routers = {entry.size[0] for name, entry in self.weights.items() if name.endswith(ROUTER) and entry.size}
        if not routers <= {model.num_moe_experts}:
            raise CheckpointError(f"{where}: model.num_moe_experts={model.num_moe_experts}, but it has {max(routers)}")

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Return shape, dtype and parts of all tensors by name, those of the optimizer included."""
        found = self.metadata.state_dict_metadata.items()
        return {name: entry for name, entry in found if isinstance(entry, TensorStorageMetadata)}

    @property
    def weights(self) -> dict[str, TensorStorageMetadata]:
        """Return shape, dtype and parts of all weights and buffers by name."""
        return {name: entry for name, entry in self.tensors.items() if not name.startswith(OPTIMIZER)}

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, in the shape of the whole model. Raises CheckpointError if a part of it cannot be read."""
        return tensor_of(self.values(name))

    def values(self, name: str) -> Values:
        """Return where a tensor is stored if its rows follow one another in files. Otherwise return the tensor.

        Raises:
            CheckpointError: a part of it cannot be read.
        """
        entry = self.tensors[name]
        parts = [(part, self._part(name, part, entry.properties.dtype)) for part in entry.chunks]
        num_elements = sum(prod(stored.shape) for _, stored in parts)
        if num_elements != prod(entry.size):
            raise CheckpointError(
                f"{self.directory}: the parts of {name} have {num_elements} elements, but the tensor has "
                f"{prod(entry.size)}"
            )
        rows = _joined(entry, parts)
        if rows is not None:
            return rows
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        for part, stored in parts:
            box = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.sizes, strict=True))
            whole[box].copy_(tensor_of(stored))
        return whole

    def _part(self, name: str, part: ChunkStorageMetadata, dtype: torch.dtype) -> Values:
        place = self.metadata.storage_data[MetadataIndex(name, part.offsets)]  # ``read_metadata`` has checked it
        path, value_bytes = self.directory / place.relative_path, prod(part.sizes) * dtype.itemsize
        try:
            with path.open("rb") as file:
                if value_bytes < place.length:
                    frame = _frame(dtype, tuple(part.sizes))
                    file.seek(place.offset)
                    if place.length == frame.num_bytes and file.read(len(frame.head)) == frame.head:
                        span = Span(path=path, offset=place.offset + len(frame.head), num_bytes=value_bytes)
                        return StoredValues(dtype=dtype, shape=tuple(part.sizes), spans=(span,))
                # Another version of torch has written the part, or its values are not row after row.
                file.seek(place.offset)
                stored = torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
        except Exception as error:  # torch may raise any exception for invalid content
            raise CheckpointError(f"{path}: {name} cannot be read: {describe(error)}") from error
        if not isinstance(stored, torch.Tensor) or stored.shape != part.sizes or stored.dtype != dtype:
            raise CheckpointError(f"{path}: {name} has another shape or dtype than in the metadata")
        return stored


def _joined(entry: TensorStorageMetadata, parts: list[tuple[ChunkStorageMetadata, Values]]) -> StoredValues | None:
    """Return where a tensor is stored if each of its parts in files consists of whole rows, otherwise None."""
    spans, num_rows = list[Span](), 0
    for part, stored in sorted(parts, key=lambda each: tuple(each[0].offsets)):
        is_next = tuple(part.offsets[:1]) in ((), (num_rows,)) and part.sizes[1:] == entry.size[1:]
        if not is_next or not isinstance(stored, StoredValues):
            return None
        spans += stored.spans
        num_rows += part.sizes[0] if part.sizes else 1
    if num_rows != (entry.size[0] if entry.size else 1):
        return None
    return StoredValues(dtype=entry.properties.dtype, shape=tuple(entry.size), spans=tuple(spans))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Bytes that ``torch.save`` writes before and after the values of a contiguous tensor."""

    head: bytes
    value_bytes: int
    tail: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.head) + self.value_bytes + len(self.tail)


@lru_cache(maxsize=1024)
def _frame(dtype: torch.dtype, shape: tuple[int, ...]) -> _Frame:
    content = _Sparse()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), content)  # the memory of the tensor is never touched
    return content.frame(prod(shape) * dtype.itemsize)


class _Sparse(io.RawIOBase):
    """File in memory. If a range of the file is skipped instead of written, it needs no memory."""

    def __init__(self) -> None:
        super().__init__()
        self._position = 0
        self._before, self._after = bytearray(), bytearray()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert whence != os.SEEK_END, "torch seeks from the end"
        self._position = offset if whence == os.SEEK_SET else self._position + offset
        return self._position

    def write(self, data: Any) -> int:
        part = self._before if self._position == len(self._before) else self._after
        part += data
        self._position += len(data)
        return len(data)

    def frame(self, value_bytes: int) -> _Frame:
        """Return the bytes before and after the only skipped range. The range must have ``value_bytes`` bytes."""
        found = _Frame(head=bytes(self._before), value_bytes=value_bytes, tail=bytes(self._after))
        assert found.num_bytes == self._position, f"torch skipped other bytes than the {value_bytes} of the values"
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenTensor:
    """Tensor in a file that ``WeightsWriter`` has written."""

    name: str
    dtype: str
    """Name of the dtype in torch, e.g. ``bfloat16``."""
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """File that ``WeightsWriter`` has completed."""

    entry: FileEntry
    tensors: tuple[WrittenTensor, ...]

    @property
    def number(self) -> int:
        """Number in the name of the file."""
        return int(self.entry.name.strip("_").split("_")[0])


@dataclass(kw_only=True)
class WeightsWriter:
    """Writes a dense checkpoint of weights into a directory, file by file."""

    directory: Path
    most_file_bytes: int
    """A new file begins when a file has reached this size."""
    files: list[WrittenFile] = field(default_factory=list)
    """Complete files, also those that an interrupted conversion has written."""
    completed: Callable[[], None] = lambda: None
    """Called in a thread after each file that was added to ``files``."""

    def write(self, tensors: Iterable[tuple[str, Values]]) -> None:
        """Write tensors, each as one part.

        Raises:
            CheckpointError: a tensor cannot be read, or a file does not contain what was written.
            OSError: a file cannot be written.
        """
        left, numbers = iter(tensors), {file.number for file in self.files}
        contents: dict[str, tuple[WrittenTensor, ...]] = {}

        def complete(entry: FileEntry) -> None:
            self.files.append(WrittenFile(entry=entry, tensors=contents[entry.name]))
            self.completed()

        with VerifiedFiles(self.directory, complete) as files:
            for item in left:
                number = next(number for number in count() if number not in numbers)
                numbers.add(number)
                name = f"__{number}_0.distcp"
                with files.new(name) as file:
                    written = [_write_tensor(file, *item)]
                    while file.num_bytes < self.most_file_bytes and (following := next(left, None)) is not None:
                        written.append(_write_tensor(file, *following))
                    contents[name] = tuple(written)

    def finish(self, manifest: Manifest) -> Manifest:
        """Write the metadata, then the manifest, and verify all files that were not verified before.

        Args:
            manifest: manifest without files.

        Returns:
            The manifest as written.

        Raises:
            CheckpointError: the files do not contain what was written.
            OSError: a file cannot be written.
        """
        described, results = dict[str, TensorStorageMetadata](), list[WriteResult]()
        for written in sorted(self.files, key=lambda file: file.number):
            for tensor in written.tensors:
                offsets, shape = torch.Size([0] * len(tensor.shape)), torch.Size(tensor.shape)
                place = _StorageInfo(written.entry.name, tensor.offset, tensor.num_bytes)
                index = MetadataIndex(tensor.name, offsets, 0)
                results.append(WriteResult(index=index, size_in_bytes=place.length, storage_data=place))
                described[tensor.name] = TensorStorageMetadata(
                    properties=TensorProperties(dtype=getattr(torch, tensor.dtype)),
                    size=shape,
                    chunks=[ChunkStorageMetadata(offsets=offsets, sizes=shape)],
                )
        for name in (METADATA_NAME, COMMON_NAME, FORMAT_NAME):
            (self.directory / name).unlink(missing_ok=True)  # of a conversion that was interrupted here
        writer = FileSystemWriter(self.directory, sync_files=True)
        writer.finish(Metadata(state_dict_metadata=dict(described)), [results])
        entries = [file.entry for file in self.files]
        entries.append(entry_of(self.directory, METADATA_NAME))
        common = io.BytesIO()
        torch.save({"checkpoint_version": 3.0, "iteration": 0}, common)
        entries.append(write_file(self.directory, COMMON_NAME, common.getvalue()))
        formats = {"sharded_backend": BACKEND, "sharded_backend_version": BACKEND_VERSION}
        formats |= {"common_backend": "torch", "common_backend_version": 1}
        entries.append(write_file(self.directory, FORMAT_NAME, json.dumps(formats).encode()))
        fsync_directory(self.directory)
        manifest = replace(manifest, files=tuple(sorted(entries, key=lambda entry: entry.name)))
        manifest.write(self.directory)
        Manifest.verified(self.directory, known=[file.entry.name for file in self.files])
        return manifest


def _write_tensor(file: HashedFile, name: str, values: Values) -> WrittenTensor:
    start, shape = file.num_bytes, tuple(values.shape)
    frame = _frame(values.dtype, shape)
    # Equal to ``torch.save``, except for its CRC-32 of the values, which ``torch.load`` does not compare.
    file.write(frame.head)
    for chunk in chunks_of(values):
        file.write(chunk)
    file.write(frame.tail)
    dtype = str(values.dtype).removeprefix("torch.")
    return WrittenTensor(name=name, dtype=dtype, shape=shape, offset=start, num_bytes=file.num_bytes - start)
