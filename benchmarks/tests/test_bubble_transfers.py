"""Tests what the claim ``bubble-transfers`` computes from measured values."""

from typing import Any

import pytest

from benchmarks import bubble_transfers
from benchmarks.bubble_transfers import Simulated, _summary, judge, simulate
from benchmarks.stage_times import KINDS, NOTHING, StageTimes
from megatron_ft.planning.pipeline import PipelineShape

TIMES = {(kind, NOTHING): StageTimes(forward_seconds=1.0, backward_seconds=2.0, rest_seconds=0.5) for kind in KINDS}


def row(**changes: float) -> dict[str, Any]:
    about = {"iteration_seconds": 2.0, "blocked_seconds": 0.0, "idle_seconds": 0.5, "captured_bytes": 100.0}
    return {**about, "idle_bytes": 95.0, "used_seconds": 0.25, **changes}


def measured(**changes: float) -> dict[str, Any]:
    """Return the figures of two stages and one pair."""
    off = row(idle_bytes=0.0)
    return _summary([[[off, row(**changes)]], [[row(iteration_seconds=1.0), row(iteration_seconds=1.0)]]])


@pytest.fixture(scope="module")
def simulated() -> list[Simulated]:
    return list(simulate(4, TIMES, 1e9))


def test_the_slower_stage_and_all_bytes_count() -> None:
    found = measured(iteration_seconds=1.5, idle_bytes=45.0)
    assert found["ratios"] == [0.75] and found["idle_copied_share"] == 0.7 and found["used_share"] == 0.5


def test_copies_that_fit_delay_nothing_and_longer_ones_less_than_without_the_key(simulated: list[Simulated]) -> None:
    assert {one.num_chunks for one in simulated} == {1, 2}
    of_fill = {(one.num_chunks, one.copies): one for one in simulated}
    half, twice = of_fill[1, "0.5 of least waits"], of_fill[1, "2 of least waits"]
    # f=1, b=2 and four stages: the last stage waits 3 s, the least of all, in an iteration of 33.5 s.
    assert (half.copy_seconds, twice.copy_seconds) == (1.5, 6.0)
    assert half.fits and half.delay_share == 0 < half.delay_without_share
    assert not twice.fits and 0 < twice.delay_share <= twice.delay_without_share
    assert judge({"dense": measured()}, simulated, quick=False)[0]


@pytest.mark.parametrize(
    "changes", [{"iteration_seconds": 2.1}, {"blocked_seconds": 0.03}, {"idle_bytes": 60.0, "captured_bytes": 150.0}]
)
def test_slow_iterations_and_copies_outside_of_waits_fail(
    changes: dict[str, float], simulated: list[Simulated]
) -> None:
    assert not judge({"dense": measured(**changes)}, simulated, quick=False)[0]
    assert judge({"dense": measured(**changes)}, simulated, quick=True)[0]


def test_slices_of_partial_windows_are_smaller_and_stages_add_up() -> None:
    found = bubble_transfers.slice_bytes(PipelineShape(num_stages=4, num_microbatches=8))
    assert all(len(sizes) == 4 and min(sizes) > 0 for sizes in found.values())
    assert all(sum(found[name]) < sum(found["dense"]) / 2 for name in ("sparse window", "partial", "selective"))
