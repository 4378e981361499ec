"""Lists and compares the tensors of dense checkpoints, windows and Hugging Face folders, one tensor at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_ft.errors import CheckpointError
from megatron_ft.mcore.checkpoint.metadata import read_common
from megatron_ft.mcore.convert.converter import verify_folder
from megatron_ft.mcore.convert.dense_files import DenseReader
from megatron_ft.mcore.convert.folder import CONFIG, DTYPES, Folder
from megatron_ft.mcore.convert.model_tensors import check_tensors
from megatron_ft.snapshot.storage.window_file import rank_name, window_name
from megatron_ft.snapshot.storage.window_folder import WindowFolder
from megatron_ft.snapshot.window import Slice, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One tensor of a checkpoint or folder."""

    name: str
    dtype: str
    """Name of the dtype in torch, e.g. ``bfloat16``."""
    shape: tuple[int, ...]
    num_bytes: int
    norm: float | None = None
    """Euclidean norm of the values; None if it was not computed."""
    iteration: int | None = None
    """Iteration after which the values were captured. None if all tensors of the source are from the same iteration."""


class Source(Protocol):
    """A checkpoint or folder whose tensors can be listed and read."""

    path: Path
    title: str
    """Description of the source in one line."""

    def rows(self) -> Iterator[TensorRow]:
        """Yield all tensors in order of their names."""

    def read(self, name: str) -> torch.Tensor:
        """Return the values of a tensor. Raise CheckpointError if they cannot be read."""

    def check(self) -> None:
        """Check the stored data that are not tensors, if they were not checked when the source was opened. Raise
        CheckpointError if they are damaged."""


class DenseSource:
    """Tensors of a dense checkpoint. If there is a manifest, the files have been verified with it."""

    def __init__(self, path: Path, *, trust: bool, with_optimizer: bool) -> None:
        self.path, self.reader = path, DenseReader.open(path, trust=trust)
        self._tensors = self.reader.tensors if with_optimizer else self.reader.weights
        manifest = self.reader.manifest
        self.title = (
            "dense checkpoint without a manifest" if manifest is None else f"dense checkpoint: {manifest.summary()}"
        )

    def rows(self) -> Iterator[TensorRow]:
        for name, entry in sorted(self._tensors.items()):
            yield _row(name, entry.properties.dtype, tuple(entry.size))

    def read(self, name: str) -> torch.Tensor:
        return self.reader.read(name)

    def check(self) -> None:
        """Check that ``common.pt``, the state that all ranks share, can be read. If the manifest describes the model,
        check the description, and that all tensors of the model are stored. Raise CheckpointError if a check fails."""
        read_common(self.reader.directory)
        if self.reader.manifest is not None and self.reader.manifest.settings.get("model"):
            check_tensors(self.reader.weights, self.reader.model(), str(self.path))


class FolderSource:
    """Tensors of a Hugging Face folder that was compared with the model in its ``config.json``."""

    def __init__(self, path: Path) -> None:
        self.path, self._folder = path, verify_folder(path)
        num_files = len({stored.file for stored in self._folder.tensors.values()})
        self.title = f"Hugging Face folder: {self._folder.config['model_type']}, {num_files} files"

    @property
    def folder(self) -> Folder:
        """Return the opened and verified Hugging Face folder."""
        return self._folder

    def rows(self) -> Iterator[TensorRow]:
        for name, stored in sorted(self._folder.tensors.items()):
            yield _row(name, DTYPES[stored.dtype], stored.shape)

    def read(self, name: str) -> torch.Tensor:
        return self._folder.read(name)

    def check(self) -> None:
        return


class WindowSource:
    """Pieces of a window on storage: element ranges of parameters, each from one rank. All files are verified.

    A piece has the name ``<parameter>[<start>:<stop>].<component>``. ``@tp<n>`` is added for tensor-parallel ranks
    above 0, and ``/slice<n>`` for slices above 0.
    """

    def __init__(self, path: Path, *, with_optimizer: bool) -> None:
        self.path, self._folder = path, WindowFolder(path.parent)
        keys = [key for key in self._folder.list_windows() if window_name(key) == path.name]
        if not keys:
            raise CheckpointError(f"{path}: must be the directory of a window, such as window_0000012")
        self._key = keys[0]
        with self._folder.open(self._key, 0) as opened:
            self.world_size = opened.window.world_size
        window = self._folder.verify(self._key, self.world_size)
        self.windows: list[Window] = []
        """Descriptions of the parts of the window, one part per rank, in rank order."""
        self._places: dict[str, tuple[int, int, int]] = {}
        self._rows: list[TensorRow] = []
        for rank in range(self.world_size):
            with self._folder.open(self._key, rank) as opened:
                self.windows.append(opened.window)
                for index, part in enumerate(opened.window.slices):
                    self._take(rank, index, part, with_optimizer=with_optimizer)
        last = window.last_iteration
        self.title = f"window of iterations {window.start_iteration} to {last}, {self.world_size} ranks"

    @property
    def leaves_out_experts(self) -> bool:
        """Return whether some experts in the window were not captured for it, but copied from earlier windows."""
        return any(window.leaves_out_experts for window in self.windows)

    def _take(self, rank: int, index: int, part: Slice, *, with_optimizer: bool) -> None:
        for number, piece in enumerate(part.pieces):
            if piece.component not in ("weight", "master") and not with_optimizer:
                continue
            name = f"{piece.parameter}[{piece.start}:{piece.stop}].{piece.component}"
            name += f"@tp{piece.tensor_part}" if piece.tensor_part else ""
            name += f"/slice{index}" if index else ""
            dtype = getattr(torch, piece.dtype)
            row = _row(name, dtype, (piece.num_bytes // dtype.itemsize,))
            captured_at = part.iteration if part.captured_at is None else part.captured_at[number]
            self._rows.append(replace(row, iteration=captured_at))
            self._places[name] = rank, index, number

    def rows(self) -> Iterator[TensorRow]:
        yield from sorted(self._rows, key=lambda row: row.name)

    def read(self, name: str) -> torch.Tensor:
        rank, index, number = self._places[name]
        with self._folder.open(self._key, rank) as opened:
            piece = opened.window.slices[index].pieces[number]
            content = opened.read_slice(index)[piece.offset : piece.end]
        return torch.frombuffer(bytearray(content), dtype=getattr(torch, piece.dtype))

    def check(self) -> None:
        return


def _row(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorRow:
    num_bytes = prod(shape) * dtype.itemsize
    return TensorRow(name=name, dtype=str(dtype).removeprefix("torch."), shape=shape, num_bytes=num_bytes)


def is_window(path: Path) -> bool:
    """Return whether a directory is a window: whether it has the file of at least one rank."""
    return any(path.glob(rank_name(0).replace("00000", "*")))


def open_source(path: Path, *, trust: bool = False, with_optimizer: bool = False) -> Source:
    """Open and verify a dense checkpoint, a window or a Hugging Face folder.

    Args:
        trust: whether a checkpoint without a manifest may be read; its metadata is a pickle, which can run code.
        with_optimizer: whether the tensors of the optimizer are included.

    Raises:
        CheckpointError: the path is none of these, or it is damaged.
    """
    if (path / CONFIG).is_file():
        return FolderSource(path)
    if is_window(path):
        return WindowSource(path.absolute(), with_optimizer=with_optimizer)
    return DenseSource(path, trust=trust, with_optimizer=with_optimizer)


def with_norms(source: Source) -> Iterator[TensorRow]:
    """Yield all tensors with their norms, computed in FP64."""
    for row in source.rows():
        norm = float(torch.linalg.vector_norm(source.read(row.name).double()))
        yield TensorRow(**{**asdict(row), "norm": norm})


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """Difference of one tensor between two sources."""

    name: str
    reason: str
    largest: float | None = None
    """Largest difference of two values at the same index, divided by the largest magnitude in the two tensors. None if
    the shapes differ or a tensor is missing."""


def differences(one: Source, other: Source, *, tolerance: float = 0.0) -> list[TensorDifference]:
    """Compare two sources tensor by tensor. Return the tensors that differ, in this order: tensors that are missing or
    have another shape; then tensors with other values or dtypes, the largest difference first.

    Args:
        tolerance: largest difference that counts as equal, divided by the largest magnitude in both tensors. With 0,
            dtypes and all bits must be equal.
    """
    rows: list[Mapping[str, TensorRow]] = [{row.name: row for row in source.rows()} for source in (one, other)]
    found = [
        TensorDifference(name=name, reason=f"only in {source.path}")
        for source, mine, theirs in ((one, rows[0], rows[1]), (other, rows[1], rows[0]))
        for name in mine.keys() - theirs.keys()
    ]
    for name in sorted(rows[0].keys() & rows[1].keys()):
        if (difference := _difference(name, rows[0][name], rows[1][name], one, other, tolerance)) is not None:
            found.append(difference)
    return sorted(found, key=lambda each: (each.largest is not None, -(each.largest or 0.0), each.name))


def _difference(
    name: str, mine: TensorRow, theirs: TensorRow, one: Source, other: Source, tolerance: float
) -> TensorDifference | None:
    if mine.shape != theirs.shape:
        return TensorDifference(name=name, reason=f"has the shapes {list(mine.shape)} and {list(theirs.shape)}")
    first, second = one.read(name), other.read(name)
    if not tolerance and mine.dtype == theirs.dtype and torch.equal(_bits(first), _bits(second)):
        return None
    values = first.double(), second.double()
    scale = max((float(value.abs().max()) for value in values if value.numel()), default=0.0) or 1.0
    largest = float((values[0] - values[1]).abs().max() / scale) if first.numel() else 0.0
    if tolerance and largest <= tolerance:
        return None
    reason = f"has the dtypes {mine.dtype} and {theirs.dtype}" if mine.dtype != theirs.dtype else "has other values"
    return TensorDifference(name=name, reason=reason, largest=largest)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # Values are compared as bytes, because NaN differs from itself, and 0 equals -0.
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def to_json(value: Any) -> dict[str, Any]:
    """Convert a ``TensorRow`` or a ``TensorDifference`` to JSON values."""
    return asdict(value)
