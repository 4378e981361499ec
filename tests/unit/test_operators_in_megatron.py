"""Compares parameter counts, by kind of operator, and tensors of checkpoints with models that Megatron-Core builds."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.config.model import ModelConfig
from megatron_ft.mcore.convert.model_tensors import tensors_of
from megatron_ft.operators import operators_of

ROOT = Path(__file__).parents[2]

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "vocab_size": 128,
    "ffn_hidden_size": 48,
    "moe_ffn_hidden_size": 40,
    "num_moe_experts": 4,
}
GPT2_LIKE = {
    "untie_embeddings_and_output_weights": False,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "activation": "gelu",
    "add_bias_linear": True,
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
}
LATENT = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 10,
}
DENSE: dict[str, Any] = {"num_moe_experts": None, "moe_ffn_hidden_size": None}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "gpt2_like": GPT2_LIKE,
    "grouped_queries_and_channels": {"num_query_groups": 2, "kv_channels": 16, "qk_layernorm": True},
    "shared_experts_with_gate": {
        "moe_shared_expert_intermediate_size": 24,
        "moe_shared_expert_gate": True,
        "add_qkv_bias": True,
        "moe_first_dense_layers": 1,
    },
    "every_second_layer": {"num_layers": 4, "moe_layer_freq": 2, "max_position_embeddings": 64},
    "latent_attention": LATENT,
    "latent_attention_with_low_rank_queries": {**LATENT, "q_lora_rank": 12, "moe_first_dense_layers": 1},
    "dense": DENSE,
    "dense_gpt2_like": {**GPT2_LIKE, **DENSE},
    "dense_latent_attention": {**LATENT, **DENSE, "normalization": "LayerNorm"},
    "latent_attention_with_biases": {
        **LATENT,
        "q_lora_rank": 12,
        "normalization": "LayerNorm",
        "add_bias_linear": True,
    },
    "latent_attention_without_norms": {**LATENT, "qk_layernorm": False, "q_lora_rank": 12},
    "gated_with_biases": {**GPT2_LIKE, "qk_layernorm": True, "gated_linear_unit": True, "moe_first_dense_layers": 1},
    "expert_bias": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "shared_experts_not_gated": {"moe_shared_expert_intermediate_size": 24, "gated_linear_unit": False},
}


@pytest.fixture(scope="module")
def built() -> dict[str, dict[str, Any]]:
    """Return the counts and tensors of all variants, which are built in one separate process."""
    models = [{**SMALL, **variant} for variant in VARIANTS.values()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.count_parameters"],
        input=json.dumps(models),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(VARIANTS, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_counts_are_megatrons(name: str, built: dict[str, dict[str, Any]]) -> None:
    ours: Counter[str] = Counter()
    for operator in operators_of(ModelConfig(**{**SMALL, **VARIANTS[name]})):
        ours[operator.id.kind] += operator.num_parameters
    assert dict(ours) == built[name]["counts"]


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_the_tensors_of_checkpoints_are_megatrons(name: str, built: dict[str, dict[str, Any]]) -> None:
    ours = {own: list(shape) for own, shape in tensors_of(ModelConfig(**{**SMALL, **VARIANTS[name]}))}
    assert ours == built[name]["tensors"]
