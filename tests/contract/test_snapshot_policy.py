"""Tests the properties that every snapshot policy must have."""

import itertools
import json
import threading
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from megatron_ft.config.serialize import build_policy
from megatron_ft.formatting import counted, every
from megatron_ft.operators import OperatorId, StateShard
from megatron_ft.planning.snapshot.demand import Demand
from megatron_ft.planning.snapshot.dense import DenseInterval, GeminiStyle, OverheadBounded
from megatron_ft.planning.snapshot.orders import BackToFront, CapacityAware, LayerOrder
from megatron_ft.planning.snapshot.partial_experts import PartialExperts, SelectiveExperts
from megatron_ft.planning.snapshot.plan import Piece, ReorderTrigger, WindowPlan, window_bytes
from megatron_ft.planning.snapshot.policy import SnapshotPolicy, replan
from megatron_ft.planning.snapshot.sparse_window import SparseWindow
from megatron_ft.snapshot.capture import capture
from megatron_ft.snapshot.capture.capture import CaptureFigures, WindowCapture, _ThreadCopier
from megatron_ft.snapshot.capture.idle_gate import CopyTimes, IdleGate
from megatron_ft.snapshot.window import Slice
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
    # The experts of some policies are a fixed number, so the plan does not depend on the budget.
    is_fixed = plan.partial is not None and getattr(policy, "num_experts", None) is not None
    assert plan.basis.budget_bytes == (None if is_fixed else given.budget_bytes)
    assert plan.basis.peak_bytes == peak
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
@demands
def test_windows_have_the_same_bytes_if_they_are_copied_in_bubbles(
    policy: SnapshotPolicy, demand: Demand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In some iterations the rank waits for messages until its slice is copied. In the others it never waits."""
    monkeypatch.setattr(capture, "CHUNK_BYTES", 48)
    plan = policy.plan(demand, context(demand, 0.3))
    for shards in demand.shards_by_rank:
        at_once, in_bubbles = captured(plan, shards, is_gated=False), captured(plan, shards, is_gated=True)
        assert (at_once.windows, at_once.reported) == (in_bubbles.windows, in_bubbles.reported)
        assert at_once.figures.num_bytes == in_bubbles.figures.num_bytes
        assert at_once.figures.idle_bytes == 0
        assert in_bubbles.figures.idle_bytes == in_bubbles.num_expected
        assert in_bubbles.num_expected > 0 or not shards


@dataclass(kw_only=True)
class Captured:
    """Result of capturing two windows of made-up state."""

    figures: CaptureFigures = field(default_factory=CaptureFigures)
    windows: list[bytes] = field(default_factory=list)
    reported: list[tuple[int, int]] = field(default_factory=list)
    """Index and iteration of each slice."""
    num_expected: int = 0
    """Bytes of the slices of iterations in which the rank waited."""


class Reports:
    """Client that notes the slices that a snapshot server would receive."""

    def __init__(self, reported: list[tuple[int, int]]) -> None:
        self._reported, self.has_slice = reported, threading.Event()

    def begin(self, buffer: int, **about: object) -> None:
        """Do nothing."""

    def captured(self, buffer: int, index: int, part: Slice) -> None:
        self._reported.append((index, part.iteration))
        self.has_slice.set()


def captured(plan: WindowPlan, shards: Sequence[StateShard], *, is_gated: bool) -> Captured:
    """Capture two windows of state that changes as soon as a slice has settled."""
    found, random, state = Captured(), np.random.default_rng(1), dict[tuple[object, ...], torch.Tensor]()

    def source(piece: Piece) -> torch.Tensor:
        key = (piece.parameter, piece.tensor_part, piece.start, piece.component)
        return state.setdefault(key, torch.from_numpy(random.integers(0, 256, piece.num_bytes, dtype=np.uint8)))

    # Each wait seems to take a million seconds, so every slice is expected to fit into the bubbles.
    gate = IdleGate(itertools.count(step=10**6).__next__)
    with gate.iteration(), gate.waiting():
        gate.learn(CopyTimes(idle_bytes=1 << 30, idle_seconds=1.0))
    copier, client = _ThreadCopier(gate if is_gated else None), Reports(found.reported)
    buffer = torch.zeros(window_bytes(plan, shards), dtype=torch.uint8)
    windows = WindowCapture(plan, shards, client=client, copier=copier, buffers=[buffer], source=source)  # type: ignore[arg-type]
    found.figures = windows.figures
    for iteration in range(2 * plan.num_iterations):
        index, before = iteration % plan.num_iterations, windows.figures.num_bytes
        client.has_slice.clear()
        windows.begin_slice(0, index, iteration=iteration, header=dict)
        if waits := iteration % 3 != 1:
            with gate.iteration(), gate.waiting():
                assert client.has_slice.wait(60)
        windows.settle()
        found.num_expected += (windows.figures.num_bytes - before) * waits
        for tensor in state.values():
            tensor.add_(1)
        if index == plan.num_iterations - 1:
            found.windows.append(buffer.numpy().tobytes())
    copier.close()
    return found


@policies
def test_policies_are_frozen(policy: SnapshotPolicy) -> None:
    with pytest.raises((FrozenInstanceError, AttributeError)):
        policy.replan_drift = 0.5  # type: ignore[misc]
