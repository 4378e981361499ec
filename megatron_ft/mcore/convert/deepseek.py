"""Conversion tables of DeepSeekMoE (``deepseek``; arXiv 2401.06066), and of DeepSeek-V2 without groups of experts, such
as V2-Lite (``deepseek_v2``; arXiv 2405.04434, section 2.1). Both models have shared experts, and a dense MLP in the
first layers. DeepSeek-V2 has latent attention."""

from collections.abc import Mapping
from typing import Any

from megatron_ft.config.model import ModelConfig
from megatron_ft.errors import CheckpointError
from megatron_ft.mcore.convert.family import (
    LAYER,
    THEIR_LAYER,
    YARN,
    Family,
    Rule,
    attention_rules,
    common_model,
    common_settings,
    expert_width,
    flag,
    hidden,
    mlp_rules,
    outer_rules,
    rope_settings,
    router_rule,
    scaled_rope,
)

_MLP = f"{THEIR_LAYER}.mlp"
_NAMES = ("gate_proj", "up_proj", "down_proj")


def _shared_width(model: ModelConfig) -> int:
    return model.moe_shared_expert_intermediate_size or 0


def _has_shared(model: ModelConfig) -> bool:
    return bool(model.moe_shared_expert_intermediate_size)


_MLP_RULES = (
    *mlp_rules(f"{LAYER}.mlp", _MLP, _NAMES, lambda model: model.ffn_hidden_size, kind="dense"),
    router_rule(f"{_MLP}.gate.weight"),
    *mlp_rules(
        f"{LAYER}.mlp.experts.experts.{{expert}}", f"{_MLP}.experts.{{expert}}", _NAMES, expert_width, kind="moe"
    ),
    *mlp_rules(
        f"{LAYER}.mlp.shared_experts", f"{_MLP}.shared_experts", _NAMES, _shared_width, kind="moe", when=_has_shared
    ),
)


def _latent_rules() -> tuple[Rule, ...]:
    """Return the conversion rules of latent attention and of each layer's norms."""
    ours, theirs = f"{LAYER}.self_attention", f"{THEIR_LAYER}.self_attn"

    def heads(model: ModelConfig, *widths: int) -> int:
        return model.num_attention_heads * sum(widths)

    def query(model: ModelConfig) -> int:
        return heads(model, model.qk_head_dim, model.qk_pos_emb_head_dim)

    def rank(model: ModelConfig) -> int:
        return model.q_lora_rank or 0

    has_rank = lambda model: model.q_lora_rank is not None  # noqa: E731
    has_no_rank = lambda model: model.q_lora_rank is None  # noqa: E731
    rows = [
        ("linear_q_proj.weight", "q_proj", lambda m: (query(m), m.hidden_size), has_no_rank),
        ("linear_q_down_proj.weight", "q_a_proj", lambda m: (rank(m), m.hidden_size), has_rank),
        ("linear_q_up_proj.layer_norm_weight", "q_a_layernorm", lambda m: (rank(m),), has_rank),
        ("linear_q_up_proj.weight", "q_b_proj", lambda m: (query(m), rank(m)), has_rank),
        (
            "linear_kv_down_proj.weight",
            "kv_a_proj_with_mqa",
            lambda m: (m.kv_lora_rank + m.qk_pos_emb_head_dim, m.hidden_size),
            None,
        ),
        ("linear_kv_up_proj.layer_norm_weight", "kv_a_layernorm", lambda m: (m.kv_lora_rank,), None),
        (
            "linear_kv_up_proj.weight",
            "kv_b_proj",
            lambda m: (heads(m, m.qk_head_dim, m.v_head_dim), m.kv_lora_rank),
            None,
        ),
        ("linear_proj.weight", "o_proj", lambda m: (m.hidden_size, heads(m, m.v_head_dim)), None),
    ]
    norms = (
        Rule(ours=f"{LAYER}.input_layernorm.weight", theirs=(f"{THEIR_LAYER}.input_layernorm.weight",), shape=hidden),
        *(
            Rule(
                ours=f"{LAYER}.{name}",
                theirs=(f"{THEIR_LAYER}.post_attention_layernorm.weight",),
                shape=hidden,
                kind=kind,
            )
            for name, kind in (("pre_mlp_layernorm.weight", "moe"), ("mlp.linear_fc1.layer_norm_weight", "dense"))
        ),
    )
    return (
        *norms,
        *(
            Rule(
                ours=f"{ours}.{name}",
                theirs=(f"{theirs}.{their_name}.weight",),
                shape=shape,
                **({} if when is None else {"when": when}),
            )
            for name, their_name, shape, when in rows
        ),
    )


def _settings(model: ModelConfig) -> dict[str, Any]:
    shared = model.moe_shared_expert_intermediate_size or 0
    if shared % expert_width(model):
        raise CheckpointError(
            f"model.moe_shared_expert_intermediate_size={shared}: must be a multiple of the width of an expert, "
            f"{expert_width(model)}, because config.json has only the number of shared experts"
        )
    return {
        **common_settings(model),
        "intermediate_size": model.ffn_hidden_size,
        "moe_intermediate_size": expert_width(model),
        "n_routed_experts": model.num_moe_experts,
        "n_shared_experts": shared // expert_width(model) or None,
        "first_k_dense_replace": model.moe_first_dense_layers,
        "moe_layer_freq": 1,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        "scoring_func": "softmax",
        "attention_bias": False,
    }


def _latent_settings(model: ModelConfig) -> dict[str, Any]:
    settings = _settings(model)
    del settings["head_dim"]
    return {
        **settings,
        "num_key_value_heads": model.num_attention_heads,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_head_dim,
        "qk_rope_head_dim": model.qk_pos_emb_head_dim,
        "v_head_dim": model.v_head_dim,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "rope_scaling": rope_settings(model),
    }


def _model(config: Mapping[str, Any]) -> dict[str, Any]:
    width, scaling = config["moe_intermediate_size"], config.get("routed_scaling_factor", 1.0)
    return {
        **common_model(config),
        "num_moe_experts": config["n_routed_experts"],
        "moe_ffn_hidden_size": width,
        "ffn_hidden_size": config["intermediate_size"],
        "moe_first_dense_layers": config.get("first_k_dense_replace") or 0,
        "moe_shared_expert_intermediate_size": (config.get("n_shared_experts") or 0) * width or None,
        "moe_router_pre_softmax": not flag(config, "norm_topk_prob", default=False),
        "moe_router_topk_scaling_factor": None if scaling == 1.0 else scaling,
    }


def _latent_model(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_model(config),
        "num_query_groups": None,
        "kv_channels": None,
        "q_lora_rank": config["q_lora_rank"],
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        **_yarn(config),
    }


def _yarn(config: Mapping[str, Any]) -> dict[str, Any]:
    if not scaled_rope(config):
        return {}
    inner = config.get("rope_scaling") or config["rope_parameters"]
    found = {ours: inner[theirs] for ours, theirs in YARN.items() if inner.get(theirs) is not None}
    if "rotary_scaling_factor" not in found or not all(isinstance(value, int | float) for value in found.values()):
        raise CheckpointError(f"rope_scaling={inner!r:.120}: must have the entry factor, and only numbers as values")
    # Published files have integers for keys that are floating-point numbers here.
    lengths = ("original_max_position_embeddings",)
    return {
        "rope_type": "yarn",
        **{key: int(value) if key in lengths else float(value) for key, value in found.items()},
    }


def _refused(config: Mapping[str, Any]) -> str:
    return _refused_routing(config) or scaled_rope(config)


def _refused_latent(config: Mapping[str, Any]) -> str:
    reason = scaled_rope(config)
    return _refused_routing(config) or ("" if "'yarn'" in reason else reason)


def _refused_routing(config: Mapping[str, Any]) -> str:
    if config.get("moe_layer_freq", 1) != 1:
        return "moe_layer_freq: dense layers between MoE layers are not supported"
    if config.get("scoring_func", "softmax") != "softmax" or config.get("topk_method") not in (None, "greedy"):
        return (
            f"topk_method={config.get('topk_method')!r:.40}, scoring_func={config.get('scoring_func')!r:.40}: only "
            "the choice among all experts by softmax (greedy) is supported"
        )
    if config.get("attention_bias") or config.get("mlp_bias"):
        return "attention_bias, mlp_bias: biases are not supported"
    if config.get("norm_topk_prob") and config.get("routed_scaling_factor", 1.0) != 1.0:
        return "routed_scaling_factor: is not used with norm_topk_prob=true, so it must be 1"
    return ""


_FIXED = {"add_qkv_bias": False, "moe_shared_expert_gate": False}
DEEPSEEK = Family(
    name="deepseek",
    architecture="DeepseekForCausalLM",
    rules=(*attention_rules(), *_MLP_RULES),
    fixed={**_FIXED, "qk_layernorm": False, "multi_latent_attention": False},
    settings=_settings,
    model=_model,
    refused=_refused,
)
DEEPSEEK_2 = Family(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    rules=(*outer_rules(), *_latent_rules(), *_MLP_RULES),
    fixed={**_FIXED, "qk_layernorm": True, "multi_latent_attention": True},
    settings=_latent_settings,
    model=_latent_model,
    refused=_refused_latent,
)
