"""Tests recovery from replicas for every set of survivors: it is possible if each expert has a holder; otherwise the
lost experts are named."""

from itertools import combinations

import pytest

from megatron_ft.operators import OperatorId
from megatron_ft.planning.placement.migration import MigrationPlan, holdings
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.spread import Spread
from megatron_ft.planning.recovery.living_state import lost_experts, plan_replicas, share_out
from megatron_ft.planning.state.declined import Declined
from megatron_ft.topology import Cluster

NUM_EXPERTS, NUM_SLOTS, EXPERT_BYTES = 4, 2, 100
LAYERS = (2, 4)


def placed(num_ranks: int) -> PlacementPlan:
    """Return a placement of two MoE layers over as many nodes as ranks, with experts divided evenly over the slots."""
    each, more = divmod(num_ranks * NUM_SLOTS, NUM_EXPERTS)
    counts = [each + (expert < more) for expert in range(NUM_EXPERTS)]
    return Spread().place(
        [counts, counts[::-1]],
        Cluster.of(num_ranks, 1),
        num_slots_per_rank=NUM_SLOTS,
        ranks=tuple(range(num_ranks)),
        loads=[[1.0] * NUM_EXPERTS] * 2,
        layer_numbers=LAYERS,
    )


def decide(plan: PlacementPlan, survivors: tuple[int, ...]) -> MigrationPlan | Declined:
    return plan_replicas(
        plan,
        survivors,
        lambda held: placed(len(survivors)),
        num_slots_per_rank=NUM_SLOTS,
        expert_bytes=EXPERT_BYTES,
    )


SURVIVORS = [chosen for size in (1, 2, 3, 4) for chosen in combinations(range(4), size)]


@pytest.mark.parametrize("survivors", SURVIVORS, ids=str)
def test_every_set_of_survivors_of_four(survivors: tuple[int, ...]) -> None:
    plan = placed(4)
    expected = {
        (layer, expert)
        for layer, by_rank in zip(plan.layer_numbers, plan.slots, strict=True)
        for expert in range(NUM_EXPERTS)
        if not any(expert in by_rank[rank] for rank in survivors)
    }
    assert {(lost.layer, lost.expert) for lost in lost_experts(plan, survivors)} == expected
    found = decide(plan, survivors)
    if expected:
        assert isinstance(found, Declined) and {(o.layer, o.expert) for o in found.operators} == expected
        assert all(f"{layer}.expert.{expert}" in found.summary() for layer, expert in expected)
        return
    assert isinstance(found, MigrationPlan)
    assert found.placement.ranks == tuple(range(len(survivors)))
    _check_that_it_makes_the_placement(plan, survivors, found)


def _check_that_it_makes_the_placement(plan: PlacementPlan, survivors: tuple[int, ...], found: MigrationPlan) -> None:
    """Check that each rank's previous experts and received experts are those of the new placement."""
    for position, layer in enumerate(LAYERS):
        had = [set(plan.slots[position][old]) for old in survivors]
        has = [set(experts) for experts in had]
        for transfer in found.transfers:
            if transfer.layer_number == layer:
                assert transfer.expert in had[transfer.source_rank]
                has[transfer.target_rank].add(transfer.expert)
        for rank, experts in enumerate(found.placement.slots[position]):
            assert set(experts) <= has[rank]


def test_both_layers_are_named_apart() -> None:
    """An expert of one layer may survive although the expert with this number in another layer does not."""
    plan = placed(4)
    plan = plan.replacing((plan.slots[0], ((0, 1), (0, 1), (0, 1), (2, 3))))
    assert lost_experts(plan, (0, 1, 2)) == (
        OperatorId(layer=4, kind="expert", expert=2),
        OperatorId(layer=4, kind="expert", expert=3),
    )
    found = decide(plan, (0, 1, 2))
    assert isinstance(found, Declined)
    assert found.summary() == "living_state: no surviving rank holds these operators: 4.expert.2, 4.expert.3"


def test_too_few_slots_decline() -> None:
    """The remaining rank has all experts, but not enough slots for them."""
    plan = placed(2).replacing((((0, 1), (2, 3)),) * 2)
    wide = PlacementPlan.from_json({**plan.to_json(), "num_slots_per_rank": 4, "slots": [[[0, 1, 2, 3], [0]]] * 2})
    found = decide(wide, (0,))
    assert isinstance(found, Declined) and found.missing == ()
    assert found.reason == "placement.num_slots_per_rank=2: the slots of all ranks, 2, are fewer than the experts, 4"


def test_bytes_are_shared_out_evenly_and_each_tensor_once() -> None:
    sizes = {"a": 10, "b": 7, "c": 5, "d": 2}
    assert share_out(sizes, [1, 3]) == {1: ("a", "d"), 3: ("b", "c")}
    assert share_out({}, [0]) == {0: ()}


def test_after_an_interrupted_migration_the_same_placement_is_planned_from_what_ranks_have() -> None:
    """Rank 1 has already replaced its experts by those of rank 3, which is lost."""
    plan = placed(4)
    survivors = (0, 1, 2)
    undisturbed = decide(plan, survivors)
    owned = [list(of_layer) for of_layer in holdings(plan, survivors)]
    for layer, by_rank in enumerate(plan.slots):
        owned[layer][1] = frozenset(by_rank[3])
    given = tuple(tuple(of_layer) for of_layer in owned)
    found = plan_replicas(
        plan,
        survivors,
        lambda held: placed(len(survivors)),
        num_slots_per_rank=NUM_SLOTS,
        expert_bytes=EXPERT_BYTES,
        owned=given,
    )
    assert isinstance(undisturbed, MigrationPlan) and isinstance(found, MigrationPlan)
    assert found.placement == undisturbed.placement
    for transfer in found.transfers:
        assert transfer.expert in given[LAYERS.index(transfer.layer_number)][transfer.source_rank]
    lost = lost_experts(plan, survivors, tuple(tuple(frozenset({0}) for _ in of_layer) for of_layer in given))
    assert {(operator.layer, operator.expert) for operator in lost} == {(n, e) for n in LAYERS for e in (1, 2, 3)}
