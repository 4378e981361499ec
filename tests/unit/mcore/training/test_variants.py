"""Tests that every kind of model and precision that the configuration offers trains in this process."""

import math
from typing import Any

import pytest

from megatron_ft.testing import engines

pytestmark = pytest.mark.slow  # trains

VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "fp32_plain_optimizer": {"parallel.use_distributed_optimizer": False},
    "bf16": {"precision.params_dtype": "bf16"},
    "bf16_plain_optimizer": {"precision.params_dtype": "bf16", "parallel.use_distributed_optimizer": False},
    "bf16_gradients_in_bf16": {"precision.params_dtype": "bf16", "precision.grad_reduce_in_fp32": False},
    "fp16": {"precision.params_dtype": "fp16", "precision.initial_loss_scale": 256.0},
    "fp16_fixed_scale": {"precision.params_dtype": "fp16", "precision.loss_scale": 128.0},
    "no_clipping": {"optimizer.clip_grad": 0.0},
    "capacity": {"model.moe_expert_capacity_factor": 1.0},
    "capacity_by_position": {"model.moe_expert_capacity_factor": 1.0, "model.moe_token_drop_policy": "position"},
    "capacity_padded": {
        "model.moe_expert_capacity_factor": 1.25,
        "model.moe_pad_expert_input_to_capacity": True,
    },
    "expert_bias": {"model.moe_router_score_function": "sigmoid", "model.moe_router_enable_expert_bias": True},
    "expert_bias_bf16": {
        "model.moe_router_score_function": "sigmoid",
        "model.moe_router_enable_expert_bias": True,
        "precision.params_dtype": "bf16",
    },
    "groups_of_experts": {
        "model.moe_router_num_groups": 2,
        "model.moe_router_group_topk": 1,
        "model.moe_router_topk_scaling_factor": 2.5,
        "model.moe_router_pre_softmax": True,
    },
    "shared_experts": {"model.moe_shared_expert_intermediate_size": 32},
    "shared_experts_gated": {
        "model.moe_shared_expert_intermediate_size": 32,
        "model.moe_shared_expert_gate": True,
    },
    "tied": {"model.untie_embeddings_and_output_weights": False},
    "gpt2_like": {
        "model.position_embedding_type": "learned_absolute",
        "model.normalization": "LayerNorm",
        "model.activation": "gelu",
        "model.gated_linear_unit": False,
    },
    "grouped_queries": {"model.num_query_groups": 2, "model.kv_channels": 16},
    "qk_norm_and_bias": {"model.qk_layernorm": True, "model.add_qkv_bias": True},
    "half_rotary": {"model.rotary_percent": 0.5},
    "recompute_full": {"training.recompute_granularity": "full"},
    "recompute_selective": {"training.recompute_granularity": "selective"},
    "dropout": {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1},
    "some_layers_mixed": {"model.num_layers": 4, "model.moe_layer_freq": 2, "model.moe_first_dense_layers": 1},
    "dense": {"model.num_moe_experts": None, "model.moe_ffn_hidden_size": None},
    "dense_with_biases": {
        "model.num_moe_experts": None,
        "model.moe_ffn_hidden_size": None,
        "model.add_bias_linear": True,
        "model.normalization": "LayerNorm",
    },
    "seq_aux_loss": {"model.moe_router_load_balancing_type": "seq_aux_loss", "training.micro_batch_size": 2},
    "global_aux_loss": {"model.moe_router_load_balancing_type": "global_aux_loss"},
    "sinkhorn": {"model.moe_router_load_balancing_type": "sinkhorn", "model.moe_aux_loss_coeff": 0.0},
    "no_balancing": {"model.moe_router_load_balancing_type": "none", "model.moe_z_loss_coeff": None},
    "one_expert_per_token": {"model.moe_router_topk": 1, "model.moe_router_pre_softmax": True},
    "overlapped_reduction": {"parallel.overlap_grad_reduce": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_trains(name: str) -> None:
    """Three iterations are committed with finite values, changed weights and a decreasing loss."""
    with engines.engine_of(engines.micro_config(VARIANTS[name])) as engine:
        states = [engines.digests(engine)]
        losses = []
        for iteration in (1, 2, 3):
            result = engine.run_iteration(iteration)
            assert result.decision.action == "commit", result.decision
            assert math.isfinite(result.vote.grad_norm) and result.vote.grad_norm > 0
            losses.append(result.vote.loss)
            states.append(engines.digests(engine))
        evaluated, num_tokens = engine.evaluate()
    # A learning rate of zero before the first iteration of the warm-up leaves the weights alone.
    assert states[3] != states[2] != states[1]
    assert abs(losses[0] - math.log(engines.VOCAB_SIZE)) < 0.2
    assert evaluated < losses[0]
    assert num_tokens == 4 * 4 * 16


def test_mixture_runs_count_every_choice() -> None:
    """Each token goes to top-k experts in every MoE layer if none is dropped, and to no expert in a dense model."""
    config = engines.micro_config({"model.num_layers": 4, "model.moe_layer_freq": 2})
    with engines.engine_of(config) as engine:
        engine.run_iteration(1)
        load = engine.expert_load()
    tokens = config.training.global_batch_size * config.model.seq_length
    assert load.sum(dim=1).tolist() == [0, tokens * 2, 0, tokens * 2]
