"""Checks of a model: sizes and dense layers first, then MoE layers and routers."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from megatron_ft.config.checks.primitives import above, at_least, one_of, require, share, show
from megatron_ft.config.job import JobConfig
from megatron_ft.config.model import YARN_KEYS, ModelConfig
from megatron_ft.errors import ConfigError
from megatron_ft.serde import decode

SIZES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "seq_length",
    "max_position_embeddings",
    "vocab_size",
    "make_vocab_size_divisible_by",
    "ffn_hidden_size",
    "rotary_base",
)
LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
ROUTERS = ("learned", "trace")
BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")


def check(config: JobConfig) -> None:
    """Check the group ``model``. Raise ``ConfigError`` for the first violated rule."""
    for each in CHECKS:
        each(config)


def valid_model(values: Mapping[str, Any]) -> ModelConfig:
    """Return a ``ModelConfig`` with the ``values`` of keys that were read from a file, and defaults for all other keys.

    Raises:
        ConfigError: a key is unknown, or a value has another type or is not valid.
    """
    try:
        model: ModelConfig = decode(ModelConfig, {**asdict(ModelConfig()), **values}, "model")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    # A trace of recorded loads belongs to a run, not to its weights. So the router is checked without its trace.
    check(replace(JobConfig(), model=replace(model, router="learned", router_trace_file=None)))
    return model


def _check_model(model: ModelConfig) -> None:
    """Check sizes, attention heads, position embeddings, norms and dropout."""
    for name in SIZES:
        at_least(1, f"model.{name}", getattr(model, name))
    one_of(("rope", "learned_absolute"), "model.position_embedding_type", model.position_embedding_type)
    one_of(("RMSNorm", "LayerNorm"), "model.normalization", model.normalization)
    one_of(("silu", "gelu"), "model.activation", model.activation)
    share("model.hidden_dropout", model.hidden_dropout)
    share("model.attention_dropout", model.attention_dropout)
    above(0, "model.layernorm_epsilon", model.layernorm_epsilon)
    above(0, "model.init_method_std", model.init_method_std)
    _check_heads(model)
    _check_positions(model)
    if model.multi_latent_attention:
        _check_latent_attention(model)
    _check_yarn(model)


def _check_heads(model: ModelConfig) -> None:
    heads, groups = model.num_attention_heads, model.num_query_groups
    require(
        model.kv_channels is not None or model.multi_latent_attention or model.hidden_size % heads == 0,
        "model.num_attention_heads",
        heads,
        f"must divide model.hidden_size={model.hidden_size}, or model.kv_channels must be given",
    )
    require(
        groups is None or heads % groups == 0,
        "model.num_query_groups",
        groups,
        f"must divide model.num_attention_heads={heads}",
    )


def _check_positions(model: ModelConfig) -> None:
    rows = model.max_position_embeddings
    require(
        rows is None or rows >= model.seq_length,
        "model.seq_length",
        model.seq_length,
        f"must not exceed model.max_position_embeddings={rows}",
    )
    if model.position_embedding_type == "learned_absolute":
        require(
            not model.multi_latent_attention,
            "model.position_embedding_type",
            model.position_embedding_type,
            "must be rope with model.multi_latent_attention=true",
        )
        return
    require(
        0 < model.rotary_percent <= 1,
        "model.rotary_percent",
        model.rotary_percent,
        "must be greater than 0 and at most 1",
    )
    channels = model.kv_channels or model.hidden_size // model.num_attention_heads
    rotated = model.qk_pos_emb_head_dim if model.multi_latent_attention else int(channels * model.rotary_percent)
    key = "model.qk_pos_emb_head_dim" if model.multi_latent_attention else "model.rotary_percent"
    require(
        rotated >= 2 and rotated % 2 == 0,
        key,
        getattr(model, key.removeprefix("model.")),
        f"must rotate an even number of channels per head, at least 2; it rotates {rotated} of {channels}",
    )


def _check_latent_attention(model: ModelConfig) -> None:
    for name in LATENT_SIZES:
        at_least(1, f"model.{name}", getattr(model, name))
    require(
        model.num_query_groups in (None, model.num_attention_heads),
        "model.num_query_groups",
        model.num_query_groups,
        "must be null with model.multi_latent_attention=true: latent attention has no query groups",
    )
    require(
        not model.add_qkv_bias,
        "model.add_qkv_bias",
        True,
        "must be false with model.multi_latent_attention=true: latent projections have no bias",
    )


def _check_yarn(model: ModelConfig) -> None:
    require(model.rope_type in (None, "yarn"), "model.rope_type", model.rope_type, "must be yarn or null")
    require(
        model.rope_type is None or model.multi_latent_attention,
        "model.rope_type",
        model.rope_type,
        "must be null without model.multi_latent_attention=true: only latent attention can scale rotary positions",
    )
    for name in YARN_KEYS:
        value = getattr(model, name)
        if value is not None:
            require(model.rope_type == "yarn", f"model.{name}", value, "must be null without model.rope_type=yarn")
            (at_least if name == "mscale_all_dim" else above)(0, f"model.{name}", value)


def _check_moe(model: ModelConfig) -> None:
    """Check experts, shared experts, router, load balancing and capacity."""
    one_of(ROUTERS, "model.router", model.router)
    _check_trace(model)
    one_of(BALANCING, "model.moe_router_load_balancing_type", model.moe_router_load_balancing_type)
    one_of(("softmax", "sigmoid"), "model.moe_router_score_function", model.moe_router_score_function)
    one_of(("probs", "position"), "model.moe_token_drop_policy", model.moe_token_drop_policy)
    at_least(1, "model.num_moe_experts", model.num_moe_experts)
    at_least(1, "model.moe_layer_freq", model.moe_layer_freq)
    at_least(0, "model.moe_first_dense_layers", model.moe_first_dense_layers)
    if model.num_moe_experts is None:
        _check_dense(model)
        return
    at_least(1, "model.moe_ffn_hidden_size", model.moe_ffn_hidden_size)
    _check_has_mixture_layer(model)
    _check_shared_experts(model)
    _check_router(model, model.num_moe_experts)
    _check_groups(model, model.num_moe_experts)
    _check_balancing(model)
    _check_capacity(model)


def _check_dense(model: ModelConfig) -> None:
    for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        value = getattr(model, name)
        require(value is None, f"model.{name}", value, "must be null in a dense model (model.num_moe_experts=null)")


def _check_has_mixture_layer(model: ModelConfig) -> None:
    # Number (from 1) of the last layer that ``moe_layer_freq`` makes an MoE layer.
    last = model.num_layers - model.num_layers % model.moe_layer_freq
    require(
        last > model.moe_first_dense_layers,
        "model.moe_layer_freq",
        model.moe_layer_freq,
        f"must make at least one of the model.num_layers={model.num_layers} layers an MoE layer; the first "
        f"model.moe_first_dense_layers={model.moe_first_dense_layers} layers are always dense. For a dense model set "
        "model.num_moe_experts=null",
    )


def _check_shared_experts(model: ModelConfig) -> None:
    width = model.moe_shared_expert_intermediate_size
    at_least(1, "model.moe_shared_expert_intermediate_size", width)
    require(
        width is not None or not model.moe_shared_expert_gate,
        "model.moe_shared_expert_gate",
        model.moe_shared_expert_gate,
        "must be false without model.moe_shared_expert_intermediate_size",
    )
    require(
        width is None or not model.add_bias_linear,
        "model.add_bias_linear",
        model.add_bias_linear,
        "must be false with shared experts: Megatron's shared experts have no bias",
    )


def _check_router(model: ModelConfig, num_experts: int) -> None:
    topk, softmax = model.moe_router_topk, model.moe_router_score_function == "softmax"
    require(
        1 <= topk <= num_experts,
        "model.moe_router_topk",
        topk,
        f"must be from 1 to model.num_moe_experts={num_experts}",
    )
    sinkhorn = model.moe_router_load_balancing_type == "sinkhorn"
    require(
        topk > 1 or not softmax or model.moe_router_pre_softmax or sinkhorn,
        "model.moe_router_pre_softmax",
        model.moe_router_pre_softmax,
        "must be true with model.moe_router_topk=1: softmax over one expert has no gradient",
    )
    require(
        not model.moe_router_enable_expert_bias or not softmax,
        "model.moe_router_enable_expert_bias",
        model.moe_router_enable_expert_bias,
        "must be false unless model.moe_router_score_function=sigmoid",
    )
    require(
        not model.moe_router_enable_expert_bias or not sinkhorn,
        "model.moe_router_enable_expert_bias",
        model.moe_router_enable_expert_bias,
        "must be false with model.moe_router_load_balancing_type=sinkhorn, which ignores the bias",
    )
    above(0, "model.moe_router_topk_scaling_factor", model.moe_router_topk_scaling_factor)
    at_least(0, "model.moe_router_bias_update_rate", model.moe_router_bias_update_rate)


def _check_trace(model: ModelConfig) -> None:
    if model.router != "trace":
        for name, unset in (("router_trace_file", None), ("router_trace_start", 0)):
            value = getattr(model, name)
            require(value == unset, f"model.{name}", value, f"must be {show(unset)} unless model.router=trace")
        return
    require(model.num_moe_experts is not None, "model.router", "trace", "must be 'learned' in a dense model")
    require(
        model.router_trace_file is not None, "model.router_trace_file", None, "must be given with model.router=trace"
    )
    at_least(0, "model.router_trace_start", model.router_trace_start)
    for name, value, steers in (
        ("moe_router_num_groups", model.moe_router_num_groups, model.moe_router_num_groups is not None),
        ("moe_router_enable_expert_bias", True, model.moe_router_enable_expert_bias),
        ("moe_router_load_balancing_type", "sinkhorn", model.moe_router_load_balancing_type == "sinkhorn"),
    ):
        require(
            not steers, f"model.{name}", value, "must keep its default with model.router=trace, which fixes the routing"
        )


def _check_groups(model: ModelConfig, num_experts: int) -> None:
    groups, group_topk = model.moe_router_num_groups, model.moe_router_group_topk
    require(
        (groups is None) == (group_topk is None),
        "model.moe_router_num_groups",
        groups,
        "must be given if and only if model.moe_router_group_topk is given",
    )
    if groups is None or group_topk is None:
        return
    divided = groups >= 1 and num_experts % groups == 0
    require(divided, "model.moe_router_num_groups", groups, f"must divide model.num_moe_experts={num_experts}")
    require(
        1 <= group_topk <= groups,
        "model.moe_router_group_topk",
        group_topk,
        f"must be from 1 to model.moe_router_num_groups={groups}",
    )
    per_group = model.moe_router_topk // group_topk
    require(
        model.moe_router_topk % group_topk == 0 and per_group <= num_experts // groups,
        "model.moe_router_topk",
        model.moe_router_topk,
        f"must be a multiple of model.moe_router_group_topk={group_topk} and at most "
        f"{group_topk * (num_experts // groups)}, the number of experts in the selected groups",
    )


def _check_balancing(model: ModelConfig) -> None:
    at_least(0, "model.moe_aux_loss_coeff", model.moe_aux_loss_coeff)
    at_least(0, "model.moe_z_loss_coeff", model.moe_z_loss_coeff)
    require(
        model.moe_router_load_balancing_type != "sinkhorn" or model.moe_aux_loss_coeff == 0,
        "model.moe_aux_loss_coeff",
        model.moe_aux_loss_coeff,
        "must be 0 with model.moe_router_load_balancing_type=sinkhorn, which has no auxiliary loss",
    )


def _check_capacity(model: ModelConfig) -> None:
    factor = model.moe_expert_capacity_factor
    above(0, "model.moe_expert_capacity_factor", factor)
    require(
        factor is not None or not model.moe_pad_expert_input_to_capacity,
        "model.moe_pad_expert_input_to_capacity",
        model.moe_pad_expert_input_to_capacity,
        "must be false without model.moe_expert_capacity_factor",
    )
    require(
        factor is None or model.moe_router_load_balancing_type != "sinkhorn",
        "model.moe_expert_capacity_factor",
        factor,
        "must be null with model.moe_router_load_balancing_type=sinkhorn",
    )


CHECKS: tuple[Callable[[JobConfig], None], ...] = (
    lambda config: _check_model(config.model),
    lambda config: _check_moe(config.model),
)
"""All checks of this file."""
