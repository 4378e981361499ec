"""Tests that inconsistent plans are refused, and that the error names the inconsistency."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.config.placement import EVEN
from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.layout import Layout, busiest_tokens, copies_per_rank, even_tokens
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.topology import Cluster

GOOD: dict[str, Any] = {
    "num_experts": 2,
    "num_slots_per_rank": 2,
    "ranks": [0, 1],
    "domains": ["a", "b"],
    "layer_numbers": [3],
    "slots": [[[0, 1], [1, 1]]],
    "algorithm": "by hand",
}


def test_round_trip_and_views() -> None:
    plan = PlacementPlan.from_json(json.loads(json.dumps(GOOD)))
    assert plan.to_json() == GOOD
    assert plan.replica_counts(0) == (1, 3)
    assert plan.replicas_per_rank(0).tolist() == [[1, 0], [1, 2]]
    assert plan.expert_domains(0) == (frozenset("a"), frozenset("ab"))
    assert "at least 1" in plan.summary()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": [[[0, 0], [0]]]}, "layer 3: expert=1: must have at least one slot"),
        ({"slots": [[[0, 1, 1], [0]]]}, "slots of layer 3, rank 0"),
        ({"slots": [[[0, 1]]]}, "slot lists of layer 3=1: must be 2 lists"),
        ({"slots": [[[0, 1], [2]]]}, "layer 3: expert=2: must be from 0 to 1"),
        ({"slots": [[[0, 1], [-1]]]}, "layer 3: expert=-1"),
        ({"layer_numbers": [3, 4]}, "layer_numbers"),
        ({"ranks": [0, 0]}, "ranks"),
        ({"domains": ["a"]}, "ranks"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlacementPlan.from_json({**GOOD, **change})


def test_heavy_replicas_of_a_domain_are_dealt_apart() -> None:
    layout = Layout.of(Cluster.of(1, 2), 2)
    dealt = layout.deal(np.array([[1], [1], [1], [1]]), [10, 9, 2, 1])
    assert dealt == ((0, 3), (1, 2))


@given(st.data())
def test_each_replica_goes_to_the_least_loaded_rank_of_its_domain(data: st.DataObject) -> None:
    num_ranks, num_slots = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 4))
    counts = data.draw(st.lists(st.integers(0, num_ranks), min_size=1, max_size=9))
    loads = data.draw(st.lists(st.integers(0, 20), min_size=len(counts), max_size=len(counts)))
    while sum(counts) > num_ranks * num_slots:
        counts[counts.index(max(counts))] -= 1
    dealt = Layout.of(Cluster.of(1, num_ranks), num_slots).deal(np.array(counts)[:, None], loads)
    per_copy = [load / max(count, 1) for load, count in zip(loads, counts, strict=True)]
    slots: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = [0.0] * num_ranks
    for expert in sorted(range(len(counts)), key=lambda expert: (-per_copy[expert], expert)):
        for _ in range(counts[expert]):
            free = [rank for rank in range(num_ranks) if len(slots[rank]) < num_slots]
            chosen = min(free, key=lambda rank: (expert in slots[rank], sums[rank], len(slots[rank]), rank))
            slots[chosen].append(expert)
            sums[chosen] += per_copy[expert]
    assert dealt == tuple(tuple(sorted(experts)) for experts in slots)
    busiest = busiest_tokens(copies_per_rank(dealt, len(counts)), loads, EVEN)
    assert even_tokens(dealt, loads).max() == pytest.approx(busiest)


@pytest.mark.parametrize(("slots", "ranks", "message"), [(0, None, "num_slots_per_rank=0"), (1, [], "ranks")])
def test_layouts_without_slots_are_refused(slots: int, ranks: list[int] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layout.of(Cluster.of(2, 1), slots, ranks)
