"""Copies the slices of windows into shared memory, and reports each finished slice to the snapshot server."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_ft.operator_state import StateShard
from megatron_ft.planning.snapshot.pieces import Piece, slice_bytes
from megatron_ft.planning.snapshot.plan import WindowPlan
from megatron_ft.snapshot.capture.copier import Copier, CopyBatch, pin, unpin
from megatron_ft.snapshot.server.client import Arena, KeeperClient
from megatron_ft.snapshot.window import Slice

Source = Callable[[Piece], torch.Tensor]
"""Function that returns the present elements of a piece as a contiguous 1-D tensor."""


@dataclass(kw_only=True)
class CaptureFigures:
    """Time that this rank has spent on captures."""

    num_slices: int = 0
    num_bytes: int = 0
    stalled_seconds: float = 0.0
    """Seconds for which training waited for copies or started them."""
    busy_seconds: float = 0.0
    """Seconds for which copies ran; training does not wait for most of this time."""


class WindowMemory:
    """The window buffers of an arena as tensors. They are pinned if the copies come from CUDA."""

    def __init__(self, arena: Arena, device: torch.device) -> None:
        """Map the buffers as tensors; pin them on CUDA. Raises RuntimeError if the driver refuses to pin them."""
        self.arena = arena
        self.buffers = [torch.frombuffer(arena.buffer(index), dtype=torch.uint8) for index in range(arena.num_buffers)]
        """One tensor per buffer, uint8 [window_bytes]. No view of them may exist when ``release`` is called."""
        self._is_pinned = device.type == "cuda"
        if self._is_pinned:
            for buffer in self.buffers:
                pin(buffer)

    def release(self) -> None:
        """Unpin and unmap the buffers. Afterwards the snapshot server can free their memory.

        Raises:
            BufferError: a view of a buffer still exists.
            RuntimeError: the driver refuses to unpin a buffer.
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
        buffers: host memory of each buffer, uint8, at least as large as a window.
        source: returns the elements of a piece. The tensors must stay at the same addresses while this object is used.
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
        """The slice that is being copied: number of its buffer, its index in the window, and its description."""

    def begin_window(self, buffer: int, start_iteration: int) -> None:
        """Begin a window in ``buffer``. The next calls of ``begin_slice`` add its slices."""
        num_slices, plan = self.plan.num_iterations, self._plan_json
        self._client.begin(buffer, start_iteration=start_iteration, num_slices=num_slices, plan=plan)

    def begin_slice(self, buffer: int, index: int, *, iteration: int, header: Mapping[str, Any]) -> None:
        """Start to copy slice ``index``, which belongs to the state after ``iteration``. Store ``header`` with it."""
        assert self._under_way is None, "a slice is still being copied"
        began = time.perf_counter()
        self._copier.start(self._batches[buffer][index])
        self._under_way = buffer, index, replace(self._slices[index], iteration=iteration, header=header)
        self.figures.stalled_seconds += time.perf_counter() - began

    def settle(self) -> None:
        """Wait until the slice in progress, if any, is copied, and report it. Then the tensors may change."""
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
        pieces = Piece.of_slice(plan, index, shards)
        part = Slice(iteration=index, offset=offset, num_bytes=slice_bytes(pieces), header={}, pieces=pieces)
        slices.append(part)
        offset = part.end
    return slices
