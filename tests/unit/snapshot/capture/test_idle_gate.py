"""Tests that copies run while a rank waits for messages, and that all of them have run when the update is due."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_ft.snapshot.capture.capture import CopyBatch, _ThreadCopier, capture_bandwidth
from megatron_ft.snapshot.capture.idle_gate import CHUNK_BYTES, CopyTimes, IdleGate

LIMIT_SECONDS = 60.0


class Clock:
    """Clock that only the test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class WatchedGate(IdleGate):
    """Gate that counts the chunks for which the copying thread has asked."""

    def __init__(self, clock: Any) -> None:
        super().__init__(clock)
        self._asked = threading.Condition()
        self.num_asked = 0

    def await_turn(self, *, may_compete: bool) -> bool:
        with self._asked:
            self.num_asked += 1
            self._asked.notify_all()
        return super().await_turn(may_compete=may_compete)

    def await_asked(self, number: int) -> None:
        """Wait until the copying thread has asked for chunk ``number``, counted from 1."""
        with self._asked:
            assert self._asked.wait_for(lambda: self.num_asked >= number, LIMIT_SECONDS), "no chunk is asked for"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gate(clock: Clock) -> WatchedGate:
    return WatchedGate(clock)


@pytest.fixture
def copier(gate: WatchedGate) -> Iterator[_ThreadCopier]:
    found = _ThreadCopier(gate)
    yield found
    found.wait()
    found.close()


def run(gate: IdleGate, clock: Clock, waits: list[float], *, tail: float = 0.0) -> None:
    """Run an iteration with one second of computation before each wait, and ``tail`` seconds after the last one."""
    with gate.iteration():
        for seconds in waits:
            clock.seconds += 1.0
            with gate.waiting():
                clock.seconds += seconds
        clock.seconds += tail


def chunks(number: int) -> tuple[CopyBatch, torch.Tensor, torch.Tensor]:
    """Return a batch of ``number`` chunks, its sources and its targets."""
    source = torch.arange(number * CHUNK_BYTES // 8, dtype=torch.int64)
    target = torch.zeros(number * CHUNK_BYTES, dtype=torch.uint8)
    return CopyBatch.of([source], [target]), source, target


def num_copied(target: torch.Tensor) -> int:
    """Return the number of chunks whose last byte pattern has arrived."""
    return sum(bool(chunk.any()) for chunk in target.split(CHUNK_BYTES))


def learned(gate: IdleGate, clock: Clock, waits: list[float], *, tail: float = 0.0) -> None:
    """Give the gate expectations: these waits, and a rate of one chunk per second."""
    run(gate, clock, waits, tail=tail)
    times = CopyTimes(idle_bytes=CHUNK_BYTES, idle_seconds=1.0, busy_bytes=CHUNK_BYTES, busy_seconds=1.0)
    gate.learn(times)


def test_everything_is_copied_at_once_before_anything_is_measured(
    gate: WatchedGate, clock: Clock, copier: _ThreadCopier
) -> None:
    batch, source, target = chunks(3)
    assert gate.bytes_at_once(batch.num_bytes) == batch.num_bytes
    copier.start(batch)
    gate.await_asked(3)
    copier.wait()
    assert torch.equal(target.view(torch.int64), source)
    assert (copier.times.idle_bytes, copier.times.busy_bytes) == (0, batch.num_bytes)
    assert copier.busy_seconds == copier.times.busy_seconds > 0


def test_nothing_is_copied_until_the_rank_waits(gate: WatchedGate, clock: Clock, copier: _ThreadCopier) -> None:
    learned(gate, clock, [2.0, 2.0])
    batch, source, target = chunks(3)
    copier.start(batch)
    gate.await_asked(1)
    assert num_copied(target) == 0
    with gate.waiting():
        gate.await_asked(3)
    copier.wait()
    assert torch.equal(target.view(torch.int64), source)
    assert copier.times.idle_bytes >= 2 * CHUNK_BYTES


def test_what_no_bubble_takes_is_copied_when_the_update_is_due(
    gate: WatchedGate, clock: Clock, copier: _ThreadCopier
) -> None:
    learned(gate, clock, [2.0, 2.0])
    batch, source, target = chunks(3)
    copier.start(batch)
    gate.await_asked(1)
    assert num_copied(target) == 0
    copier.wait()
    assert torch.equal(target.view(torch.int64), source)
    assert copier.times.idle_bytes == 0


def test_what_fits_into_no_bubble_is_copied_before_it(gate: WatchedGate, clock: Clock, copier: _ThreadCopier) -> None:
    """Two seconds of waits and one second after them take three chunks of five."""
    learned(gate, clock, [1.0, 1.0], tail=1.0)
    batch, source, target = chunks(5)
    assert gate.bytes_at_once(batch.num_bytes) == 2 * CHUNK_BYTES
    copier.start(batch)
    gate.await_asked(3)
    assert num_copied(target) == 2
    copier.wait()
    assert torch.equal(target.view(torch.int64), source)


def test_after_the_last_wait_of_an_iteration_the_rest_is_copied(
    gate: WatchedGate, clock: Clock, copier: _ThreadCopier
) -> None:
    learned(gate, clock, [4.0, 4.0])
    batch, _, target = chunks(2)
    copier.start(batch)
    gate.await_asked(1)
    ended = threading.Event()
    copier._after = ended.set
    with gate.iteration():
        with gate.waiting():
            pass
        with gate.waiting():
            pass
        assert ended.wait(LIMIT_SECONDS), "the batch is copied although the iteration has not ended"
        assert num_copied(target) == 2


def test_the_shortest_of_the_newest_iterations_is_expected(gate: WatchedGate, clock: Clock) -> None:
    learned(gate, clock, [2.0, 6.0], tail=1.0)
    assert gate.idle_seconds == 8.0
    assert gate.bytes_at_once(10 * CHUNK_BYTES) == CHUNK_BYTES
    run(gate, clock, [3.0, 2.0], tail=4.0)
    assert gate.idle_seconds == 5.0
    assert gate.bytes_at_once(10 * CHUNK_BYTES) == 4 * CHUNK_BYTES
    for _ in range(5):
        run(gate, clock, [8.0, 1.0], tail=3.0)
    assert gate.bytes_at_once(20 * CHUNK_BYTES) == 8 * CHUNK_BYTES


def test_iterations_that_fail_or_do_not_wait_change_nothing(gate: WatchedGate, clock: Clock) -> None:
    learned(gate, clock, [2.0])
    with pytest.raises(RuntimeError, match="peer"), gate.iteration():
        with gate.waiting():
            clock.seconds += 0.5
        raise RuntimeError("a peer is lost")
    with gate.waiting():  # evaluation
        clock.seconds += 9.0
    assert (gate.idle_seconds, gate.bytes_at_once(5 * CHUNK_BYTES)) == (2.0, 3 * CHUNK_BYTES)
    run(gate, clock, [])
    assert (gate.idle_seconds, gate.bytes_at_once(5 * CHUNK_BYTES)) == (0.0, 3 * CHUNK_BYTES)
    gate.forget()
    assert gate.bytes_at_once(5 * CHUNK_BYTES) == 5 * CHUNK_BYTES


def test_small_batches_give_a_rate_together(gate: WatchedGate, clock: Clock) -> None:
    learned(gate, clock, [2.0])
    gate.learn(CopyTimes(idle_bytes=CHUNK_BYTES // 2, idle_seconds=0.125, busy_bytes=0, busy_seconds=0.0))
    assert gate.bytes_at_once(5 * CHUNK_BYTES) == 3 * CHUNK_BYTES
    gate.learn(CopyTimes(idle_bytes=CHUNK_BYTES // 2, idle_seconds=0.375))
    assert gate.bytes_at_once(5 * CHUNK_BYTES) == CHUNK_BYTES


def test_the_bandwidth_is_measured_without_waiting_for_a_bubble(
    gate: WatchedGate, clock: Clock, copier: _ThreadCopier
) -> None:
    learned(gate, clock, [1e6])
    assert 1e6 < capture_bandwidth(torch.device("cpu"), copier) < 1e12


def test_an_error_in_a_bubble_reaches_the_rank_that_trains(gate: WatchedGate, copier: _ThreadCopier) -> None:
    batch, _, _ = chunks(1)

    def fail() -> None:
        raise ValueError("the server is gone")

    copier.start(batch, after=fail)
    with pytest.raises(ValueError, match="the server is gone"):
        copier.wait()
