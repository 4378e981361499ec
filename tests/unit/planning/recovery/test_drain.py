"""Tests the move before nodes leave, for every set of remaining ranks: these have all experts afterwards."""

from itertools import combinations

import pytest

from megatron_ft.planning.placement.migration import holdings
from megatron_ft.planning.recovery.living_state import lost_experts, plan_drain
from tests.unit.planning.recovery.test_living_state import EXPERT_BYTES, NUM_EXPERTS, placed

STAYING = [chosen for size in (2, 3) for chosen in combinations(range(4), size)]


@pytest.mark.parametrize("staying", STAYING, ids=str)
def test_every_set_of_ranks_that_stay(staying: tuple[int, ...]) -> None:
    plan = placed(4)
    moves = plan_drain(plan, staying, lambda held: placed(len(staying)), expert_bytes=EXPERT_BYTES)
    assert (moves is None) == (not lost_experts(plan, staying))
    if moves is None:
        return
    assert not lost_experts(moves.placement, staying)
    moves.placement.validate()
    for before, after in zip(plan.slots, moves.placement.slots, strict=True):
        assert all(after[rank] == before[rank] for rank in range(4) if rank not in staying)
    assert {transfer.target_rank for transfer in moves.transfers} <= set(staying)


def test_some_sets_need_it() -> None:
    plan = placed(4)
    assert any(lost_experts(plan, staying) for staying in STAYING)
    assert all(frozenset().union(*by_rank) == set(range(NUM_EXPERTS)) for by_rank in holdings(plan)), (
        "all are held before"
    )
