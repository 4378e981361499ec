"""The plan against sums done by hand."""

import json

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import from_dict
from megatron_ft.corpus.check import DataSummary, SourceSummary
from megatron_ft.errors import ConfigError
from megatron_ft.planning.job import JobPlan, plan_job
from megatron_ft.planning.render import readable_bytes, render

DATA = DataSummary(
    sources=(SourceSummary(split="train", name="x", tokens=10, samples=1, checked="all"),),
    tokenizer_vocab_size=257,
    vocab_size=384,
    eod=256,
)
SMALL = {"model": {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4}}


def plan(device: str = "cpu", **groups: dict[str, object]) -> JobPlan:
    return plan_job(from_dict({**SMALL, **groups}), DATA, device=device)


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
    with pytest.raises(ConfigError, match=r"launch\.gpu_memory_bytes=1000: must be at least \d+"):
        plan("cuda", launch={"gpu_memory_bytes": 1000})
    with pytest.raises(ConfigError, match=r"launch\.host_memory_bytes=1000: must be at least \d+"):
        plan(launch={"host_memory_bytes": 1000})


def test_recomputation_keeps_fewer_activations() -> None:
    kept = [
        plan(training={"recompute_granularity": granularity}).stages[0].memory.activations_bytes
        for granularity in (None, "selective", "full")
    ]
    assert kept[0] > kept[1] > kept[2] > 0


def test_round_trip_through_json_lists_every_rank() -> None:
    result = plan(parallel={"pipeline_model_parallel_size": 2}, launch={"ranks_per_node": 4})
    content = json.loads(json.dumps(result.to_json()))
    assert JobPlan.from_json(content) == result
    assert [place["pp"] for place in content["ranks"]] == [0, 0, 1, 1]


def test_the_same_configuration_gives_the_same_plan() -> None:
    assert plan() == plan()


def test_text_names_what_people_look_for() -> None:
    text = render(plan(launch={"num_nodes": 3, "ranks_per_node": 8}))
    for part in ("24 = 3 nodes x 8", "gradients", "moments", "and 8 more", "vocabulary", "masked padding"):
        assert part in text
    assert all(len(line) < 160 for line in text.splitlines())


def test_summary_is_one_line() -> None:
    assert "\n" not in plan().summary() and "ranks" in plan().summary()


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 30, "3.0 GiB"), (5 << 60, "5120.0 PiB")]
)
def test_bytes_are_readable(count: int, text: str) -> None:
    assert readable_bytes(count) == text


def test_defaults_are_planned() -> None:
    assert plan_job(JobConfig(), DATA, device="cpu").num_parameters == 3_511_424
