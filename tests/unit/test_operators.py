"""Tests parameter counts: published totals, and the division into operators."""

from pathlib import Path

import pytest
import yaml

from megatron_ft.config.model import ModelConfig
from megatron_ft.operators import (
    OperatorId,
    is_moe_layer,
    num_active_parameters,
    num_parameters,
    operators_of,
    padded_vocab_size,
)

MODELS = Path(__file__).parents[2] / "conf" / "model"


def read(name: str) -> ModelConfig:
    values = yaml.safe_load((MODELS / f"{name}.yaml").read_text())
    if "layernorm_epsilon" in values:
        values["layernorm_epsilon"] = float(values["layernorm_epsilon"])
    return ModelConfig(**values)


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("mixtral_8x7b", 46_702_792_704),
        ("deepseek_moe_16b", 16_375_728_128),
        ("qwen_moe", 14_315_784_192),
    ],
)
def test_open_weights_have_exactly_these_counts(name: str, exact: int) -> None:
    assert num_parameters(operators_of(read(name))) == exact


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.yaml")), ids=lambda path: path.stem)
def test_counts_agree_with_what_the_authors_print(path: Path) -> None:
    model = read(path.stem)
    if model.published_parameters is None:
        pytest.skip("a model of this project's own")
    operators = operators_of(model)
    assert num_parameters(operators) == pytest.approx(model.published_parameters, rel=0.025)
    if model.published_active_parameters is not None:
        active = num_active_parameters(model, operators)
        assert active == pytest.approx(model.published_active_parameters, rel=0.015)


def test_operators_are_cut_by_layer_gate_and_expert() -> None:
    model = ModelConfig(num_layers=2, moe_layer_freq=2, num_moe_experts=3)
    ids = [operator.id for operator in operators_of(model, 257)]
    assert ids == [
        OperatorId(layer=0, kind="embedding"),
        OperatorId(layer=1, kind="non_expert"),
        OperatorId(layer=2, kind="non_expert"),
        OperatorId(layer=2, kind="gate"),
        *(OperatorId(layer=2, kind="expert", expert=expert) for expert in range(3)),
        OperatorId(layer=3, kind="head"),
    ]


def test_first_layers_stay_dense() -> None:
    model = ModelConfig(num_layers=4, moe_first_dense_layers=1)
    assert [is_moe_layer(model, layer) for layer in (1, 2, 3, 4)] == [False, True, True, True]


def test_vocabulary_is_padded() -> None:
    assert padded_vocab_size(ModelConfig(), 257) == 384
    assert padded_vocab_size(ModelConfig(vocab_size=1000), 257) == 1024
