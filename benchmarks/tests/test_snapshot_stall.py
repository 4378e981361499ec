"""Tests that figures come from warm rounds and the slowest rank, and that the counters count what they should."""

import mmap
import os
import threading
import time
from typing import Any

import pytest
import torch

from benchmarks.operations import counted
from benchmarks.processor import process_cpu_seconds, thread_cpu_seconds, thread_minor_faults, thread_named
from benchmarks.replication_bandwidth import MIB, NUM_SLICES, Case
from benchmarks.replication_bandwidth import summary as replication_summary
from benchmarks.stall_figures import DCP, DCP_SHARED, MEGATRON, OURS, judge, summary

NUM_SAVES = 4
PAGES = 64
NUM_BYTES = 10_000 * mmap.PAGESIZE


def _row(system: str, blocked: float, **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "system": system,
        "blocked_seconds": [blocked] * NUM_SAVES,
        "settle_seconds": [0.0] * NUM_SAVES,
        "blocked_cpu_seconds": 0.0,
        "iteration_seconds": [1.0] * (NUM_SAVES + 1),
        "drain_seconds": 0.0,
        "num_bytes": NUM_BYTES,
        "memcpy_seconds": 0.08,
        "main_faults": 0,
        "process_cpu_seconds": 7.0,
        "capture_cpu_seconds": 0.08,
        "capture_faults": 0,
        "keeper_cpu_seconds": 0.4,
    }
    return row | changes


def _rank(first: float, warm: list[float], **changes: Any) -> dict[str, Any]:
    rows = [_row(OURS, first, capture_faults=9)] + [_row(OURS, value, **changes) for value in warm]
    rows += [_row(name, value) for value in (first, *warm) for name in (DCP, DCP_SHARED, MEGATRON)]
    return {
        "rows": rows,
        "plain_seconds": [5.0] + [1.0] * len(warm),
        "plain_cpu_seconds": [9.0] + [1.0] * len(warm),
        "dense_bytes": NUM_BYTES * 3 // NUM_SAVES,
        "window_iterations": NUM_SAVES,
        "num_delayed": 0,
        "operations": [7, 0, 0, 0],
    }


def test_every_round_counts_for_its_slowest_rank_and_the_first_apart() -> None:
    figures = summary([_rank(0.5, [0.01, 0.03, 0.01]), _rank(0.1, [0.02, 0.01, 0.02])])
    ours = figures["systems"][OURS]
    assert ours["blocked_seconds"] == pytest.approx(0.02)
    assert ours["share_of_iteration"] == pytest.approx(0.02)
    assert ours["of_memcpy"] == pytest.approx(1.0)
    assert ours["worst_of_memcpy"] == pytest.approx(1.5)
    assert ours["first_blocked_seconds"] == pytest.approx(0.5)
    assert ours["capture_faults"] == 0
    assert ours["cpu_seconds"] == pytest.approx(0.5)
    assert ours["bytes_against_dense"] == pytest.approx(1 / 3)
    assert judge(figures, num_saves=NUM_SAVES, quick=False)[0]
    few = summary([_rank(0.1, [0.01, 0.01, 0.01], capture_faults=3)])
    assert few["systems"][OURS]["capture_faults"] == 9 and judge(few, num_saves=NUM_SAVES, quick=False)[0]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([_rank(0.1, [0.03, 0.03])], "3.00% of an iteration"),
        ([_rank(0.1, [0.01, 0.01], memcpy_seconds=0.02)], "2.00x memcpy"),
        ([_rank(0.1, [0.01, 0.01], capture_faults=11)], "22 new pages"),
        ([_rank(0.1, [0.01, 0.01]) | {"operations": [7, 0, 2, 0]}], "operations"),
        ([_rank(0.1, [0.01, 0.01]) | {"num_delayed": 1}], "1 windows delayed"),
        ([_rank(0.1, [0.01, 0.01]) | {"window_iterations": 1}], "W=1"),
    ],
)
def test_what_breaks_the_claim_is_named(ranks: list[dict[str, Any]], text: str) -> None:
    passed, figure, _ = judge(summary(ranks), num_saves=NUM_SAVES, quick=False)
    assert not passed
    assert text in figure


def test_pages_and_time_of_a_thread_are_its_own() -> None:
    def touch() -> None:
        with mmap.mmap(-1, PAGES * mmap.PAGESIZE) as memory:
            memory.madvise(mmap.MADV_NOHUGEPAGE)
            for page in range(PAGES):
                memory[page * mmap.PAGESIZE] = 1
        deadline = time.thread_time() + 0.02
        while time.thread_time() < deadline:
            pass
        done.set()
        release.wait()

    done, release = threading.Event(), threading.Event()
    mine = thread_minor_faults(threading.main_thread())
    thread = threading.Thread(target=touch, name="touches")
    thread.start()
    done.wait()
    found = thread_named("touches")
    assert thread_minor_faults(found) >= PAGES
    assert thread_minor_faults(threading.main_thread()) - mine < PAGES
    assert 0.02 <= thread_cpu_seconds(found) <= process_cpu_seconds(os.getpid())
    release.set()
    thread.join()
    with pytest.raises(LookupError, match="touches"):
        thread_named("touches")


def test_operations_are_counted() -> None:
    tensor = torch.zeros(4)
    with counted() as found:
        tensor.add_(1)
        tensor.clone()
    tensor.clone()
    assert found == [2]


def test_replication_is_the_median_of_pairs() -> None:
    case = Case(slice_bytes=MIB, num_copies=1)
    sender = {
        "keeper_seconds": [2.0, 1.0, 4.0],
        "gloo_seconds": [1.0, 2.0, 4.0],
        "keeper_cpu_seconds": 3.0,
        "gloo_cpu_seconds": 1.0,
        "first_keeper_seconds": 9.0,
        "first_gloo_seconds": 9.0,
    }
    figures = replication_summary(case, [sender, {"gloo_cpu_seconds": 2.0}])
    gib = 3 * NUM_SLICES * MIB / (1 << 30)
    assert figures["ratio"] == 1.0
    assert figures["lowest_ratio"] == 0.5
    assert figures["keeper_cpu_seconds_per_gib"] == pytest.approx(3.0 / gib)
    assert figures["gloo_cpu_seconds_per_gib"] == pytest.approx(3.0 / gib)
