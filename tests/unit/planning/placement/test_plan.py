"""Tests that inconsistent plans are refused, and that the error names the inconsistency."""

import json
from typing import Any

import numpy as np
import pytest

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.layout import Layout
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
        ({"slots": [[[0, 1]]]}, "slot lists of layer 3=1: must be 2"),
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


@pytest.mark.parametrize(("slots", "ranks", "message"), [(0, None, "num_slots_per_rank=0"), (1, [], "ranks")])
def test_layouts_without_slots_are_refused(slots: int, ranks: list[int] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layout.of(Cluster.of(2, 1), slots, ranks)
