"""Tests the properties that every placement algorithm must have."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.algorithm import PlacementAlgorithm
from megatron_ft.planning.placement.algorithms import ALGORITHMS
from megatron_ft.planning.placement.allocation import allocate
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.survival import survival
from megatron_ft.topology import Cluster

KEEPS_FLOOR = ("overlap_search", "spread")
algorithms = pytest.mark.parametrize("algorithm", [kind() for kind in ALGORITHMS.values()], ids=list(ALGORITHMS))


@st.composite
def demands(draw: st.DrawFn) -> tuple[Cluster, int, list[list[int]]]:
    """Draw a cluster, a number of slots per rank, and loads of two layers that fit."""
    num_nodes = draw(st.integers(1, 6))
    ranks_per_node = draw(st.integers(1, 2))
    domains = [f"rack{draw(st.integers(0, 3))}" for _ in range(num_nodes)] if draw(st.booleans()) else None
    num_slots = draw(st.integers(1, 4))
    num_experts = draw(st.integers(1, min(8, num_nodes * ranks_per_node * num_slots)))
    load = st.lists(st.integers(0, 50), min_size=num_experts, max_size=num_experts)
    return Cluster.of(num_nodes, ranks_per_node, domains), num_slots, [draw(load), draw(load)]


def counts_for(cluster: Cluster, num_slots: int, loads: list[list[int]]) -> list[tuple[int, ...]]:
    total = len(cluster.nodes) * num_slots
    return [allocate(load, total, 1).replica_counts for load in loads]


@algorithms
@settings(max_examples=40, deadline=None)
@given(demand=demands())
def test_slots_hold_exactly_the_replicas(
    algorithm: PlacementAlgorithm, demand: tuple[Cluster, int, list[list[int]]]
) -> None:
    cluster, num_slots, loads = demand
    counts = counts_for(cluster, num_slots, loads)
    plan = algorithm.place(counts, cluster, num_slots_per_rank=num_slots, loads=loads)
    found = [plan.replica_counts(layer) for layer in range(2)]
    if algorithm.name == "overlap_search":  # it gives a slot to another expert rather than a second copy to a rank
        assert [sum(of_layer) for of_layer in found] == [sum(of_layer) for of_layer in counts]
        assert all(min(new) >= min(of_layer) for new, of_layer in zip(found, counts, strict=True))
    else:
        assert found == counts
    assert all(len(experts) == num_slots for by_rank in plan.slots for experts in by_rank)
    assert plan == algorithm.place(counts, cluster, num_slots_per_rank=num_slots, loads=loads)
    assert PlacementPlan.from_json(plan.to_json()) == plan


@algorithms
@pytest.mark.parametrize(("num_nodes", "num_slots"), [(5, 2), (4, 3), (6, 2)])
def test_survival_is_that_of_every_loss_tried(algorithm: PlacementAlgorithm, num_nodes: int, num_slots: int) -> None:
    cluster = Cluster.of(num_nodes, 1)
    counts = counts_for(cluster, num_slots, [[1, 2, 3, 4, 9], [7, 1, 1, 2, 2]])
    plan = algorithm.place(counts, cluster, num_slots_per_rank=num_slots)
    for value in survival(plan.all_expert_domains(), cluster.failure_domains, range(num_nodes + 1)):
        losses = list(combinations(range(num_nodes), value.num_lost))
        good = sum(
            all(
                set(range(5)) == {expert for node in set(range(num_nodes)) - set(lost) for expert in by_rank[node]}
                for by_rank in plan.slots
            )
            for lost in losses
        )
        assert value.exact
        assert value.probability == pytest.approx(good / len(losses), abs=0)


@pytest.mark.parametrize("algorithm", [ALGORITHMS[name]() for name in KEEPS_FLOOR], ids=KEEPS_FLOOR)
def test_floor_of_distinct_domains(algorithm: PlacementAlgorithm) -> None:
    for num_nodes, num_slots, counts in [
        (3, 2, (2, 2, 2)),
        (4, 2, (2, 3, 3)),
        (5, 2, (2, 2, 3, 3)),
        (10, 6, (2,) * 14 + (4, 28)),
    ]:
        plan = algorithm.place([counts], Cluster.of(num_nodes, 1), num_slots_per_rank=num_slots)
        assert min(len(domains) for domains in plan.expert_domains(0)) >= 2


@algorithms
def test_three_ranks_hold_eight_experts(algorithm: PlacementAlgorithm) -> None:
    counts = allocate([1] * 8, 12, 1).replica_counts
    plan = algorithm.place([counts], Cluster.of(3, 1), num_slots_per_rank=4, layer_numbers=[2])
    assert Counter(e for experts in plan.slots[0] for e in experts) == Counter(dict(enumerate(counts)))
    assert plan.layer_numbers == (2,)


@algorithms
def test_only_living_and_named_ranks_get_slots(algorithm: PlacementAlgorithm) -> None:
    cluster = Cluster.of(4, 2).without(1)
    assert algorithm.place([(3, 3)], cluster, num_slots_per_rank=1).ranks == (0, 1, 4, 5, 6, 7)
    plan = algorithm.place([(2, 2)], cluster, num_slots_per_rank=1, ranks=[0, 4, 5, 6])
    assert plan.ranks == (0, 4, 5, 6)
    assert plan.domains == ("node0", "node2", "node2", "node3")
    with pytest.raises(ConfigError, match=r"rank=2: must be on a node that is alive"):
        algorithm.place([(2, 2)], cluster, num_slots_per_rank=2, ranks=[0, 2])


@algorithms
@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([(0, 4)], r"replica_counts\[0\]=0: must be at least 1: each expert needs a slot"),
        ([(4, 5)], r"replica_counts=\[4, 5\]: must have a sum of at most 8 "),
        ([(4, 4), (2, 3, 3)], r"replica_counts=\[2, 3\]: must have the same number of experts in every layer"),
        ([], r"at least one layer"),
    ],
)
def test_bad_counts_are_refused(algorithm: PlacementAlgorithm, counts: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        algorithm.place(counts, Cluster.of(4, 1), num_slots_per_rank=2)
