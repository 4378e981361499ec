"""Tests when a new placement is used: the tokens that it saves, the bytes that it moves, and that all ranks decide
alike."""

import pytest

from megatron_ft.planning.placement.migration import MigrationPlan, holdings
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.rebalance import RebalancePolicy, critical_tokens, imbalance, smooth

BYTES = 1000


def plan(*slots: tuple[int, ...]) -> PlacementPlan:
    """Return a placement of one layer with three experts, from a tuple of slots for each rank."""
    made = PlacementPlan(
        num_experts=3,
        num_slots_per_rank=2,
        ranks=tuple(range(len(slots))),
        domains=tuple(f"node{rank}" for rank in range(len(slots))),
        layer_numbers=(1,),
        slots=(slots,),
        algorithm="by hand",
    )
    made.validate()
    return made


LOADS = [[8.0, 2.0, 2.0]]
UNEVEN, EVEN = plan((0, 0), (1, 2)), plan((0, 1), (0, 2))


def migration(now: PlacementPlan, then: PlacementPlan) -> MigrationPlan:
    return MigrationPlan.between(then, holdings(now), BYTES)


def policy(**changes: float) -> RebalancePolicy:
    values = {"interval_iterations": 10, "min_gain": 0.05, "bytes_per_saved_token": 1000.0, **changes}
    return RebalancePolicy(**values)


def test_smoothing_weighs_the_past() -> None:
    assert smooth(None, [[4, 0]], 0.9) == [[4.0, 0.0]]
    assert smooth([[4.0, 0.0]], [[0, 8]], 0.75) == [[3.0, 2.0]]
    assert smooth([[4.0, 0.0]], [[0, 8]], 0.0) == [[0.0, 8.0]]


def test_every_layer_costs_its_busiest_rank() -> None:
    assert critical_tokens(UNEVEN, LOADS) == 8.0
    assert critical_tokens(EVEN, LOADS) == 6.0
    assert (imbalance(UNEVEN, LOADS), imbalance(EVEN, LOADS)) == (pytest.approx(4 / 3), 1.0)
    assert imbalance(EVEN, [[0.0, 0.0, 0.0]]) == 1.0


@pytest.mark.parametrize(
    ("interval", "iteration", "due"), [(10, 10, True), (10, 20, True), (10, 11, False), (10, 0, False), (0, 10, False)]
)
def test_due_after_every_interval(interval: int, iteration: int, due: bool) -> None:
    assert policy(interval_iterations=interval).due(iteration) == due


def test_pays_when_it_saves_enough_for_what_it_moves() -> None:
    """Two of 8 tokens are saved in each of 10 iterations, and two experts move."""
    move = migration(UNEVEN, EVEN)
    assert move.num_bytes == 2 * BYTES
    verdict = policy(bytes_per_saved_token=100.0).decide(UNEVEN, move, LOADS)
    assert (verdict.pays, verdict.gain, verdict.moved_bytes) == (True, 0.25, 2000)
    assert "25.0%" in verdict.reason and "2,000 bytes" in verdict.reason


def test_does_not_pay_for_too_many_bytes() -> None:
    verdict = policy(bytes_per_saved_token=99.0).decide(UNEVEN, migration(UNEVEN, EVEN), LOADS)
    assert not verdict.pays
    assert "2,000 for 20 saved tokens" in verdict.reason


def test_does_not_pay_below_the_least_gain() -> None:
    move = migration(UNEVEN, EVEN)
    assert policy(min_gain=0.25).decide(UNEVEN, move, LOADS).pays
    verdict = policy(min_gain=0.26).decide(UNEVEN, move, LOADS)
    assert not verdict.pays and "less than 26.0%" in verdict.reason


@pytest.mark.parametrize("loads", [LOADS, [[0.0, 0.0, 0.0]]])
def test_staying_never_pays(loads: list[list[float]]) -> None:
    assert not policy().decide(EVEN, migration(EVEN, EVEN), loads).pays


def test_a_worse_placement_never_pays() -> None:
    verdict = policy(min_gain=0.0).decide(EVEN, migration(EVEN, UNEVEN), LOADS)
    assert not verdict.pays and verdict.gain < 0
