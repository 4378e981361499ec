"""Compares the memory of a rank with values computed by hand: state, and activations kept for the backward pass."""

from dataclasses import replace

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.planning.cost.memory import RankMemory, RankParameters, _activation_bytes
from megatron_ft.topology import Topology

HIDDEN, HEADS, SEQUENCE, VOCABULARY = 8, 2, 16, 100
ATTENTION = 2 * HIDDEN + 4 * HIDDEN + 2 * HEADS * SEQUENCE + 2 * HIDDEN
"""Values per token: inputs of two norms and two projections, queries, keys and values, scores, softmax."""


def job(**model: object) -> JobConfig:
    base = JobConfig()
    sizes = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "seq_length": SEQUENCE}
    sizes |= {"num_query_groups": None, "kv_channels": None, "ffn_hidden_size": 20, "moe_ffn_hidden_size": 10}
    return replace(
        base,
        model=replace(base.model, **{**sizes, "num_moe_experts": 4, "moe_router_topk": 1, **model}),
        training=replace(base.training, micro_batch_size=1, global_batch_size=1),
        precision=replace(base.precision, params_dtype="bf16"),
    )


def values_of_mlp(config: JobConfig) -> int:
    """Return the values per token that one layer's MLP keeps."""
    kept = _activation_bytes(config, Topology(world_size=1), 0, VOCABULARY)
    logits = SEQUENCE * VOCABULARY * (2 + 4)
    return (kept - logits) // (2 * SEQUENCE) - ATTENTION


def test_each_chosen_expert_keeps_its_part() -> None:
    one = HIDDEN + 3 * 10 + HIDDEN  # what goes in; gate, input and product; what comes out
    scores = 3 * 4
    for topk in (1, 2, 4):
        assert values_of_mlp(job(gated_linear_unit=True, moe_router_topk=topk)) == topk * one + scores
    shared = job(gated_linear_unit=True, moe_shared_expert_intermediate_size=6)
    assert values_of_mlp(shared) == one + scores + HIDDEN + 3 * 6
    assert values_of_mlp(job(gated_linear_unit=False)) == HIDDEN + 2 * 10 + HIDDEN + scores
    assert values_of_mlp(job(gated_linear_unit=True, num_moe_experts=None)) == HIDDEN + 3 * 20


def test_earlier_stages_keep_more_microbatches_and_no_logits() -> None:
    config = job(num_layers=4)
    config = replace(config, training=replace(config.training, global_batch_size=8))
    stages = [
        _activation_bytes(config, Topology(world_size=4, pipeline_model_parallel_size=4), stage, 0)
        for stage in range(4)
    ]
    assert stages == [4 * stages[3], 3 * stages[3], 2 * stages[3], stages[3]]
    last = _activation_bytes(config, Topology(world_size=4, pipeline_model_parallel_size=4), 3, VOCABULARY)
    assert last - stages[3] == SEQUENCE * VOCABULARY * (2 + 4)


def test_a_sharded_optimizer_keeps_masters_and_moments_once() -> None:
    config, parameters = job(), RankParameters(num_dense=80, num_expert=48)
    for is_sharded, updated in ((False, 128), (True, 80 // 4 + 48 // 2)):
        parallel = replace(config.parallel, use_distributed_optimizer=is_sharded)
        found = RankMemory.of_stage(
            replace(config, parallel=parallel),
            parameters,
            Topology(world_size=4, expert_model_parallel_size=2),
            0,
            VOCABULARY,
        )
        assert found.weights_bytes == 2 * 128 and found.gradients_bytes in (2 * 128, 4 * 128)
        assert (found.master_bytes, found.moments_bytes) == (4 * updated, 8 * updated)


@pytest.mark.parametrize(
    ("copies", "is_sharded", "num_copied"), [(None, True, 0), (2, True, 20), (3, True, 2 * 20 + 6), (3, False, 6)]
)
def test_copies_of_optimizer_state_are_counted(copies: int | None, is_sharded: bool, num_copied: int) -> None:
    """Each of 4 ranks updates 20 of 80 dense parameters. With 3 copies, each of 4 experts, which has 2 replicas and 6
    parameters, needs one more copy."""
    config = job()
    placement = replace(
        config.placement, algorithm={"_target_": "x"}, num_slots_per_rank=4, min_replicas=2, state_copies=copies
    )
    parallel = replace(config.parallel, use_distributed_optimizer=is_sharded)
    found = RankMemory.of_stage(
        replace(config, placement=placement, parallel=parallel),
        RankParameters(num_dense=80, num_expert=4 * 6),
        Topology(world_size=4, expert_model_parallel_size=4),
        0,
        VOCABULARY,
    )
    assert found.copies_bytes == num_copied * 16


def test_experts_without_slots_for_their_replicas_are_counted_as_copied() -> None:
    """4 ranks have 4 slots for 2 replicas of each of 4 experts, so 4 of 8 copies of their state
    have no slot. Each rank updates 20 of 80 dense parameters."""
    placement = replace(job().placement, algorithm={"_target_": "x"}, num_slots_per_rank=1, min_replicas=2)
    parameters, topology = RankParameters(num_dense=80, num_expert=6), Topology(world_size=4)
    found = {
        copies: RankMemory.of_stage(
            replace(job(), placement=replace(placement, state_copies=copies)), parameters, topology, 0, VOCABULARY
        ).copies_bytes
        for copies in (1, 2, 3)
    }
    assert found == {1: 0, 2: (20 + 4 * 6 // 4) * 16, 3: (2 * 20 + 8 * 6 // 4) * 16}


@pytest.mark.parametrize(("copies", "num_copied"), [(1, 0), (2, 20 + 12), (3, 2 * (20 + 12))])
def test_copied_shards_contain_experts_without_replicas(copies: int, num_copied: int) -> None:
    """Each of 4 ranks updates 20 of 80 dense parameters, and 12 of 24 of its experts."""
    config = job()
    found = RankMemory.of_stage(
        replace(
            config,
            placement=replace(config.placement, algorithm=None, state_copies=copies),
            parallel=replace(config.parallel, use_distributed_optimizer=True),
        ),
        RankParameters(num_dense=80, num_expert=24),
        Topology(world_size=4, expert_model_parallel_size=2),
        0,
        VOCABULARY,
    )
    assert found.copies_bytes == num_copied * 16
