"""One slice after the other into a window's buffer, and the word to the keeper when it is there."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_ft.operator_state import StateShard
from megatron_ft.planning.snapshot.pieces import Piece, slice_bytes, slice_pieces
from megatron_ft.planning.snapshot.plan import WindowPlan
from megatron_ft.snapshot.capture.copier import Copier, CopyBatch

Source = Callable[[Piece], torch.Tensor]
"""The live elements of a piece: 1-D, contiguous."""


class Keeper(Protocol):
    """What capture asks of the node's keeper; ``KeeperClient`` offers it."""

    def begin(self, buffer: int, *, start_iteration: int, num_slices: int, plan: Mapping[str, Any]) -> None:
        """A window begins in ``buffer``."""

    def captured(
        self,
        buffer: int,
        *,
        index: int,
        iteration: int,
        offset: int,
        num_bytes: int,
        header: Mapping[str, Any],
        pieces: Sequence[Sequence[str | int]],
    ) -> None:
        """A slice lies in ``buffer``; cheap."""


@dataclass(kw_only=True)
class CaptureFigures:
    """What capturing has cost this rank."""

    num_slices: int = 0
    num_bytes: int = 0
    stalled_seconds: float = 0.0
    """Training stood still for so long, waiting for copies or starting them."""
    busy_seconds: float = 0.0
    """Copying took so long, most of it hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    pieces: tuple[Piece, ...]
    rows: list[list[str | int]]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnderWay:
    buffer: int
    index: int
    iteration: int
    header: Mapping[str, Any]


class WindowCapture:
    """Captures the slices of ``plan`` on one rank.

    Args:
        buffers: host memory of each buffer: uint8 [at least the window's bytes].
        source: live tensors; they must stay where they are as long as this object is used.
    """

    def __init__(
        self,
        plan: WindowPlan,
        shards: Sequence[StateShard],
        *,
        keeper: Keeper,
        copier: Copier,
        buffers: Sequence[torch.Tensor],
        source: Source,
    ) -> None:
        self.plan = plan
        self.figures = CaptureFigures()
        self._plan_json = plan.to_json()
        self._keeper = keeper
        self._copier = copier
        self._slices = _lay_out(plan, shards)
        self._batches = [[self._batch(part, buffer, source) for part in self._slices] for buffer in buffers]
        self._under_way: _UnderWay | None = None

    def begin_window(self, buffer: int, start_iteration: int) -> None:
        """The next slice is the first of a window in ``buffer``."""
        num_slices, plan = self.plan.num_iterations, self._plan_json
        self._keeper.begin(buffer, start_iteration=start_iteration, num_slices=num_slices, plan=plan)

    def begin_slice(self, buffer: int, index: int, *, iteration: int, header: Mapping[str, Any]) -> None:
        """Start to copy slice ``index`` of the state after ``iteration``; ``header`` goes with it."""
        assert self._under_way is None, "a slice is under way"
        began = time.perf_counter()
        self._copier.start(self._batches[buffer][index])
        self._under_way = _UnderWay(buffer=buffer, index=index, iteration=iteration, header=header)
        self.figures.stalled_seconds += time.perf_counter() - began

    def settle(self) -> None:
        """Wait until the slice under way, if any, is copied, and tell the keeper. Its sources may then change."""
        if self._under_way is None:
            return
        began = time.perf_counter()
        done, self._under_way = self._under_way, None
        self._copier.wait()
        part = self._slices[done.index]
        self._keeper.captured(
            done.buffer,
            index=done.index,
            iteration=done.iteration,
            offset=part.offset,
            num_bytes=part.num_bytes,
            header=done.header,
            pieces=part.rows,
        )
        self.figures.num_slices += 1
        self.figures.num_bytes += self._batches[done.buffer][done.index].num_bytes
        self.figures.busy_seconds += self._copier.busy_seconds
        self.figures.stalled_seconds += time.perf_counter() - began

    def _batch(self, part: _Slice, buffer: torch.Tensor, source: Source) -> CopyBatch:
        targets = [buffer.narrow(0, part.offset + piece.offset, piece.num_bytes) for piece in part.pieces]
        return CopyBatch.of([source(piece) for piece in part.pieces], targets)


def _lay_out(plan: WindowPlan, shards: Sequence[StateShard]) -> list[_Slice]:
    slices, offset = [], 0
    for index in range(plan.num_iterations):
        pieces = slice_pieces(plan, index, shards)
        num_bytes = slice_bytes(pieces)
        rows = [piece.to_row() for piece in pieces]
        slices.append(_Slice(pieces=pieces, rows=rows, offset=offset, num_bytes=num_bytes))
        offset += num_bytes
    return slices
