"""Tests which values the copies of a window contain: those queued on the device, and those on the host, when the copy
began."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ft.snapshot.capture.capture import CopyBatch, _StreamCopier, capture_bandwidth, pin, unpin

NUM_BYTES = 64 << 20
SLEEP_CYCLES = 200_000_000
"""Cycles of about a tenth of a second. Operations queued behind them have not run when the host continues."""


@pytest.fixture
def target() -> Iterator[torch.Tensor]:
    """Return pinned host memory, pinned in the same way as a window's memory and not by torch."""
    memory = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    pin(memory)
    yield memory
    unpin(memory)


def copied_after_a_queued_write(target: torch.Tensor, cuda: Any) -> int:
    """Return the content of a batch that begins while the write of its source is still queued."""
    source = torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    copier = _StreamCopier(source.device, cuda)
    torch.cuda._sleep(SLEEP_CYCLES)
    source.fill_(7)
    copier.start(CopyBatch.of([source], [target]))
    copier.wait()
    assert int(target.min()) == int(target.max())
    return int(target[0])


class Unordered(torch.cuda.Stream):
    """Stream that waits for no other stream."""

    def wait_stream(self, stream: torch.cuda.Stream) -> None:
        """Do nothing."""


def test_a_batch_comes_after_what_the_computing_stream_has_queued(target: torch.Tensor) -> None:
    assert copied_after_a_queued_write(target, torch.cuda) == 7


def test_without_the_order_the_same_batch_comes_before(target: torch.Tensor) -> None:
    """Shows that the previous test can fail."""
    names = ("Event", "current_stream", "stream")
    cuda = SimpleNamespace(Stream=Unordered, **{name: getattr(torch.cuda, name) for name in names})
    assert copied_after_a_queued_write(target, cuda) == 0


def test_what_is_queued_after_the_wait_is_not_in_the_batch(target: torch.Tensor) -> None:
    source = torch.ones(NUM_BYTES, dtype=torch.uint8, device="cuda")
    copier = _StreamCopier(source.device)
    for value in (2, 3):
        copier.start(CopyBatch.of([source], [target]))
        copier.wait()
        source.fill_(value)
        assert bool((target == value - 1).all())
    assert copier.busy_seconds > 0.0 and copier.wait() == 0.0
    copier.close()


def test_sources_in_host_memory_are_those_of_the_start(target: torch.Tensor) -> None:
    step, weight = torch.tensor(5.0), torch.arange(1024, device="cuda", dtype=torch.float32)
    batch = CopyBatch.of([step, weight], [target[:4], target[4:4100]])
    copier = _StreamCopier(weight.device)
    copier.start(batch)
    step.fill_(6.0)
    copier.wait()
    assert float(target[:4].view(torch.float32)) == 5.0
    assert torch.equal(target[4:4100].clone().view(torch.float32), torch.arange(1024, dtype=torch.float32))


def test_a_slice_of_many_pieces_of_every_dtype(target: torch.Tensor) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64)
    sources = [torch.randint(0, 100, (1 + 37 * n,), device="cuda").to(dtypes[n % 5]) for n in range(200)]
    targets, offset = [], 0
    for source in sources:
        size = source.numel() * source.element_size()
        targets.append(target[offset : offset + size])
        offset += size + 3  # at any alignment
    copier = _StreamCopier(torch.device("cuda"))
    copier.start(CopyBatch.of(sources, targets))
    copier.wait()
    for source, kept in zip(sources, targets, strict=True):
        assert torch.equal(kept, source.view(torch.uint8).cpu())


def test_memory_is_pinned_once_and_can_be_pinned_again() -> None:
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    for _ in range(2):
        pin(memory)
        with pytest.raises(RuntimeError, match="cannot pin"):
            pin(memory)
        unpin(memory)


def test_refused_memory_leaves_the_device_usable() -> None:
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="cannot unpin"):
        unpin(memory)
    ones = torch.ones(8, 8, device="cuda")
    assert float((ones @ ones).sum()) == 512.0


def test_the_probe_measures_what_copies_reach(target: torch.Tensor) -> None:
    source = torch.ones(NUM_BYTES, dtype=torch.uint8, device="cuda")
    copier = _StreamCopier(source.device)
    seconds = []
    for _ in range(5):
        copier.start(CopyBatch.of([source], [target]))
        copier.wait()
        seconds.append(copier.busy_seconds)
    ceiling = NUM_BYTES / min(seconds)
    assert 0.5 * ceiling < capture_bandwidth(source.device, copier) < 1.2 * ceiling
