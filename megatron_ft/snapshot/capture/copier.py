"""Copies bytes during the computation: a thread on CPU, a side stream on CUDA.

A batch is started, and waited for before its sources may change. It is prepared once: starting it again allocates
nothing.
"""

import ctypes
import mmap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_PROBE_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
_NUM_PIECES = 4
"""Number of parts in which a large tensor is copied, so that the device needs only a part of the memory."""
_NUM_PROBES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyBatch:
    """Copies that are started together."""

    sources: tuple[torch.Tensor, ...]
    """Contiguous live tensors, any shape and dtype."""
    targets: tuple[torch.Tensor, ...]
    """Host memory of the same sizes: uint8 [num_bytes]."""
    num_bytes: int

    @classmethod
    def of(cls, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> "CopyBatch":
        """Pair sources with targets.

        Raises:
            ValueError: a source that is not contiguous, or a target of another size.
        """
        for source, target in zip(sources, targets, strict=True):
            size = source.numel() * source.element_size()
            # Both are checked once, here: ``memmove`` checks nothing.
            if not source.is_contiguous() or target.dtype is not torch.uint8 or target.numel() != size:
                raise ValueError(
                    f"cannot copy {source.dtype}{tuple(source.shape)} to {target.numel()} bytes without conversion"
                )
        return cls(sources=tuple(sources), targets=tuple(targets), num_bytes=sum(t.numel() for t in targets))


class ThreadCopier:
    """Copies in a separate thread, without the interpreter's lock while bytes are copied."""

    def __init__(self) -> None:
        self._batch: CopyBatch | None = None
        self._closed = False
        self._wake = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._under_way = False
        self._failure: BaseException | None = None
        self.busy_seconds = 0.0
        """Duration of the copies of the last batch."""
        self.cpu_seconds = 0.0
        """CPU time that the copying thread has used."""
        self._thread = threading.Thread(target=self._serve, name="capture", daemon=True)
        self._thread.start()

    def start(self, batch: CopyBatch) -> None:
        """Start to copy and return at once. One batch at a time."""
        assert not self._under_way, "the previous batch is not finished"
        self._batch, self._under_way = batch, True
        self._wake.release()

    def wait(self) -> float:
        """Wait until the batch is copied; return the seconds of waiting, 0 without a batch.

        Raises:
            BaseException: raised by the copying thread.
        """
        if not self._under_way:
            return 0.0
        began = time.perf_counter()
        self._done.acquire()
        self._under_way, self._batch = False, None
        if self._failure is not None:
            raise self._failure
        return time.perf_counter() - began

    def close(self) -> None:
        """End the copier; no batch may be in progress."""
        assert not self._under_way, "a batch is not finished"
        self._closed = True
        self._wake.release()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            self._wake.acquire()
            if self._closed:
                return
            began = time.perf_counter()
            try:
                self._copy()
            except BaseException as failure:  # noqa: BLE001 - raised again in wait()
                self._failure = failure
            self.busy_seconds = time.perf_counter() - began
            self.cpu_seconds = time.thread_time()
            self._done.release()

    def _copy(self) -> None:
        assert self._batch is not None, "there is no batch to copy"
        for source, target in zip(self._batch.sources, self._batch.targets, strict=True):
            # On this thread alone: ``Tensor.copy_`` would also use PyTorch's intra-op threads, which have to compute.
            ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())


class StreamCopier:
    """Copies on a separate CUDA stream into memory that was pinned with ``pin``; methods as ``ThreadCopier``.

    The host copies sources in host memory itself, in ``start``. It also writes them itself, so at that moment they have
    the same values as when the device's sources were queued. The ``step`` of PyTorch's Adam is such a source.

    The batch keeps its sources until ``wait``. ``Tensor.record_stream`` would keep their memory in use for longer, at a
    cost for each of them.

    Args:
        device: device of the sources that are not in host memory.
        cuda: has ``Stream``, ``Event``, ``current_stream`` and ``stream`` of ``torch.cuda``; tests replace it.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._cuda, self._device = cuda, device
        self._stream = cuda.Stream(device)
        self._began = cuda.Event(enable_timing=True)
        self._ended = cuda.Event(enable_timing=True)
        self._batch: CopyBatch | None = None
        self.busy_seconds = 0.0

    def start(self, batch: CopyBatch) -> None:
        # After what the computing stream has queued so far.
        assert self._batch is None, "the previous batch is not finished"
        self._batch = batch
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
        # The device must not overwrite sources before the copies end, and the host reports the bytes after this.
        self._cuda.current_stream(self._device).wait_event(self._ended)
        self._ended.synchronize()
        self._batch = None
        self.busy_seconds = self._began.elapsed_time(self._ended) / 1000
        return time.perf_counter() - began

    def close(self) -> None:
        assert self._batch is None, "a batch is not finished"


Copier = ThreadCopier | StreamCopier


def open_copier(device: torch.device) -> Copier:
    """Return the copier for tensors on ``device``."""
    return StreamCopier(device) if device.type == "cuda" else ThreadCopier()


def pin(memory: torch.Tensor) -> None:
    """Pin host memory for asynchronous copies from CUDA. ``unpin`` it before it is unmapped.

    Raises:
        RuntimeError: the driver refuses, for instance at the limit of locked memory.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    # ``Tensor.pin_memory`` would copy to memory of its own; this memory belongs to the snapshot server.
    code = cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(code) != 0:
        raise RuntimeError(f"cannot pin {memory.numel()} bytes of snapshot memory: CUDA error {code} (check ulimit -l)")


def unpin(memory: torch.Tensor) -> None:
    """Unpin memory to which no copy is in progress. Raises RuntimeError if it was not pinned."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = cudart.cudaHostUnregister(memory.data_ptr())
    if int(code) != 0:
        raise RuntimeError(f"cannot unpin {memory.numel()} bytes of snapshot memory: CUDA error {code}")


def capture_bandwidth(device: torch.device, copier: Copier) -> float:
    """Measure the bytes per second that ``copier`` copies from ``device`` into memory like that of windows: the best of
    a few.

    That memory is shared, has all its pages, and is pinned if copies come from CUDA. No copy may be in progress.
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
            # The fastest: other ranks of the node may copy at the same time and only slow it down.
            best = min(best, copier.busy_seconds)
    finally:
        if is_pinned:
            unpin(target)
    return num_bytes / best
