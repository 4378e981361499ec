"""Tests when the current plan is kept, and when another plan is made."""

import dataclasses
import json

from megatron_ft.planning.snapshot.demand import Demand
from megatron_ft.planning.snapshot.dense import OverheadBounded
from megatron_ft.planning.snapshot.orders import BackToFront
from megatron_ft.planning.snapshot.plan import Activations, ReorderTrigger, WindowPlan
from megatron_ft.planning.snapshot.policy import SnapshotContext, replan, why_outdated
from megatron_ft.planning.snapshot.sparse_window import SparseWindow
from megatron_ft.testing.demands import equal_experts

DEMAND = equal_experts(8)
COUNTED = Activations(layers=(1,), tokens=(((80, 70, 60, 50, 40, 30, 20, 10),),))
REVERSED = Activations(layers=(1,), tokens=(((10, 20, 30, 40, 50, 60, 70, 80),),))


def given(share: float = 0.5, activations: Activations | None = COUNTED) -> SnapshotContext:
    return SnapshotContext(bandwidth_bytes_per_second=share * 9600, iteration_seconds=1.0, activations=activations)


def test_budgets_within_the_drift_keep_the_plan() -> None:
    policy = SparseWindow()
    plan = policy.plan(DEMAND, given(0.5))
    for share in (0.41, 0.59):
        assert replan(policy, DEMAND, given(share), plan) is plan
        assert why_outdated(policy, DEMAND, given(share), plan) is None


def test_budgets_beyond_the_drift_make_another() -> None:
    policy = SparseWindow()
    plan = policy.plan(DEMAND, given(0.5))
    for share in (0.35, 0.61):
        other = replan(policy, DEMAND, given(share), plan)
        cause = why_outdated(policy, DEMAND, given(share), plan)
        assert cause is not None and other.reason.startswith(f"{cause}; ")
        assert other.reason.startswith("the budget of an iteration changed from 4,800 to ")
        assert other.slices == policy.plan(DEMAND, given(share)).slices
        assert replan(policy, DEMAND, given(share), other) is other
    assert replan(SparseWindow(replan_drift=0.5), DEMAND, given(0.35), plan) is plan


def test_changed_popularity_makes_another_order_and_is_its_basis() -> None:
    policy = SparseWindow()
    plan = policy.plan(DEMAND, given())
    assert plan.slices[0][0].operator.expert == 7
    other = replan(policy, DEMAND, given(activations=REVERSED), plan)
    assert other.slices[0][0].operator.expert == 0
    assert other.reason.startswith("the activation frequencies of experts have changed; ")
    assert replan(policy, DEMAND, given(activations=REVERSED), other) is other
    assert replan(policy, DEMAND, given(activations=COUNTED), other).slices == plan.slices


def test_orders_that_do_not_depend_on_activations_are_kept() -> None:
    for policy in (
        SparseWindow(order=BackToFront()),
        SparseWindow(reorder=ReorderTrigger(min_share=2.0)),
        OverheadBounded(),
    ):
        plan = policy.plan(DEMAND, given())
        assert replan(policy, DEMAND, given(activations=REVERSED), plan) is plan


def test_other_operators_or_larger_ones_make_another_plan() -> None:
    policy = SparseWindow()
    plan = policy.plan(DEMAND, given())
    more = replan(policy, equal_experts(9), given(activations=None), plan)
    assert more.reason.startswith("the operators have changed")
    more.validate(equal_experts(9).operators)
    larger = replan(policy, equal_experts(8, 130), given(), plan)
    assert larger.reason.startswith("the largest slice changed from ")


def test_a_plan_without_a_basis_is_made_again() -> None:
    policy = SparseWindow()
    plan = dataclasses.replace(policy.plan(DEMAND, given()), basis=None)
    assert replan(policy, Demand(shards_by_rank=DEMAND.shards_by_rank), given(), plan).basis is not None


def test_a_plan_knows_the_policy_that_made_it() -> None:
    plan = SparseWindow().plan(DEMAND, dataclasses.replace(given(), policy="this"))
    plan = WindowPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert plan.has_other_policy("other") and not plan.has_other_policy("this")
    content = plan.to_json()
    del content["basis"]["policy"]  # as in windows of earlier versions
    assert not WindowPlan.from_json(content).has_other_policy("other")
