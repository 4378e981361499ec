"""Tests the conversion of a configuration to plain values and back, and which values are refused."""

import json
from typing import Any

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.config.model import ModelConfig
from megatron_ft.config.serialize import from_dict, to_dict
from megatron_ft.errors import ConfigError


def test_round_trip_through_json() -> None:
    config = JobConfig(model=ModelConfig(num_query_groups=2, moe_z_loss_coeff=None))
    config.data.train_weights = [1.0, 2.0]
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_missing_keys_take_defaults_and_integers_serve_as_floats() -> None:
    config = from_dict({"optimizer": {"lr": 1}})
    assert config.optimizer.lr == 1.0 and isinstance(config.optimizer.lr, float)
    assert config.model == ModelConfig()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modle": {}}, "modle=.*not a known key.*'model'"),
        ({"model": {"num_layer": 3}}, "model.num_layer=3.*'num_layers'"),
        ({"model": {"num_layers": "3"}}, "model.num_layers='3'.*type int"),
        ({"model": {"num_layers": True}}, "model.num_layers=True.*type int"),
        ({"model": {"num_query_groups": 1.5}}, "int or null"),
        ({"data": {"train": "x"}}, "list of str"),
        ({"model": 3}, "must be a mapping"),
    ],
)
def test_foreign_keys_and_types_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(values)
