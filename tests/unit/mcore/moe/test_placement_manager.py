"""What a placement in force says of the next loss: what the job as it is configured would do."""

from typing import Any

import pytest

from megatron_ft.config.checks.placement import derive_placement
from megatron_ft.config.serialize import from_dict
from megatron_ft.mcore.moe.placement_manager import PlacementManager

ALGORITHM = {"algorithm": {"_target_": "megatron_ft.planning.placement.spread.Spread"}}


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        ({}, None),
        ({"min_nodes": 2}, 1.0),
        ({"min_nodes": 4}, 0.0),
        ({"min_nodes": 3, "failure_domains": ["a", "a", "b", "c"]}, 2 / 3),
        ({"min_nodes": 2, "failure_domains": ["a", "a", "a", "a"]}, None),
    ],
)
def test_survival_is_that_of_the_job_as_configured(launch: dict[str, Any], expected: float | None) -> None:
    placement = {**ALGORITHM, "min_replicas": 1, "num_slots_per_rank": 8}
    groups = {"placement": placement, "launch": {"num_nodes": 4, **launch}}
    keeper = PlacementManager(derive_placement(from_dict(groups)), world_size=4, stage=0)
    found = keeper.single_loss_survival
    assert found == (expected if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("placement", "backend", "shares"),
    [
        ({}, "CppDispatch", "balanced"),
        ({"dispatch_backend": "reference", "shares": "even"}, "ReferenceDispatch", "even"),
    ],
)
def test_the_model_dispatches_as_configured(placement: dict[str, Any], backend: str, shares: str) -> None:
    placement = {**ALGORITHM, "min_replicas": 1, "num_slots_per_rank": 8, **placement}
    groups = {"placement": placement, "launch": {"num_nodes": 4}, "training": {"device": "cpu"}}
    manager = PlacementManager(derive_placement(from_dict(groups)), world_size=4, stage=0)
    found = manager.replicas().backend
    assert (type(found).__name__, found.shares) == (backend, shares)
