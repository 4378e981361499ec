"""What a placement in force says of the next loss: what the job as it is configured would do."""

from typing import Any

import pytest

from megatron_ft.config.checks.placement import derive_placement
from megatron_ft.config.serialize import from_dict
from megatron_ft.mcore.moe.placement_manager import PlacementManager
from tests.helpers.keys import grouped

ALGORITHM = {"algorithm": {"_target_": "megatron_ft.planning.placement.spread.Spread"}}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"min_nodes": 2}, 1.0),
        ({"min_nodes": 4}, 0.0),
        ({"min_nodes": 3, "failure_domains": ["a", "a", "b", "c"]}, 2 / 3),
        ({"min_nodes": 2, "failure_domains": ["a", "a", "a", "a"]}, None),
    ],
)
def test_survival_is_that_of_the_job_as_configured(keys: dict[str, Any], expected: float | None) -> None:
    placement = {**ALGORITHM, "min_replicas": 1, "num_slots_per_rank": 8}
    groups = {"placement": placement, **grouped(num_nodes=4, **keys)}
    keeper = PlacementManager(derive_placement(from_dict(groups)), world_size=4, stage=0)
    found = keeper.single_loss_survival
    assert found == (expected if expected is None else pytest.approx(expected))
