"""Names and shapes of the tensors that a complete dense checkpoint of a model has.

The names are those of Megatron-Core's layers in a checkpoint of this project, whatever its parallel layout.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from megatron_ft.config.model import ModelConfig
from megatron_ft.errors import CheckpointError
from megatron_ft.operators import head_channels, is_moe_layer

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]
_FUSED_NORM, _SEPARATE_NORM = "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
"""Name prefixes of the norm before an MLP or MoE layer. The first is for a norm that is fused with the first linear
layer, the second for a separate norm. With Transformer Engine, the norm is separate in every MoE layer."""


def tensors_of(model: ModelConfig) -> Named:
    """Yield (name, shape) of all weights and buffers. The embedding has ``model.vocab_size`` rows."""
    hidden, rows = model.hidden_size, model.vocab_size or 0
    yield "embedding.word_embeddings.weight", (rows, hidden)
    if model.position_embedding_type == "learned_absolute":
        yield "embedding.position_embeddings.weight", (model.max_position_embeddings or model.seq_length, hidden)
    for layer in range(model.num_layers):
        has_experts = is_moe_layer(model, layer + 1)
        parts = (
            _latent_attention(model) if model.multi_latent_attention else _attention(model),
            _norm(model, norm_before_mlp(model, has_experts=has_experts), hidden),
            _mixture(model) if has_experts else _mlp(model, "mlp", model.ffn_hidden_size, bias=model.add_bias_linear),
        )
        for part in parts:
            yield from ((f"decoder.layers.{layer}.{name}", shape) for name, shape in part)
    yield from _norm(model, "decoder.final_layernorm.", hidden)
    if model.untie_embeddings_and_output_weights:
        yield "output_layer.weight", (rows, hidden)


def norm_before_mlp(model: ModelConfig, *, has_experts: bool) -> str:
    """Return the name prefix of the norm before a layer's MLP, or before its MoE layer if ``has_experts``."""
    return _SEPARATE_NORM if model.multi_latent_attention and has_experts else _FUSED_NORM


def check_tensors(stored: Mapping[str, Any], model: ModelConfig, where: str) -> None:
    """Check that a checkpoint has all tensors of a model, in their shapes.

    Args:
        stored: metadata of each tensor of the checkpoint, by name. Each entry has a ``size``.
        where: directory of the checkpoint, for messages.

    Raises:
        CheckpointError: a tensor is missing, or has another shape.
    """
    # Stop after three names: a model that does not belong to the checkpoint may have any number of tensors.
    missing = [name for name, _ in islice(_missing(stored, model), 3)]
    if missing:
        raise CheckpointError(
            f"{where}: lacks tensors of the model that its manifest describes (at most 3 are named): {missing}; "
            "use a complete checkpoint"
        )
    for name, shape in tensors_of(model):
        found = tuple(stored[_stored_name(stored, name)].size)
        if found != shape:
            raise CheckpointError(
                f"{where}: {name} has the shape {list(found)}, but the model of its manifest has {list(shape)}; use a "
                "complete checkpoint"
            )


def _missing(stored: Mapping[str, Any], model: ModelConfig) -> Named:
    return (each for each in tensors_of(model) if _stored_name(stored, each[0]) not in stored)


def _stored_name(stored: Mapping[str, Any], name: str) -> str:
    if name in stored or _FUSED_NORM not in name:
        return name
    return name.replace(_FUSED_NORM, _SEPARATE_NORM)


def _norm(model: ModelConfig, prefix: str, width: int) -> Named:
    yield f"{prefix}weight", (width,)
    if model.normalization == "LayerNorm":
        yield f"{prefix}bias", (width,)


def _attention(model: ModelConfig) -> Named:
    hidden, channels = model.hidden_size, head_channels(model)
    queries = model.num_attention_heads * channels
    rows = queries + 2 * (model.num_query_groups or model.num_attention_heads) * channels
    yield from _norm(model, "self_attention.linear_qkv.layer_norm_", hidden)
    yield "self_attention.linear_qkv.weight", (rows, hidden)
    if model.add_bias_linear or model.add_qkv_bias:
        yield "self_attention.linear_qkv.bias", (rows,)
    for letter in "qk" if model.qk_layernorm else "":
        yield from _norm(model, f"self_attention.{letter}_layernorm.", channels)
    yield from _projection(model, queries)


def _projection(model: ModelConfig, width: int) -> Named:
    yield "self_attention.linear_proj.weight", (model.hidden_size, width)
    if model.add_bias_linear:
        yield "self_attention.linear_proj.bias", (model.hidden_size,)


def _latent_attention(model: ModelConfig) -> Named:
    attention, hidden, heads = "self_attention", model.hidden_size, model.num_attention_heads
    query = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    yield from _norm(model, "input_layernorm.", hidden)
    if model.q_lora_rank is None:
        yield f"{attention}.linear_q_proj.weight", (query, hidden)
    else:
        yield f"{attention}.linear_q_down_proj.weight", (model.q_lora_rank, hidden)
        yield from _normed_projection(model, f"{attention}.linear_q_up_proj.", query, model.q_lora_rank)
    yield f"{attention}.linear_kv_down_proj.weight", (model.kv_lora_rank + model.qk_pos_emb_head_dim, hidden)
    width = heads * (model.qk_head_dim + model.v_head_dim)
    yield from _normed_projection(model, f"{attention}.linear_kv_up_proj.", width, model.kv_lora_rank)
    yield from _projection(model, heads * model.v_head_dim)


def _normed_projection(model: ModelConfig, prefix: str, rows: int, rank: int) -> Named:
    if model.qk_layernorm:
        yield from _norm(model, f"{prefix}layer_norm_", rank)
    yield f"{prefix}weight", (rows, rank)


def _mlp(model: ModelConfig, prefix: str, width: int, *, bias: bool) -> Named:
    # The two halves of a gated unit are separate tensors.
    for half in ("_w", "_v") if model.gated_linear_unit else ("",):
        yield f"{prefix}.linear_fc1.weight{half}", (width, model.hidden_size)
        if bias:
            yield f"{prefix}.linear_fc1.bias{half}", (width,)
    yield f"{prefix}.linear_fc2.weight", (model.hidden_size, width)
    if bias:
        yield f"{prefix}.linear_fc2.bias", (model.hidden_size,)


def _mixture(model: ModelConfig) -> Named:
    num_experts, shared = model.num_moe_experts or 0, model.moe_shared_expert_intermediate_size
    yield "mlp.router.weight", (num_experts, model.hidden_size)
    if model.add_bias_linear:
        yield "mlp.router.bias", (num_experts,)
    if model.moe_router_enable_expert_bias:
        yield "mlp.router.expert_bias", (num_experts,)
    width = model.moe_ffn_hidden_size or model.ffn_hidden_size
    for expert in range(num_experts):
        yield from _mlp(model, f"mlp.experts.experts.{expert}", width, bias=model.add_bias_linear)
    if shared is not None:
        yield from _mlp(model, "mlp.shared_experts", shared, bias=False)
        if model.moe_shared_expert_gate:
            yield "mlp.shared_experts.gate_weight", (1, model.hidden_size)
