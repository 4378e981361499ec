"""The configuration and the folder of a small run."""

from pathlib import Path

import pytest

from megatron_ft.config.job import JobConfig


@pytest.fixture
def config() -> JobConfig:
    config = JobConfig()
    config.telemetry.wandb = "disabled"
    config.telemetry.progress = "plain"
    config.training.train_iterations = 12
    return config


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "trial-001"
