"""Tests that the bandwidth for planning is measured with the real copier, into memory like that of windows."""

import pytest
import torch

from megatron_ft.snapshot.capture import capture
from megatron_ft.snapshot.capture.capture import CopyBatch, _ThreadCopier, capture_bandwidth


class TimedCopier:
    """Copier that reports the given durations."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = seconds
        self.batches: list[CopyBatch] = []
        self.busy_seconds = 0.0
        self.pinned_while_copying: list[bool] = []
        self.pinned: list[int] = []

    def start(self, batch: CopyBatch) -> None:
        self.batches.append(batch)
        self.pinned_while_copying.append(batch.targets[0].data_ptr() in self.pinned)

    def wait(self) -> float:
        self.busy_seconds = self._seconds[len(self.batches) - 1]
        return 0.0

    def close(self) -> None:
        """Do nothing."""


def test_the_copier_of_windows_is_asked_and_the_best_try_counts() -> None:
    timed = TimedCopier([0.5, 0.25, 1.0])
    assert capture_bandwidth(torch.device("cpu"), timed) == (32 << 20) / 0.25
    (num_bytes,) = {batch.num_bytes for batch in timed.batches}
    assert num_bytes == 32 << 20 and timed.pinned_while_copying == [False] * 3


def test_memory_is_pinned_as_that_of_windows_while_cuda_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses tensors in host memory. The copier only counts calls."""
    timed, ones = TimedCopier([0.5] * 3), torch.ones
    monkeypatch.setattr(capture, "pin", lambda memory: timed.pinned.append(memory.data_ptr()))
    monkeypatch.setattr(capture, "unpin", lambda memory: timed.pinned.remove(memory.data_ptr()))
    monkeypatch.setattr(torch, "ones", lambda *sizes, dtype, device: ones(*sizes, dtype=dtype))
    assert capture_bandwidth(torch.device("cuda", 0), timed) == (256 << 20) / 0.5
    assert timed.pinned_while_copying == [True] * 3 and timed.pinned == []


def test_a_real_copier_measures_itself() -> None:
    real = _ThreadCopier()
    try:
        assert 1e6 < capture_bandwidth(torch.device("cpu"), real) < 1e12
    finally:
        real.close()
