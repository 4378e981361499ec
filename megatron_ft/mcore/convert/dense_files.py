"""Reads single tensors of dense checkpoints, and writes checkpoints that contain only weights. It needs no ranks.

Files are in torch's distributed format, as ranks also write it (``mcore/checkpoint``). One tensor is in memory at a
time, so checkpoints of any size can be converted on a small machine.
"""

import io
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ft.config.model import ModelConfig
from megatron_ft.errors import CheckpointError
from megatron_ft.mcore.checkpoint.files import BACKEND, BACKEND_VERSION
from megatron_ft.snapshot.storage.checkpoints import list_checkpoints
from megatron_ft.snapshot.storage.files import FileEntry, HashedFile, fsync_directory, hash_file, write_file
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME, Manifest
from megatron_ft.snapshot.storage.window_file import window_name
from megatron_ft.snapshot.storage.window_folder import WindowFolder

_OPTIMIZER = "optimizer."
_FILE_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}")
_METADATA, _COMMON, _FORMAT = ".metadata", "common.pt", "metadata.json"
WEIGHTS_ONLY = "weights"
"""Group of settings in a manifest; its presence means that the checkpoint contains only weights."""


def refuse_run_folder(directory: Path) -> None:
    """Check that a directory is not the folder of a run, which contains checkpoints and windows.

    Raises:
        CheckpointError: it is. The error names the newest checkpoint and the newest window.
    """
    if not (directory / "config.yaml").is_file() or (directory / _METADATA).exists():
        return
    found = [entry.path for entry in list_checkpoints(directory / "checkpoints") if entry.complete]
    windows = directory / "windows"
    keys = WindowFolder(windows).list_windows() if windows.is_dir() else []
    newest = [
        f"{what} are in {folder}, the newest is {path}"
        for what, folder, path in (
            ("checkpoints", directory / "checkpoints", found[-1] if found else None),
            ("windows", windows, windows / window_name(keys[-1]) if keys else None),
        )
        if path is not None
    ]
    where = "; its ".join(newest) if newest else "checkpoints/ and windows/ contain none yet"
    raise CheckpointError(f"{directory}: must be a checkpoint or a window, but is the folder of a run; its {where}")


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
            refuse_run_folder(directory)
        if not has_manifest and not trust:
            raise CheckpointError(
                f"{directory} has no {MANIFEST_NAME} of this project, so its pickle files, which can run code, cannot "
                "be verified; use --trust only if you trust the origin of this checkpoint"
            )
        manifest = Manifest.verified(directory) if has_manifest else None
        try:
            metadata = FileSystemReader(directory).read_metadata()
        except Exception as error:  # torch may raise any exception for invalid metadata
            raise CheckpointError(
                f"{directory / _METADATA}: cannot be read: {type(error).__name__}: {error}"
            ) from error
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
        try:
            return ModelConfig(**keys)
        except TypeError as error:
            raise CheckpointError(f"{self.directory}: the manifest describes another kind of model: {error}") from None

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Return shape, dtype and parts of all tensors by name, those of the optimizer included."""
        found = self.metadata.state_dict_metadata.items()
        return {name: entry for name, entry in found if isinstance(entry, TensorStorageMetadata)}

    @property
    def weights(self) -> dict[str, TensorStorageMetadata]:
        """Return shape, dtype and parts of all weights and buffers by name."""
        return {name: entry for name, entry in self.tensors.items() if not name.startswith(_OPTIMIZER)}

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, in the shape of the whole model. Raises CheckpointError if a part of it cannot be read."""
        entry = self.tensors[name]
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        num_elements = 0
        for part in entry.chunks:
            stored = self._part(name, part)
            box = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.sizes, strict=True))
            whole[box].copy_(stored)
            num_elements += stored.numel()
        if num_elements != whole.numel():
            raise CheckpointError(
                f"{self.directory}: the parts of {name} have {num_elements} elements, but the tensor has "
                f"{whole.numel()}"
            )
        return whole

    def _part(self, name: str, part: ChunkStorageMetadata) -> torch.Tensor:
        place = self.metadata.storage_data.get(MetadataIndex(name, part.offsets))
        if place is None or not _FILE_NAME.fullmatch(place.relative_path):
            raise CheckpointError(f"{self.directory}: a part of {name} has no valid position in a file")
        path = self.directory / place.relative_path
        try:
            with path.open("rb") as file:
                if not 0 <= place.offset <= place.offset + place.length <= path.stat().st_size:
                    raise CheckpointError(f"{path}: {name} is at bytes beyond the end of the file")
                file.seek(place.offset)
                stored = torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error}") from error
        if not isinstance(stored, torch.Tensor) or stored.shape != part.sizes:
            raise CheckpointError(f"{path}: {name} has another shape than in the metadata")
        return stored


@dataclass(kw_only=True)
class WeightsWriter:
    """Writes a dense checkpoint of weights into an empty directory, file by file."""

    directory: Path
    most_file_bytes: int
    """A new file begins when a file has reached this size."""
    entries: list[FileEntry] = field(default_factory=list)
    _results: list[WriteResult] = field(default_factory=list)
    _described: dict[str, TensorStorageMetadata] = field(default_factory=dict)

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write tensors, each as one part. Raises OSError if a file cannot be written."""
        file: HashedFile | None = None
        try:
            for name, tensor in tensors:
                if file is None:
                    file = HashedFile(self.directory, f"__{len(self.entries)}_0.distcp")
                self._add(file, name, tensor)
                if file.num_bytes >= self.most_file_bytes:
                    self.entries.append(file.commit())
                    file = None
            if file is not None:
                self.entries.append(file.commit())
        finally:
            if file is not None:
                file.close()

    def _add(self, file: HashedFile, name: str, tensor: torch.Tensor) -> None:
        start, offsets = file.num_bytes, torch.Size([0] * tensor.dim())
        # A view would be stored with all bytes of the tensor that it belongs to.
        torch.save(tensor.detach().clone(memory_format=torch.contiguous_format), file)
        place = _StorageInfo(file.name, start, file.num_bytes - start)
        index = MetadataIndex(name, offsets, 0)
        self._results.append(WriteResult(index=index, size_in_bytes=place.length, storage_data=place))
        self._described[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=tensor.dtype),
            size=tensor.shape,
            chunks=[ChunkStorageMetadata(offsets=offsets, sizes=tensor.shape)],
        )

    def finish(self, manifest: Manifest) -> Manifest:
        """Write the metadata, then the manifest. ``manifest`` lists no files yet. Return the manifest as written."""
        writer = FileSystemWriter(self.directory, sync_files=True)
        writer.finish(Metadata(state_dict_metadata=dict(self._described)), [self._results])
        with (self.directory / _METADATA).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self.entries.append(FileEntry(name=_METADATA, num_bytes=size, xxh3_128=hash_file(file)))
        common = io.BytesIO()
        torch.save({"checkpoint_version": 3.0, "iteration": 0}, common)
        self.entries.append(write_file(self.directory, _COMMON, common.getvalue()))
        formats = {"sharded_backend": BACKEND, "sharded_backend_version": BACKEND_VERSION}
        formats |= {"common_backend": "torch", "common_backend_version": 1}
        self.entries.append(write_file(self.directory, _FORMAT, json.dumps(formats).encode()))
        fsync_directory(self.directory)
        written = replace(manifest, files=tuple(sorted(self.entries, key=lambda entry: entry.name)))
        written.write(self.directory)
        return written
