"""Compares the number of slices with the paper's algorithm; tests splitting, balance, stalls and planning time."""

import math
import random
import time

import pytest

from megatron_ft.errors import ConfigError
from megatron_ft.operators import StateShard
from megatron_ft.planning.snapshot.demand import Demand
from megatron_ft.planning.snapshot.plan import Unit
from megatron_ft.planning.snapshot.policy import SnapshotContext
from megatron_ft.planning.snapshot.sparse_window import SparseWindow, _Packing
from megatron_ft.testing.demands import context, equal_experts, expert, one_huge_embedding, shard, uneven


def algorithm_1(num_operators: int, master_optim: int, compute: int, budget: int) -> tuple[int, int]:
    """Compute MoEvement's algorithm 1, lines 7 to 18, with T_Iter * B_PCIe = budget."""
    active = num_operators
    while active > 2:
        frozen = num_operators - active
        if master_optim * active + compute * frozen <= budget:
            break
        active -= 1
    return math.ceil(num_operators / active), active


def test_never_more_slices_than_the_paper_where_its_slices_fit() -> None:
    rng = random.Random(3)
    num_shorter = num_compared = 0
    for _ in range(300):
        num_operators = rng.randint(2, 60)
        budget = rng.randint(2 * num_operators * 100, 14 * num_operators * 100)
        window, active = algorithm_1(num_operators, 1200, 200, budget)
        if 1200 * active + 200 * (num_operators - active) > budget:
            continue
        seconds = SnapshotContext(bandwidth_bytes_per_second=budget, iteration_seconds=1.0)
        plan = SparseWindow(max_window_iterations=64).plan(equal_experts(num_operators), seconds)
        assert plan.num_iterations <= window
        num_compared += 1
        num_shorter += plan.num_iterations < window
    assert num_compared > 200
    assert num_shorter > 10


def test_the_paper_s_example_takes_three_slices() -> None:
    # Figure 6: six equal operators, two a slice; later slices have room for more, but two slices are not enough.
    budget = SnapshotContext(bandwidth_bytes_per_second=2 * 1200 + 4 * 200, iteration_seconds=1.0)
    plan = SparseWindow(balance=False).plan(equal_experts(6), budget)
    assert [len(units) for units in plan.slices] == [2, 2, 2]


def test_balanced_slices_are_as_many_and_more_even() -> None:
    for seed in range(5):
        demand = uneven(seed=seed)
        given = context(demand, 0.55)
        filled, balanced = (SparseWindow(balance=balance).plan(demand, given) for balance in (False, True))
        assert balanced.num_iterations == filled.num_iterations > 1
        assert demand.slice_bytes(balanced).max() <= demand.slice_bytes(filled).max()
    assert demand.slice_bytes(balanced).max() < demand.slice_bytes(filled).max()


def test_a_smaller_budget_than_that_of_a_balanced_plan_does_not_pack() -> None:
    demand = equal_experts(12)
    plan = SparseWindow().plan(demand, context(demand, 0.5))
    table = demand.bytes_of([unit for units in plan.slices for unit in units])
    peak = int(demand.slice_bytes(plan).max())
    assert _Packing.of(table, peak, plan.num_iterations) is not None
    assert _Packing.of(table, peak - peak // 1024 - 1, plan.num_iterations) is None


def test_an_operator_larger_than_the_budget_is_cut_until_it_fits() -> None:
    demand = one_huge_embedding()
    given = context(demand, 0.3)
    plan = SparseWindow().plan(demand, given)
    cut = [unit for units in plan.slices for unit in units if unit.num_parts > 1]
    assert {str(unit.operator) for unit in cut} == {"0.embedding"}
    assert demand.slice_bytes(plan).max() <= given.budget_bytes
    whole = demand.bytes_of([Unit(operator=cut[0].operator)]).full.max()
    assert whole > given.budget_bytes


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_an_operator_that_only_one_rank_has_is_cut_too(share: float) -> None:
    # As with the distributed optimizer over many ranks: each has little, and that is one operator or two.
    ranks = [(shard(expert(1, rank), 6000), shard(expert(2, rank % 3), 500 + rank)) for rank in range(6)]
    demand = Demand(shards_by_rank=tuple(ranks))
    given = context(demand, share)
    plan = SparseWindow().plan(demand, given)
    assert demand.slice_bytes(plan).max() <= given.budget_bytes
    assert "no stall" in plan.reason


def test_frozen_bytes_beyond_the_budget_stall_and_say_for_how_long() -> None:
    demand = equal_experts(40)
    given = SnapshotContext(bandwidth_bytes_per_second=4000.0, iteration_seconds=1.0)
    plan = SparseWindow().plan(demand, given)
    by_slice = demand.slice_bytes(plan).max(axis=1)
    stall = sum(max(0.0, num_bytes / 4000.0 - 1.0) for num_bytes in by_slice)
    assert f"stalls {stall:.3g} s every {plan.num_iterations} iterations" in plan.reason
    assert 200 * 40 < by_slice.max() <= 1.125 * 200 * 40 + 1200, "no more above the frozen bytes than one operator"


def test_a_window_is_no_longer_than_it_may_be() -> None:
    demand = equal_experts(100)
    given = context(demand, 0.2)
    free = SparseWindow().plan(demand, given)
    assert free.num_iterations > 4
    bounded = SparseWindow(max_window_iterations=4).plan(demand, given)
    assert bounded.num_iterations == 4
    assert demand.slice_bytes(bounded).max() > given.budget_bytes
    assert "stalls" in bounded.reason


@pytest.mark.parametrize("wanted", [2, 3, 5])
def test_a_window_is_as_long_as_it_must_be(wanted: int) -> None:
    demand = uneven()
    plan = SparseWindow(min_window_iterations=wanted).plan(demand, context(demand, 2.0))
    assert plan.num_iterations == wanted


def test_early_slices_are_smaller_in_units_and_equal_in_bytes() -> None:
    demand = equal_experts(200)
    plan = SparseWindow().plan(demand, context(demand, 0.35))
    sizes = [len(units) for units in plan.slices]
    assert sizes == sorted(sizes)
    by_slice = demand.slice_bytes(plan)[:, 0]
    assert by_slice.max() - by_slice.min() <= 1200


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"max_window_iterations": 0}, "max_window_iterations=0"),
        ({"min_window_iterations": 9, "max_window_iterations": 8}, "min_window_iterations=9"),
        ({"max_parts": 0}, "max_parts=0"),
        ({"replan_drift": -0.1}, "replan_drift=-0.1"),
    ],
)
def test_fields_out_of_range_are_refused(fields: dict[str, float], key: str) -> None:
    demand = equal_experts(4)
    with pytest.raises(ConfigError, match=f"snapshot.policy.{key}: must be at"):
        SparseWindow(**fields).plan(demand, context(demand, 1.0))  # type: ignore[arg-type]


@pytest.mark.parametrize(("bandwidth", "seconds"), [(0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0), (0.1, 1.0)])
def test_measurements_out_of_range_are_refused(bandwidth: float, seconds: float) -> None:
    given = SnapshotContext(bandwidth_bytes_per_second=bandwidth, iteration_seconds=seconds)
    with pytest.raises(ConfigError, match=r"snapshot\.(bandwidth_bytes_per_second|iteration_seconds)="):
        SparseWindow().plan(equal_experts(4), given)


@pytest.mark.parametrize("is_shared", [True, False])
def test_ten_thousand_operators_on_64_ranks_are_planned_within_two_seconds(is_shared: bool) -> None:
    rng = random.Random(1)
    ranks: list[list[StateShard]] = [[] for _ in range(64)]
    for number in range(10_000):
        sizes = [shard(expert(number // 100 + 1, number % 100), rng.randint(500, 1500)) for _ in range(3)]
        for rank in range(64) if is_shared else (rng.randrange(64),):
            ranks[rank].append(rng.choice(sizes))
    demand = Demand(shards_by_rank=tuple(map(tuple, ranks)))
    given = context(demand, 0.3)
    demand.operator_bytes  # noqa: B018 - reading the shards is not planning
    start = time.process_time()
    plan = SparseWindow().plan(demand, given)
    assert time.process_time() - start < 2.0
    assert plan.num_iterations > 2
