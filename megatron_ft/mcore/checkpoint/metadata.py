"""Reads and checks ``.metadata``, the list of tensors of a checkpoint in torch's distributed format.

The file is a pickle. Only the classes that torch writes there are constructed, so reading it runs no code. All sizes
and offsets are compared with the files before a tensor is allocated.
"""

import enum
import io
import os
import pathlib
import pickle
import re
import warnings
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_ft.errors import CheckpointError
from megatron_ft.serde import read_bytes

METADATA_NAME = ".metadata"
COMMON_NAME = "common.pt"
"""Name of the file with the state that is the same on all ranks."""
FORMAT_NAME = "metadata.json"
"""Name of the file that states the format of a checkpoint."""
_MOST_METADATA_BYTES, _MOST_FORMAT_BYTES = 1 << 30, 1 << 20
OPTIMIZER = "optimizer."
"""Beginning of the names of the optimizer's tensors."""
_FILE_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}")
_CLASSES = {
    (module.__name__, name): getattr(module, name)
    for module, names in (
        (metadata, ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "StorageMeta")),
        (metadata, ("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
        (filesystem, ("_StorageInfo",)),
        (planner, ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")),
        (torch, ("Size",)),
        (pathlib, ("PosixPath", "PurePosixPath")),
        (torch.serialization, ("_get_layout",)),
    )
    for name in names
}


class _Unpickler(pickle.Unpickler):
    """Unpickler that constructs only the classes of torch's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("builtins", "getattr"):  # some versions of Python pickle enums with it
            return _member
        raise pickle.UnpicklingError(f"contains {module}.{name}, which may run code and is never in torch's metadata")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("contains a persistent ID, which never occurs in torch's metadata")


def _member(kind: Any, name: str) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError("calls getattr on an object that is not an enum; such a call may run code")
    return kind[name]


def load_metadata(directory: Path) -> Metadata:
    """Read the metadata of a checkpoint. Raise CheckpointError unless it is a pickle that has only torch's classes."""
    path = directory / METADATA_NAME
    content = read_bytes(path, max_bytes=_MOST_METADATA_BYTES, kind=CheckpointError)
    try:
        found = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # an unpickler may raise any exception for invalid content
        raise CheckpointError(f"{path}: cannot be read: {describe(error)}") from error
    if not isinstance(found, Metadata) or not isinstance(getattr(found, "state_dict_metadata", None), dict):
        raise CheckpointError(f"{path}: must be the metadata of a checkpoint, not {type(found).__name__}")
    return found


def read_metadata(directory: Path) -> Metadata:
    """Read the metadata of a checkpoint, and check that all parts of tensors are inside the files.

    Raises:
        CheckpointError: the metadata cannot be read or contains something other than a list of tensors; a part of a
            tensor is in no file; or the parts of a weight do not fill the weight.
    """
    found = load_metadata(directory)
    try:
        _check(directory, found)
    except _Invalid as error:
        raise CheckpointError(f"{directory / METADATA_NAME}: {error}") from None
    except (AttributeError, TypeError, ValueError, OverflowError) as error:  # a pickle may leave out any field
        raise CheckpointError(f"{directory / METADATA_NAME}: has an unknown form: {describe(error)}") from error
    return found


def read_common(directory: Path) -> dict[str, Any]:
    """Read ``common.pt``, the state of a checkpoint that is the same on all ranks.

    Raises:
        CheckpointError: the file cannot be read, or contains classes that Megatron has not registered as safe.
    """
    # A checkpoint without a manifest is not verified, and Megatron would open pipes, devices and files of any size.
    read_bytes(directory / FORMAT_NAME, max_bytes=_MOST_FORMAT_BYTES, kind=CheckpointError)
    if os.path.lexists(directory / COMMON_NAME) and not (directory / COMMON_NAME).is_file():
        raise CheckpointError(f"{directory / COMMON_NAME}: must be a regular file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about unusual pickles before it refuses them
            found = dist_checkpointing.load_common_state_dict(str(directory))
    except Exception as error:  # torch may raise any exception for invalid content
        raise CheckpointError(f"{directory / COMMON_NAME}: cannot be read: {describe(error)}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{directory / COMMON_NAME}: must be a dictionary, not {type(found).__name__}")
    return found


def describe(error: BaseException) -> str:
    """Return the type and the text of an error in one line of at most 300 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


class _Invalid(Exception):
    """Raised if the metadata contains something that torch does not write."""


def _require(is_valid: bool, what: str, constraint: str) -> None:
    if not is_valid:
        raise _Invalid(f"{what}: {constraint}")


def _check(directory: Path, found: Metadata) -> None:
    entries, places = found.state_dict_metadata, found.storage_data
    _require(isinstance(places, dict), "storage_data", "must be a mapping")
    has_tensors = any(isinstance(each, TensorStorageMetadata) for each in entries.values())
    _require(has_tensors, "list of tensors", "must not be empty")
    sizes: dict[str, int] = {}
    for name, entry in entries.items():
        what = f"{name!r:.200}"
        _require(isinstance(name, str) and name.isprintable() and len(name) <= 1000, what, "must be a printable name")
        _require(isinstance(entry, TensorStorageMetadata | BytesStorageMetadata), what, "must describe a tensor")
        if isinstance(entry, TensorStorageMetadata):
            _check_shape(what, entry)
            for part in entry.chunks:
                _check_place(directory, what, entry, part, places.get(MetadataIndex(name, part.offsets)), sizes)
            if not name.startswith(OPTIMIZER):
                _check_parts(what, entry)


def _are_counts(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(value) is int and value >= 0 for value in values)


def _check_shape(what: str, entry: TensorStorageMetadata) -> None:
    properties = entry.properties
    is_typed = isinstance(properties, TensorProperties) and isinstance(properties.dtype, torch.dtype)
    _require(is_typed, what, "must have a dtype")
    _require(_are_counts(entry.size), what, f"size={entry.size!r:.80}: must be a list of integers")
    _require(isinstance(entry.chunks, list | tuple), what, "must have a list of parts")
    for part in entry.chunks:
        is_part = isinstance(part, ChunkStorageMetadata) and _are_counts(part.offsets) and _are_counts(part.sizes)
        _require(is_part, what, "has a part without valid offsets and sizes")
        is_inside = len(part.offsets) == len(part.sizes) == len(entry.size) and all(
            offset + size <= whole for offset, size, whole in zip(part.offsets, part.sizes, entry.size, strict=True)
        )
        _require(is_inside, what, f"has a part {list(part.sizes)} outside of its shape {list(entry.size)}")


def _check_place(
    directory: Path,
    what: str,
    entry: TensorStorageMetadata,
    part: ChunkStorageMetadata,
    place: Any,
    sizes: dict[str, int],
) -> None:
    is_place = isinstance(place, _StorageInfo) and isinstance(place.relative_path, str)
    _require(is_place and bool(_FILE_NAME.fullmatch(place.relative_path)), what, "has a part without a valid file")
    name = place.relative_path
    if name not in sizes:
        path = directory / name
        sizes[name] = path.stat().st_size if path.is_file() and not path.is_symlink() else -1
    _require(sizes[name] >= 0, what, f"its file {name} must exist, and must be a regular file")
    is_range = type(place.offset) is int and type(place.length) is int and place.offset >= 0 and place.length >= 0
    _require(is_range, what, f"has a part in {name} without a valid offset and length")
    _require(place.offset + place.length <= sizes[name], what, f"has a part that extends past the end of {name}")
    needed = prod(part.sizes) * entry.properties.dtype.itemsize
    _require(needed <= place.length, what, f"needs {needed} bytes, but its part of {name} has {place.length}")


def _check_parts(what: str, entry: TensorStorageMetadata) -> None:
    found, wanted = sum(prod(part.sizes) for part in entry.chunks), prod(entry.size)
    _require(found == wanted, what, f"its parts have {found} elements, but the tensor has {wanted}")
    filled = sorted((part for part in entry.chunks if prod(part.sizes)), key=lambda part: tuple(part.offsets))
    for number, part in enumerate(filled if entry.size else ()):
        for other in filled[number + 1 :]:
            if other.offsets[0] >= part.offsets[0] + part.sizes[0]:
                break
            _require(not _overlap(part, other), what, "has parts that overlap")


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    def ends(part: ChunkStorageMetadata) -> Sequence[int]:
        return [offset + size for offset, size in zip(part.offsets, part.sizes, strict=True)]

    pairs = zip(one.offsets, ends(one), other.offsets, ends(other), strict=True)
    return all(start < other_end and other_start < end for start, end, other_start, other_end in pairs)
