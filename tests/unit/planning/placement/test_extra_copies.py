"""Base copies stay where they are and survive; extra copies follow the load and make ranks equally full."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.planning.balanced_shares import least_load
from megatron_ft.planning.placement.allocation import (
    add_extra_copies,
    allocate,
    base_capacities,
    base_counts,
    match_domains,
)
from megatron_ft.planning.placement.migration import MigrationPlan, holdings, remap
from megatron_ft.planning.placement.overlap_search import OverlapSearch
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.survival import survival
from megatron_ft.topology import Cluster

NUM_RANKS, NUM_SLOTS, FLOOR = 8, 6, 2
LOADS = [[1] * 12 + [30, 40, 50, 60], [5, 9] * 8]


def plan_of(
    loads: Sequence[Sequence[int]],
    previous: PlacementPlan | None = None,
    *,
    share: float = 0.0,
    cluster: Cluster | None = None,
    num_slots: int = NUM_SLOTS,
) -> PlacementPlan:
    cluster = cluster or Cluster.of(NUM_RANKS, 1)
    total = len(cluster.nodes) * num_slots
    return OverlapSearch(survival_share=share, num_kicks=0).place(
        [allocate(layer, total, FLOOR).replica_counts for layer in loads],
        cluster,
        num_slots_per_rank=num_slots,
        loads=loads,
        min_replicas=FLOOR,
        previous=None if previous is None else holdings(previous),
    )


def surviving(plan: PlacementPlan) -> list[float]:
    return [value.probability for value in survival(plan.all_expert_domains(), plan.domains, range(1, 5))]


def fullest(plan: PlacementPlan, loads: Sequence[Sequence[int]]) -> list[float]:
    """Fullest over mean rank of each layer."""
    return [
        least_load(load, plan.replicas_per_rank(layer)) * len(plan.ranks) / sum(load)
        for layer, load in enumerate(loads)
    ]


@pytest.mark.parametrize(
    ("counts", "floor", "num_slots", "expected"),
    [
        ((2, 3, 7), 2, 6, (2, 2, 2)),
        ((2, 3, 7), 2, 8, (2, 3, 3)),
        ((2, 3, 7), 2, 100, (2, 3, 7)),
        ((1, 3), 2, 3, (1, 2)),
    ],
)
def test_base_copies_grow_where_there_are_fewest(
    counts: tuple[int, ...], floor: int, num_slots: int, expected: tuple[int, ...]
) -> None:
    assert base_counts(counts, floor, num_slots) == expected


def test_domains_give_slots_in_proportion() -> None:
    assert base_capacities((6, 6, 12), 16) == (4, 4, 8)
    assert base_capacities((6, 6, 12), 17) == (5, 5, 9)


def test_two_copies_in_pairs_survive_as_static_groups_do_and_the_rest_makes_ranks_equally_full() -> None:
    """Static expert parallelism with four of the six slots has pairs of ranks with the same four experts."""
    plan = plan_of(LOADS)
    pairs = [{f"node{rank}", f"node{rank + 4}"} for rank in range(4)]
    static = [value.probability for value in survival(pairs, plan.domains, range(1, 5))]
    assert all(ours >= theirs for ours, theirs in zip(surviving(plan), static, strict=True))
    assert max(fullest(plan, LOADS)) < 1.01
    strict = plan_of(LOADS, share=1.0)
    assert max(fullest(strict, LOADS)) > 1.2, "the search for survival alone leaves ranks idle"
    assert all(more >= less for more, less in zip(surviving(strict), surviving(plan), strict=True))


def test_loads_move_extra_copies_only() -> None:
    first = plan_of([[1] * 16] * 2)
    second = plan_of(LOADS, first)
    base = OverlapSearch(num_kicks=0).assign((FLOOR,) * 16, (4,) * NUM_RANKS)
    for plan in (first, second):
        for layer in range(2):
            assert (plan.replicas_per_rank(layer) >= base).all()


def test_copies_stay_where_they_are_while_that_costs_little() -> None:
    before = plan_of(LOADS)
    later = [[1] * 12 + [50, 30, 60, 40], [9, 5] * 8]
    kept, fresh = plan_of(later, before), plan_of(later)
    moves = [
        MigrationPlan.between(remap(plan, holdings(before)), holdings(before), 1).num_bytes for plan in (kept, fresh)
    ]
    assert moves[0] < moves[1]
    assert max(fullest(kept, later)) <= max(fullest(fresh, later)) * 1.03


def test_copies_move_where_staying_costs_much() -> None:
    """The popular experts have changed places with unpopular ones."""
    before, turned = plan_of(LOADS), [layer[::-1] for layer in LOADS]
    assert max(fullest(before, turned)) > 1.5
    assert max(fullest(plan_of(turned, before), turned)) < 1.03


def test_the_same_bases_are_found_again_among_fewer_ranks() -> None:
    """After a loss base copies are searched for the remaining domains, and put where most of them are."""
    before = plan_of(LOADS)
    held = tuple(tuple(of_rank for rank, of_rank in enumerate(of_layer) if rank != 3) for of_layer in holdings(before))
    cluster = Cluster.of(NUM_RANKS - 1, 1)
    counts = [allocate(layer, 7 * NUM_SLOTS, FLOOR).replica_counts for layer in LOADS]
    search = OverlapSearch(num_kicks=0)

    def moved(previous: tuple[tuple[frozenset[int], ...], ...] | None) -> int:
        plan = search.place(
            counts, cluster, num_slots_per_rank=NUM_SLOTS, loads=LOADS, min_replicas=FLOOR, previous=previous
        )
        return MigrationPlan.between(remap(plan, held), held, 1).num_bytes

    assert moved(held) < moved(None)


@given(
    loads=st.lists(st.integers(0, 50), min_size=2, max_size=8),
    num_nodes=st.integers(2, 5),
    ranks_per_node=st.integers(1, 2),
    num_slots=st.integers(2, 5),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_every_plan_holds_its_copies_whatever_was_held(
    loads: list[int], num_nodes: int, ranks_per_node: int, num_slots: int, data: st.DataObject
) -> None:
    num_ranks = num_nodes * ranks_per_node
    if len(loads) > num_slots * num_ranks:
        loads = loads[: num_slots * num_ranks]
    experts = st.frozensets(st.integers(0, len(loads) - 1), max_size=num_slots + 1)
    held = (tuple(data.draw(st.lists(experts, min_size=num_ranks, max_size=num_ranks))),)
    counts = allocate(loads, num_ranks * num_slots, 2).replica_counts
    place = partial(
        OverlapSearch(num_kicks=0).place,
        [counts],
        Cluster.of(num_nodes, ranks_per_node),
        num_slots_per_rank=num_slots,
        loads=[loads],
        min_replicas=2,
    )
    plan = place(previous=held)
    found = plan.replica_counts(0)
    assert sum(found) == sum(counts), "every slot is in use"
    assert min(found) >= min(2, *counts), "every expert keeps its base copies"
    by_rank = place().slots[0]
    if len(loads) >= num_slots * ranks_per_node and sum(counts) > 2 * len(loads):
        assert all(len(set(experts)) == len(experts) for experts in by_rank), "no rank holds an expert twice"
    assert all(len(of_rank) == num_slots for of_rank in plan.slots[0])
    if min(counts) >= 2:
        assert min(len(names) for names in plan.expert_domains(0)) >= 2


def test_an_extra_copy_goes_to_the_least_loaded_domain_without_one() -> None:
    base = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1]])
    found = add_extra_copies(base, (3, 1, 2), (2, 2, 2), [30.0, 1.0, 8.0])
    # Loads of the domains are 10, 1 and 4; expert 0 comes first, then expert 2, for which domain 0 alone has room.
    assert found.tolist() == [[1, 1, 1], [0, 1, 0], [1, 0, 1]]


def test_domains_change_places_only_where_copies_were_elsewhere() -> None:
    base = [np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1]])]
    assert match_domains(base, base, (2, 2, 2))[0] is base[0]
    turned = [base[0][:, [1, 2, 0]]]
    assert (match_domains(base, turned, (2, 2, 2))[0] == turned[0]).all()
    # The third domain has other slots, and exchanges with no other.
    assert match_domains(base, turned, (2, 2, 3))[0].tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
