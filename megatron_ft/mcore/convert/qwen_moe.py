"""Conversion tables of ``qwen2_moe`` (Qwen1.5-MoE, Qwen2-MoE) and ``qwen3_moe`` (Qwen3-MoE). Models of ``qwen2_moe``
have a gated shared expert (arXiv 2407.10671, section 2.2.2). Models of ``qwen3_moe`` have no shared expert, but have
norms of queries and keys (arXiv 2505.09388, section 2)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_ft.config.model import ModelConfig
from megatron_ft.mcore.convert.family import (
    LAYER,
    ONLY_MOE_LAYERS,
    THEIR_LAYER,
    Family,
    Rule,
    attention_rules,
    common_model,
    common_settings,
    expert_width,
    flag,
    limited_window,
    mlp_rules,
    router_rule,
    scaled_rope,
)

_MLP = f"{THEIR_LAYER}.mlp"
_NAMES = ("gate_proj", "up_proj", "down_proj")


def _shared_width(model: ModelConfig) -> int:
    return model.moe_shared_expert_intermediate_size or 0


_ROUTED = (
    *attention_rules(),
    router_rule(f"{_MLP}.gate.weight"),
    *mlp_rules(
        f"{LAYER}.mlp.experts.experts.{{expert}}", f"{_MLP}.experts.{{expert}}", _NAMES, expert_width, kind="moe"
    ),
)
_SHARED = (
    *mlp_rules(f"{LAYER}.mlp.shared_experts", f"{_MLP}.shared_expert", _NAMES, _shared_width, kind="moe"),
    Rule(
        ours=f"{LAYER}.mlp.shared_experts.gate_weight",
        theirs=(f"{_MLP}.shared_expert_gate.weight",),
        shape=lambda model: (1, model.hidden_size),
        kind="moe",
    ),
)


def _settings(model: ModelConfig) -> dict[str, Any]:
    return {
        **common_settings(model),
        "intermediate_size": model.ffn_hidden_size,
        "moe_intermediate_size": expert_width(model),
        "num_experts": model.num_moe_experts,
        # A softmax over the chosen experts alone gives them weights with the sum 1.
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": None,
        "output_router_logits": False,
    }


def _settings_2(model: ModelConfig) -> dict[str, Any]:
    shared = model.moe_shared_expert_intermediate_size
    settings = {**_settings(model), "shared_expert_intermediate_size": shared, "qkv_bias": model.add_qkv_bias}
    settings.pop("head_dim")  # always the hidden size divided by the number of heads
    return settings


def _settings_3(model: ModelConfig) -> dict[str, Any]:
    return {**_settings(model), "attention_bias": model.add_qkv_bias}


def _model(config: Mapping[str, Any]) -> dict[str, Any]:
    experts = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
    return {
        **common_model(config),
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "moe_router_pre_softmax": not flag(config, "norm_topk_prob", default=False),
    }


def _model_2(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_model(config),
        "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
        "add_qkv_bias": flag(config, "qkv_bias", default=True),
    }


def _model_3(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_model(config), "add_qkv_bias": flag(config, "attention_bias", default=False)}


def _refused(config: Mapping[str, Any]) -> str:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        return "decoder_sparse_step and mlp_only_layers: dense layers between MoE layers are not supported"
    if config.get("attention_bias"):
        return "attention_bias=true: a bias in the output projection of attention is not supported"
    length = config.get("max_position_embeddings", 0)
    return scaled_rope(config) or limited_window({"use_sliding_window": False, **config}, length)


QWEN2 = Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    rules=(*_ROUTED, *_SHARED),
    fixed={**ONLY_MOE_LAYERS, "qk_layernorm": False, "moe_shared_expert_gate": True},
    settings=_settings_2,
    model=_model_2,
    refused=_refused,
)
QWEN3 = replace(
    QWEN2,
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    rules=_ROUTED,
    fixed={
        **ONLY_MOE_LAYERS,
        "qk_layernorm": True,
        "add_qkv_bias": False,
        "moe_shared_expert_intermediate_size": None,
        "moe_shared_expert_gate": False,
    },
    settings=_settings_3,
    model=_model_3,
)
