"""Compares the cost of losses with a layout computed by hand, an enumeration of all losses, and the placement's
survival."""

import dataclasses
import json
from itertools import combinations
from typing import Any, ClassVar

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import JobInputs, config_of, derive_placement
from megatron_ft.config.requirements import REQUIREMENTS, Requirement
from megatron_ft.config.serialize import from_dict
from megatron_ft.errors import ConfigError
from megatron_ft.planning.cost.memory import expert_state_bytes
from megatron_ft.planning.placement.copies import NON_EXPERT
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.report import plan_state_copies
from megatron_ft.planning.placement.stage import StageRequest, first_plans
from megatron_ft.planning.placement.survival import survival
from megatron_ft.planning.recovery.costs import (
    STRATEGIES,
    cost_of_loss,
    costs_of_nodes,
    idle_copies,
    placer,
    windows_serve,
)
from megatron_ft.planning.recovery.facts import RecoveryFacts
from megatron_ft.planning.recovery.layout import JobLayouts, MembershipLayout
from megatron_ft.planning.recovery.living_state import why_no_replicas
from megatron_ft.planning.recovery.strategy import Cost, Loss, Stored
from megatron_ft.planning.snapshot.report import SnapshotReport
from tests.helpers.keys import grouped

MODEL = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_moe_experts": 8, "moe_layer_freq": 2}
SPREAD = {
    "algorithm": {"_target_": "megatron_ft.planning.placement.spread.Spread"},
    "min_replicas": 2,
    "num_slots_per_rank": 4,
}
WINDOWS = {"_target_": "megatron_ft.planning.snapshot.dense.DenseInterval", "interval_iterations": 3}


def job(**groups: Any) -> JobConfig:
    return derive_placement(from_dict({"model": MODEL, **groups}))


def elastic(num_nodes: int = 4, min_nodes: int | None = 2, **groups: Any) -> JobConfig:
    launch = {"num_nodes": num_nodes, "ranks_per_node": 1, **groups.pop("launch", {})}
    recovery = {"min_nodes": min_nodes, **groups.pop("recovery", {})}
    parallel = {"use_distributed_optimizer": False, **groups.pop("parallel", {})}
    placement = {**SPREAD, **groups.pop("placement", {})}
    return job(launch=launch, recovery=recovery, parallel=parallel, placement=placement, **groups)


def plans_of(config: JobConfig) -> list[PlacementPlan]:
    if config.placement.algorithm is None:
        return []
    return first_plans(config, StageRequest.of_job(config), JobInputs())


def facts_of(config: JobConfig, nodes: tuple[int, ...] | None = None) -> RecoveryFacts:
    plans = plans_of(config if nodes is None else config_of(config, nodes))
    layout = None if nodes is None else layout_on(config, nodes)
    return RecoveryFacts.of(config, plans, SnapshotReport.of(config, 257), layout)


def layout_on(config: JobConfig, nodes: tuple[int, ...]) -> MembershipLayout:
    layout = JobLayouts.of(config).on(nodes)
    assert isinstance(layout, MembershipLayout)
    return layout


def changed(facts: RecoveryFacts, **groups: dict[str, Any]) -> RecoveryFacts:
    """Return ``facts`` with keys of the configuration changed."""
    values = {name: dataclasses.replace(getattr(facts.config, name), **keys) for name, keys in groups.items()}
    return dataclasses.replace(facts, config=dataclasses.replace(facts.config, **values))


def restarting(**snapshot: Any) -> JobConfig:
    """Return two nodes of two ranks whose ranks are restarted."""
    measured = {"bandwidth_bytes_per_second": 1e12, "iteration_seconds": 1.0}
    return job(
        launch={"num_nodes": 2, "ranks_per_node": 2},
        recovery={"max_restarts": 2},
        snapshot={"policy": WINDOWS, "num_peer_copies": 1, **measured, **snapshot},
    )


# --- step 1 ------------------------------------------------------------------------------------------------------


def test_replicas_serve_one_lost_node_of_four_and_what_moves_is_counted() -> None:
    config = elastic()
    cost = cost_of_loss(facts_of(config), [2], place=placer(config, JobInputs()))
    assert (cost.strategy, cost.max_iterations, cost.is_automatic, cost.is_bitwise) == ("living_state", 0, True, False)
    assert cost.moved_bytes is not None and cost.moved_bytes % expert_state_bytes(config) == 0
    assert not cost.declined and not cost.lost_operators


@pytest.mark.parametrize("num_lost", [2, 3, 4])
def test_every_joint_loss_serves_where_each_expert_has_a_holder_left(num_lost: int) -> None:
    """Compare with an enumeration, and the share of survived losses with the survival of the placement."""
    config = elastic(6, 1)
    held, (plan,) = facts_of(config), plans_of(config)
    served = 0
    losses = list(combinations(range(6), num_lost))
    for lost in losses:
        left = [node for node in range(6) if node not in lost]
        whole = all(
            any(expert in by_rank[node] for node in left)
            for by_rank in plan.slots
            for expert in range(plan.num_experts)
        )
        cost = cost_of_loss(held, lost)
        assert (cost.strategy == "living_state") == whole, lost
        served += whole
    expected = survival(plan.all_expert_domains(), plan.domains, [num_lost])[0].probability
    assert served / len(losses) == pytest.approx(expected)

    assert num_lost == 2 or 0 < served < len(losses), "both outcomes are seen"


def test_an_expert_without_holder_is_named_by_layer_and_number() -> None:
    config = elastic(6, 1)
    (plan,), held = plans_of(config), facts_of(config)
    lost = tuple(rank for rank, experts in enumerate(plan.slots[0]) if 5 in experts)
    cost = cost_of_loss(held, lost)
    (replicas, *_) = cost.declined
    assert replicas.strategy == "living_state" and f"{plan.layer_numbers[0]}.expert.5" in map(str, replicas.missing)
    assert cost.lost_operators == replicas.missing and not cost.is_automatic


def test_too_few_nodes_left_decline() -> None:
    cost = cost_of_loss(facts_of(elastic(4, 3)), [0, 1])
    reason = "recovery.min_nodes=3 is more than the number of remaining nodes, 2"
    assert cost.strategy != "living_state" and cost.declined[0].reason == reason


def test_a_second_loss_is_judged_by_the_nodes_there_are() -> None:
    held = facts_of(elastic(5), (0, 1, 3, 4))
    assert held.nodes == (0, 1, 3, 4)
    (plan,) = held.placements
    assert plan.domains == ("node0", "node1", "node3", "node4")
    assert cost_of_loss(held, [3]).strategy == "living_state"
    with pytest.raises(ConfigError, match="lost node=2: must be one of the present nodes"):
        cost_of_loss(held, [2])


@pytest.mark.parametrize(
    ("groups", "output"),
    [
        ({"parallel": {"use_distributed_optimizer": True}}, "parallel.use_distributed_optimizer=true"),
        ({"launch": {"mode": "torchrun"}}, "launch.mode=torchrun"),
    ],
)
def test_what_is_not_covered_declines_by_its_key(groups: dict[str, Any], output: str) -> None:
    config = elastic()
    for group, values in groups.items():
        config = dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **values)})
    cost = cost_of_loss(RecoveryFacts.of(config, plans_of(config), None), [1])
    assert cost.strategy != "living_state" and output in cost.declined[0].reason


def test_without_min_nodes_copies_do_not_help() -> None:
    cost = cost_of_loss(facts_of(elastic(min_nodes=None)), [1])
    assert "recovery.min_nodes=null" in cost.declined[0].reason and not cost.lost_operators


# --- windows and checkpoints -------------------------------------------------------------------------------------


def test_a_rollback_to_a_window_that_leaves_out_experts_is_not_bitwise() -> None:
    partial = {"_target_": "megatron_ft.planning.snapshot.partial_experts.PartialExperts", "interval_iterations": 3}
    unmeasured = {"bandwidth_bytes_per_second": None, "iteration_seconds": None}
    cost = cost_of_loss(facts_of(restarting(policy=partial, **unmeasured)), [1], is_gone=False)
    assert (cost.strategy, cost.is_bitwise, cost.loses_updates) == ("rollback", False, True)
    assert cost.result == "loses expert updates" and cost.to_json()["loses_updates"]
    assert "at most 3.75 % of the whole training's tokens" in cost.summary()
    assert cost.max_iterations == 3 + 1, "windows have one slice, whatever the measurements"


def test_dead_ranks_are_started_again_from_memory() -> None:
    held = facts_of(restarting())
    cost = cost_of_loss(held, [1], is_gone=False)
    assert (cost.strategy, cost.medium, cost.is_automatic, cost.is_bitwise) == ("rollback", "memory", True, True)
    assert cost.max_iterations == 3 + 1, "an interval, and the window that is not committed yet"


def test_a_job_whose_snapshot_servers_outlive_it_goes_on_from_memory() -> None:
    held = facts_of(restarting(outlive_job_seconds=600))
    cost = cost_of_loss(held, held.nodes, is_gone=False, ends_job=True)
    assert (cost.strategy, cost.medium, cost.is_automatic, cost.is_bitwise) == ("rollback", "memory", False, True)
    assert cost.max_iterations == 3 + 1, "at most two windows"
    assert cost.summary().startswith("death of all processes of the job on nodes 0, 1")
    ended = cost_of_loss(facts_of(restarting()), held.nodes, is_gone=False, ends_job=True)
    assert ended.medium != "memory"
    reasons = [each.reason for each in ended.declined if each.strategy == "rollback"]
    assert "snapshot.outlive_job_seconds=0: windows in memory are lost with the job" in reasons[0]
    early = cost_of_loss(held, held.nodes, is_gone=False, ends_job=True, stored=Stored(iteration=2))
    assert early.medium != "memory", "a server without a committed window ends with its job"
    committed = Stored(iteration=9, memory_start=4)
    assert cost_of_loss(held, held.nodes, is_gone=False, ends_job=True, stored=committed).max_iterations == 5
    assert "which is not certain" in "".join(each.reason for each in cost_of_loss(held, [1]).declined)
    assert "the death of the whole job" in windows_serve(held.config)


def test_a_node_that_is_gone_takes_windows_in_memory_with_it() -> None:
    cost = cost_of_loss(facts_of(restarting(persist_interval_windows=2)), [1])
    assert (cost.strategy, cost.medium, cost.is_automatic) == ("rollback", "persisted", False)
    assert (
        "from memory: the loss of a node ends the job" in cost.declined[-1].reason and cost.max_iterations == 2 * 3 + 1
    )


def test_nothing_is_left_where_nothing_was_put_away() -> None:
    cost = cost_of_loss(facts_of(restarting()), [1])
    assert not cost.is_recoverable and [declined.strategy for declined in cost.declined] == [
        "living_state",
        "localized_replay",
        "rollback",
        "checkpoint",
    ]
    assert cost.max_iterations == JobConfig().training.train_iterations


def test_ranks_do_not_start_over_by_themselves_beside_windows_that_they_cannot_use() -> None:
    held = changed(facts_of(restarting()), recovery={"min_nodes": 1})
    for stored, is_automatic in (
        (None, False),
        (Stored(iteration=9, memory_start=6), False),
        (Stored(iteration=9, persisted_start=6), False),
        (Stored(iteration=1), True),
    ):
        cost = cost_of_loss(held, [1], stored=stored)
        assert (cost.strategy, cost.is_automatic) == ("start_over", is_automatic), stored


def test_checkpoints_lose_an_interval() -> None:
    cost = cost_of_loss(facts_of(job(checkpoint={"save_interval_iterations": 50})), [0])
    assert (cost.strategy, cost.max_iterations) == ("checkpoint", 50)


def test_a_window_that_is_measured_first_has_no_bound() -> None:
    held = facts_of(restarting(bandwidth_bytes_per_second=None))
    cost = cost_of_loss(held, [0], is_gone=False)
    assert cost.medium == "memory" and cost.max_iterations is None and cost.iterations == "<= 2 windows"


def test_saved_state_of_the_run_replaces_bounds() -> None:
    held = facts_of(restarting(persist_interval_windows=2))
    stored = Stored(iteration=40, memory_start=36, persisted_start=30, checkpoint=25)
    assert cost_of_loss(held, [0], is_gone=False, stored=stored).max_iterations == 4
    assert cost_of_loss(held, [0], stored=stored).max_iterations == 10
    none = Stored(iteration=40, checkpoint=25)
    cost = cost_of_loss(held, [0], stored=none)
    assert (cost.strategy, cost.max_iterations) == ("checkpoint", 15)
    assert cost.declined[-1].reason.endswith("no complete window is on storage yet")
    assert cost_of_loss(held, [0], stored=Stored(iteration=40)).max_iterations == 40


def test_where_replicas_decline_ranks_start_again_on_the_nodes_left() -> None:
    """The ranks continue from a dense checkpoint, because windows need the previous number of ranks."""
    windows = {"policy": WINDOWS, "num_peer_copies": 1, "persist_interval_windows": 1}
    config = elastic(6, 1, snapshot=windows, checkpoint={"save_interval_iterations": 9}, recovery={"max_restarts": 1})
    held = facts_of(config)
    assert cost_of_loss(held, [1]).strategy == "living_state", "snapshots do not stand against it"
    cost = cost_of_loss(held, [0, 1, 2, 3])
    assert (cost.strategy, cost.is_automatic, cost.is_bitwise, cost.max_iterations) == ("checkpoint", True, False, 9)
    assert cost.declined[-1].reason == (
        "ranks restart on fewer nodes, but windows can only be loaded by the previous number of ranks"
    )
    too_few = cost_of_loss(changed(held, recovery={"min_nodes": 3}), [0, 1, 2, 3])
    assert (too_few.is_automatic, too_few.is_bitwise) == (False, True)
    ranks_only = cost_of_loss(held, [0, 1, 2, 3], is_gone=False)
    assert (ranks_only.medium, ranks_only.is_automatic, ranks_only.is_bitwise) == ("memory", True, True)


def test_nodes_that_joined_later_are_domains_of_their_own() -> None:
    config = elastic(4, topology={"failure_domains": ["a", "a", "b", "b"]})
    assert config_of(config, (1, 3, 5)).topology.failure_domains == ["a", "b", "node5"]
    held = facts_of(config, (1, 2, 3, 5))
    assert held.domain_of(5) == "node5" and held.domain_of(0) == "a"


def test_a_job_that_does_not_run_has_what_is_on_storage() -> None:
    held = dataclasses.replace(facts_of(restarting(persist_interval_windows=2)), is_running=False)
    cost = cost_of_loss(held, [0], is_gone=False)
    assert (cost.medium, cost.is_automatic) == ("persisted", False)
    assert cost.declined[-1].reason == "from memory: the job is not running"
    assert cost_of_loss(dataclasses.replace(facts_of(elastic()), is_running=False), [0]).strategy != "living_state"


# --- who holds what ----------------------------------------------------------------------------------------------


def lost_operators(config: JobConfig, *nodes: int) -> set[str]:
    return set(map(str, cost_of_loss(facts_of(config), nodes).lost_operators))


def test_pipeline_stages_lose_their_own_layers() -> None:
    config = job(
        launch={"num_nodes": 2, "ranks_per_node": 1},
        parallel={"pipeline_model_parallel_size": 2, "use_distributed_optimizer": False},
    )
    second = lost_operators(config, 1)
    assert {"3.non_expert", "4.gate", "4.expert.0", "5.head"} <= second
    assert not {"0.embedding", "1.non_expert"} & second and facts_of(config).stages == ((0,), (1,))


def test_expert_ranks_lose_their_experts_and_nothing_else() -> None:
    config = job(
        launch={"num_nodes": 2, "ranks_per_node": 1},
        parallel={"expert_model_parallel_size": 2, "use_distributed_optimizer": False},
    )
    assert lost_operators(config, 1) == {f"{layer}.expert.{e}" for layer in (2, 4) for e in range(4, 8)}


def test_a_sharded_optimizer_loses_a_part_of_everything() -> None:
    config = job(launch={"num_nodes": 2, "ranks_per_node": 1}, parallel={"use_distributed_optimizer": True})
    assert len(lost_operators(config, 0)) == len(facts_of(config).operators)


SHARDED: dict[str, Any] = {
    "parallel": {"use_distributed_optimizer": True},
    "placement": {"state_copies": 2, "num_slots_per_rank": 8},
}
"""Distributed optimizer with two copies of each shard, and every expert on every rank."""


@pytest.mark.parametrize("nodes", [None, (0, 1, 3)], ids=str)
def test_copies_of_shards_survive_what_the_plan_of_copies_survives(nodes: tuple[int, ...] | None) -> None:
    """Every set of lost nodes is compared with the owners of the shards, also after node 2 was lost."""
    config = elastic(min_nodes=1, **SHARDED)
    present = nodes or tuple(range(4))
    of_present = config if nodes is None else config_of(config, nodes)
    (plan,) = plans_of(of_present)
    copies = plan_state_copies(of_present, plan, 1)
    assert copies is not None
    (shards,) = (operator.owners for operator in copies.operators if operator.expert == NON_EXPERT)
    assert sorted({len(owners) for owners in shards}) == [2]
    found = facts_of(config, nodes)
    for size in range(1, len(present)):
        for lost in combinations(present, size):
            ranks = {present.index(node) for node in lost}
            survives = all(set(owners) - ranks for owners in shards)
            cost = cost_of_loss(found, lost)
            assert (cost.strategy == "living_state") == survives, lost
            assert survives or "1.non_expert" in map(str, cost.lost_operators)


def test_one_remaining_node_keeps_one_copy() -> None:
    """The number of copies is lowered to the number of failure domains."""
    config = elastic(min_nodes=1, **SHARDED)
    assert [config_of(config, range(size)).placement.state_copies for size in (4, 3, 2, 1)] == [2, 2, 2, 1]
    assert config_of(elastic(), [0, 1]).placement.state_copies is None


def test_tensor_parts_live_on_where_a_data_parallel_copy_does() -> None:
    parallel = {"tensor_model_parallel_size": 2, "use_distributed_optimizer": False}
    config = job(launch={"num_nodes": 2, "ranks_per_node": 2}, parallel=parallel)
    assert not lost_operators(config, 0) and lost_operators(config, 0, 1)
    split = job(launch={"num_nodes": 2, "ranks_per_node": 1}, parallel=parallel)
    assert "1.non_expert" in lost_operators(split, 0)


def test_spanned_stages_and_shared_domains_are_warned_of() -> None:
    parallel = {"pipeline_model_parallel_size": 2}
    (warning,) = facts_of(job(launch={"num_nodes": 1, "ranks_per_node": 2}, parallel=parallel)).warnings
    assert warning == "node 0 spans pipeline stages 0, 1: its loss affects all of them"
    shared = dataclasses.replace(facts_of(restarting()), failure_domains=("rack", "rack"))
    assert shared.warnings[0] == "node 0 and its peer, node 1, are in the same failure domain rack"
    assert not facts_of(restarting()).warnings


def test_each_node_has_a_cost_that_fits_in_a_line_and_in_json() -> None:
    config = elastic()
    costs = costs_of_nodes(facts_of(config), JobInputs())
    assert [cost.lost_nodes for cost in costs] == [(0,), (1,), (2,), (3,)]
    declining = cost_of_loss(facts_of(elastic(6, 1)), [0, 1, 2, 3])
    for cost in (*costs, declining):
        assert json.loads(json.dumps(cost.to_json()))["strategy"] == cost.strategy
        assert "\n" not in cost.summary()


# --- the layout is kept ------------------------------------------------------------------------------------------


def keeping(groups: dict[str, dict[str, Any]] | None = None, *, device: str = "cpu", **keys: Any) -> RecoveryFacts:
    """Return four nodes of one rank each in two stages, with a sharded optimizer. Lost places are filled."""
    filled = {"num_nodes": 4, "ranks_per_node": 1, "keep_layout": True, "restart_lost_nodes": True, **keys}
    found = {**grouped(**filled), "parallel": {"pipeline_model_parallel_size": 2}, "model": MODEL}
    found["snapshot"] = {"policy": WINDOWS, "num_peer_copies": 1, "iteration_seconds": 1.0}
    found["snapshot"]["bandwidth_bytes_per_second"] = 1e12
    found["training"] = {"device": device}
    for name, values in (groups or {}).items():
        found[name] = {**found.get(name, {}), **values}
    return facts_of(job(**found))


def living(groups: dict[str, dict[str, Any]] | None = None, **keys: Any) -> RecoveryFacts:
    """Return the same job with the whole optimizer on every rank."""
    given = groups or {}
    return keeping({**given, "parallel": {"use_distributed_optimizer": False, **given.get("parallel", {})}}, **keys)


def test_the_stage_of_a_lost_node_goes_back_alone() -> None:
    held = keeping()
    cost = cost_of_loss(held, [3])
    assert (cost.strategy, cost.stages, cost.is_automatic, cost.is_bitwise) == ("localized_replay", (1,), True, True)
    assert held.snapshot is not None and held.snapshot.window_iterations and held.snapshot.interval_iterations
    assert cost.max_iterations == held.snapshot.interval_iterations + held.snapshot.window_iterations + 4
    assert cost.description == "localized_replay (stage 1)"
    assert [declined.strategy for declined in cost.declined] == ["living_state"]


@pytest.mark.parametrize(("lost", "share"), [([3], 0.5), ([1, 3], 1.0)], ids=["one stage", "all stages"])
def test_work_counts_the_stages_that_replay_and_the_nodes_that_are_replaced(lost: list[int], share: float) -> None:
    work = cost_of_loss(keeping(num_spare_nodes=2), lost).work
    assert work is not None and (work.again_share, work.num_replaced_nodes) == (share, len(lost))


@pytest.mark.parametrize("expert_size", [1, 2])
def test_copies_of_shards_replace_a_replay(expert_size: int) -> None:
    """With two expert-parallel ranks, only the copies have the experts of a lost rank."""
    parallel = {"expert_model_parallel_size": expert_size}
    held = keeping({"placement": {"state_copies": 2}, "parallel": parallel})
    cost = cost_of_loss(held, [3])
    assert (cost.strategy, cost.max_iterations, cost.is_bitwise) == ("living_state", 0, True)
    assert cost.moved_bytes == held.received_bytes[1]
    assert cost_of_loss(keeping({"parallel": parallel}), [3]).strategy == "localized_replay"
    assert cost_of_loss(held, [2, 3]).strategy != "living_state", "both copies are lost"


@pytest.mark.parametrize(
    ("lost", "keys", "output"),
    [
        ([0, 1, 2, 3], {}, "no rank survives, so the logged votes are lost"),
        ([0, 1], {}, "no remaining node has copies of the windows of nodes"),
        (
            [0, 2],
            {"restart_lost_nodes": False, "num_spare_nodes": 1},
            "nodes.num_spare_nodes=1 is less than the number of lost nodes, 2",
        ),
    ],
)
def test_localized_replay_declines_without_replacement_or_window(
    lost: list[int], keys: dict[str, Any], output: str
) -> None:
    cost = cost_of_loss(keeping(**keys), lost)
    assert cost.strategy != "localized_replay" and output in cost.declined[1].reason


@pytest.mark.parametrize(
    ("keys", "facts", "nodes", "reason"),
    [
        (
            {"restart_lost_nodes": False, "num_spare_nodes": 1},
            {"num_waiting": 0},
            [1],
            "too few spare nodes are left (left: 0, needed for the lost nodes: 1)",
        ),
        ({"restart_lost_nodes": False, "num_spare_nodes": 1}, {"num_waiting": 2}, [0, 2], ""),
        ({}, {"worn_nodes": (1,)}, [1], "nodes [1] were lost too often"),
        ({"num_spare_nodes": 1}, {"worn_nodes": (1,)}, [1], ""),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_gone", [True, False])
def test_a_running_job_states_which_nodes_can_take_lost_places(
    keys: dict[str, Any], facts: dict[str, Any], nodes: list[int], reason: str, is_gone: bool
) -> None:
    held = dataclasses.replace(keeping(**keys), **facts)
    cost = cost_of_loss(held, nodes, is_gone=is_gone)
    reasons = [found.reason for found in cost.declined if found.strategy == "localized_replay"]
    if reason:
        assert cost.strategy != "localized_replay" and reason in reasons[0]
    else:
        assert (cost.strategy, reasons) == ("localized_replay", [])


def test_after_a_change_of_the_layout_a_full_job_takes_lanes_away_again() -> None:
    config = elastic(recovery={"keep_layout": True}, nodes={"restart_lost_nodes": True})
    held = facts_of(config)
    kept = cost_of_loss(held, [1])
    assert (kept.strategy, kept.is_bitwise) == ("living_state", True)
    changed = cost_of_loss(dataclasses.replace(held, has_changed_layout=True), [1])
    assert (changed.strategy, changed.is_bitwise) == ("living_state", False)
    stored = Stored(iteration=9, checkpoint=4)
    last = cost_of_loss(dataclasses.replace(held, has_changed_layout=True), [0, 1, 2], stored=stored)
    assert last.strategy == "checkpoint", "two nodes are too few"


def test_windows_from_before_a_move_of_experts_are_not_replayed_by_single_stages() -> None:
    held = keeping()
    stored = Stored(iteration=9, memory_start=6, placed_from=7)
    cost = cost_of_loss(held, [1], stored=stored)
    assert cost.strategy != "localized_replay"
    moved = "experts moved after the newest committed window started (iteration 6) and before iteration 7"
    assert any(moved in found.reason for found in cost.declined)
    newer = dataclasses.replace(stored, memory_start=7)
    assert cost_of_loss(held, [1], stored=newer).strategy == "localized_replay"


@pytest.mark.parametrize(
    ("max_restarts", "keys", "is_automatic"),
    [
        (2, {}, True),
        (0, {}, False),
        (2, {"restart_lost_nodes": False, "num_spare_nodes": 2}, True),
        (2, {"restart_lost_nodes": False, "num_spare_nodes": 1}, False),
    ],
)
def test_all_ranks_start_again_where_the_places_of_lost_nodes_are_filled(
    max_restarts: int, keys: dict[str, Any], is_automatic: bool
) -> None:
    held = keeping(max_restarts=max_restarts, **keys)
    cost = cost_of_loss(held, [0, 1], stored=Stored(iteration=30, memory_start=26, checkpoint=20))
    assert (cost.strategy, cost.max_iterations, cost.is_automatic) == ("checkpoint", 10, is_automatic)
    assert cost.is_bitwise, "it starts again at the same size"
    if is_automatic:
        assert "no remaining node has copies of the windows of nodes [0]" in cost.declined[2].reason


@pytest.mark.parametrize(
    "device", [{"keep_processes": False}, {"device": "cuda"}, {"device": "cuda", "keep_processes": False}], ids=str
)
@pytest.mark.parametrize("replaced", [{}, {"restart_lost_nodes": False, "num_spare_nodes": 1}], ids=str)
def test_all_ranks_go_back_to_windows_in_memory_where_processes_are_not_kept(
    device: dict[str, Any], replaced: dict[str, Any]
) -> None:
    held = keeping(max_restarts=1, **device, **replaced)
    for node in held.nodes:
        cost = cost_of_loss(held, [node])
        assert (cost.description, cost.is_automatic, cost.is_bitwise) == ("rollback (memory)", True, True)
        assert not cost.keeps_processes and cost.max_iterations == held.window_bound(1)
        assert "all ranks start again" in cost.declined[1].reason
    stored = Stored(iteration=30, memory_start=26)
    assert cost_of_loss(held, [0], stored=stored).max_iterations == 4
    assert cost_of_loss(held, [0], stored=Stored(iteration=30)).strategy == "start_over"
    assert cost_of_loss(held, held.nodes, is_gone=False).description == "rollback (memory)"


def test_a_node_in_the_place_of_a_lost_one_has_the_peers_of_this_place() -> None:
    held = keeping(max_restarts=1, keep_processes=False)
    places = held.layouts.on((0, 7, 2, 3))
    assert isinstance(places, MembershipLayout)
    replaced = RecoveryFacts.of(held.config, (), held.snapshot, places)
    for node in held.nodes:
        expected = tuple({1: 7}.get(peer, peer) for peer in held.peers_of(node))
        assert expected and replaced.peers_of({1: 7}.get(node, node)) == expected
    assert cost_of_loss(replaced, [7]).description == "rollback (memory)"


def test_a_restart_from_windows_needs_a_replacement_and_a_copy() -> None:
    held = keeping(max_restarts=1, keep_processes=False, restart_lost_nodes=False, num_spare_nodes=1)
    cost = cost_of_loss(held, [0, 2])
    assert not cost.is_automatic and "the loss of a node ends the job" in cost.declined[2].reason
    held = keeping(max_restarts=1, keep_processes=False)
    assert cost_of_loss(held, [0, 2]).description == "rollback (memory)"
    assert "copies of the windows of nodes [0]" in cost_of_loss(held, [0, 1]).declined[2].reason


def test_a_stage_goes_back_to_what_has_been_committed() -> None:
    stored = Stored(iteration=30, memory_start=26)
    assert cost_of_loss(keeping(), [0], stored=stored).max_iterations == 4
    assert cost_of_loss(keeping(), [0], stored=Stored(iteration=30)).declined[1].reason.startswith("no window")


def test_a_lost_place_receives_the_state_of_living_ranks() -> None:
    held = living()
    cost = cost_of_loss(held, [3])
    assert (cost.strategy, cost.max_iterations, cost.is_bitwise) == ("living_state", 0, True)
    assert cost.moved_bytes == held.received_bytes[1] and cost.declined == ()
    both = cost_of_loss(held, [0, 3], is_gone=False)
    assert (both.strategy, both.moved_bytes) == ("living_state", sum(held.received_bytes))
    assert cost_of_loss(living({"snapshot": {"policy": None, "num_peer_copies": 0}}), [3]).strategy == "living_state"


@pytest.mark.parametrize(
    ("held", "lost", "reason"),
    [
        (keeping(), [3], "no surviving rank holds these operators"),
        (living(), [2, 3], "no surviving rank holds these operators"),
        (living({"parallel": {"expert_model_parallel_size": 2}}), [1], "no surviving rank holds these operators"),
        (living(strategies=["localized_replay"]), [3], "not chosen: recovery.strategies=[localized_replay]"),
        (living({"model": {"hidden_dropout": 0.1}}), [3], "model.hidden_dropout=0.1: the random number generators"),
        (living(restart_lost_nodes=False, num_spare_nodes=1), [1, 3], "nodes.num_spare_nodes=1 is less than"),
    ],
)
def test_living_state_declines_where_ranks_lack_it(held: RecoveryFacts, lost: list[int], reason: str) -> None:
    cost = cost_of_loss(held, lost)
    assert cost.strategy != "living_state"
    assert cost.declined[0].strategy == "living_state" and reason in cost.declined[0].reason


def test_only_the_stage_without_its_state_replays_and_lost_neighbours() -> None:
    held = living({"parallel": {"pipeline_model_parallel_size": 4}}, num_nodes=8)
    assert cost_of_loss(held, [0, 1, 6], is_gone=False).stages == (0,)
    assert cost_of_loss(held, [0, 1, 2], is_gone=False).stages == (0, 1)


def test_replicas_and_copies_serve_in_a_kept_layout() -> None:
    copies = {**SPREAD, "state_copies": 2, "num_slots_per_rank": 8}
    held = keeping({"placement": copies})
    assert idle_copies(held.config) == ()
    assert cost_of_loss(held, [3]).strategy == "living_state"
    assert cost_of_loss(held, [2, 3], is_gone=False).strategy == "localized_replay"


def test_a_place_that_stays_empty_costs_a_lane() -> None:
    """Losses up to the number of spares keep the layout, and so every bit. Further ones need ``recovery.min_nodes``."""
    placement = {**SPREAD, "state_copies": 2, "num_slots_per_rank": 8}
    parallel = {"pipeline_model_parallel_size": 1}
    spare = {"restart_lost_nodes": False, "num_spare_nodes": 1}
    held = keeping({"placement": placement, "parallel": parallel}, min_nodes=2, **spare)
    replaced, fewer = cost_of_loss(held, [1]), cost_of_loss(held, [1, 3])
    assert [(cost.strategy, cost.is_bitwise, cost.is_automatic) for cost in (replaced, fewer)] == [
        ("living_state", True, True),
        ("living_state", False, True),
    ]
    needs_all = keeping({"placement": placement, "parallel": parallel}, **spare)
    assert not cost_of_loss(needs_all, [1, 3]).is_automatic
    too_few = cost_of_loss(keeping({"placement": placement, "parallel": parallel}, min_nodes=3, **spare), [1, 3])
    reasons = [declined.reason for declined in too_few.declined]
    assert "recovery.min_nodes=3 is more than the number of remaining nodes, 2" in reasons
    assert "nodes.num_spare_nodes=1 is less than the number of lost nodes, 2" in reasons
    # After the spare has taken a place, the next loss takes a lane; after that, spares have no places to take.
    used = facts_of(held.config, (0, 4, 2, 3))
    assert cost_of_loss(used, [2]).is_bitwise is False
    smaller = cost_of_loss(facts_of(held.config, (0, 4, 3)), [3])
    assert (smaller.strategy, smaller.is_bitwise) == ("living_state", False)
    again = keeping({"placement": placement, "parallel": parallel}, min_nodes=2)
    assert cost_of_loss(again, [1, 3]).is_bitwise, "lost nodes are started again"


def test_copies_that_no_recovery_reads_are_named() -> None:
    assert idle_copies(elastic()) == () and idle_copies(job()) == ()
    (state,) = idle_copies(job(launch={"num_nodes": 4}, placement={**SPREAD, "state_copies": 2}))
    assert state.startswith("placement.state_copies=2: no recovery uses these copies")
    assert idle_copies(elastic(**SHARDED)) == (), "a recovery from the loss of a node reads them"
    (windows,) = idle_copies(restarting())
    assert windows.startswith("snapshot.num_peer_copies=1: ") and "the loss of a node ends the job" in windows
    (beside_replicas,) = idle_copies(elastic(snapshot={"policy": WINDOWS, "num_peer_copies": 1}))
    assert "the loss of a node ends the job" not in beside_replicas
    kept = grouped(num_nodes=2, keep_layout=True, num_spare_nodes=1)
    assert idle_copies(job(**kept, snapshot={"policy": WINDOWS, "num_peer_copies": 1})) == ()


def test_replicas_are_used_as_the_job_is_configured() -> None:
    assert why_no_replicas(elastic()) == ""
    assert why_no_replicas(elastic(min_nodes=None)) == "recovery.min_nodes=null: all nodes are needed"
    assert "placement.algorithm=null" in why_no_replicas(job())
    assert why_no_replicas(elastic(training={"device": "cuda"})) == "training.device=cuda"
    chosen = elastic(recovery={"strategies": ["checkpoint"]})
    assert why_no_replicas(chosen) == "recovery.strategies does not contain living_state"


def test_windows_serve_what_the_job_is_configured_for() -> None:
    assert windows_serve(restarting()) == "the death of ranks on running nodes (recovery.max_restarts=2)"
    assert windows_serve(restarting(persist_interval_windows=1)).endswith(
        "the end of the job: run.resume with the same number of ranks loads persisted windows"
    )
    assert windows_serve(job(snapshot={"policy": WINDOWS})).startswith("no failure: recovery.max_restarts=0")
    assert windows_serve(changed(facts_of(restarting()), recovery={"strategies": ["checkpoint"]}).config) == (
        "no failure: recovery.strategies does not contain rollback, snapshot.persist_interval_windows=0 and "
        "snapshot.outlive_job_seconds=0"
    )
    kept = grouped(num_nodes=2, keep_layout=True, num_spare_nodes=1)
    assert windows_serve(job(**kept, snapshot={"policy": WINDOWS})).startswith("the loss of a rank or a node")


def test_a_job_of_slurm_is_not_started_again_by_hand() -> None:
    lost = {}
    for launcher in ("local", "srun"):
        config = restarting(persist_interval_windows=1)
        launch = dataclasses.replace(config.launch, node_launcher=launcher)
        lost[launcher] = cost_of_loss(facts_of(dataclasses.replace(config, launch=launch)), [1])

    assert [cost.description for cost in lost.values()] == [
        "rollback (persisted), by hand",
        "rollback (persisted), by Slurm",
    ]


def test_windows_that_are_seldom_written_lose_as_many() -> None:
    held = facts_of(restarting(bandwidth_bytes_per_second=None, persist_interval_windows=100))
    assert cost_of_loss(held, [0]).iterations == "<= 101 windows"
    assert cost_of_loss(held, [0], is_gone=False).iterations == "<= 2 windows"


# --- pipeline stages ---------------------------------------------------------------------------------------------


def staged(**groups: Any) -> JobConfig:
    """Return four nodes, of which nodes 0 and 1 have stage 0."""
    placement = {"num_slots_per_rank": 8, **groups.pop("placement", {})}
    return elastic(parallel={"pipeline_model_parallel_size": 2, **groups.pop("parallel", {})}, placement=placement)


@pytest.mark.parametrize("lost", [lost for size in (1, 2) for lost in combinations(range(4), size)], ids=str)
def test_a_job_survives_if_each_stage_keeps_a_node(lost: tuple[int, ...]) -> None:
    config = staged()
    cost = cost_of_loss(facts_of(config), lost, place=placer(config, JobInputs()))
    assert (cost.strategy == "living_state") == (lost not in ((0, 1), (2, 3)))
    assert {operator.layer for operator in cost.lost_operators} == {(0, 1): {0, 1, 2}, (2, 3): {3, 4, 5}}.get(
        lost, set()
    )


def test_ranks_that_change_their_stage_receive_its_experts() -> None:
    """With two ranks on each node, three nodes have three lanes, so a rank of stage 1 changes to stage 0."""
    config = elastic(launch={"ranks_per_node": 2}, parallel={"pipeline_model_parallel_size": 2})
    cost = cost_of_loss(facts_of(config), [0], place=placer(config, JobInputs()))
    assert cost.strategy == "living_state" and cost.moved_bytes is not None
    assert cost.moved_bytes >= 4 * expert_state_bytes(config), "it has the slots of four experts"


def test_a_hot_spare_has_no_state() -> None:
    config = staged()
    remaining = config_of(config, (0, 2))
    present = RecoveryFacts.of(config, plans_of(remaining), None, layout_on(config, (0, 2, 3)))
    assert (present.layout.processes, present.layout.spares) == ((0, 2), (3,))
    costs = {node: cost_of_loss(present, [node]) for node in (0, 2, 3)}
    assert [cost.strategy == "living_state" for cost in costs.values()] == [False, False, True]


def test_shards_and_weights_of_a_stage_must_both_live() -> None:
    config = staged(parallel={"use_distributed_optimizer": True}, placement={"state_copies": 2})
    assert cost_of_loss(facts_of(config), [3]).strategy == "living_state"
    assert cost_of_loss(facts_of(config), [2, 3]).strategy != "living_state"


# --- predicted seconds -------------------------------------------------------------------------------------------


def test_a_prediction_needs_the_speed_of_links_only_if_experts_move() -> None:
    config = elastic()
    cost = cost_of_loss(facts_of(config), [2], place=placer(config, JobInputs()))
    assert cost.moved_bytes and (cost.seconds, cost.why_no_seconds) == (None, ("topology.link_bytes_per_second=null",))
    config = elastic(topology={"link_bytes_per_second": 1e6})
    cost = cost_of_loss(facts_of(config), [2], place=placer(config, JobInputs()))
    faster = changed(facts_of(config), topology={"link_bytes_per_second": 1e9})
    saved = cost_of_loss(faster, [2], place=placer(config, JobInputs())).seconds
    assert cost.seconds is not None and saved is not None and saved < cost.seconds
    assert cost.predicted == f"{cost.seconds:.2g} s"


def test_a_prediction_is_a_bound_until_the_run_has_saved_state() -> None:
    held = facts_of(restarting())
    bound = cost_of_loss(held, [1], is_gone=False)
    exact = cost_of_loss(held, [1], is_gone=False, stored=Stored(iteration=40, memory_start=39))
    assert bound.seconds is not None and exact.seconds is not None and bound.max_iterations is not None
    assert bound.predicted.startswith("<= ")
    assert bound.seconds - exact.seconds == pytest.approx((bound.max_iterations - 1) * 1.0)
    slow = dataclasses.replace(held, iteration_seconds=10.0)
    assert (cost_of_loss(slow, [1], is_gone=False).seconds or 0.0) > 10.0


def test_a_start_by_hand_or_an_unmeasured_window_has_no_prediction() -> None:
    by_hand = cost_of_loss(facts_of(restarting(persist_interval_windows=1)), [1])
    assert (by_hand.seconds, by_hand.why_no_seconds) == (None, ("the job is started again by hand",))
    unmeasured = cost_of_loss(facts_of(restarting(bandwidth_bytes_per_second=None)), [0], is_gone=False)
    assert unmeasured.why_no_seconds == ("snapshot.bandwidth_bytes_per_second=null",)


def test_a_localized_replay_receives_windows_only_for_lost_nodes() -> None:
    assert cost_of_loss(keeping(), [3]).why_no_seconds == ("topology.link_bytes_per_second=null",)
    held = changed(keeping(), topology={"link_bytes_per_second": 1e3})
    gone, died = cost_of_loss(held, [3]).seconds, cost_of_loss(held, [3], is_gone=False).seconds
    assert gone is not None and died is not None and gone > died


# --- recovery.strategies -----------------------------------------------------------------------------------------


def test_strategies_and_requirements_have_the_same_names() -> None:
    assert [strategy.name for strategy in STRATEGIES] == [*REQUIREMENTS, "start_over"]


def test_a_strategy_that_is_not_chosen_declines_and_the_next_one_serves() -> None:
    config = elastic(checkpoint={"save_interval_iterations": 9}, recovery={"max_restarts": 1})
    assert cost_of_loss(facts_of(config), [1]).strategy == "living_state"
    cost = cost_of_loss(changed(facts_of(config), recovery={"strategies": ["checkpoint"]}), [1])
    assert (cost.strategy, cost.is_automatic, cost.max_iterations) == ("checkpoint", True, 9)
    assert {declined.reason for declined in cost.declined} == {"not chosen: recovery.strategies=[checkpoint]"}
    only = changed(facts_of(config), recovery={"strategies": ["living_state"], "max_restarts": 0})
    assert cost_of_loss(only, [1]).strategy == "living_state"
    by_hand = cost_of_loss(only, [0, 1, 2])
    assert (by_hand.strategy, by_hand.is_automatic) == ("checkpoint", False), "a user can load any saved state"


def test_ranks_do_not_start_over_beside_state_whose_strategy_is_not_chosen() -> None:
    held = changed(facts_of(restarting()), recovery={"strategies": ["checkpoint"]})
    cost = cost_of_loss(held, [0], is_gone=False, stored=Stored(iteration=9, memory_start=6))
    assert (cost.strategy, cost.is_automatic) == ("start_over", False)


def test_of_strategies_that_keep_all_iterations_the_fastest_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two strategies that serve any loss: the order of the table decides only if no time or the same time is known."""

    @dataclasses.dataclass(frozen=True)
    class Serving:
        name: ClassVar[str] = "living_state"
        requirements: ClassVar[tuple[Requirement, ...]] = ()
        seconds: float | None

        def cost(self, loss: Loss, facts: RecoveryFacts) -> Cost:
            cost = Cost.in_processes(
                f"{self.seconds}",
                loss,
                facts,
                0,
                sent_bytes=0,
                lost_operators=(),
                is_bitwise=True,
            )
            unknown = () if self.seconds is not None else ("x=null",)
            return dataclasses.replace(cost, seconds=self.seconds, why_no_seconds=unknown)

    def best(*seconds: float | None) -> str:
        serving = [Serving(seconds=value) for value in seconds]
        monkeypatch.setattr("megatron_ft.planning.recovery.costs.STRATEGIES", (*serving, *STRATEGIES))
        return cost_of_loss(held, [1]).strategy

    held = facts_of(job(launch={"num_nodes": 2}))
    assert best(3.0, 2.0) == "2.0" and best(2.0, 3.0) == "2.0"
    assert best(None, 3.0) == "3.0" and best(None, None) == "None"


def test_a_checkpoint_that_is_as_new_as_a_window_serves_instead_of_it() -> None:
    """Ranks choose in the same way (``RecoverySource.choose``)."""
    held = facts_of(restarting())
    assert held.snapshot is not None and held.snapshot.window_iterations == 1
    older = Stored(iteration=40, memory_start=36, checkpoint=35)
    assert cost_of_loss(held, [0], is_gone=False, stored=older).strategy == "rollback"
    newer = dataclasses.replace(older, checkpoint=36)
    cost = cost_of_loss(held, [0], is_gone=False, stored=newer)
    assert (cost.strategy, cost.max_iterations) == ("checkpoint", 4)
    assert "the checkpoint of iteration 36 is at least as new" in cost.declined[-1].reason
    only = changed(held, recovery={"strategies": ["rollback"]})
    assert cost_of_loss(only, [0], is_gone=False, stored=newer).strategy == "rollback"


def test_recorded_windows_are_compared_with_a_checkpoint_one_by_one() -> None:
    """The sizes of windows can differ from the configured size, which may not be measured."""
    held = facts_of(restarting(bandwidth_bytes_per_second=None))
    assert held.snapshot is not None and held.snapshot.window_iterations is None
    stored = Stored(iteration=40, memory_start=36, memory_last=36, checkpoint=36)
    assert cost_of_loss(held, [0], is_gone=False, stored=stored).strategy == "checkpoint"
    longer = dataclasses.replace(stored, memory_last=37)
    assert cost_of_loss(held, [0], is_gone=False, stored=longer).strategy == "rollback"
    # The loss of a node ends the job, and only the older window on storage is left.
    gone = dataclasses.replace(longer, persisted_start=30, persisted_last=31)
    assert cost_of_loss(held, [0], stored=gone).strategy == "checkpoint"
    assert cost_of_loss(held, [0], stored=dataclasses.replace(gone, checkpoint=30)).medium == "persisted"
