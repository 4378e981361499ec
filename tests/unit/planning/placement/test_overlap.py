"""Compares the paper's construction with results computed by hand, and the search with it and with every placement."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.allocation import allocate
from megatron_ft.planning.placement.layout import Counts, per_replica_loads
from megatron_ft.planning.placement.maximum_rank_overlap import MaximumRankOverlap, overlap
from megatron_ft.planning.placement.overlap_search import (
    Losses,
    OverlapSearch,
    _align,
    _even_out,
    placements,
    support_masks,
)
from megatron_ft.planning.placement.survival import SurvivalObjective, survival
from megatron_ft.topology import Cluster


def score(search: OverlapSearch, counts: Counts) -> float:
    return search.objective.score(support_masks(counts).tolist(), counts.shape[1])


def test_construction_by_hand() -> None:
    counts = overlap((2, 2, 2, 3, 3, 4, 6, 8), (3,) * 10)
    held = counts > 0
    assert np.nonzero(held[0])[0].tolist() == [0, 1]
    assert (held[0] == held[1]).all()
    assert (held[0] == held[2]).all()
    assert np.nonzero(held[3])[0].tolist() == [2, 3, 4]
    assert held[6][5:].all()
    assert held[7][5:].all()
    assert counts.sum(axis=0).tolist() == [3] * 10


def test_known_survival_of_the_construction() -> None:
    plan = MaximumRankOverlap().place([(2, 2, 2, 3, 3, 4, 6, 8)], Cluster.of(10, 1), num_slots_per_rank=3)
    values = survival(plan.all_expert_domains(), plan.domains, range(1, 6))
    assert [value.probability for value in values] == pytest.approx([1, 44 / 45, 111 / 120, 175 / 210, 175 / 252])


@pytest.mark.parametrize(
    ("num_nodes", "counts", "lost", "construction", "best"),
    [(4, (2, 3, 3), 2, 4 / 6, 5 / 6), (5, (3, 3, 4), 3, 6 / 10, 8 / 10), (3, (2, 2, 2), 1, 2 / 3, 1.0)],
)
def test_better_where_the_short_group_leaves_room(
    num_nodes: int, counts: tuple[int, ...], lost: int, construction: float, best: float
) -> None:
    cluster = Cluster.of(num_nodes, 1)
    for algorithm, expected in [(MaximumRankOverlap(), construction), (OverlapSearch(), best)]:
        plan = algorithm.place([counts], cluster, num_slots_per_rank=2)
        assert survival(plan.all_expert_domains(), plan.domains, [lost])[0].probability == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(
    loads=st.lists(st.integers(0, 40), min_size=2, max_size=9),
    num_nodes=st.integers(2, 9),
    num_slots=st.integers(1, 4),
    floor=st.integers(1, 3),
)
def test_never_worse_and_keeps_the_floor(loads: list[int], num_nodes: int, num_slots: int, floor: int) -> None:
    total = num_nodes * num_slots
    if len(loads) > total:
        loads = loads[:total]
    counts = allocate(loads, total, min(floor, num_nodes)).replica_counts
    search = OverlapSearch(num_kicks=1)
    found = search.assign(counts, (num_slots,) * num_nodes, loads)
    assert found.sum(axis=1).tolist() == list(counts)
    assert found.sum(axis=0).tolist() == [num_slots] * num_nodes
    assert (found > 0).sum(axis=1).min() >= min(*counts, num_nodes)
    assert score(search, found) >= score(search, overlap(counts, (num_slots,) * num_nodes, loads)) - 1e-9


@pytest.mark.parametrize("counts", [(1, 2, 2, 3), (2, 2, 4), (3, 3, 3, 3), (2, 3, 3)])
def test_exchanges_alone_reach_the_best(counts: tuple[int, ...]) -> None:
    num_slots = 2 if sum(counts) == 8 else 3
    num_nodes = sum(counts) // num_slots
    search = OverlapSearch(num_exhaustive_slots=0)
    best = max(score(search, c) for c in placements(counts, num_slots, num_nodes, min(counts)))
    assert score(search, search.assign(counts, (num_slots,) * num_nodes)) == pytest.approx(best)


def test_a_start_that_ends_worse_is_not_taken() -> None:
    """The score rises with the number of starts or stays the same."""
    counts, capacities = (6, 4, 5, 3, 6, 8), (4,) * 8
    searches = [OverlapSearch(num_exhaustive_slots=0, num_kicks=number) for number in (0, 2, 4)]
    scores = [score(search, search.assign(counts, capacities)) for search in searches]
    assert scores == sorted(scores) and scores[0] < scores[-1]
    uneven = OverlapSearch(num_exhaustive_slots=0)
    found = score(uneven, uneven.assign((3, 3, 4, 2, 2, 2, 5, 3, 4), (4,) * 7))
    assert found == pytest.approx(0.873490814), "the worst start ends at 0.8399"


def test_every_placement_is_listed_once() -> None:
    # Two experts twice each on two nodes of two slots: {0,0}{1,1} and {0,1}{0,1}.
    found = [counts.tolist() for counts in placements((2, 2), 2, 2, 1)]
    assert sorted(found) == [[[1, 1], [1, 1]], [[2, 0], [0, 2]]]
    assert len(list(placements((2, 2), 2, 2, 2))) == 1


def test_layers_are_turned_against_each_other() -> None:
    masks, values = SurvivalObjective().losses(4, 100)
    losses = Losses(masks=masks, values=values)
    first = np.array([[1, 1, 0, 0], [0, 0, 1, 1]])
    second = first[:, [0, 2, 1, 3]]
    turned = _align([first, second], (1,) * 4, losses)
    assert losses.score(np.concatenate(turned)) == pytest.approx(losses.score(first))
    assert losses.score(np.concatenate([first, second])) < losses.score(first)


def test_joint_survival_is_not_worse_than_the_construction() -> None:
    loads = [[1, 2, 3, 30, 5], [9, 1, 7, 1, 1], [2, 2, 2, 2, 2]]
    counts = [allocate(load, 12, 2).replica_counts for load in loads]
    cluster = Cluster.of(6, 1)
    joint = {}
    for algorithm in (MaximumRankOverlap(), OverlapSearch()):
        plan = algorithm.place(counts, cluster, num_slots_per_rank=2)
        joint[plan.algorithm] = SurvivalObjective().score(
            [sum(1 << int(name[4:]) for name in held) for held in plan.all_expert_domains()], 6
        )
    assert joint["overlap_search"] >= joint["maximum_rank_overlap"]


def test_unreliable_domains_are_not_left_alone() -> None:
    # Node 0 and 1 fail often: an expert on just those two would be lost first.
    objective = SurvivalObjective(failure_rates=(0.5, 0.5, 0.01, 0.01))
    plan = OverlapSearch(objective=objective).place([(2, 3, 3)], Cluster.of(4, 1), num_slots_per_rank=2)
    assert frozenset({"node0", "node1"}) not in plan.expert_domains(0)


def test_loads_are_evened_out_without_costing_survival() -> None:
    loads = [60, 50, 40, 8, 6, 4, 2, 1, 1, 1]
    counts = allocate(loads, 24, 2).replica_counts
    plain, even = (OverlapSearch(balance=balance).assign(counts, (4,) * 6, loads) for balance in (False, True))
    weights = np.asarray(loads) / np.asarray(counts)
    assert (weights @ even).max() <= (weights @ plain).max()
    assert score(OverlapSearch(), even) >= score(OverlapSearch(), plain) - 1e-12


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_of_survival_is_a_share(share: float) -> None:
    with pytest.raises(ConfigError, match=f"survival_share={share}"):
        OverlapSearch(survival_share=share).place([(2, 2)], Cluster.of(2, 1), num_slots_per_rank=2)


@given(loads=st.lists(st.integers(0, 50), min_size=3, max_size=8), num_nodes=st.integers(3, 6))
def test_relabelling_keeps_the_sets_and_evens_the_loads(loads: list[int], num_nodes: int) -> None:
    counts = overlap(allocate(loads, 3 * num_nodes, 2).replica_counts, (3,) * num_nodes)
    evened = _even_out(counts, loads)
    assert sorted(support_masks(evened).tolist()) == sorted(support_masks(counts).tolist())
    assert (evened.sum(axis=1) == counts.sum(axis=1)).all()
    before, after = (per_replica_loads(found, loads) @ found for found in (counts, evened))
    assert (after**2).sum() <= (before**2).sum() + 1e-9
