"""Tests the properties that every snapshot policy must have."""

import json
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import yaml

from megatron_ft.config.serialize import build_policy
from megatron_ft.formatting import counted, every
from megatron_ft.operators import OperatorId
from megatron_ft.planning.snapshot.demand import Demand
from megatron_ft.planning.snapshot.dense import DenseInterval, GeminiStyle, OverheadBounded
from megatron_ft.planning.snapshot.orders import BackToFront, CapacityAware, LayerOrder
from megatron_ft.planning.snapshot.partial_experts import PartialExperts, SelectiveExperts
from megatron_ft.planning.snapshot.plan import ReorderTrigger, WindowPlan
from megatron_ft.planning.snapshot.policy import SnapshotPolicy, replan
from megatron_ft.planning.snapshot.sparse_window import SparseWindow
from megatron_ft.testing.demands import context, dense_model, equal_experts, one_huge_embedding, uneven

POLICIES: dict[str, SnapshotPolicy] = {
    "sparse_window": SparseWindow(),
    "sparse_window_filled": SparseWindow(balance=False, order=LayerOrder()),
    "sparse_window_back_to_front": SparseWindow(order=BackToFront()),
    "sparse_window_short": SparseWindow(max_window_iterations=2),
    "dense": DenseInterval(interval_iterations=10),
    "checkfreq": OverheadBounded(),
    "gemini": GeminiStyle(mtbf_seconds=600.0),
    "partial_experts": PartialExperts(),
    "selective_experts": SelectiveExperts(),
    "partial_experts_two_levels": PartialExperts(num_persisted_experts=1),
    "selective_experts_two_levels": SelectiveExperts(num_experts=2, num_persisted_experts=1),
}
DEMANDS: dict[str, Demand] = {
    "uneven_ranks": uneven(),
    "one_huge_embedding": one_huge_embedding(),
    "dense_model": dense_model(),
    "single_rank": equal_experts(9),
    "single_operator": equal_experts(1),
}
policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
demands = pytest.mark.parametrize("demand", DEMANDS.values(), ids=list(DEMANDS))
shares = pytest.mark.parametrize("share", [2.0, 0.6, 0.3, 0.05])


@policies
@demands
@shares
def test_every_element_is_captured_once_in_a_window(policy: SnapshotPolicy, demand: Demand, share: float) -> None:
    plan = policy.plan(demand, context(demand, share))
    plan.validate(demand.operators)
    captured: dict[tuple[int, OperatorId, str], list[tuple[int, int]]] = {}
    for units in plan.slices:
        for unit in units:
            for rank, shards in enumerate(demand.shards_by_rank):
                for shard in (shard for shard in shards if shard.operator == unit.operator):
                    captured.setdefault((rank, shard.operator, shard.parameter), []).append(unit.range_of(shard))
    for rank, shards in enumerate(demand.shards_by_rank):
        for shard in shards:
            position = shard.start
            for start, stop in sorted(captured[rank, shard.operator, shard.parameter]):
                assert start == position
                position = stop
            assert position == shard.stop


@policies
@demands
@shares
def test_slices_fit_the_budget_or_the_stall_is_declared(policy: SnapshotPolicy, demand: Demand, share: float) -> None:
    given = context(demand, share)
    plan = policy.plan(demand, given)
    peak = int(demand.slice_bytes(plan).max())
    assert plan.basis is not None
    assert (plan.basis.budget_bytes, plan.basis.peak_bytes) == (given.budget_bytes, peak)
    assert ("no stall" in plan.reason) == (peak <= given.budget_bytes)
    assert f"largest slice {peak:,} bytes, budget {given.budget_bytes:,} bytes" in plan.reason


@policies
@demands
def test_plans_are_the_same_every_time_and_survive_json(policy: SnapshotPolicy, demand: Demand) -> None:
    given = context(demand, 0.3)
    plan = policy.plan(demand, given)
    assert plan == policy.plan(Demand(shards_by_rank=demand.shards_by_rank), given)
    assert WindowPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert (
        f"window of {counted(plan.num_iterations, 'iteration')} {every(plan.interval_iterations)}: " in plan.summary()
    )


@policies
@demands
def test_a_plan_is_kept_while_nothing_changes(policy: SnapshotPolicy, demand: Demand) -> None:
    given = context(demand, 0.3)
    plan = policy.plan(demand, given)
    assert replan(policy, demand, given, plan) is plan


@pytest.mark.parametrize(
    "name", ["sparse_window", "dense", "checkfreq", "gemini", "partial_experts", "selective_experts"]
)
def test_every_choice_of_the_group_builds_its_policy(name: str) -> None:
    folder = Path(__file__).parents[2] / "conf" / "snapshot"
    policy = build_policy("snapshot.policy", yaml.safe_load((folder / f"{name}.yaml").read_text())["policy"])
    assert type(policy) is type(POLICIES[name])


def test_nested_fields_are_built_from_mappings() -> None:
    policy = build_policy(
        "snapshot.policy",
        {
            "_target_": "megatron_ft.planning.snapshot.sparse_window.SparseWindow",
            "order": {"_target_": "megatron_ft.planning.snapshot.orders.CapacityAware", "capacities": [1.0, 2.0]},
            "reorder": {"min_share": 0.5},
        },
    )
    trigger = ReorderTrigger(min_share=0.5)
    assert policy == SparseWindow(order=CapacityAware(capacities=(1.0, 2.0)), reorder=trigger)


@policies
def test_policies_are_frozen(policy: SnapshotPolicy) -> None:
    with pytest.raises((FrozenInstanceError, AttributeError)):
        policy.replan_drift = 0.5  # type: ignore[misc]
