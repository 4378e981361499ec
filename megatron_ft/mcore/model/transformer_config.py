"""Converts ``JobConfig`` to Megatron's ``TransformerConfig``."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_ft.config.job import JobConfig
from megatron_ft.config.model import YARN_KEYS, ModelConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {"silu": functional.silu, "gelu": functional.gelu}


def build_transformer_config(config: JobConfig, transformer_impl: str) -> TransformerConfig:
    """Build Megatron's configuration of a job. ``transformer_impl`` is ``local`` or ``transformer_engine``."""
    parallel, dtype = config.parallel, DTYPES[config.precision.params_dtype]
    arguments = {
        **_architecture(config.model),
        # Grouped linear layers combine all experts of a rank in one module. Expert replicas need one module per expert.
        **_mixture(config.model, grouped=transformer_impl == "transformer_engine" and not config.placement.algorithm),
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
        # With an interleaved schedule and two pipeline stages, a rank exchanges several tensors with the same peer at
        # once. Unbatched calls have a fixed order, so the peer can distinguish them.
        "overlap_p2p_comm": parallel.virtual_pipeline_model_parallel_size is not None,
        "batch_p2p_comm": parallel.virtual_pipeline_model_parallel_size is None,
        # If true, Megatron would wait for the whole device after each exchange, which only PyTorch before 2.0 needs.
        "batch_p2p_sync": False,
        # After an output is sent, only its autograd graph is needed, so its data is freed. Interleaved schedules free
        # the data before the send has ended, so ``_StagedCommunicator`` keeps the memory allocated until then.
        "deallocate_pipeline_outputs": True,
        "sequence_parallel": parallel.tensor_model_parallel_size > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        # Megatron's own FP8 needs Transformer Engine. FP8 layers of the local spec are in fp8_layers.py.
        "fp8": None,
        "transformer_impl": transformer_impl,
        # Gradients are divided by the number of tokens of the iteration, so padding microbatches have no effect.
        "calculate_per_token_loss": True,
        "deterministic_mode": config.training.deterministic,
        "use_cpu_initialization": transformer_impl == "local",
        # parameters.py sets the weights later. Megatron's initialization only marks which parameters are sharded.
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        **_recompute(config),
    }
    return (MLATransformerConfig if config.model.multi_latent_attention else TransformerConfig)(**arguments)


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _architecture(model: ModelConfig) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.kv_channels,
        "ffn_hidden_size": model.ffn_hidden_size,
        "normalization": model.normalization,
        "layernorm_epsilon": model.layernorm_epsilon,
        "gated_linear_unit": model.gated_linear_unit,
        "activation_func": _ACTIVATIONS[model.activation],
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "qk_layernorm": model.qk_layernorm,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_method_std,
    }
    if model.multi_latent_attention:
        arguments |= {
            "multi_latent_attention": True,
            "q_lora_rank": model.q_lora_rank,
            "kv_lora_rank": model.kv_lora_rank,
            "qk_head_dim": model.qk_head_dim,
            "qk_pos_emb_head_dim": model.qk_pos_emb_head_dim,
            "v_head_dim": model.v_head_dim,
            "rope_type": model.rope_type or "rope",
            "rotary_base": model.rotary_base,
            "rotary_percent": model.rotary_percent,
        }
        arguments |= {name: value for name in YARN_KEYS if (value := getattr(model, name)) is not None}
    return arguments


def _mixture(model: ModelConfig, *, grouped: bool) -> dict[str, Any]:
    if model.num_moe_experts is None:
        return {}
    return {
        "num_moe_experts": model.num_moe_experts,
        # Not a list if all layers have experts: with a list, Megatron cannot load checkpoints of Megatron-LM, in which
        # one tensor contains the weights of all layers.
        "moe_layer_freq": 1 if all(moe_layer_pattern(model)) else moe_layer_pattern(model),
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size or model.ffn_hidden_size,
        "moe_router_topk": model.moe_router_topk,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "moe_shared_expert_gate": model.moe_shared_expert_gate,
        "moe_router_score_function": model.moe_router_score_function,
        "moe_router_pre_softmax": model.moe_router_pre_softmax,
        "moe_router_num_groups": model.moe_router_num_groups,
        "moe_router_group_topk": model.moe_router_group_topk,
        "moe_router_topk_scaling_factor": model.moe_router_topk_scaling_factor,
        "moe_router_load_balancing_type": model.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
        "moe_z_loss_coeff": model.moe_z_loss_coeff,
        "moe_router_enable_expert_bias": model.moe_router_enable_expert_bias,
        "moe_router_bias_update_rate": model.moe_router_bias_update_rate,
        "moe_expert_capacity_factor": model.moe_expert_capacity_factor,
        "moe_pad_expert_input_to_capacity": model.moe_pad_expert_input_to_capacity,
        "moe_token_drop_policy": model.moe_token_drop_policy,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": grouped,
    }


def moe_layer_pattern(model: ModelConfig) -> list[int]:
    """Return one number per layer, first layer first: 1 for an MoE layer, 0 for a dense MLP."""
    return [
        int(layer > model.moe_first_dense_layers and layer % model.moe_layer_freq == 0)
        for layer in range(1, model.num_layers + 1)
    ]


def _recompute(config: JobConfig) -> dict[str, Any]:
    granularity = config.training.recompute_granularity
    if granularity == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {} if granularity is None else {"recompute_granularity": granularity}


def output_layer_std(model: ModelConfig) -> float:
    """Return the initial standard deviation of projections whose output is added to the residual stream."""
    return model.init_method_std / math.sqrt(2.0 * model.num_layers)
