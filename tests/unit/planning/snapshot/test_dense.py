"""Compares intervals of dense snapshots with an enumeration of all intervals."""

import math

import pytest

from megatron_ft.errors import ConfigError
from megatron_ft.planning.snapshot.dense import DenseInterval, GeminiStyle, OverheadBounded, _useful_time_ratio
from megatron_ft.planning.snapshot.policy import SnapshotContext
from megatron_ft.testing.demands import equal_experts, uneven

DEMAND = equal_experts(10)
WHOLE_BYTES = 10 * 100 * 12


def given(stall_seconds: float, iteration_seconds: float = 2.0) -> SnapshotContext:
    """Return a context with a bandwidth at which one snapshot stalls training for the given time."""
    bandwidth = WHOLE_BYTES / (iteration_seconds + stall_seconds)
    return SnapshotContext(bandwidth_bytes_per_second=bandwidth, iteration_seconds=iteration_seconds)


def test_everything_is_one_slice_at_the_given_interval() -> None:
    plan = DenseInterval(interval_iterations=10).plan(uneven(), given(1.0))
    assert (plan.num_iterations, plan.interval_iterations) == (1, 10)


@pytest.mark.parametrize("stall", [0.0, 0.01, 0.5, 3.0, 47.0])
@pytest.mark.parametrize("bound", [0.01, 0.03, 0.5])
def test_the_bounded_interval_is_the_smallest_within_the_bound(stall: float, bound: float) -> None:
    context = given(stall)
    stall = context.stall_seconds(WHOLE_BYTES)
    interval = OverheadBounded(max_overhead=bound).plan(DEMAND, context).interval_iterations
    assert stall / (interval * 2.0) <= bound * (1 + 1e-12)
    assert interval == 1 or stall / ((interval - 1) * 2.0) > bound


@pytest.mark.parametrize("stall", [0.0, 0.1, 1.0, 20.0])
@pytest.mark.parametrize("mtbf", [60.0, 600.0, 7200.0])
def test_no_other_interval_has_more_useful_time(stall: float, mtbf: float) -> None:
    context = given(stall)
    stall = context.stall_seconds(WHOLE_BYTES)
    interval = GeminiStyle(mtbf_seconds=mtbf).plan(DEMAND, context).interval_iterations
    best = max(range(1, 2000), key=lambda n: _useful_time_ratio(n, stall, 2.0, mtbf))
    assert interval == best


def test_useful_time_is_the_product_of_both_overheads() -> None:
    # Section 2.4 at 10 iterations of 2 s, a stall of 1 s, a failure every 100 s: 1/1.05 * 1/1.1.
    assert _useful_time_ratio(10, 1.0, 2.0, 100.0) == pytest.approx(1 / 1.05 / 1.1)


def test_more_failures_and_shorter_stalls_shorten_the_interval() -> None:
    by_mtbf = [GeminiStyle(mtbf_seconds=m).plan(DEMAND, given(5.0)).interval_iterations for m in (60.0, 600.0, 6000.0)]
    by_stall = [GeminiStyle(mtbf_seconds=600.0).plan(DEMAND, given(s)).interval_iterations for s in (0.1, 1.0, 10.0)]
    assert by_mtbf == sorted(set(by_mtbf))
    assert by_stall == sorted(set(by_stall))


@pytest.mark.parametrize(
    ("policy", "key"),
    [
        (DenseInterval(interval_iterations=0), "interval_iterations=0"),
        (OverheadBounded(max_overhead=0.0), "max_overhead=0.0"),
        (OverheadBounded(max_overhead=math.nan), "max_overhead=nan"),
        (GeminiStyle(mtbf_seconds=-1.0), "mtbf_seconds=-1.0"),
        (GeminiStyle(mtbf_seconds=math.inf), "mtbf_seconds=inf"),
    ],
)
def test_fields_out_of_range_are_refused(policy: DenseInterval | OverheadBounded | GeminiStyle, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"snapshot\.policy\.{key}: must be"):
        policy.plan(DEMAND, given(1.0))
