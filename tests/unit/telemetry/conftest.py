"""Records of a small made-up run."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.telemetry.metrics import FROM_EVENTS, METRICS

RUN_STARTED = {"kind": "run_started", "run_name": "trial", "model": "moe_micro", "world_size": 2}


def metrics_record(iteration: int, loss: float | str | None = None) -> dict[str, object]:
    """Metrics of one iteration; the loss falls with it."""
    return {
        "kind": "metrics",
        "iteration": iteration,
        "loss": 5.0 / iteration if loss is None else loss,
        "grad_norm": 1.0 + 0.1 * iteration,
        "learning_rate": 1e-3,
        "tokens": 2048,
        "iteration_seconds": 0.5,
        "tokens_per_second": 4096.0,
    }


def run_records(first: int, last: int, *, loss_offset: float = 0.0) -> Iterator[dict[str, object]]:
    """Metrics and expert load of iterations ``first`` to ``last``, an evaluation of every fourth."""
    for iteration in range(first, last + 1):
        yield metrics_record(iteration, 5.0 / iteration + loss_offset)
        yield {"kind": "expert_load", "iteration": iteration, "layers": [[1, 2, 3, 2], [8, 0, 0, 0]]}
        if iteration % 4 == 0:
            yield {"kind": "evaluation", "iteration": iteration, "loss": 5.1 / iteration}


class FakeClock:
    """A wall clock that moves one second per look."""

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


_FROM_EVENTS = re.compile("|".join(re.sub("<[a-z]+>", "[a-z0-9]+", name) for name in FROM_EVENTS))


def is_listed(name: str) -> bool:
    """Whether a metric is in one of the lists of ``metrics.py``."""
    return name in METRICS or _FROM_EVENTS.fullmatch(name) is not None
