"""Compares the needs of whole layouts with Megatron's rules applied by hand, and carries out plans between layouts."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.recovery.layout import LaneLimits, choose_layout
from megatron_ft.planning.state.declined import Declined
from megatron_ft.planning.state.holdings import Medium, Needs
from megatron_ft.planning.state.model_state import WEIGHT, ModelState, Sharding
from megatron_ft.planning.state.parallel_layout import ParallelLayout
from megatron_ft.planning.state.transfers import TransferPlan
from tests.helpers.state_models import domains, model, placements
from tests.helpers.state_transfers import check_plan, held_elements, needed_elements, planned


def needs_of(of: ModelState, layout: ParallelLayout, sharding: Sharding) -> Needs:
    return of.needs(layout, sharding, iteration=3, domain_of=domains(layout))


def ranges(needs: Needs, rank: int, kind: str) -> list[tuple[str, int, int, int]]:
    return sorted(
        (row.tensor.parameter, row.tensor.tensor_part, row.start, row.stop)
        for row in needs
        if row.rank == rank and row.tensor.kind == kind
    )


def test_weights_of_a_rank_are_those_of_its_stage_chunks_tensor_part_and_experts() -> None:
    layout = ParallelLayout.regular(8, tensor_size=2, num_stages=2)
    of = model(tensor_size=2, num_stages=2, num_chunks=2, num_experts=2)
    needs = needs_of(of, layout, Sharding(expert_parallel_size=2))
    # Rank 7: stage 1, lane 1, TP 1, EP 1; its chunks have layers 2 and 4, and the head.
    assert ranges(needs, 7, WEIGHT) == [
        ("head.weight", 1, 0, 90),
        *[(f"layers.2.experts.1.{name}", 0, 0, size) for name, size in (("fc1", 40), ("fc2", 23))],
        ("layers.2.norm", 0, 0, 7),
        ("layers.2.qkv", 1, 0, 75),
        *[(f"layers.4.experts.1.{name}", 0, 0, size) for name, size in (("fc1", 40), ("fc2", 23))],
        ("layers.4.norm", 0, 0, 7),
        ("layers.4.qkv", 1, 0, 75),
    ]


def test_each_optimizer_element_is_on_one_rank_of_its_group_or_on_all() -> None:
    layout = ParallelLayout.regular(8, tensor_size=2, num_stages=1)
    of = model(tensor_size=2, num_experts=2)
    for sharding, dense, repeated, expert in (
        (Sharding(expert_parallel_size=2), 1, 2, 1),  # both tensor-parallel groups cut a repeated parameter
        (Sharding(expert_parallel_size=2, is_distributed=False), 4, 8, 4),
        (Sharding(expert_parallel_size=2, num_state_copies=2), 2, 4, 2),
    ):
        counts: dict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
        for _, (tensor, place, _) in needed_elements(needs_of(of, layout, sharding)):
            if tensor.kind == "master":
                counts[tensor.parameter][tensor.tensor_part, place] += 1
        assert set(counts["layers.1.qkv"].values()) == {dense}
        assert set(counts["layers.1.norm"].values()) == {repeated}
        assert set(counts["layers.1.experts.1.fc1"].values()) == {expert}
        assert len(counts["layers.1.qkv"]) == 2 * 75


def test_copies_of_a_shard_lie_on_other_domains_and_are_held_as_copies() -> None:
    layout = ParallelLayout.regular(4, tensor_size=1, num_stages=1)
    holdings = model().holdings(
        layout, Sharding(num_state_copies=2), iteration=3, domain_of=domains(layout, ranks_per_node=2)
    )
    for (tensor, _, _), holders in held_elements(holdings).items():
        if tensor.kind == "master":
            assert sorted(holders.values()) == [Medium.LIVE, Medium.STATE_COPY]
            assert {rank // 2 for rank in holders} == {0, 1}


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_replicas_share_the_optimizer_state_of_their_expert(copies: int) -> None:
    layout = ParallelLayout.regular(4, tensor_size=1, num_stages=1)
    of = model(num_experts=2)
    plans = placements(layout, [[1]], 2, 1)  # each expert on two of four ranks
    needs = needs_of(of, layout, Sharding(placements=plans, num_state_copies=copies))
    counts: Counter[int] = Counter()
    for rank, (tensor, _, _) in needed_elements(needs):
        if tensor.parameter.startswith("layers.1.experts.0.") and tensor.kind == "master":
            counts[rank] += 1
    assert sum(counts.values()) == copies * (40 + 23)
    # Two holders: one copy is halved between them, two copies make both whole; a third is kept by a rank beside them.
    assert sorted(counts.values()) == {1: [31, 32], 2: [63, 63], 3: [63, 63, 63]}[copies]


def test_shapes_that_do_not_fit_are_refused() -> None:
    layout = ParallelLayout.regular(4, tensor_size=1, num_stages=1)
    with pytest.raises(ConfigError, match=r"expert_model_parallel_size=3: must divide the number of experts \(2\)"):
        needs_of(model(), layout, Sharding(expert_parallel_size=3))
    with pytest.raises(ConfigError, match="must have PP. and TP., the sizes of the model"):
        needs_of(model(num_stages=2), layout, Sharding())
    with pytest.raises(ConfigError, match="num_state_copies=5"):
        needs_of(model(), layout, Sharding(num_state_copies=5))


def test_layouts_are_data() -> None:
    layout = ParallelLayout.regular(9, tensor_size=2, num_stages=2, num_spares=1)
    assert ParallelLayout.from_json(layout.to_json()) == layout
    assert layout.summary() == "TP2 CP1 PP2, lanes: 2, ranks: 8, hot spares: 1"
    assert layout.places()[5] == (1, 0, 1)
    for broken in (
        ParallelLayout(tensor_size=1, stages=(((0,), (1,)), ((2,),))),
        ParallelLayout(tensor_size=2, stages=(((0,),),)),
        ParallelLayout(tensor_size=1, stages=(((0,), (0,)),)),
        ParallelLayout(tensor_size=1, stages=(((0,), (1,)),), spares=(1,)),
    ):
        with pytest.raises(ConfigError):
            broken.validate()
    with pytest.raises(ConfigError, match="must be a positive multiple of TP . CP . PP = 4"):
        ParallelLayout.regular(6, tensor_size=2, num_stages=2)


def test_a_substitute_gets_each_element_once_and_nothing_else_moves() -> None:
    layout = ParallelLayout.regular(8, tensor_size=2, num_stages=2)
    of, sharding = model(tensor_size=2, num_stages=2), Sharding(expert_parallel_size=2, num_state_copies=2)
    held = of.holdings(layout, sharding, iteration=3, domain_of=domains(layout))
    living = sorted({*layout.ranks, 8} - {3})
    chosen = choose_layout(layout, living, {rank: rank for rank in range(9)}, LaneLimits(most=2))
    assert isinstance(chosen, ParallelLayout)
    assert chosen.stages == (((0, 1), (2, 8)), ((4, 5), (6, 7)))
    needs = needs_of(of, chosen, sharding)
    plan = planned(held.without(ranks=[3]), needs)
    mine = {element for rank, element in needed_elements(needs) if rank == 8}
    assert plan.received_bytes() == {8: sum(tensor.item_bytes for tensor, _, _ in mine)}
    assert len(mine) == len({element for rank, element in needed_elements(needs_of(of, layout, sharding)) if rank == 3})


def test_a_spare_sends_and_keeps_the_copies_it_has() -> None:
    layout = ParallelLayout.regular(3, tensor_size=1, num_stages=1, num_spares=1)
    of, sharding = model(), Sharding(num_state_copies=2)
    held = of.holdings(layout, sharding, iteration=3, domain_of=domains(layout))
    assert Medium.STATE_COPY in {holders.get(2) for holders in held_elements(held).values()}
    smaller = ParallelLayout(tensor_size=1, stages=(((0,), (2,)),))
    needs = of.needs(smaller, sharding, iteration=3, domain_of=domains(layout), has_copies=False)
    plan = planned(held.without(ranks=[1]), needs)
    assert plan.received_bytes()[2] < sum(t.item_bytes for rank, (t, _, _) in needed_elements(needs) if rank == 2)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_from_any_layout_to_the_next_one_every_rank_gets_what_it_needs(data: st.DataObject) -> None:
    """Random layouts lose as many ranks as the copies allow. After the plan, the survivors have exactly their state."""
    tensor_size, num_stages = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 2]))
    lanes, spares = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 2))
    num_ranks = tensor_size * num_stages * lanes + spares
    layout = ParallelLayout.regular(num_ranks, tensor_size=tensor_size, num_stages=num_stages, num_spares=spares)
    of = model(
        tensor_size=tensor_size,
        num_stages=num_stages,
        num_chunks=data.draw(st.sampled_from([1, 2])),
        is_tied=data.draw(st.booleans()),
    )
    has_slots = data.draw(st.booleans())
    is_distributed, cuts = data.draw(st.booleans()), data.draw(st.booleans())
    copies = data.draw(st.integers(1, lanes)) if is_distributed else 1
    limits = LaneLimits.of(
        layout, lanes + 1, num_expert_ranks=1, num_experts=2, num_slots_per_rank=1 if has_slots else None
    )

    def sharding(of_layout: ParallelLayout, shift: int) -> Sharding:
        plans: tuple[PlacementPlan, ...] | None = None
        if has_slots and len(of_layout.stages[0]) * tensor_size >= 2:
            layers = [
                sorted({p.operator.layer for chunk in s for p in chunk if p.operator.kind == "expert"})
                for s in of.chunks
            ]
            plans = placements(of_layout, layers, 2, 1, shift)
        return Sharding(
            is_distributed=is_distributed,
            padded_for_lanes=(3,),
            bucket_size=100,
            placements=plans,
            num_state_copies=min(copies, of_layout.num_lanes),
            cuts_replicas=cuts,
        )

    held = of.holdings(layout, sharding(layout, 0), iteration=3, domain_of=domains(layout))
    lost = data.draw(st.sets(st.sampled_from(layout.ranks), max_size=2))
    new = list(range(100, 100 + data.draw(st.integers(0, 3))))
    living = sorted({*layout.ranks, *layout.spares, *new} - lost)
    node_of = {rank: rank // 2 for rank in (*layout.ranks, *layout.spares, *new)}
    chosen = choose_layout(layout, living, node_of, limits)
    if isinstance(chosen, Declined):
        assert "complete groups" in chosen.summary()
        return
    needs = of.needs(
        chosen,
        sharding(chosen, data.draw(st.integers(0, 1))),
        iteration=3,
        domain_of={r: f"node{r}" for r in living},
    )
    remaining = held.without(ranks=lost)
    holders = held_elements(remaining)
    plan = TransferPlan.of(remaining, needs, limit_bytes=400, min_piece_bytes=16)
    if any(element not in holders for _, element in needed_elements(needs)):
        assert isinstance(plan, Declined)
        assert lost
    else:
        assert not isinstance(plan, Declined), plan.summary()
        check_plan(plan, remaining, needs)
    if not lost:
        assert not isinstance(plan, Declined)
