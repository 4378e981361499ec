"""Rules for the dense part of a model."""

from megatron_ft.config.checks.primitives import above, at_least, one_of, require, share
from megatron_ft.config.model import ModelConfig

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


def check_model(model: ModelConfig) -> None:
    """Sizes, heads, positions, norms and dropout."""
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
        0 < model.rotary_percent <= 1, "model.rotary_percent", model.rotary_percent, "must be greater than 0, at most 1"
    )
    channels = model.kv_channels or model.hidden_size // model.num_attention_heads
    rotated = model.qk_pos_emb_head_dim if model.multi_latent_attention else int(channels * model.rotary_percent)
    key = "model.qk_pos_emb_head_dim" if model.multi_latent_attention else "model.rotary_percent"
    require(
        rotated >= 2 and rotated % 2 == 0,
        key,
        getattr(model, key.removeprefix("model.")),
        f"must rotate an even number of a head's channels, at least 2; it rotates {rotated} of {channels}",
    )


def _check_latent_attention(model: ModelConfig) -> None:
    for name in LATENT_SIZES:
        at_least(1, f"model.{name}", getattr(model, name))
    require(
        model.num_query_groups in (None, model.num_attention_heads),
        "model.num_query_groups",
        model.num_query_groups,
        "must be null with model.multi_latent_attention=true: latent attention has no groups",
    )
    require(
        not model.add_qkv_bias,
        "model.add_qkv_bias",
        True,
        "must be false with model.multi_latent_attention=true: latent projections have no bias",
    )
