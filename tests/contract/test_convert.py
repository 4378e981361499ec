"""Tests every family of convertible models: its table is complete and is inverted without a changed bit, and its
``config.json`` describes the model from which it was made."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_ft.config.model import ModelConfig
from megatron_ft.errors import CheckpointError
from megatron_ft.mcore.convert.converter import FAMILIES
from megatron_ft.mcore.convert.family import Family
from megatron_ft.mcore.convert.folder import CONFIG, ONLY_FILE
from megatron_ft.mcore.convert.model_tensors import tensors_of

SMALL = ModelConfig(
    num_layers=3,
    hidden_size=8,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=6,
    seq_length=32,
    vocab_size=40,
    rotary_base=500_000,
    layernorm_epsilon=1e-6,
    ffn_hidden_size=12,
    moe_ffn_hidden_size=12,
    num_moe_experts=3,
    moe_router_topk=2,
)
DEEPSEEK = replace(SMALL, moe_first_dense_layers=1, moe_shared_expert_intermediate_size=24, moe_router_pre_softmax=True)
LATENT = replace(
    DEEPSEEK,
    num_query_groups=None,
    kv_channels=None,
    multi_latent_attention=True,
    qk_layernorm=True,
    kv_lora_rank=6,
    qk_head_dim=4,
    qk_pos_emb_head_dim=2,
    v_head_dim=3,
)
MODELS: dict[str, tuple[ModelConfig, ...]] = {
    "mixtral": (SMALL, replace(SMALL, untie_embeddings_and_output_weights=False)),
    "qwen2_moe": tuple(
        replace(
            SMALL,
            kv_channels=2,  # config.json has no key for another width
            moe_shared_expert_intermediate_size=10,
            moe_shared_expert_gate=True,
            add_qkv_bias=has_bias,
            moe_router_pre_softmax=has_bias,
        )
        for has_bias in (True, False)
    ),
    "qwen3_moe": (replace(SMALL, qk_layernorm=True), replace(SMALL, qk_layernorm=True, moe_router_pre_softmax=True)),
    "deepseek": (DEEPSEEK, replace(SMALL, moe_router_topk_scaling_factor=2.5, moe_router_pre_softmax=True)),
    "deepseek_v2": (
        replace(
            LATENT,
            rope_type="yarn",
            rotary_scaling_factor=8.0,
            original_max_position_embeddings=16,
            beta_fast=16.0,
            mscale=0.707,
            mscale_all_dim=0.5,
        ),
        replace(LATENT, q_lora_rank=5, moe_first_dense_layers=0, moe_router_pre_softmax=False),
    ),
}
"""Models of each family. A new family is one row here."""
CASES = [
    pytest.param(FAMILIES[name], model, id=f"{name}-{n}") for name in MODELS for n, model in enumerate(MODELS[name])
]


def write_folder(path: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Write a Hugging Face folder of one file with random weights of the first Mixtral model."""
    family, generator = FAMILIES["mixtral"], torch.Generator().manual_seed(3)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype)
        for rule in family.tensors(SMALL)
        for name, shape in zip(rule.theirs, rule.their_shapes(SMALL), strict=True)
    }
    save_file(tensors, path / ONLY_FILE)
    (path / CONFIG).write_text(json.dumps({"model_type": family.name, **family.settings(SMALL)}))


def test_every_family_has_a_row() -> None:
    assert MODELS.keys() == FAMILIES.keys()


@pytest.mark.parametrize(("family", "model"), CASES)
def test_no_tensor_is_named_twice(family: Family, model: ModelConfig) -> None:
    rules = family.tensors(model)
    ours, theirs = [rule.ours for rule in rules], [name for rule in rules for name in rule.theirs]
    assert len(ours) == len(set(ours)) and len(theirs) == len(set(theirs))
    assert len(ours) > model.num_layers * (model.num_moe_experts or 0) * 3
    assert not any("{" in name for name in (*ours, *theirs))


@pytest.mark.parametrize(("family", "model"), CASES)
def test_a_family_names_exactly_the_tensors_of_its_models(family: Family, model: ModelConfig) -> None:
    assert {rule.ours: rule.shape(model) for rule in family.tensors(model)} == dict(tensors_of(model))


@pytest.mark.parametrize(("family", "model"), CASES)
def test_a_conversion_can_be_inverted_without_a_changed_bit(family: Family, model: ModelConfig) -> None:
    generator = torch.Generator().manual_seed(7)
    for rule in family.tensors(model):
        shape = rule.shape(model)
        tensor = torch.randn(shape, generator=generator)
        parts = rule.layout.split(tensor, model)
        assert tuple(tuple(part.shape) for part in parts) == rule.their_shapes(model)
        assert sum(part.numel() for part in parts) == tensor.numel(), "a value is lost or repeated"
        merged = rule.layout.merge(parts, model)
        assert tuple(merged.shape) == shape and torch.equal(merged, tensor)


@pytest.mark.parametrize(("family", "model"), CASES)
def test_config_json_describes_the_model(family: Family, model: ModelConfig) -> None:
    config = {"model_type": family.name, **family.settings(model)}
    found = family.read_model(config, "config.json")
    different = [field.name for field in fields(model) if getattr(found, field.name) != getattr(model, field.name)]
    assert set(different) <= {"moe_aux_loss_coeff", "moe_z_loss_coeff", "init_method_std"}, (
        "only training is not described"
    )
    # Newer versions of transformers store rotary embeddings elsewhere.
    scaling = config.pop("rope_scaling", None) or {"rope_type": "default"}
    config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), **scaling}
    assert family.read_model(config, "config.json") == found


@pytest.mark.parametrize(("family", "model"), CASES)
def test_what_cannot_be_expressed_is_refused(family: Family, model: ModelConfig) -> None:
    for changes in (
        {"normalization": "LayerNorm"},
        {"moe_router_score_function": "sigmoid"},
        {"multi_latent_attention": not model.multi_latent_attention},
        {"qk_layernorm": not model.qk_layernorm},
    ):
        key = next(iter(changes))
        with pytest.raises(CheckpointError, match=rf"model\.{key}=.*must be"):
            family.check(replace(model, **changes))


@pytest.mark.parametrize(("family", "model"), CASES)
@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("rope_scaling", {"type": "longrope", "factor": 4.0}, "longrope"),
        ("num_hidden_layers", "3", "must be an integer above 0"),
        ("num_hidden_layers", None, "num_hidden_layers"),
        ("rms_norm_eps", "small", "layernorm_epsilon"),
        ("tie_word_embeddings", "yes", "must be true or false"),
        ("hidden_act", "gelu", "model.activation"),
        ("num_attention_heads", 0, "num_attention_heads"),
    ],
)
def test_an_unsupported_config_json_is_refused(
    family: Family, model: ModelConfig, entry: str, value: object, message: str
) -> None:
    config = {"model_type": family.name, **family.settings(model), entry: value}
    with pytest.raises(CheckpointError, match=message):
        family.read_model(config, "config.json")
    config.pop("hidden_size")
    with pytest.raises(CheckpointError):
        family.read_model(config, "config.json")


@pytest.mark.parametrize("name", sorted(MODELS))
def test_dense_layers_and_scaled_positions_are_refused_where_they_cannot_be_expressed(name: str) -> None:
    family, model = FAMILIES[name], MODELS[name][0]
    config = {"model_type": name, **family.settings(model), "rope_scaling": {"type": "yarn", "factor": 4.0}}
    if name == "deepseek_v2":
        assert family.read_model(config, "config.json").rotary_scaling_factor == 4.0
        config["rope_scaling"] = {"type": "yarn", "factor": "4"}
        with pytest.raises(CheckpointError, match="must have the entry factor, and only numbers"):
            family.read_model(config, "config.json")
    else:
        with pytest.raises(CheckpointError, match="yarn"):
            family.read_model(config, "config.json")
    if not name.startswith("deepseek"):
        with pytest.raises(CheckpointError, match=r"model\.moe_first_dense_layers=1: must be 0"):
            family.check(replace(model, moe_first_dense_layers=1))


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("topk_method", "group_limited_greedy", "only the choice among all experts"),
        ("scoring_func", "sigmoid", "only the choice among all experts"),
        ("moe_layer_freq", 2, "dense layers between MoE layers"),
        ("attention_bias", True, "biases are not supported"),
        ("q_lora_rank", 0.5, "must be null or an integer"),
        ("kv_lora_rank", 0, "must be an integer above 0"),
        ("first_k_dense_replace", -1, "must be null or an integer"),
    ],
)
def test_other_kinds_of_deepseek_are_refused(entry: str, value: object, message: str) -> None:
    family = FAMILIES["deepseek_v2"]
    config = {"model_type": family.name, **family.settings(MODELS["deepseek_v2"][0]), entry: value}
    with pytest.raises(CheckpointError, match=message):
        family.read_model(config, "config.json")
