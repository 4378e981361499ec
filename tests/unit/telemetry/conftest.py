"""Provides a clock, a configuration and a folder of a small run."""

import re
from pathlib import Path

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.planning.recovery.costs import STRATEGIES
from megatron_ft.telemetry.metrics import FROM_EVENTS, METRICS


class FakeClock:
    """Wall clock that advances one second with each reading."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


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


_STRATEGY = "|".join(("unknown", *(strategy.name for strategy in STRATEGIES)))
_FROM_EVENTS = re.compile(
    "|".join(re.sub("<[a-z]+>", "[a-z0-9]+", name.replace("<strategy>", f"({_STRATEGY})")) for name in FROM_EVENTS)
)


def is_listed(name: str) -> bool:
    """Return whether a metric is in one of the lists of ``metrics.py``."""
    return name in METRICS or _FROM_EVENTS.fullmatch(name) is not None
