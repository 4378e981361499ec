"""Tests the default lengths of the learning-rate schedule."""

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.config.validate import validate


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, 10),
        ({"training.train_iterations": 30}, 5),
        ({"training.train_iterations": 1}, 0),
        ({"training.train_iterations": 600, "optimizer.lr_decay_iterations": 12}, 2),
        ({"training.train_iterations": 30, "optimizer.lr_warmup_iterations": 29}, 29),
    ],
)
def test_default_warm_up_fits_the_run(overrides: dict[str, int], expected: int) -> None:
    config = JobConfig()
    for key, value in overrides.items():
        group, name = key.split(".")
        setattr(getattr(config, group), name, value)
    validate(config)
    assert config.optimizer.num_warmup_iterations(config.training.train_iterations) == expected
