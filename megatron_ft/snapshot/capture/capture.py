"""Copies the slices of windows into shared memory during the computation, and reports each finished slice."""

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_ft.operators import StateShard
from megatron_ft.planning.snapshot.plan import Piece, WindowPlan, slice_bytes
from megatron_ft.snapshot.capture.idle_gate import CHUNK_BYTES, CopyTimes, IdleGate
from megatron_ft.snapshot.server.client import Arena, KeeperClient
from megatron_ft.snapshot.window import Slice, Update

# A batch of copies is prepared once and can be started many times without new allocations. After each start, the caller
# waits for the batch before it changes the copied tensors.

_PROBE_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
_NUM_PIECES = 4
"""Number of copies in a measurement of bandwidth. All copies read the same source tensor, so that the measurement
needs less device memory."""
_NUM_PROBES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyBatch:
    """Copies that start together: each copies a source tensor to its target memory."""

    sources: tuple[torch.Tensor, ...]
    """Contiguous tensors of any shape and dtype."""
    targets: tuple[torch.Tensor, ...]
    """Host memory to which each source is copied: 1-D, uint8, with as many elements as the source has bytes."""
    num_bytes: int

    @classmethod
    def of(cls, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> "CopyBatch":
        """Pair each source with a target.

        Raises:
            ValueError: a source is not contiguous, or a target has another size than its source.
        """
        for source, target in zip(sources, targets, strict=True):
            size = source.numel() * source.element_size()
            # Check layout and size here, once per batch, because ``memmove`` checks nothing.
            if not source.is_contiguous() or target.dtype is not torch.uint8 or target.numel() != size:
                raise ValueError(
                    f"cannot copy {source.dtype}{tuple(source.shape)} to {target.numel()} elements of {target.dtype}: "
                    f"the source must be contiguous, and the target must have {size} elements of torch.uint8"
                )
        return cls(sources=tuple(sources), targets=tuple(targets), num_bytes=sum(t.numel() for t in targets))

    def take(self, rows: Sequence[int]) -> "CopyBatch":
        """Return a batch with only the pairs whose indices are in ``rows``."""
        targets = tuple(self.targets[row] for row in rows)
        return CopyBatch(
            sources=tuple(self.sources[row] for row in rows), targets=targets, num_bytes=sum(t.numel() for t in targets)
        )


Action = Callable[[], None]


def _nothing() -> None:
    """Do nothing."""


class _ThreadCopier:
    """Copies in a separate thread. The thread releases the interpreter lock while it copies bytes.

    Args:
        gate: shows when the rank waits for messages, so that most bytes can be copied during these waits. If None, a
            batch is copied as soon as it is started.
    """

    def __init__(self, gate: IdleGate | None = None) -> None:
        self._gate = gate
        self._at_once = 0
        """Bytes of a batch that may be copied while the rank computes. The batch's other bytes wait for a bubble."""
        self._batch: CopyBatch | None = None
        self._before: Action = _nothing
        self._after: Action = _nothing
        self._closed = False
        self._wake = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._under_way = False
        self._failure: BaseException | None = None
        self.busy_seconds = 0.0
        """Seconds in which bytes of the last batch were copied, without pauses between the copies."""
        self.times = CopyTimes()
        """Bytes and durations of the last batch's copies, separately for copies that began while the rank waited for a
        message and for all others. All are 0 without a gate."""
        self.cpu_seconds = 0.0
        """CPU time that the thread has used."""
        self._thread = threading.Thread(target=self._serve, name="capture", daemon=True)
        self._thread.start()

    def start(self, batch: CopyBatch, before: Action = _nothing, after: Action = _nothing) -> None:
        """Start to copy ``batch``; do not wait for it. Only one batch may be in progress. ``before`` is called before
        the first byte is copied and ``after`` when all bytes are copied; both may run in another thread."""
        assert not self._under_way, "a batch is still being copied"
        self._batch, self._before, self._after, self._under_way = batch, before, after, True
        if self._gate is not None:
            self._at_once = self._gate.bytes_at_once(batch.num_bytes)
            self._gate.hold()
        self._wake.release()

    def wait(self) -> float:
        """Wait until the batch is copied and ``after`` has returned. Return the seconds of waiting, 0 if no batch is in
        progress.

        Raises:
            BaseException: the error of the copying thread, of ``before`` or of ``after``.
        """
        if not self._under_way:
            return 0.0
        began = time.perf_counter()
        if self._gate is not None:
            self._gate.release()
        self._done.acquire()
        # Drop the references to window buffers, because a buffer can be unmapped only after the last one is gone.
        self._under_way, self._batch, self._before, self._after = False, None, _nothing, _nothing
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return time.perf_counter() - began

    def close(self) -> None:
        """End the thread. No batch may be in progress."""
        assert not self._under_way, "a batch is still being copied"
        self._closed = True
        self._wake.release()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            self._wake.acquire()
            if self._closed:
                return
            try:
                self._before()
                self._copy()
                self._after()
            except BaseException as failure:  # noqa: BLE001 - raised again in wait()
                self._failure = failure
            self.cpu_seconds = time.thread_time()
            self._done.release()

    def _copy(self) -> None:
        assert self._batch is not None, "there is no batch to copy"
        if self._gate is not None:
            return self._copy_in_bubbles(self._batch, self._gate)
        began = time.perf_counter()
        for source, target in zip(self._batch.sources, self._batch.targets, strict=True):
            # ``memmove`` uses only this thread. ``Tensor.copy_`` would also use intra-op threads, which training needs.
            ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())
        self.busy_seconds = time.perf_counter() - began
        return None

    def _copy_in_bubbles(self, batch: CopyBatch, gate: IdleGate) -> None:
        times = CopyTimes()
        for source, target in zip(batch.sources, batch.targets, strict=True):
            to, since, num_bytes = target.data_ptr(), source.data_ptr(), target.numel()
            for offset in range(0, num_bytes, CHUNK_BYTES):
                size = min(CHUNK_BYTES, num_bytes - offset)
                is_idle = gate.await_turn(may_compete=times.busy_bytes < self._at_once)
                began = time.perf_counter()
                ctypes.memmove(to + offset, since + offset, size)
                times.add(size, time.perf_counter() - began, is_idle=is_idle)
        gate.learn(times)
        self.times, self.busy_seconds = times, times.idle_seconds + times.busy_seconds


class _StreamCopier:
    """Copies on a separate CUDA stream into pinned memory. The methods are those of ``_ThreadCopier``.

    ``start`` copies sources in host memory at once, on the CPU. The ``step`` of PyTorch's Adam is such a source. Only
    the CPU changes these sources, so their values belong to the same iteration as the device tensors whose copies
    ``start`` queues.

    This object references the batch until ``wait``, so that the memory of the sources is not reused during the copies.
    ``Tensor.record_stream`` would block this memory for longer, and would cost time for each source.

    Args:
        device: device of the sources that are not in host memory.
        cuda: ``torch.cuda``, or a replacement with ``Stream``, ``Event``, ``current_stream`` and ``stream`` for tests.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._cuda, self._device = cuda, device
        self._stream = cuda.Stream(device)
        self._began = cuda.Event(enable_timing=True)
        self._ended = cuda.Event(enable_timing=True)
        self._batch: CopyBatch | None = None
        self._after: Action = _nothing
        self.busy_seconds = 0.0
        self.times = CopyTimes()

    def start(self, batch: CopyBatch, before: Action = _nothing, after: Action = _nothing) -> None:
        # The copies begin after all work that is queued on the compute stream now.
        assert self._batch is None, "a batch is still being copied"
        before()
        self._batch, self._after = batch, after
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            self._began.record()
            for source, target in zip(batch.sources, batch.targets, strict=True):
                if source.device.type == "cpu":
                    ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())
                else:
                    target.copy_(source.detach().view(-1).view(torch.uint8), non_blocking=True)
            self._ended.record()

    def wait(self) -> float:
        if self._batch is None:
            return 0.0
        began = time.perf_counter()
        # The compute stream must not overwrite the sources before the copies end. The caller reports the bytes as
        # complete when this method returns, so the CPU waits, too.
        self._cuda.current_stream(self._device).wait_event(self._ended)
        self._ended.synchronize()
        self._batch = None
        self.busy_seconds = self._began.elapsed_time(self._ended) / 1000
        after, self._after = self._after, _nothing
        after()
        return time.perf_counter() - began

    def close(self) -> None:
        assert self._batch is None, "a batch is still being copied"


Copier = _ThreadCopier | _StreamCopier


def open_copier(device: torch.device, gate: IdleGate | None = None) -> Copier:
    """Return the copier for tensors on ``device``. ``gate``: see ``_ThreadCopier``; it must be None on CUDA."""
    assert gate is None or device.type != "cuda", "only copies of a thread can wait for bubbles"
    return _StreamCopier(device) if device.type == "cuda" else _ThreadCopier(gate)


def pin(memory: torch.Tensor) -> None:
    """Pin host memory, so that CUDA can copy to it asynchronously. Call ``unpin`` before the memory is unmapped.

    Raises:
        RuntimeError: the driver refuses, for instance because the limit of locked memory is reached.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    # ``Tensor.pin_memory`` would return a copy in other memory, but the snapshot server needs the bytes in this memory.
    code = cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(code) != 0:
        raise RuntimeError(f"cannot pin {memory.numel()} bytes of snapshot memory: CUDA error {code} (check ulimit -l)")


def unpin(memory: torch.Tensor) -> None:
    """Unpin host memory. No copy to the memory may be in progress. Raises RuntimeError if it was not pinned."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = cudart.cudaHostUnregister(memory.data_ptr())
    if int(code) != 0:
        raise RuntimeError(f"cannot unpin {memory.numel()} bytes of snapshot memory: CUDA error {code}")


def capture_bandwidth(device: torch.device, copier: Copier) -> float:
    """Measure how many bytes per second ``copier`` copies from ``device`` to host memory: the best of several trials.

    The host memory has the properties of a window buffer: shared, with all pages allocated, and pinned if ``device`` is
    CUDA. No copy may be in progress.
    """
    num_bytes = _PROBE_BYTES[device.type]
    source = torch.ones(num_bytes // _NUM_PIECES, dtype=torch.uint8, device=device)
    target = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8).fill_(1)
    batch = CopyBatch.of([source] * _NUM_PIECES, target.chunk(_NUM_PIECES))
    is_pinned = device.type == "cuda"
    if is_pinned:
        pin(target)
    try:
        best = float("inf")
        for _ in range(_NUM_PROBES):
            copier.start(batch)
            copier.wait()
            # Use the fastest trial, because other ranks of the node may copy at the same time and slow a trial down.
            best = min(best, copier.busy_seconds)
    finally:
        if is_pinned:
            unpin(target)
    return num_bytes / best


Header = Callable[[], Mapping[str, str]]
"""Function that returns a slice's header: state outside of tensors, as JSON texts by name. It may run in any thread."""

Source = Callable[[Piece], torch.Tensor]
"""Function that returns the current elements of a piece as a contiguous 1-D tensor."""


@dataclass(kw_only=True)
class CaptureFigures:
    """Amount of state that this rank has captured so far, and the time that this took."""

    num_slices: int = 0
    num_bytes: int = 0
    stalled_seconds: float = 0.0
    """Seconds that training spent on starting copies and on waiting for them."""
    busy_seconds: float = 0.0
    """Seconds for which copies ran; training does not wait for most of this time."""
    idle_bytes: int = 0
    """Bytes that were copied while the rank waited for messages of adjacent pipeline stages. Only counted with
    ``snapshot.copy_in_bubbles``."""
    idle_seconds: float = 0.0
    """Seconds for which the copies of ``idle_bytes`` ran."""


class WindowMemory:
    """Tensors that view the window buffers in ``arena``, a rank's memory for windows; pinned if the device is CUDA."""

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
        # Each tensor is a view of the mapping, which can be closed only after the last view is deleted.
        while self.buffers:
            buffer = self.buffers.pop()
            if self._is_pinned:
                unpin(buffer)
            del buffer
        self.arena.close()


class WindowCapture:
    """Captures the slices of ``plan`` from the state of one rank into window buffers.

    Args:
        buffers: host memory of each buffer, uint8, at least as large as a window.
        source: returns the elements of a piece. The tensors must stay at the same addresses while this object is used.
        encode: called with the pieces of a slice before they are copied, perhaps in another thread. It computes those
            tensors of ``source`` that training does not keep up to date. None if training updates all tensors.
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
        encode: Callable[[Sequence[Piece]], None] | None = None,
    ) -> None:
        self.plan = plan
        self._encode = encode
        self.figures = CaptureFigures()
        self._plan_json = plan.to_json()
        self._client = client
        self._copier = copier
        self._slices = _lay_out(plan, shards)
        self._buffers = buffers
        # Prepare the batches once for every buffer, so that the time to start a slice does not grow with its pieces.
        self._batches = [[self._batch(part, buffer, source) for part in self._slices] for buffer in buffers]
        self._bytes_under_way: int | None = None
        """Size of the slice that is being copied; None if no slice is being copied."""

    @property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """Pieces (ranges of tensor elements) of each slice, in the order of slices."""
        return tuple(part.pieces for part in self._slices)

    def begin_slice(
        self,
        buffer: int,
        index: int,
        *,
        iteration: int,
        header: Header,
        captured_at: tuple[int, ...] | None = None,
        update: Update | None = None,
        gradients: Sequence[torch.Tensor] = (),
    ) -> None:
        """Start to copy slice ``index``, which belongs to the state after ``iteration``. Slice 0 begins a window in
        ``buffer``. After the copy, ``header`` is called and the slice is reported to the snapshot server.

        ``captured_at`` contains the iteration of each piece's state; None means ``iteration`` for all pieces. Only
        pieces with the value ``iteration`` are copied here. The snapshot server copies the others from earlier windows.

        ``update`` is the AdamW update with which a peer can compute pieces of this slice from the preceding slice.
        ``gradients`` contains its gradients, FP32. They are copied before this method returns, because the next
        iteration overwrites them.
        """
        assert self._bytes_under_way is None, "a slice is still being copied"
        began = time.perf_counter()
        part = replace(self._slices[index], iteration=iteration, captured_at=captured_at, update=update)
        batch = self._batches[buffer][index]
        if captured_at is not None:
            batch = batch.take([row for row in range(len(part.pieces)) if part.is_captured(row)])

        def begin() -> None:
            # Report this before the first byte is overwritten, so that the server stops using the buffer's old window.
            if index == 0:
                num_slices = self.plan.num_iterations
                self._client.begin(buffer, start_iteration=iteration, num_slices=num_slices, plan=self._plan_json)

        if update is not None:
            begin()
            self._copy_gradients(buffer, part, update, gradients)

        def before() -> None:
            if update is None:
                begin()
            if self._encode is not None:
                self._encode(part.pieces)

        def after() -> None:
            # Report this only after the copy, because the server hashes the bytes as soon as it receives the report.
            self._client.captured(buffer, index, replace(part, header=header()))

        self._copier.start(batch, before, after)
        self._bytes_under_way = batch.num_bytes
        self.figures.stalled_seconds += time.perf_counter() - began

    def settle(self) -> None:
        """Wait until the slice in progress, if any, is copied and reported. Afterwards the caller may change the
        tensors and use the client."""
        if self._bytes_under_way is None:
            return
        began = time.perf_counter()
        num_bytes, self._bytes_under_way = self._bytes_under_way, None
        self._copier.wait()
        self.figures.num_slices += 1
        self.figures.num_bytes += num_bytes
        self.figures.busy_seconds += self._copier.busy_seconds
        self.figures.idle_bytes += self._copier.times.idle_bytes
        self.figures.idle_seconds += self._copier.times.idle_seconds
        self.figures.stalled_seconds += time.perf_counter() - began

    def _copy_gradients(self, buffer: int, part: Slice, update: Update, gradients: Sequence[torch.Tensor]) -> None:
        for (start, stop), gradient in zip(update.ranges(part), gradients, strict=True):
            target = self._buffers[buffer].narrow(0, part.end + start, stop - start)
            target.view(torch.float32).copy_(gradient)
            self.figures.num_bytes += stop - start

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
