"""Tests costs of recoveries with made-up times, and measures the real times of one stage."""

from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest

from benchmarks.recovery_costs import WINDOW_ITERATIONS, Case, ablation, frozen_operators, window_of
from benchmarks.recovery_speed import ablation_column, ablation_table, compare, judge, paper_cases, speed_table
from benchmarks.stage_times import KINDS, LOADS, NOTHING, Kind, Request, StageTimes, Times, measure
from megatron_ft.operators import OperatorId

FORWARD, BACKWARD, REST = 1.0, 2.0, 0.0
EXPERTS = tuple(f"expert.{number}" for number in range(len(LOADS[0])))


def made_up(*cases: Case, gate: float = 0.0) -> Times:
    """Return made-up times. An expert's weight gradients take time in proportion to its tokens; those of all experts
    together take one second."""
    return {request: _times(request, gate) for case in cases for request in case.requests()}


def _times(request: Request, gate: float) -> StageTimes:
    kind, frozen = request
    loads = LOADS[KINDS.index(kind)]
    skipped = sum(load for name, load in zip(EXPERTS, loads, strict=True) if name in frozen) / sum(loads)
    backward = BACKWARD - skipped - gate * ("gate" in frozen)
    return StageTimes(forward_seconds=FORWARD, backward_seconds=backward, rest_seconds=REST)


def test_stages_are_of_the_kinds_that_are_measured() -> None:
    assert get_args(Kind) == KINDS


def test_numbers_of_experts_tell_nothing_of_their_popularity() -> None:
    for loads in LOADS:
        mean = sum(number * load for number, load in enumerate(loads)) / sum(loads)
        assert mean == pytest.approx((len(loads) - 1) / 2, abs=0.1)


@pytest.mark.parametrize("by_popularity", [False, True])
def test_slices_freeze_less_and_less(by_popularity: bool) -> None:
    rows = frozen_operators(3, 1, by_popularity)
    assert len(rows) == WINDOW_ITERATIONS - 1
    for place in range(3):
        patterns = [row[place] for row in rows]
        assert patterns[0] and all(later < earlier for earlier, later in pairwise(patterns))
    assert ("embedding" in rows[0][0]) == by_popularity, "by layer it is captured first, by popularity last"
    assert "head" in rows[0][2] and not {"embedding", "head"} & rows[0][1]


def test_popular_experts_stay_frozen_longest() -> None:
    """Within each stage, no active expert is more popular than a frozen one."""
    plan = window_of(3, 1, True)
    for index in range(WINDOW_ITERATIONS - 1):
        active = {unit.operator for unit in plan.active(index)}
        for layer in (1, 2, 3):
            loads = LOADS[layer - 1]
            experts = [OperatorId(layer=layer, kind="expert", expert=number) for number in range(len(loads))]
            done = [loads[number] for number, one in enumerate(experts) if one in active]
            left = [loads[number] for number, one in enumerate(experts) if one not in active]
            assert max(done, default=0) <= min(left, default=100)


def test_a_recovery_replays_between_one_window_and_two() -> None:
    """The windows have 4 iterations, so 4, 5, 6 or 7 iterations are replayed, 5.5 on average."""
    case = Case(num_stages=3, num_microbatches=6)
    cost = case.recover(made_up(case))
    assert cost.num_executions == 5.5 * 3 * 6


@pytest.mark.parametrize("microbatches", [4, 24])
def test_without_frozen_gradients_only_the_bubble_is_saved(microbatches: int) -> None:
    """The saving is (PP - 1) / (M + PP - 1) of the wall time."""
    case = Case(num_stages=3, num_microbatches=microbatches, skips_frozen=False)
    comparisons = list(compare(case, "moe_micro", made_up(case), 0.0))
    assert all(one.holds for one in comparisons)
    for one in comparisons[:3]:
        assert one.less_percent == pytest.approx(100 * 2 / (microbatches + 2))
        assert one.localized.cpu_seconds == pytest.approx(one.whole.cpu_seconds / 3)


def test_each_technique_makes_recoveries_cheaper() -> None:
    steps = ablation(Case(num_stages=3))
    walls = [float(cells[0]) for cells in ablation_column(steps, made_up(*steps.values()))]
    assert len(walls) == 4 and walls == sorted(walls, reverse=True) and len(set(walls)) == 4


def test_an_order_that_does_not_help_is_reported() -> None:
    """The order of experts makes no difference if the gates take all the compute time."""
    steps = ablation(Case(num_stages=3))
    times = {request: replace(one, backward_seconds=BACKWARD) for request, one in made_up(*steps.values()).items()}
    walls = [cells[0] for cells in ablation_column(steps, times)]
    assert walls[0] == walls[1] == walls[2] and float(walls[3]) < float(walls[2])


def test_a_comparison_that_does_not_hold_fails_the_claim() -> None:
    cases = [*paper_cases(), Case(num_stages=4, num_chunks=2)]
    times = made_up(*cases)
    found = [one for case in cases for one in compare(case, "moe_micro", times, 0.0)]
    steps = ablation(cases[0])
    table = ablation_table([steps], made_up(*steps.values()))
    passed, figure = judge(found, table)
    assert passed and f"{len(found)} of {len(found)} comparisons hold" in figure
    assert len(speed_table(found)["rows"]) == len(found)
    slow = replace(found[0], localized=replace(found[0].localized, wall_seconds=found[0].whole.wall_seconds))
    more = replace(found[0], localized=replace(found[0].localized, num_executions=1.0))
    for wrong in (slow, more):
        passed, figure = judge([wrong, *found[1:]], table)
        assert not passed and f"{len(found) - 1} of {len(found)} comparisons hold" in figure


@pytest.mark.slow
@pytest.mark.distributed
def test_a_stage_is_measured_on_the_real_engine() -> None:
    frozen = frozenset([*EXPERTS, "gate", "non_expert"])
    requests: list[Request] = [("first", NOTHING), ("middle", NOTHING), ("middle", frozen), ("last", NOTHING)]
    for _ in range(3):  # a busy machine lengthens a time and never shortens it
        times = measure("moe_micro", requests, repeats=2, timeout_seconds=150.0)
        assert set(times) == set(requests)
        for one in times.values():
            assert 0 < min(one.forward_seconds, one.backward_seconds, one.rest_seconds) < 1.0
        if times["middle", frozen].backward_seconds < times["middle", NOTHING].backward_seconds:
            return
    pytest.fail(f"a frozen operator's backward pass takes as long as another's, three times: {times}")
