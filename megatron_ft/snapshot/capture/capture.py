"""Copies slice after slice into the buffers of windows, and reports each to the snapshot server."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_ft.operator_state import StateShard
from megatron_ft.planning.snapshot.pieces import Piece, slice_bytes, slice_pieces
from megatron_ft.planning.snapshot.plan import WindowPlan
from megatron_ft.snapshot.capture.copier import Copier, CopyBatch, pin, unpin
from megatron_ft.snapshot.server.client import Arena, KeeperClient
from megatron_ft.snapshot.window import Slice

Source = Callable[[Piece], torch.Tensor]
"""Function that returns the live elements of a piece: 1-D, contiguous."""


@dataclass(kw_only=True)
class CaptureFigures:
    """Cost of capturing on this rank."""

    num_slices: int = 0
    num_bytes: int = 0
    stalled_seconds: float = 0.0
    """Time in which training waited for copies or started them."""
    busy_seconds: float = 0.0
    """Time of the copies, most of which training does not wait for."""


class WindowMemory:
    """The buffers of an arena as tensors while they are mapped; pinned if copies come from CUDA."""

    def __init__(self, arena: Arena, device: torch.device) -> None:
        """Map and pin the buffers. Raises RuntimeError if the driver refuses to pin them."""
        self.arena = arena
        self.buffers = [torch.frombuffer(arena.buffer(index), dtype=torch.uint8) for index in range(arena.num_buffers)]
        """uint8 [window_bytes] each. Views of them must be gone before ``release``."""
        self._is_pinned = device.type == "cuda"
        if self._is_pinned:
            for buffer in self.buffers:
                pin(buffer)

    def release(self) -> None:
        """Unpin and unmap: the snapshot server can then free the memory.

        Raises:
            BufferError: a buffer is in use.
            RuntimeError: the driver refuses.
        """
        # Each tensor exports the mapping: it can be closed only after the last one is gone.
        while self.buffers:
            buffer = self.buffers.pop()
            if self._is_pinned:
                unpin(buffer)
            del buffer
        self.arena.close()


class WindowCapture:
    """Captures the slices of ``plan`` on one rank.

    Args:
        buffers: host memory of each buffer: uint8 [at least the window's bytes].
        source: live tensors; they must stay in place as long as this object is used.
    """

    def __init__(
        self,
        plan: WindowPlan,
        shards: Sequence[StateShard],
        *,
        client: KeeperClient,
        copier: Copier,
        buffers: Sequence[torch.Tensor],
        source: Source,
    ) -> None:
        self.plan = plan
        self.figures = CaptureFigures()
        self._plan_json = plan.to_json()
        self._client = client
        self._copier = copier
        self._slices = _lay_out(plan, shards)
        # Prepared once for every buffer: starting a slice must not cost time in proportion to its pieces.
        self._batches = [[self._batch(part, buffer, source) for part in self._slices] for buffer in buffers]
        self._under_way: tuple[int, int, Slice] | None = None
        """Buffer, index and description of the slice that is being copied."""

    def begin_window(self, buffer: int, start_iteration: int) -> None:
        """Begin a window in ``buffer``; its slices follow."""
        num_slices, plan = self.plan.num_iterations, self._plan_json
        self._client.begin(buffer, start_iteration=start_iteration, num_slices=num_slices, plan=plan)

    def begin_slice(self, buffer: int, index: int, *, iteration: int, header: Mapping[str, Any]) -> None:
        """Start to copy slice ``index`` of the state after ``iteration``, with its ``header``."""
        assert self._under_way is None, "the previous slice is not finished"
        began = time.perf_counter()
        self._copier.start(self._batches[buffer][index])
        self._under_way = buffer, index, replace(self._slices[index], iteration=iteration, header=header)
        self.figures.stalled_seconds += time.perf_counter() - began

    def settle(self) -> None:
        """Wait until the slice in progress, if any, is copied, and report it. Afterwards its sources may change."""
        if self._under_way is None:
            return
        began = time.perf_counter()
        (buffer, index, part), self._under_way = self._under_way, None
        # Before the report: the server hashes the bytes as soon as it knows of them.
        self._copier.wait()
        self._client.captured(buffer, index, part)
        self.figures.num_slices += 1
        self.figures.num_bytes += self._batches[buffer][index].num_bytes
        self.figures.busy_seconds += self._copier.busy_seconds
        self.figures.stalled_seconds += time.perf_counter() - began

    def _batch(self, part: Slice, buffer: torch.Tensor, source: Source) -> CopyBatch:
        targets = [buffer.narrow(0, part.offset + piece.offset, piece.num_bytes) for piece in part.pieces]
        return CopyBatch.of([source(piece) for piece in part.pieces], targets)


def _lay_out(plan: WindowPlan, shards: Sequence[StateShard]) -> list[Slice]:
    slices, offset = [], 0
    for index in range(plan.num_iterations):
        pieces = slice_pieces(plan, index, shards)
        part = Slice(iteration=index, offset=offset, num_bytes=slice_bytes(pieces), header={}, pieces=pieces)
        slices.append(part)
        offset = part.end
    return slices
