"""Compares the plan of a job with values computed by hand."""

import json
from collections.abc import Mapping

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import config_of
from megatron_ft.config.serialize import from_dict
from megatron_ft.corpus.samples import DataSummary, _SourceSummary
from megatron_ft.errors import ConfigError
from megatron_ft.formatting import memory_size
from megatron_ft.planning.devices import DeviceChoice
from megatron_ft.planning.job import JobPlan, with_slots
from megatron_ft.planning.render import render
from tests.helpers.keys import grouped

DATA = DataSummary(
    sources=(_SourceSummary(split="train", name="x", tokens=10, samples=1, checked="all"),),
    tokenizer_vocab_size=257,
    vocab_size=384,
    eod=256,
)
SMALL = {"model": {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4}}


def plan(device: str = "cpu", *, with_losses: bool = False, **groups: Mapping[str, object]) -> JobPlan:
    return JobPlan.of(from_dict({**SMALL, **groups}), DATA, device=device, with_losses=with_losses)


def test_one_rank_holds_everything() -> None:
    result = plan()
    memory = result.stages[0].memory
    assert result.stages[0].parameters.total == result.num_parameters
    assert memory.weights_bytes == memory.gradients_bytes == 4 * result.num_parameters
    assert (memory.master_bytes, memory.moments_bytes) == (0, 8 * result.num_parameters)


def test_bf16_halves_weights_and_keeps_fp32_masters() -> None:
    result = plan(precision={"params_dtype": "bf16"})
    memory = result.stages[0].memory
    assert memory.weights_bytes == 2 * result.num_parameters
    assert memory.master_bytes == memory.gradients_bytes == 4 * result.num_parameters


@pytest.mark.parametrize("virtual", [None, 2])
def test_stages_share_all_parameters(virtual: int | None) -> None:
    parallel = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": virtual}
    result = plan(parallel=parallel, launch={"ranks_per_node": 2})
    assert sum(stage.parameters.total for stage in result.stages) == result.num_parameters
    assert sorted(layer for stage in result.stages for layer in stage.layers) == [1, 2, 3, 4]


def test_expert_ranks_share_experts_and_shard_the_rest_of_the_optimizer() -> None:
    alone = plan().stages[0]
    result = plan(parallel={"expert_model_parallel_size": 2}, launch={"ranks_per_node": 4})
    stage = result.stages[0]
    assert stage.parameters.num_expert * 2 == alone.parameters.num_expert
    assert stage.parameters.num_dense == alone.parameters.num_dense
    updated = -(-stage.parameters.num_dense // 4) + stage.parameters.num_expert // 2
    assert stage.memory.moments_bytes == 8 * updated


def test_without_distributed_optimizer_every_rank_keeps_all_moments() -> None:
    result = plan(parallel={"use_distributed_optimizer": False}, launch={"ranks_per_node": 2})
    assert result.stages[0].memory.moments_bytes == 8 * result.num_parameters


def test_tied_embeddings_are_held_twice_over_two_stages() -> None:
    model = {**SMALL["model"], "untie_embeddings_and_output_weights": False}
    result = plan(model=model, parallel={"pipeline_model_parallel_size": 2}, launch={"ranks_per_node": 2})
    held = sum(stage.parameters.total for stage in result.stages)
    assert held == result.num_parameters + 384 * 32


def test_tensor_ranks_split_matrices_and_repeat_norms() -> None:
    alone = plan().stages[0].parameters
    split = plan(parallel={"tensor_model_parallel_size": 2}, launch={"ranks_per_node": 2}).stages[0].parameters
    repeated = 9 * 32 + 4 * 8 * 32  # norms of four layers and the head; gates
    assert split.num_dense == (alone.num_dense - repeated) // 2 + repeated
    assert split.num_expert == alone.num_expert


def test_padding_microbatches_are_counted() -> None:
    result = plan(launch={"ranks_per_node": 3}, training={"global_batch_size": 16, "micro_batch_size": 2})
    assert (result.num_microbatches, result.num_microbatches_per_rank, result.num_padding_microbatches) == (8, 3, 1)
    assert result.tokens_per_iteration == 16 * 128


def test_memory_over_the_limit_is_refused_with_the_bytes_needed() -> None:
    with pytest.raises(ConfigError, match=r"limits\.gpu_memory_bytes=1000: must be at least \d+"):
        plan("cuda", limits={"gpu_memory_bytes": 1000})
    with pytest.raises(ConfigError, match=r"limits\.host_memory_bytes=1000: must be at least \d+"):
        plan(limits={"host_memory_bytes": 1000})


def test_recomputation_keeps_fewer_activations() -> None:
    kept = [
        plan(training={"recompute_granularity": granularity}).stages[0].memory.activations_bytes
        for granularity in (None, "selective", "full")
    ]
    assert kept[0] > kept[1] > kept[2] > 0


def test_json_lists_every_rank() -> None:
    result = plan(parallel={"pipeline_model_parallel_size": 2}, launch={"ranks_per_node": 4})
    content = json.loads(json.dumps(result.to_json()))
    assert (content["num_parameters"], content["placement"]) == (result.num_parameters, None)
    assert [place["pp"] for place in content["ranks"]] == [0, 0, 1, 1]


def test_the_same_configuration_gives_the_same_plan() -> None:
    assert plan() == plan()


def test_text_names_what_people_look_for() -> None:
    text = render(plan(launch={"num_nodes": 3, "ranks_per_node": 8}))
    for part in ("24 = 3 nodes x 8", "gradients", "moments", "and 8 more", "vocabulary", "masked padding"):
        assert part in text
    assert all(len(line) < 160 for line in text.splitlines())


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 30, "3.0 GiB"), (5 << 60, "5120.0 PiB")]
)
def test_bytes_are_readable(count: int, text: str) -> None:
    assert memory_size(count) == text


def test_defaults_are_planned() -> None:
    assert JobPlan.of(JobConfig(), DATA, device="cpu").num_parameters == 3_511_424


def test_losses_are_a_row_for_each_node_and_warn_of_spanned_stages() -> None:
    parallel = {"pipeline_model_parallel_size": 2}
    launch, recovery = {"num_nodes": 4, "ranks_per_node": 3}, {"max_restarts": 1}
    checkpoint = {"save_interval_iterations": 20}
    result = plan(with_losses=True, parallel=parallel, launch=launch, recovery=recovery, checkpoint=checkpoint)
    assert [(cost.lost_nodes, cost.is_gone) for cost in result.losses] == [
        ((0,), True),
        ((1,), True),
        ((2,), True),
        ((3,), True),
        ((0, 1, 2, 3), False),
    ]
    assert [cost["strategy"] for cost in json.loads(json.dumps(result.to_json()))["losses"]]
    assert not result.notes
    text = render(result)
    rows = [line.split() for line in text.splitlines()]
    assert ["node", "3", "checkpoint,", "by", "hand", "<=", "20", "-", "-", "bitwise"] in rows
    assert ["ranks", "only", "checkpoint", "<=", "20", "-", "-", "bitwise"] in rows
    assert "not used: living_state: recovery.min_nodes" not in text
    assert "  bitwise: every bit equals that of the undisturbed run" in text.splitlines()
    (note,) = plan(with_losses=True, parallel=parallel, launch={"ranks_per_node": 2}, recovery=recovery).notes
    assert note.startswith("node 0 spans pipeline stages 0, 1")
    assert not plan(parallel=parallel, launch=launch, recovery=recovery).losses, "a start does not ask"


def test_a_plan_states_with_what_the_result_of_replicas_is_equal() -> None:
    search = "megatron_ft.planning.placement.overlap_search.OverlapSearch"
    placement = {"algorithm": {"_target_": search}, "num_slots_per_rank": 3}
    groups = {"launch": {"num_nodes": 3}, "recovery": {"min_nodes": 2}, "placement": placement}
    moe = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_moe_experts": 4}
    text = render(plan(with_losses=True, model=moe, parallel={"use_distributed_optimizer": False}, **groups))
    reference = "a run without faults in which the same nodes leave at the same iterations"
    meaning = f"every bit equals that of {reference}; within a tolerance of the undisturbed run"
    assert f"  tolerance: {meaning}" in text.splitlines()


def test_a_plan_states_how_much_of_the_state_a_window_captures_and_a_recovery_loses() -> None:
    policy = {"_target_": "megatron_ft.planning.snapshot.partial_experts.PartialExperts"}
    moe = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_moe_experts": 4}
    about = {"launch": {"num_nodes": 2}, "recovery": {"max_restarts": 1}, "model": moe}

    def planned(**fields: object) -> JobPlan:
        snapshot = {"policy": {**policy, **fields}, "num_peer_copies": 1}
        return plan(with_losses=True, snapshot=snapshot, **about)

    result = planned(num_experts=1)
    report, text = result.snapshot, render(result)
    assert report is not None and report.captured_bytes is not None and report.captured_bytes < report.dense_bytes
    assert f"captured           {memory_size(report.captured_bytes)} of " in text and "and 1 expert of each" in text
    assert "window             1 iteration; a new window begins every iteration" in text
    assert "  loses expert updates: experts lose updates by at most 3.75 % of the whole training's tokens" in text
    assert "measured before the first window" in render(planned())
    assert report.stored_bytes is None and "written to storage at" not in text.replace("  ", " ")
    result = planned(num_experts=2, num_persisted_experts=1, max_lost_share=None)
    both, text = result.snapshot, render(result)
    assert both is not None and both.captured_bytes is not None
    assert both.stored_bytes == report.captured_bytes < both.captured_bytes
    assert f"written to storage at most {memory_size(both.stored_bytes)} of a window" in " ".join(text.split())
    assert "at most 1 iteration before the window (3 iterations if it is read from storage)" in text


def test_a_refusal_on_the_other_device_is_printed_once() -> None:
    refused = {"cpu": "", "cuda": "training.device=cuda: must be cpu"}
    choice = DeviceChoice(device="cpu", is_certain=False, reason="training.device=auto found no GPU on this machine")
    text = render(JobPlan.of(from_dict(SMALL), DATA, device="cpu", choice=choice, refused=refused))
    assert text.count(refused["cuda"]) == 1 and f"  device        {choice.reason}\n" in text
    accepted = render(JobPlan.of(from_dict(SMALL), DATA, device="cpu", choice=choice, refused={"cpu": "", "cuda": ""}))
    assert accepted.count("would also be accepted") == 1


def kept_layout(**groups: dict[str, object]) -> dict[str, dict[str, object]]:
    """Return a job of two stages on two nodes, with a dense snapshot every 6 iterations."""
    target = "megatron_ft.planning.snapshot.dense.DenseInterval"
    policy = {"_target_": target, "interval_iterations": 6}
    known = {"bandwidth_bytes_per_second": 1e9, "iteration_seconds": 1.0}
    return {
        "parallel": {"pipeline_model_parallel_size": 2},
        **grouped(num_nodes=2, ranks_per_node=1, keep_layout=True, num_spare_nodes=1),
        "snapshot": {"policy": policy, "num_peer_copies": 1, **known, **groups.get("snapshot", {})},
        "upstream_log": groups.get("upstream_log", {}),
    }


def test_the_upstream_log_is_part_of_what_a_node_needs() -> None:
    """The log has 6 + 1 + 2 * 4 iterations of what a stage sends: a tensor of 128 x 32 in FP32 for each microbatch."""
    result, without = plan(**kept_layout()), plan(**kept_layout() | {"upstream_log": {"commit_lag_iterations": 0}})
    assert result.upstream_log is not None and without.upstream_log is not None
    microbatch_bytes = 128 * 32 * 4 * result.upstream_log.num_entries[0]
    assert result.upstream_log.host_bytes == 15 * microbatch_bytes * JobConfig().training.micro_batch_size
    gained = result.upstream_log.host_bytes - without.upstream_log.host_bytes
    assert result.host_bytes_per_node - without.host_bytes_per_node == gained > 0
    content = json.loads(json.dumps(result.to_json()))["upstream_log"]
    assert content["host_bytes"] == result.upstream_log.host_bytes
    text = render(result)
    assert "upstream log" in text and "15 iterations" in text and all(len(line) < 160 for line in text.splitlines())


def test_an_upstream_log_whose_windows_are_measured_is_rendered() -> None:
    result = plan(**kept_layout(snapshot={"iteration_seconds": None}))
    assert result.upstream_log is not None and result.upstream_log.node_bytes is None
    assert "unknown until the first windows are measured" in render(result)
    assert json.loads(json.dumps(result.to_json()))["upstream_log"]["node_bytes"] is None


def test_an_upstream_log_over_its_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"upstream_log\.memory_limit_bytes=1000: must be at least \d+"):
        plan(**kept_layout(upstream_log={"memory_limit_bytes": 1000}))


def test_a_plan_says_that_slurm_has_not_named_the_domains() -> None:
    known = {"num_nodes": 4, "ranks_per_node": 1, "node_launcher": "srun"}
    (note,) = plan(launch=known, topology={"failure_domain_source": "slurm_topology"}).notes
    assert (
        note.startswith("topology.failure_domain_source=slurm_topology: ") and "counts every node as a domain" in note
    )
    assert not plan(launch=known, topology={"failure_domains": ["a", "a", "b", "b"]}).notes


def test_domains_of_spares_wait_with_them() -> None:
    """Names are given for all possible nodes. Placement and copies use those with which the job starts."""
    racks = {"failure_domains": ["rack0", "rack1", "rack2"]}
    kept = plan(**kept_layout(), topology=racks).snapshot
    assert kept is not None and kept.peers == ((1,), (0,))
    spread = {"_target_": "megatron_ft.planning.placement.overlap_search.OverlapSearch"}
    nodes = grouped(num_nodes=2, ranks_per_node=1, num_spare_nodes=1, **racks)
    placement = {"algorithm": spread, "num_slots_per_rank": 8, "min_replicas": 2}
    placed = plan(**nodes, placement=placement, parallel={"expert_model_parallel_size": 2}).placement
    assert placed is not None and placed.stages[0].domains == ("rack0", "rack1")


def test_a_job_that_a_second_loss_can_end_has_a_note() -> None:
    """Three nodes of one rank remain of four: six slots for two copies of four experts."""
    model = {**SMALL["model"], "num_moe_experts": 4, "moe_ffn_hidden_size": 32}
    spread = {"_target_": "megatron_ft.planning.placement.overlap_search.OverlapSearch"}

    def notes(slots: int, **keys: object) -> tuple[str, ...]:
        placement: dict[str, object] = {"algorithm": spread, "num_slots_per_rank": slots, "min_replicas": 2}
        nodes = grouped(**{"num_nodes": 4, "ranks_per_node": 1, **keys})
        parallel: dict[str, object] = {"use_distributed_optimizer": False}
        return plan(model=model, placement=placement, parallel=parallel, **nodes).notes

    (note,) = notes(2, min_nodes=2)
    assert "after the loss of a node the job has 6 slots, too few for 2 replicas of 4 experts" in note
    assert note.endswith("the next loss can end the job; placement.num_slots_per_rank=3 avoids this")
    assert notes(3, min_nodes=2) == notes(2) == notes(4, num_nodes=2, min_nodes=1) == ()


@pytest.mark.parametrize(("dropout", "has_windows"), [(0.0, True), (0.1, True), (0.1, False)])
def test_a_plan_states_that_a_replay_takes_memory_for_copies(dropout: float, has_windows: bool) -> None:
    """The copies are made only if a replay is necessary for random number generators alone."""
    search = {"_target_": "megatron_ft.planning.placement.overlap_search.OverlapSearch"}
    policy = {"_target_": "megatron_ft.planning.snapshot.dense.DenseInterval", "interval_iterations": 3}
    nodes = grouped(num_nodes=4, ranks_per_node=1, keep_layout=True, min_nodes=3, num_spare_nodes=1)
    found = plan(
        model={**SMALL["model"], "num_moe_experts": 4, "moe_ffn_hidden_size": 32, "hidden_dropout": dropout},
        placement={"algorithm": search, "num_slots_per_rank": 4},
        parallel={"use_distributed_optimizer": False},
        snapshot={"policy": policy if has_windows else None},
        **nodes,
    ).notes
    (note,) = [note for note in found if "fewer lanes (model replicas)" in note]
    assert "even with all launch.num_nodes=4 nodes the job does not return to its first layout" in note
    assert any("needs twice its memory" in note for note in found) is (dropout > 0 and has_windows)


def _slots(*, device: str = "cuda", min_nodes: int | None = None, **limits: int) -> tuple[JobConfig, str]:
    """Return the result of ``with_slots`` for 8 nodes of one rank and 16 experts: 4 slots are enough for 2 replicas."""
    config = from_dict(
        {
            "model": {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_moe_experts": 16},
            "launch": {"num_nodes": 8},
            "placement": {"algorithm": {"_target_": "megatron_ft.planning.placement.overlap_search.OverlapSearch"}},
            "recovery": {"min_nodes": min_nodes},
            "training": {"device": device},
            "limits": limits,
        }
    )
    return with_slots(config, device, lambda: DATA)


def _needed(config: JobConfig, device: str = "cuda") -> int:
    result = JobPlan.of(config, DATA, device=device)
    return result.device_bytes if device == "cuda" else result.host_bytes_per_node


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_slots_fill_the_stated_memory_and_not_more(device: str) -> None:
    key = "gpu_memory_bytes" if device == "cuda" else "host_memory_bytes"
    most, reason = _slots(device=device, **{key: 10**12})
    assert most.placement.num_slots_per_rank == 6 and f"2 more, which limits.{key} allows" in reason
    needed = _needed(most, device)
    fewer, reason = _slots(device=device, **{key: needed - 1})
    assert fewer.placement.num_slots_per_rank == 5 and "1 more" in reason
    assert _needed(fewer, device) < needed
    assert _slots(device=device, **{key: needed})[0].placement.num_slots_per_rank == 6


def test_slots_are_just_enough_for_the_replicas_without_stated_memory() -> None:
    derived, reason = _slots()
    assert derived.placement.num_slots_per_rank == 4
    assert (
        reason
        == "just enough for placement.min_replicas=2; if limits.gpu_memory_bytes is set, the number can be larger"
    )
    small, reason = _slots(gpu_memory_bytes=_needed(derived))
    assert small.placement.num_slots_per_rank == 4
    assert "allows no more" in reason


def test_slots_also_fit_after_the_loss_of_a_node() -> None:
    """With one node fewer, a remaining rank has more microbatches or larger shards of the optimizer state."""
    most, _ = _slots(device="cpu", min_nodes=4, host_memory_bytes=10**12)
    alone = _needed(most, "cpu")
    smaller = _needed(config_of(most, range(7)), "cpu")
    assert smaller > alone, "a smaller job must need more memory per rank, or this test shows nothing"
    assert _slots(device="cpu", host_memory_bytes=alone)[0].placement.num_slots_per_rank == 6
    assert _slots(device="cpu", min_nodes=4, host_memory_bytes=smaller)[0].placement.num_slots_per_rank == 6
    assert _slots(device="cpu", min_nodes=4, host_memory_bytes=alone)[0].placement.num_slots_per_rank < 6


def test_slots_that_the_configuration_gives_stay() -> None:
    given = from_dict(
        {
            "model": {"num_moe_experts": 16},
            "launch": {"num_nodes": 8},
            "placement": {"algorithm": {"_target_": "megatron_ft.planning.placement.overlap_search.OverlapSearch"}}
            | {"num_slots_per_rank": 5},
            "limits": {"gpu_memory_bytes": 10**12},
        }
    )

    def unread() -> DataSummary:
        raise AssertionError("the data do not matter here")

    derived, reason = with_slots(given, "cuda", unread)
    assert (derived.placement.num_slots_per_rank, reason) == (5, "placement.num_slots_per_rank")
