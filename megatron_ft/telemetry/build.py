"""Which sinks a job has, in the order they are served and closed."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TextIO

from megatron_ft.config.job import JobConfig
from megatron_ft.events import Record
from megatron_ft.telemetry.alerts import AlertSink, free_share, limits_of
from megatron_ft.telemetry.jsonl import JsonlSink
from megatron_ft.telemetry.read import EVENTS_FILE, METRICS_FILE, first_metrics
from megatron_ft.telemetry.sink import Sink
from megatron_ft.telemetry.state import RunState
from megatron_ft.telemetry.summary import SummarySink
from megatron_ft.telemetry.terminal import TerminalSink


def build_sinks(
    config: JobConfig,
    run_dir: Path,
    *,
    world_size: int,
    clock: Callable[[], float],
    stream: TextIO | None,
) -> tuple[list[Sink], list[Record]]:
    """The sinks, and what opening them has to report.

    The order matters at the end: a sink that cannot close tells those that come after it, so the
    events file and the terminal are last.

    Raises:
        OSError: a log file cannot be opened.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    metrics = JsonlSink(run_dir / METRICS_FILE, metrics=True)
    events = JsonlSink(run_dir / EVENTS_FILE, metrics=False)
    healed: list[Record] = [log.healed for log in (metrics, events) if log.healed is not None]
    earlier = first_metrics(run_dir)
    first_loss = float(earlier.values["loss"]) if earlier is not None else None

    def state() -> RunState:
        return RunState(
            time_opened_seconds=clock(), train_iterations=config.training.train_iterations, first_loss=first_loss
        )

    summary = SummarySink(run_dir, world_size=world_size, state=state())
    terminal = TerminalSink(config.telemetry.progress, title=run_dir.name, state=state(), clock=clock, stream=stream)
    alerts = AlertSink(limits_of(config.telemetry), free_disk_share=partial(free_share, run_dir))
    return [*_wandb(config, run_dir), alerts, metrics, summary, events, terminal], healed


def _wandb(config: JobConfig, run_dir: Path) -> list[Sink]:
    if config.telemetry.wandb == "disabled":
        return []
    from megatron_ft.telemetry.wandb_sink import WandbSink

    return [WandbSink(config.telemetry, run_dir, job=dataclasses.asdict(config))]
