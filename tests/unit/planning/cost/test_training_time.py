"""Compares the ETTR of the closed formula with numbers computed by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as some

from megatron_ft.planning.cost.training_time import checkpoint_overhead, effective_training_time_ratio

OVERHEADS = some.floats(0.0, 100.0)
SECONDS = some.floats(0.0, 1e6)
MTBFS = some.floats(1e-3, 1e9)


def test_overhead_is_waiting_over_computing() -> None:
    assert checkpoint_overhead(6.0, 2.0, 10) == pytest.approx(0.3)  # 6 s of waiting for 10 iterations of 2 s
    assert checkpoint_overhead(0.0, 2.0) == 0.0


def test_the_formula_by_hand() -> None:
    # a window of 5 iterations of 2 s: E[R] = 3/2 * 5 * 2 s = 15 s (MoEvement, section 3.4); a failure in 10 minutes
    found = effective_training_time_ratio(overhead=0.02, recovery_seconds=15.0, mtbf_seconds=600.0)
    assert found == pytest.approx(0.956480, abs=1e-6)  # 1 / 1.02 / 1.025
    # dense checkpoints every 100 iterations of 2 s that take 20 s: overhead 0.1, E[R] = 1/2 * 100 * 2 s = 100 s
    overhead = checkpoint_overhead(20.0, 2.0, 100)
    found = effective_training_time_ratio(overhead=overhead, recovery_seconds=100.0, mtbf_seconds=600.0)
    assert found == pytest.approx(0.779221, abs=1e-6)  # 1 / 1.1 / (7 / 6)


@given(OVERHEADS, SECONDS, MTBFS)
def test_it_is_a_share(overhead: float, recovery: float, mtbf: float) -> None:
    assert 0.0 < effective_training_time_ratio(overhead=overhead, recovery_seconds=recovery, mtbf_seconds=mtbf) <= 1.0


@given(some.floats(0.0, 10.0), some.floats(1e-3, 1e3))
def test_without_failures_what_is_left_is_one_minus_the_share_of_waiting(waits: float, iteration: float) -> None:
    overhead = checkpoint_overhead(waits, iteration)
    found = effective_training_time_ratio(overhead=overhead, recovery_seconds=5.0, mtbf_seconds=math.inf)
    assert found == pytest.approx(1.0 - waits / (waits + iteration))


@given(OVERHEADS, SECONDS, SECONDS, MTBFS)
def test_longer_recoveries_never_leave_more(overhead: float, first: float, second: float, mtbf: float) -> None:
    few, many = (
        effective_training_time_ratio(overhead=overhead, recovery_seconds=seconds, mtbf_seconds=mtbf)
        for seconds in sorted((first, second))
    )
    assert few >= many


@pytest.mark.parametrize(
    "wrong", [{"overhead": -0.1}, {"recovery_seconds": -1.0}, {"mtbf_seconds": 0.0}, {"mtbf_seconds": math.nan}]
)
def test_what_no_run_has_is_refused(wrong: dict[str, float]) -> None:
    figures = {"overhead": 0.0, "recovery_seconds": 0.0, "mtbf_seconds": 1.0} | wrong
    with pytest.raises(AssertionError):
        effective_training_time_ratio(**figures)
