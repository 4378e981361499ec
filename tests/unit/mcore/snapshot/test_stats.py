"""Tests that the costs of windows are reported exactly once, also if captures or memory are replaced."""

from typing import Any

from megatron_ft.mcore.snapshot.snapshotter import _SnapshotStats
from megatron_ft.snapshot.capture.capture import CaptureFigures
from megatron_ft.snapshot.server.client import PERSISTED_BYTES, REPLICATED_BYTES


class FakeArena:
    """Replacement for an arena, with the two fields of the status page that count bytes."""

    def __init__(self, replicated: int, persisted: int) -> None:
        self.words = {REPLICATED_BYTES: replicated, PERSISTED_BYTES: persisted}

    def status(self, word: int) -> int:
        return self.words[word]


def reported(costs: _SnapshotStats, figures: CaptureFigures) -> tuple[float, int | None, int | None, int | None]:
    record = costs.record(9, start_iteration=4, num_iterations=3, figures=figures)
    assert (record.iteration, record.start_iteration, record.num_iterations) == (9, 4, 3)
    return record.stalled_seconds, record.captured_bytes, record.replicated_bytes, record.persisted_bytes


def test_each_window_has_what_came_since_the_one_before() -> None:
    costs, arena, figures = _SnapshotStats(), FakeArena(1000, 500), CaptureFigures(num_bytes=10, stalled_seconds=0.5)
    keeper: Any = arena
    costs.watch(keeper)
    assert reported(costs, figures) == (0.5, 10, 0, 0), "what the keeper did for an earlier process is not of this one"
    arena.words[REPLICATED_BYTES] += 20
    figures.num_bytes, figures.stalled_seconds = 14, 0.75
    assert reported(costs, figures) == (0.25, 4, 20, 0)
    assert reported(costs, figures) == (0, 0, 0, 0)


def test_figures_that_begin_again_lose_nothing_and_are_never_negative() -> None:
    costs, keeper = _SnapshotStats(), FakeArena(0, 0)
    arena: Any = keeper
    costs.watch(arena)
    assert reported(costs, CaptureFigures(num_bytes=10, stalled_seconds=1.0)) == (1.0, 10, 0, 0)
    keeper.words[PERSISTED_BYTES] = 7
    costs.end_captures(CaptureFigures(num_bytes=15, stalled_seconds=1.5))  # tensors move: nothing is captured
    costs.watch(arena)
    assert reported(costs, CaptureFigures()) == (0.5, 5, 0, 7)
    assert reported(costs, CaptureFigures(num_bytes=3)) == (0, 3, 0, 0)
    larger: Any = FakeArena(100, 50)
    costs.watch(larger)
    assert reported(costs, CaptureFigures(num_bytes=3)) == (0, 0, 0, 0)
