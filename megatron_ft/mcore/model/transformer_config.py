"""Converts ``JobConfig`` to Megatron's ``TransformerConfig``. Names parameters globally, and sets initial weights."""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from megatron.core.process_groups_config import ProcessGroupCollection
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
        # ``initialize_weights`` sets them later. Megatron's initialization only marks which parameters are sharded.
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


# A global name is the name that the parameter would have if one rank had the whole model. Layers and experts are
# counted from 0, as in Megatron's state dicts.

_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_GROUPED_EXPERT = re.compile(r"\.(linear_fc[12]\.(?:weight|bias))(\d+)$")


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return the GPT model that ``model`` wraps for data parallelism and mixed precision."""
    while hasattr(model, "module"):
        model = model.module  # type: ignore[assignment]
    return model


def _global_name(local_name: str, *, layer_offset: int, expert_ids: Mapping[int, Sequence[int]]) -> str:
    """Convert the name of a parameter in one model chunk to its global name. ``layer_offset`` is the number of layers
    before this chunk. ``expert_ids`` lists, for each layer of the chunk (counted from 0), the experts that this rank
    has, in the order of its modules."""
    layer = _LAYER.search(local_name)
    if layer is None:
        return local_name
    local_layer = int(layer[2])
    name = _LAYER.sub(lambda m: f"{m[1]}layers.{local_layer + layer_offset}.", local_name)
    ids = expert_ids.get(local_layer, ())
    if ".experts." not in name or not ids:
        return name
    name = _GROUPED_EXPERT.sub(lambda m: f".local_experts.{m[2]}.{m[1]}", name)
    return _LOCAL_EXPERT.sub(lambda m: f".local_experts.{ids[int(m[1])]}.", name)


def named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield (global name, parameter) for each parameter of one model chunk, in the order of the chunk's modules."""
    chunk = unwrap(model)
    layers: Any = chunk.decoder.layers  # type: ignore[union-attr]
    layer_offset = layers[0].layer_number - 1 if len(layers) else 0
    expert_ids = {number: getattr(layer.mlp, "local_expert_indices", ()) for number, layer in enumerate(layers)}
    for name, parameter in chunk.named_parameters():
        if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
            # The output layer of the last stage is a copy of the word embedding, so it gets the name of the embedding.
            name = "embedding.word_embeddings.weight"
        yield _global_name(name, layer_offset=layer_offset, expert_ids=expert_ids), parameter


_RESIDUAL_WRITERS = ("linear_proj.weight", "linear_fc2.weight")


def initialize_weights(
    model: torch.nn.Module, config: ModelConfig, *, seed: int, pg_collection: ProcessGroupCollection
) -> None:
    """Initialize every parameter of a model chunk in place.

    Biases are 0 and norm weights 1. Matrices are drawn from a normal distribution with standard deviation
    ``init_method_std``, divided by sqrt(2 * num_layers) if their output is added to the residual stream. Each rank
    draws the whole matrix in FP32 on the CPU, with a generator seeded from ``seed`` and the name, and uses its
    tensor-parallel part.
    """
    with torch.no_grad():
        for name, parameter in named_parameters(model):
            shape = _full_shape(parameter, _tensor_group(name, pg_collection).size())
            parameter.copy_(own_part(draw(name, shape, config, seed), parameter, name, config, pg_collection))


def _is_sharded(parameter: torch.nn.Parameter, tp_size: int) -> bool:
    return tp_size > 1 and getattr(parameter, "tensor_model_parallel", False)


def _full_shape(parameter: torch.nn.Parameter, tp_size: int) -> torch.Size:
    shape = list(parameter.shape)
    if _is_sharded(parameter, tp_size):
        shape[parameter.partition_dim] *= tp_size  # type: ignore[attr-defined]
    return torch.Size(shape)


def generator_for(name: str, seed: int) -> torch.Generator:
    """Return a generator on the CPU whose numbers depend only on ``name`` and ``seed``."""
    # Always on the CPU, because CUDA's generator gives other numbers for the same seed.
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def draw(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> torch.Tensor:
    """Return the initial value of the whole parameter with the global name ``name``, in FP32 on the CPU."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "norm" in name.rsplit(".", 2)[-2] or name.endswith("layer_norm_weight"):
        return torch.ones(shape)
    std = output_layer_std(config) if name.endswith(_RESIDUAL_WRITERS) else config.init_method_std
    return torch.empty(shape).normal_(0.0, std, generator=generator_for(name, seed))


def own_part(
    full: torch.Tensor,
    parameter: torch.nn.Parameter,
    name: str,
    config: ModelConfig,
    pg_collection: ProcessGroupCollection,
) -> torch.Tensor:
    """Return the part of the unsharded tensor ``full`` that belongs in this rank's ``parameter``. ``name`` is the
    global name of the parameter."""
    group = _tensor_group(name, pg_collection)
    tp_rank, tp_size = group.rank(), group.size()
    if not _is_sharded(parameter, tp_size):
        return full
    dim: int = parameter.partition_dim  # type: ignore[attr-defined]
    # The first layer of a gated MLP stacks [gate; up], and each rank has a part of both.
    parts = full.chunk(2, dim) if config.gated_linear_unit and "linear_fc1." in name else (full,)
    return torch.cat([part.chunk(tp_size, dim)[tp_rank] for part in parts], dim)


def tensor_part(name: str, parameter: torch.nn.Parameter, pg_collection: ProcessGroupCollection) -> int:
    """Return the index of the tensor-parallel part of ``parameter`` that this rank has: 0 to TP - 1, or 0 if the
    parameter is not sharded. ``name`` is its global name."""
    group = _tensor_group(name, pg_collection)
    return group.rank() if _is_sharded(parameter, group.size()) else 0


def _tensor_group(name: str, pg_collection: ProcessGroupCollection) -> dist.ProcessGroup:
    # The group over which the parameter is sharded. Experts have a tensor-parallel group of their own.
    return pg_collection.expt_tp if ".experts." in name else pg_collection.tp
