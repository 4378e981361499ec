"""Tests migrations: only missing experts move, all of them do, and senders share the work evenly."""

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.allocation import allocate
from megatron_ft.planning.placement.migration import (
    Holdings,
    MigrationPlan,
    Step,
    Transfer,
    holdings,
    remap,
    replacement_steps,
)
from megatron_ft.planning.placement.overlap_search import OverlapSearch
from megatron_ft.planning.placement.plan import PlacementPlan, Slots
from megatron_ft.planning.placement.survival import survival
from megatron_ft.topology import Cluster


def plan_of(slots: Slots, ranks_per_domain: int = 1) -> PlacementPlan:
    num_ranks = len(slots[0])
    plan = PlacementPlan(
        num_experts=1 + max(e for by_rank in slots for experts in by_rank for e in experts),
        num_slots_per_rank=max(len(experts) for experts in slots[0]),
        ranks=tuple(range(num_ranks)),
        domains=tuple(f"d{rank // ranks_per_domain}" for rank in range(num_ranks)),
        layer_numbers=tuple(range(1, len(slots) + 1)),
        slots=slots,
        algorithm="by hand",
    )
    plan.validate()
    return plan


@st.composite
def moves(draw: st.DrawFn) -> tuple[PlacementPlan, PlacementPlan]:
    """Draw two placements of two layers of 5 experts on 5 ranks."""
    rank = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda pair: tuple(sorted(pair)))

    def slots() -> Slots:
        layers = []
        for _ in range(2):
            by_rank = draw(st.lists(rank, min_size=4, max_size=4))
            missing = sorted(set(range(5)) - {e for experts in by_rank for e in experts})
            by_rank.append(tuple(missing) if missing else draw(rank))
            layers.append(tuple(by_rank))
        return tuple(layers)

    def valid(found: Slots) -> bool:
        return all(len(experts) <= 2 for by_rank in found for experts in by_rank) and all(
            {e for experts in by_rank for e in experts} == set(range(5)) for by_rank in found
        )

    old, new = slots(), slots()
    if not (valid(old) and valid(new)):
        old = new = (((0, 1), (2, 3), (4,), (0, 2), (1, 3)),) * 2
    return plan_of(old), plan_of(new)


def moved(plan: PlacementPlan, held: Holdings) -> int:
    return MigrationPlan.between(plan, held, 1).num_bytes


@settings(max_examples=60, deadline=None)
@given(pair=moves())
def test_optimal_mapping_is_the_best_of_all(pair: tuple[PlacementPlan, PlacementPlan]) -> None:
    old, new = pair
    held = holdings(old)
    best = min(
        sum(
            len(set(by_rank[part]) - held[layer][rank])
            for layer, by_rank in enumerate(new.slots)
            for rank, part in enumerate(order)
        )
        for order in permutations(range(5))
    )
    optimal = remap(new, held)
    assert moved(optimal, held) == best
    for layer in range(2):
        assert Counter(optimal.slots[layer]) == Counter(new.slots[layer])


@settings(max_examples=60, deadline=None)
@given(pair=moves())
def test_transfers_bring_exactly_what_is_missing(pair: tuple[PlacementPlan, PlacementPlan]) -> None:
    old, new = pair
    migration = MigrationPlan.between(new, holdings(old), [3, 5])
    have = {(n, e, r) for n, by_rank in enumerate(old.slots, 1) for r, experts in enumerate(by_rank) for e in experts}
    want = {(n, e, r) for n, by_rank in enumerate(new.slots, 1) for r, experts in enumerate(by_rank) for e in experts}
    assert {(t.layer_number, t.expert, t.target_rank) for t in migration.transfers} == want - have
    assert all((t.layer_number, t.expert, t.source_rank) in have for t in migration.transfers)
    assert migration.num_bytes == sum({1: 3, 2: 5}[layer] for layer, _, _ in want - have)
    owners = Counter((n, e) for n, e, _ in have)
    by_expert: dict[tuple[int, int], Counter[int]] = {}
    for t in migration.transfers:
        by_expert.setdefault((t.layer_number, t.expert), Counter())[t.source_rank] += 1
    for key, sent in by_expert.items():
        assert max(sent.values()) <= -(-sum(sent.values()) // owners[key])


def test_senders_share_over_experts_too() -> None:
    old = plan_of((((0, 1, 2), (0, 1, 2), (3,), (4,), (5,)),))
    new = plan_of((((0, 1, 2), (0, 1, 2), (0, 3), (1, 4), (2, 5)),))
    assert sorted(MigrationPlan.between(new, holdings(old), 10).sent_bytes().values()) == [10, 20]


def test_the_same_placement_moves_nothing() -> None:
    plan = plan_of((((0, 1), (1, 2), (2, 0)),))
    shuffled = plan.replacing((((2, 0), (0, 1), (1, 2)),))
    assert remap(shuffled, holdings(plan)).slots == plan.slots
    assert MigrationPlan.between(plan, holdings(plan), 1).transfers == ()


def test_loss_and_return_of_a_node() -> None:
    counts = [(2, 3, 3), (3, 3, 2)]
    before = OverlapSearch().place(counts, Cluster.of(4, 1), num_slots_per_rank=2)
    after = OverlapSearch().place(counts, Cluster.of(4, 1), num_slots_per_rank=2)
    held = holdings(before, [0, None, 2, 3])
    mapped = remap(after, held)
    migration = MigrationPlan.between(mapped, held, 7)
    assert {transfer.target_rank for transfer in migration.transfers} == {1}
    assert migration.num_bytes == 7 * sum(len(set(by_rank[1])) for by_rank in mapped.slots)


def test_an_expert_without_holder_cannot_move() -> None:
    plan = plan_of((((0,), (1,), (2,)),))
    with pytest.raises(ConfigError, match="no surviving rank has expert 1 of layer 1, which rank 1 needs"):
        MigrationPlan.between(plan, holdings(plan, [0, None, 2]), 1)


def test_domains_stay_together() -> None:
    old = plan_of((((0,), (1,), (2,), (3,), (0,), (1,)),), ranks_per_domain=2)
    new = plan_of((((3,), (2,), (1,), (0,), (0,), (1,)),), ranks_per_domain=2)
    mapped = remap(new, holdings(old))
    lost = [1, 2]
    assert survival(mapped.all_expert_domains(), ["d0", "d1", "d2"], lost) == survival(
        new.all_expert_domains(), ["d0", "d1", "d2"], lost
    )
    assert moved(mapped, holdings(old)) == 0


def test_bad_transfers_are_refused() -> None:
    plan = plan_of((((0,), (1,)),))
    stray = Transfer(layer_number=1, expert=0, source_rank=0, target_rank=1, num_bytes=1)
    with pytest.raises(ConfigError, match="must be from another rank and must occur once"):
        MigrationPlan(placement=plan, transfers=(stray,)).validate()
    with pytest.raises(ConfigError, match="expert_bytes"):
        MigrationPlan.between(plan, holdings(plan), [1, 2])


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[PlacementPlan, PlacementPlan]:
    """Draw two placements in which every rank holds the same number of distinct experts of a layer."""

    def layer() -> tuple[tuple[int, ...], ...]:
        # The first three ranks hold all experts, the others any two.
        all_experts = draw(st.permutations(range(6)))
        others = [draw(st.sets(st.integers(0, 5), min_size=2, max_size=2)) for _ in range(2)]
        by_rank = [all_experts[:2], all_experts[2:4], all_experts[4:], *others]
        return tuple(tuple(sorted(by_rank[position])) for position in draw(st.permutations(range(5))))

    return plan_of((layer(), layer())), plan_of((layer(), layer()))


def carried_out(now: PlacementPlan, steps: list[Step]) -> list[list[set[int]]]:
    """Return the experts of each rank after ``steps``; check each of them."""
    held = [[set(experts) for experts in by_rank] for by_rank in now.slots]
    for step in steps:
        for ranks in (
            [replacement.transfer.target_rank for replacement in step],
            [replacement.transfer.source_rank for replacement in step],
        ):
            assert len(set(ranks)) == len(ranks) > 0
        before = [[set(experts) for experts in by_rank] for by_rank in held]
        for replacement in step:
            transfer = replacement.transfer
            layer = now.layer_numbers.index(transfer.layer_number)
            assert transfer.expert in before[layer][transfer.source_rank], "the sender holds the expert"
            assert transfer.expert not in before[layer][transfer.target_rank]
            held[layer][transfer.target_rank].remove(replacement.dropped)
            held[layer][transfer.target_rank].add(transfer.expert)
        for by_rank in held:
            assert set().union(*by_rank) == set(range(now.num_experts)), "no last copy is overwritten"
    return held


@given(exchanges())
def test_steps_end_at_the_new_placement_and_never_lose_an_expert(pair: tuple[PlacementPlan, PlacementPlan]) -> None:
    now, new = pair
    migration = MigrationPlan.between(new, holdings(now), 100)
    steps = replacement_steps(now, migration)
    if steps is None:
        return
    assert carried_out(now, steps) == [[set(experts) for experts in by_rank] for by_rank in new.slots]
    assert sum(map(len, steps)) == len(migration.transfers)


def test_no_steps_where_the_only_copies_would_be_exchanged() -> None:
    now, new = plan_of((((0, 1), (2, 3)),)), plan_of((((0, 2), (1, 3)),))
    assert replacement_steps(now, MigrationPlan.between(new, holdings(now), 100)) is None


def test_a_rank_that_has_overwritten_an_expert_does_not_send_it() -> None:
    now = plan_of((((0, 1), (0, 2), (1, 2), (1, 2)),))
    new = plan_of((((1, 2), (1, 2), (0, 1), (0, 2)),))
    migration = MigrationPlan.between(new, holdings(now), 100)
    steps = replacement_steps(now, migration)
    assert steps is not None
    assert carried_out(now, steps) == [[set(experts) for experts in new.slots[0]]]


def test_no_steps_where_a_rank_would_hold_another_number_of_experts() -> None:
    now, new = plan_of((((0, 1), (0, 1)),)), plan_of((((0, 0), (0, 1)),))
    assert replacement_steps(now, MigrationPlan.between(new, holdings(now), 100)) is None


def test_plans_of_the_search_need_few_steps() -> None:
    cluster = Cluster.of(16, 1)
    loads = [[(7 * expert + layer) % 23 + 1 for expert in range(32)] for layer in range(4)]
    search = OverlapSearch(num_kicks=0)

    def place(loads: list[list[int]], held: Holdings | None = None) -> PlacementPlan:
        counts = [allocate(layer, 96, 2).replica_counts for layer in loads]
        return search.place(counts, cluster, num_slots_per_rank=6, loads=loads, min_replicas=2, previous=held)

    now = place(loads)
    later = place([[load * (1 + expert % 3) for expert, load in enumerate(layer)] for layer in loads], holdings(now))
    migration = MigrationPlan.between(remap(later, holdings(now)), holdings(now), 100)
    steps = replacement_steps(now, migration)
    assert steps is not None and migration.transfers
    received = Counter(transfer.target_rank for transfer in migration.transfers)
    assert len(steps) <= 3 * max(received.values())
    carried_out(now, steps)
