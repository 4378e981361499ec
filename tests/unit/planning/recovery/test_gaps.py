"""Tests proposals of keys: a job that is started with the proposed words recovers as proposed."""

import json
import sys
from math import log
from types import FrameType

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.config.requirements import KeyChange
from megatron_ft.corpus.samples import DataSummary
from megatron_ft.planning.job import JobPlan, with_slots
from megatron_ft.planning.recovery.gaps import Gap
from megatron_ft.planning.render import render
from pretrain_moe import compose
from tests.helpers.sharing import chosen
from tools.can_recover import ask_config

DATA = DataSummary(sources=(), tokenizer_vocab_size=257, vocab_size=384, eod=256)
NODES = ("launch.num_nodes=4", "launch.ranks_per_node=1")
FOUR = (*NODES, "training.device=cpu")
WHOLE = ("parallel.use_distributed_optimizer=false",)
KEPT = ("recovery.keep_layout=true", "nodes.num_spare_nodes=1")
ELASTIC = ("placement=overlap_search", "recovery.min_nodes=3")
KEPT = ("recovery.max_restarts=3", "recovery.keep_layout=true", "nodes.num_spare_nodes=1")


def plan_of(*words: str) -> JobPlan:
    given, _ = compose(list(words))
    device = given.training.device
    config, _ = with_slots(given, device, lambda: DATA)
    return JobPlan.of(config, DATA, device=device, with_losses=True, given=given)


def _again(*values: object) -> object:
    """Return a row whose changes other rows propose, too."""
    return pytest.param(*values, marks=pytest.mark.extended)


@pytest.mark.parametrize(
    ("words", "changes", "strategy"),
    [
        _again(WHOLE, ["placement=overlap_search", "recovery.min_nodes=3"], "living_state"),
        ((), ["placement.state_copies=2", "placement=overlap_search", "recovery.min_nodes=3"], "living_state"),
        _again((*WHOLE, "placement=overlap_search"), ["recovery.min_nodes=3"], "living_state"),
        _again((*WHOLE, *ELASTIC, "placement.min_replicas=1"), ["placement.min_replicas=2"], "living_state"),
        (
            ("parallel.pipeline_model_parallel_size=2", "snapshot=sparse_window"),
            ["recovery.keep_layout=true", "nodes.num_spare_nodes=1"],
            "localized_replay",
        ),
        (
            ("parallel.tensor_model_parallel_size=2", "snapshot=sparse_window", "snapshot.num_peer_copies=0"),
            ["recovery.keep_layout=true", "nodes.num_spare_nodes=1", "snapshot.num_peer_copies=1"],
            "localized_replay",
        ),
        (
            (*WHOLE, *KEPT, "placement=overlap_search", "placement.min_replicas=1"),
            ["placement.min_replicas=2"],
            "living_state",
        ),
        _again(KEPT, ["snapshot=sparse_window"], "localized_replay"),
        (
            (*KEPT[1:], "recovery.strategies=[living_state]"),
            ["placement.state_copies=2"],
            "living_state",
        ),
        (
            (*WHOLE, *ELASTIC, "recovery=checkpoint", "checkpoint.save_interval_iterations=5"),
            ["recovery.strategies=null"],
            "living_state",
        ),
    ],
    ids=str,
)
def test_the_proposed_words_close_the_gap(words: tuple[str, ...], changes: list[str], strategy: str) -> None:
    plan = plan_of(*FOUR, *words)
    assert any(not cost.keeps_processes for cost in plan.losses)
    (gap,) = plan.gaps
    assert (list(gap.changes), gap.strategy, gap.obstacles) == (changes, strategy, ())
    recovers = "the job would recover from the loss of one of nodes 0, 1, 2, 3"
    assert f"with {' '.join(changes)} {recovers} by {strategy}" in render(plan)
    assert json.loads(json.dumps(plan.to_json()))["gaps"][0]["changes"] == changes
    without = [word for word in words if word.partition("=")[0] not in {each.partition("=")[0] for each in changes}]
    for node in range(4):
        cost = ask_config([*FOUR, *without, *changes], [node], is_gone=True).cost
        assert (cost.strategy, cost.max_iterations == 0 or strategy == "localized_replay") == (strategy, True)


CUDA = (*NODES, "training.device=cuda")


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (CUDA, ["snapshot=sparse_window", *KEPT]),
        _again((*CUDA, "snapshot=sparse_window", "checkpoint.save_interval_iterations=5"), list(KEPT)),
        _again((*CUDA, "snapshot=sparse_window", "recovery.max_restarts=1"), list(KEPT[1:])),
        (
            (*CUDA, "snapshot=sparse_window", "recovery=checkpoint", "snapshot.num_peer_copies=0"),
            ["recovery.strategies=null", *KEPT[1:], "snapshot.num_peer_copies=1"],
        ),
        (
            (*CUDA, "snapshot=sparse_window", *KEPT, "snapshot.num_peer_copies=0"),
            ["snapshot.num_peer_copies=1"],
        ),
    ],
    ids=str,
)
def test_a_restart_on_replaced_nodes_is_proposed_where_no_process_can_continue(
    words: tuple[str, ...], changes: list[str]
) -> None:
    (gap,) = plan_of(*words).gaps
    assert (list(gap.changes), gap.strategy) == (changes, "rollback (memory)")
    without = [word for word in words if word.partition("=")[0] not in {each.partition("=")[0] for each in changes}]
    for node in range(4):
        cost = ask_config([*without, *changes], [node], is_gone=True).cost
        assert (cost.description, cost.is_bitwise) == ("rollback (memory)", True)


def test_processes_that_need_not_end_are_kept() -> None:
    for words in (("recovery.keep_processes=false", *KEPT), ("recovery=rollback", *KEPT)):
        (gap,) = plan_of(*FOUR, "snapshot=sparse_window", *words).gaps
        change = "recovery.strategies=null" if "recovery=rollback" in words else "recovery.keep_processes=null"
        assert (gap.changes, gap.strategy) == ((change,), "localized_replay")


def test_without_a_change_that_keeps_the_job_running_a_checkpoint_is_proposed() -> None:
    (gap,) = plan_of(*FOUR, "launch.mode=torchrun").gaps
    assert (gap.changes, gap.strategy) == (("checkpoint.save_interval_iterations=6",), "checkpoint, by hand")
    (none,) = plan_of(*FOUR, "launch.mode=torchrun", "checkpoint.save_interval_iterations=5").gaps
    assert none.changes == () and len(none.obstacles) >= 2
    assert "living_state: launch.mode=torchrun" in none.summary()
    assert "rollback on replaced nodes: launch.mode=torchrun" in none.summary()


def test_a_job_that_keeps_all_iterations_has_no_gap() -> None:
    assert plan_of(*FOUR, *WHOLE, *ELASTIC).gaps == ()


def test_many_nodes_are_counted() -> None:
    gap = Gap(nodes=tuple(range(20)), changes=("a=1",), strategy="x", obstacles=())
    nodes = "one of nodes 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
    assert gap.summary() == f"with a=1 the job would recover from the loss of {nodes} by x"


def test_a_change_of_a_key_is_a_word() -> None:
    assert str(KeyChange("recovery.keep_layout", True)) == "recovery.keep_layout=true"
    changed = KeyChange("recovery.min_nodes", 3).apply(JobConfig())
    assert changed.recovery.min_nodes == 3 and JobConfig().recovery.min_nodes is None


@pytest.mark.parametrize("device", chosen(["cpu", "cuda"], ["cpu"]))
def test_mixtral_on_64_ranks_recovers_as_planned_with_and_without_a_spare(device: str) -> None:
    words = ("experiment=mixtral_slurm", f"training.device={device}", "limits.host_memory_bytes=99000000000000")
    replaced = ("recovery.keep_layout=true", "nodes.num_spare_nodes=1", "snapshot.num_peer_copies=1")
    without, by_slurm, kept = (
        plan_of(*words),
        plan_of(*words, "launch.node_launcher=srun"),
        plan_of(*words, *replaced),
    )
    assert {cost.description for cost in without.losses if cost.is_gone} == {"rollback (persisted), by hand"}
    assert {cost.description for cost in by_slurm.losses if cost.is_gone} == {"rollback (persisted), by Slurm"}
    found = {(cost.strategy, cost.medium, cost.is_automatic, cost.is_bitwise) for cost in kept.losses if cost.is_gone}
    assert found == {("rollback", "memory", True, True) if device == "cuda" else ("localized_replay", None, True, True)}
    assert [cost.lost_nodes for cost in kept.losses if cost.is_gone] == [(node,) for node in range(8)]
    (gap,) = without.gaps
    assert gap.changes == replaced


def calls_of_plan(num_nodes: int) -> int:
    """Return the number of calls of functions while a job is planned that has two experts per rank and layer."""
    words = (f"launch.num_nodes={num_nodes}", "launch.ranks_per_node=2", "training.device=cpu", "model=moe_micro")
    sizes = (f"model.num_moe_experts={4 * num_nodes}", f"parallel.expert_model_parallel_size={2 * num_nodes}")
    given, _ = compose([*words, *sizes, f"training.global_batch_size={16 * num_nodes}", "snapshot=sparse_window"])
    config, _ = with_slots(given, "cpu", lambda: DATA)
    num_calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        JobPlan.of(config, DATA, device="cpu", with_losses=True, given=given)
    finally:
        sys.setprofile(before)
    return num_calls


def test_calls_to_plan_a_job_do_not_grow_with_ranks_times_experts() -> None:
    calls_of_plan(4)  # fills caches
    few, many = calls_of_plan(16), calls_of_plan(64)
    assert log(many / few) / log(64 / 16) < 1.45, (few, many)
