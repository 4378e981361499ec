"""Reads single tensors of dense checkpoints, and writes checkpoints that contain only weights, in one process.

Files are in torch's distributed format, like those that ranks write (``mcore/checkpoint``). At most one tensor is in
memory, so checkpoints of any size can be converted on a small machine.
"""

import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import count, product
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
from megatron_ft.mcore.checkpoint.files import BACKEND, BACKEND_VERSION
from megatron_ft.mcore.checkpoint.metadata import (
    COMMON_NAME,
    FORMAT_NAME,
    METADATA_NAME,
    OPTIMIZER,
    describe,
    read_metadata,
)
from megatron_ft.mcore.convert.megatron_arguments import has_gated_units, model_of_arguments
from megatron_ft.mcore.convert.resume import ConversionRecord, WrittenFile, WrittenTensor
from megatron_ft.mcore.convert.streams import Span, StoredValues, Values, VerifiedFiles, chunks_of, tensor_of
from megatron_ft.snapshot.storage.checkpoints import newest_of_megatron
from megatron_ft.snapshot.storage.files import FileEntry, HashedFile, entry_of, fsync_directory, write_file
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME, Manifest
from megatron_ft.snapshot.storage.run_settings import refuse_other_folder
from transformer_engine_ext.recipes import AMAX_HISTORY

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_STACKED_LAYERS, _STACKED_EXPERTS = re.compile(r"decoder\.layers\.(?!\d)"), re.compile(r"\.experts\.experts\.(?!\d)")
"""Patterns in the names of stacked tensors. Such a tensor contains a weight of all layers, or of all experts."""
_GATED = re.compile(r"\.linear_fc1\.(?:weight|bias)$")
"""Pattern at the end of the names of tensors that contain both the gate half and the up half of a gated MLP."""
_MOST_STACKED = 1 << 20
"""Largest allowed number of weights (layers times experts) in one stacked tensor."""
EMBEDDING, ROUTER = "embedding.word_embeddings.weight", ".mlp.router.weight"
WEIGHTS_ONLY = "weights"
"""Key of the manifest's group of settings that marks a checkpoint as containing nothing but weights."""


@dataclass(kw_only=True)
class DenseReader:
    """Reads tensors of a dense checkpoint by name. The checkpoint may be from a job with any parallel layout."""

    directory: Path
    manifest: Manifest | None
    """Verified manifest; None for a checkpoint of another project, which the user trusts."""
    metadata: Metadata
    _newest: tuple[tuple[str, tuple[int, ...]], Values] | None = field(default=None, init=False, repr=False)
    """Cache of one part of a stacked tensor, the last one read: its key (name, offsets) and its values."""

    @classmethod
    def open(cls, directory: Path, *, trust: bool = False) -> "DenseReader":
        """Verify the files of a checkpoint, then read its metadata.

        Args:
            trust: whether a directory without a manifest may be read. Its metadata is a pickle, which can run code.

        Raises:
            CheckpointError: the checkpoint is damaged or incomplete; it has no manifest and ``trust`` is false; its
                metadata cannot be read; or the directory is the folder of a run.
        """
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: must be a directory")
        directory = newest_of_megatron(directory) or directory
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
        """Return the model of the checkpoint, from the manifest or, in a checkpoint of Megatron-LM, from the stored
        arguments. Raise CheckpointError if these describe no model, or a model that does not fit the weights."""
        if self.manifest is None:
            model = model_of_arguments(self.directory)
            self._check_model(model, f"{self.directory}: its arguments describe no model with these weights")
            return model
        recorded = self.manifest.settings.get("model", {})
        keys = {key.removeprefix("model."): value for key, value in recorded.items() if key.startswith("model.")}
        if not keys:
            raise CheckpointError(
                f"{self.directory}: the manifest does not describe the model; only checkpoints of manifest "
                "format_version 2 can be converted"
            )
        where = f"{self.directory}: the manifest describes no model with these weights"
        try:
            model = valid_model(keys)
        except ConfigError as error:
            raise CheckpointError(f"{where}: {error}") from None
        self._check_model(model, where)
        return model

    def _check_model(self, model: ModelConfig, where: str) -> None:
        layers = {int(found[1]) for found in map(_LAYER.match, self.weights) if found}
        if layers and layers != set(range(min(model.num_layers, len(layers) + 1))):
            raise CheckpointError(f"{where}: {len(layers)} layers are stored, but model.num_layers={model.num_layers}")
        embedding = self.weights.get(EMBEDDING)
        shape = (model.vocab_size, model.hidden_size)
        if embedding is not None and tuple(embedding.size) != shape:
            raise CheckpointError(f"{where}: {EMBEDDING} has the shape {list(embedding.size)}, not {list(shape)}")
        routers = {entry.size[0] for name, entry in self.weights.items() if name.endswith(ROUTER) and entry.size}
        if not routers <= {model.num_moe_experts}:
            raise CheckpointError(f"{where}: model.num_moe_experts={model.num_moe_experts}; {max(routers)} are stored")

    @cached_property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Return shape, dtype and parts of all tensors by name, including tensors of the optimizer.

        The tensors of a checkpoint of Megatron-LM get the names of this project. A tensor with the weights of several
        layers or experts is listed once for each of them. The two halves of a gated unit are listed separately.
        """
        return {name: entry for name, (entry, _) in self._resolved.items()}

    @cached_property
    def weights(self) -> dict[str, TensorStorageMetadata]:
        """Return shape, dtype and parts of all weights and buffers by name, except the amax histories of FP8 layers,
        which only training needs."""
        found = {name: entry for name, entry in self.tensors.items() if not name.startswith(OPTIMIZER)}
        return {name: entry for name, entry in found.items() if not name.endswith(AMAX_HISTORY)}

    @cached_property
    def _resolved(self) -> "dict[str, tuple[TensorStorageMetadata, list[_StoredPart]]]":
        found: dict[str, tuple[TensorStorageMetadata, list[_StoredPart]]] = {}
        is_foreign = self.manifest is None
        is_gated = is_foreign and any(map(_GATED.search, self.metadata.state_dict_metadata))
        is_gated = is_gated and has_gated_units(self.directory)
        for name, entry in self.metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                continue
            tensors: Iterable[_Resolved] = [(name, entry, [_StoredPart(name=name, part=part) for part in entry.chunks])]
            if is_foreign:
                tensors = _unstacked(name, entry, str(self.directory))
            if is_gated and _GATED.search(name):
                tensors = [half for tensor in tensors for half in _halves(*tensor, str(self.directory))]
            for own, shape, places in tensors:
                if own in found:
                    raise CheckpointError(f"{self.directory}: two tensors contain the weight {own}; one is {name}")
                found[own] = shape, places
        return found

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor, joined from its stored parts. Raise CheckpointError if a part cannot be read."""
        return tensor_of(self.values(name))

    def values(self, name: str) -> Values:
        """Return where the files contain the values of a tensor, if its rows are stored one after another. Otherwise
        read the tensor and return it.

        Raises:
            CheckpointError: a part of the tensor cannot be read.
        """
        entry, places = self._resolved[name]
        parts = [
            (part, self._stored(place, entry.properties.dtype))
            for part, place in zip(entry.chunks, places, strict=True)
        ]
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

    def _stored(self, place: "_StoredPart", dtype: torch.dtype) -> Values:
        if not place.index:
            return self._part(place.name, place.part, dtype)
        # Experts that follow one another may be in one part. Read the values of this part only once.
        key = (place.name, tuple(place.part.offsets))
        if self._newest is None or self._newest[0] != key:
            self._newest = key, self._part(place.name, place.part, dtype)
        whole = self._newest[1]
        return whole.at(place.index) if isinstance(whole, StoredValues) else whole[place.index]

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
                # Another version of torch has written the part, or the values are not stored row after row.
                file.seek(place.offset)
                stored = torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
        except Exception as error:  # torch may raise any exception for invalid content
            raise CheckpointError(f"{path}: {name} cannot be read: {describe(error)}") from error
        if not isinstance(stored, torch.Tensor) or stored.shape != part.sizes or stored.dtype != dtype:
            raise CheckpointError(f"{path}: {name} has another shape or dtype than in the metadata")
        return stored


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredPart:
    """Part of a tensor in the files. If the tensor stacks layers or experts, ``index`` selects one of them."""

    name: str
    part: ChunkStorageMetadata
    index: tuple[int, ...] = ()
    """Index of the layer or expert (or both) in the part's first dimensions; empty for the whole part."""


_Resolved = tuple[str, TensorStorageMetadata, list[_StoredPart]]
"""Name of a tensor; its shape, dtype and parts; and where the checkpoint's files store each part."""


def _unstacked(name: str, entry: TensorStorageMetadata, where: str) -> Iterator[_Resolved]:
    """Yield the tensors that a stored tensor contains: the tensor itself, or one tensor for each layer and expert.

    Megatron-LM's checkpoints stack weights: one tensor contains a weight of all layers, of all experts, or of all
    experts in all layers. Its first dimensions are the layers and the experts.
    """
    axes = [pattern for pattern in (_STACKED_LAYERS, _STACKED_EXPERTS) if pattern.search(name)]
    if not axes:
        yield name, entry, [_StoredPart(name=name, part=part) for part in entry.chunks]
        return
    stacked, rest = tuple(entry.size[: len(axes)]), torch.Size(entry.size[len(axes) :])
    if len(stacked) < len(axes) or not 0 < prod(stacked) <= _MOST_STACKED:
        raise CheckpointError(
            f"{where}: {name!r:.200} has the shape {list(entry.size)}: must begin with the number of layers or experts"
        )
    found: dict[tuple[int, ...], tuple[list[ChunkStorageMetadata], list[_StoredPart]]] = {}
    for part in entry.chunks:
        box = ChunkStorageMetadata(
            offsets=torch.Size(part.offsets[len(axes) :]), sizes=torch.Size(part.sizes[len(axes) :])
        )
        for index in product(*map(range, part.sizes[: len(axes)])):
            at = tuple(offset + position for offset, position in zip(part.offsets, index, strict=False))
            chunks, places = found.setdefault(at, ([], []))
            chunks.append(box)
            places.append(_StoredPart(name=name, part=part, index=index))
    for at in product(*map(range, stacked)):
        own = name
        for pattern, number in zip(axes, at, strict=True):
            own = pattern.sub(rf"\g<0>{number}.", own, count=1)
        chunks, places = found.get(at, ([], []))
        yield own, TensorStorageMetadata(properties=entry.properties, size=rest, chunks=chunks), places


def _halves(name: str, entry: TensorStorageMetadata, places: list[_StoredPart], where: str) -> Iterator[_Resolved]:
    """Yield the two halves of a weight of a gated unit, which Megatron-LM stores as separate parts of a tensor."""
    half, rest = divmod(entry.size[0] if entry.size else 1, 2)
    pairs = list(zip(entry.chunks, places, strict=True))
    if rest or any(part.offsets[0] < half < part.offsets[0] + part.sizes[0] for part, _ in pairs):
        raise CheckpointError(
            f"{where}: {name!r:.200} {list(entry.size)}: must have equal halves (gate, linear) in separate parts"
        )
    for suffix, start in (("_w", 0), ("_v", half)):
        mine = [(part, place) for part, place in pairs if start <= part.offsets[0] < start + half]
        boxes = [
            ChunkStorageMetadata(
                offsets=torch.Size((part.offsets[0] - start, *part.offsets[1:])), sizes=torch.Size(part.sizes)
            )
            for part, _ in mine
        ]
        size = torch.Size((half, *entry.size[1:]))
        stored = TensorStorageMetadata(properties=entry.properties, size=size, chunks=boxes)
        yield name + suffix, stored, [place for _, place in mine]


def _joined(entry: TensorStorageMetadata, parts: list[tuple[ChunkStorageMetadata, Values]]) -> StoredValues | None:
    """Return the byte ranges that contain the tensor's rows, in order. Return None if a stored part does not consist of
    whole rows, or if the byte range of its values is not known."""
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
    """A contiguous tensor as ``torch.save`` writes it: the bytes before the values and the bytes after them."""

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
    """File in memory. A byte range that the writer skips with ``seek`` occupies no memory."""

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
        """Return the bytes before and after the range that ``seek`` skipped, which is ``value_bytes`` long."""
        found = _Frame(head=bytes(self._before), value_bytes=value_bytes, tail=bytes(self._after))
        assert found.num_bytes == self._position, f"torch skipped other bytes than the {value_bytes} of the values"
        return found


@dataclass(kw_only=True)
class WeightsWriter:
    """Writes a dense checkpoint of weights into a directory, file by file."""

    directory: Path
    most_file_bytes: int
    """Size in bytes at which a file ends and a new file begins."""
    record: ConversionRecord | None = None
    """Record of complete files, with which a later call can continue this conversion; None without such a record."""
    files: list[WrittenFile] = field(default_factory=list, init=False)
    """Complete files of this conversion, including files that an interrupted call has written."""

    def __post_init__(self) -> None:
        if self.record is not None:
            self.files = self.record.files

    def write(self, tensors: Iterable[tuple[str, Values]]) -> None:
        """Write ``tensors``, pairs of name and values. No tensor is divided into parts.

        Raises:
            CheckpointError: a tensor cannot be read, or a file does not contain what was written.
            OSError: a file cannot be written.
        """
        left, numbers = iter(tensors), set(map(_number, self.files))
        contents: dict[str, tuple[WrittenTensor, ...]] = {}

        def complete(entry: FileEntry) -> None:
            file = WrittenFile(entry=entry, tensors=contents[entry.name])
            (self.files.append if self.record is None else self.record.add)(file)

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
            manifest: manifest of the checkpoint, in which the list of files is empty.

        Returns:
            The manifest as written.

        Raises:
            CheckpointError: the files do not contain what was written.
            OSError: a file cannot be written.
        """
        described, results = dict[str, TensorStorageMetadata](), list[WriteResult]()
        for written in sorted(self.files, key=_number):
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


def _number(file: WrittenFile) -> int:
    """Return the number of a checkpoint file, which is a part of its name."""
    return int(file.entry.name.strip("_").split("_")[0])


def _write_tensor(file: HashedFile, name: str, values: Values) -> WrittenTensor:
    start, shape = file.num_bytes, tuple(values.shape)
    frame = _frame(values.dtype, shape)
    # The bytes are those of ``torch.save``, except for the CRC-32 of the values, which ``torch.load`` does not check.
    file.write(frame.head)
    for chunk in chunks_of(values):
        file.write(chunk)
    file.write(frame.tail)
    dtype = str(values.dtype).removeprefix("torch.")
    return WrittenTensor(name=name, dtype=dtype, shape=shape, offset=start, num_bytes=file.num_bytes - start)
