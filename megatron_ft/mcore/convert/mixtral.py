"""Conversion table of Mixtral (arXiv 2401.04088), which has a softmax over the chosen experts, and no shared expert."""

from collections.abc import Mapping
from typing import Any

from megatron_ft.config.model import ModelConfig
from megatron_ft.mcore.convert.family import (
    LAYER,
    ONLY_MOE_LAYERS,
    THEIR_LAYER,
    Family,
    attention_rules,
    common_model,
    common_settings,
    expert_width,
    limited_window,
    mlp_rules,
    router_rule,
    scaled_rope,
)

_BLOCK = f"{THEIR_LAYER}.block_sparse_moe"


def _settings(model: ModelConfig) -> dict[str, Any]:
    return {
        **common_settings(model),
        "intermediate_size": expert_width(model),
        "num_local_experts": model.num_moe_experts,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
    }


def _model(config: Mapping[str, Any]) -> dict[str, Any]:
    width = config["intermediate_size"]
    keys = {"num_moe_experts": config["num_local_experts"], "moe_ffn_hidden_size": width, "ffn_hidden_size": width}
    return {**common_model(config), **keys}


def _refused(config: Mapping[str, Any]) -> str:
    return scaled_rope(config) or limited_window(config, config.get("max_position_embeddings", 0))


FAMILY = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    rules=(
        *attention_rules(),
        router_rule(f"{_BLOCK}.gate.weight"),
        *mlp_rules(
            f"{LAYER}.mlp.experts.experts.{{expert}}",
            f"{_BLOCK}.experts.{{expert}}",
            ("w1", "w3", "w2"),
            expert_width,
            kind="moe",
        ),
    ),
    fixed={
        **ONLY_MOE_LAYERS,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "moe_shared_expert_intermediate_size": None,
        "moe_router_pre_softmax": False,
    },
    settings=_settings,
    model=_model,
    refused=_refused,
)
