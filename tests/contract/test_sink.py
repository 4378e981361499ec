"""Tests the properties that every sink must have."""

import io
import time
from pathlib import Path

import pytest
import yaml

from megatron_ft import events
from megatron_ft.config.job import JobConfig
from megatron_ft.config.telemetry import TelemetryConfig
from megatron_ft.events import Record
from megatron_ft.telemetry.sink_set import open_sink
from megatron_ft.telemetry.sinks.base import Outcome, Sink, SinkContext
from tests.helpers.example_records import example_of

CONF = Path(__file__).parents[2] / "conf" / "telemetry"
OUTSIDE = Path(__file__).parents[1] / "helpers" / "counting_sink.yaml"
SINKS = {
    **TelemetryConfig().sinks,
    "terminal-live": TelemetryConfig().sinks["terminal"],
    **yaml.safe_load((CONF / "tensorboard.yaml").read_text())["sinks"],
    **yaml.safe_load(OUTSIDE.read_text())["sinks"],
}
"""All sinks of the project, each as an entry of ``telemetry.sinks``, and one sink that is not part of the package."""
EXAMPLES: list[Record] = [
    *(example_of(kind) for kind in events.RECORDS.values()),
    events.RunStarted(run_name="trial", model="moe_micro", world_size=2),
    events.Metrics(iteration=1, values={"loss": 5.0}),
    events.Metrics(iteration=2, values={"loss": float("nan"), "grad_norm": float("inf"), "learning_rate": 0.0}),
    events.ExpertLoad(iteration=2, layers=((3, 1), (0, 0))),
    events.ExpertLoad(iteration=2, layers=()),
    events.ExpertLoad(iteration=2, layers=((7,) * 300,) * 40, layer_numbers=tuple(range(2, 42))),
    events.Evaluation(iteration=2, loss=float("inf")),
    events.IterationSkipped(iteration=3, reason="non_finite", values={"loss": float("nan")}),
    events.RankFailed(rank=1, node=0, signal="SIGKILL", first=True),
    events.RankFailed(rank=0, exit_code=1, error="ValueError: [bold]not markup[/bold]"),
    events.CheckpointLoaded(iteration=3),
    events.RunFinished(exit_code=0, reason="all iterations done"),
    events.RunStopped(exit_code=130, reason="SIGINT"),
]
ENDED = Outcome(exit_code=0, reason="all iterations done", time_unix_seconds=100.0)


@pytest.fixture(params=SINKS)
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> Sink:
    config = JobConfig()
    config.telemetry.wandb = "offline"
    config.telemetry.progress = "live" if request.param == "terminal-live" else "plain"
    if request.param == "wandb":
        request.applymarker(pytest.mark.wandb)
        pytest.importorskip("wandb")
    if request.param == "tensorboard":
        pytest.importorskip("tensorboard")
    context = SinkContext(
        config=config, run_dir=tmp_path, world_size=2, clock=time.time, stream=io.StringIO(), first_loss=None
    )
    opened = open_sink(request.param, SINKS[request.param], context)
    assert opened is not None
    return opened


def test_takes_every_kind_of_record_and_closes(sink: Sink) -> None:
    for record in EXAMPLES:
        sink.write(record)
    assert sink.num_lost_records == 0
    sink.close(ENDED)


def test_closes_without_a_record(sink: Sink) -> None:
    sink.close(ENDED)


def test_a_record_costs_less_than_a_millisecond(sink: Sink) -> None:
    """The CPU time is that of the calling thread, because a sink must not delay training."""
    load = events.ExpertLoad(iteration=1, layers=((100,) * 16,) * 8)
    start = time.thread_time()
    for iteration in range(1, 201):
        sink.write(events.Metrics(iteration=iteration, values={"loss": 5.0, "tokens": 2048, "iteration_seconds": 0.5}))
        sink.write(load)
    cost_seconds = (time.thread_time() - start) / 400
    sink.close(ENDED)
    assert cost_seconds < 1e-3, f"{cost_seconds * 1e6:.0f} microseconds per record"


def test_the_default_file_names_the_same_sinks() -> None:
    assert yaml.safe_load((CONF / "default.yaml").read_text(encoding="utf-8"))["sinks"] == TelemetryConfig().sinks
