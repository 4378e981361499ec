"""Tests that folders of real runs with version 1 of the records can be read."""

from pathlib import Path

import pytest

from megatron_ft.events import RecoveryStarted
from megatron_ft.telemetry.goodput import Goodput
from megatron_ft.telemetry.read import read_events, read_metrics
from megatron_ft.telemetry.report.files import RunFiles
from megatron_ft.telemetry.report.model import RunReport
from megatron_ft.telemetry.report.page import render
from megatron_ft.telemetry.report.timeline import Timeline
from megatron_ft.telemetry.run_figures import RunFigures

RUNS = Path(__file__).parents[2] / "fixtures" / "run_folders"


def test_every_recovery_has_its_strategy() -> None:
    started = {
        run: [record for record in read_events(RUNS / run) if isinstance(record, RecoveryStarted)]
        for run in ("replicas", "localized", "window")
    }
    assert [(each.generation, each.strategy, each.iteration) for each in started["replicas"]] == [
        (1, "living_state", 5)
    ]
    assert [(each.generation, each.strategy, each.iteration) for each in started["localized"]] == [
        (1, "localized_replay", 13)
    ]
    found = [(each.generation, each.strategy, each.source) for each in started["window"]]
    assert found == [(0, "rollback", "memory"), (1, "rollback", None), (0, "checkpoint", None)]


@pytest.mark.parametrize(
    ("run", "recoveries"),
    [
        ("replicas", [(1, "living_state", 5, 0)]),
        ("localized", [(1, "localized_replay", 13, 1)]),
        ("window", [(1, "rollback", 10, 1), (0, "checkpoint", 20, 0)]),
    ],
)
def test_the_page_tells_the_recoveries(run: str, recoveries: list[tuple[int, str, int, int]]) -> None:
    files = RunFiles.read(RUNS / run)
    report = RunReport.of(files)
    found = [(each.generation, each.strategy, each.iteration, each.num_replayed) for each in report.recoveries]
    assert [each[:3] for each in found] == [each[:3] for each in recoveries]
    assert (found[0][3] > 0) == (run != "replicas")
    assert Timeline.of(report.recoveries[0]) is not None
    assert report.outcome.level == "good" and "Details of each recovery" in render(report)
    assert len(read_metrics(RUNS / run)) == report.iteration


@pytest.mark.parametrize(
    ("run", "strategy"), [("replicas", "living_state"), ("localized", "localized_replay"), ("window", "rollback")]
)
def test_the_time_of_a_recovery_is_under_its_strategy(run: str, strategy: str) -> None:
    files, figures, found = RunFiles.read(RUNS / run), RunFigures(), {}
    for record in sorted((*files.events, *files.metrics), key=lambda record: record.time_unix_seconds or 0.0):
        figures.take(record)
        found |= {name: value for name, value in figures.hand_out().items() if name.startswith("recovery/")}
    assert f"recovery/{strategy}_seconds" in found
    goodput = Goodput.measure((*files.events, *files.metrics))
    assert goodput.num_interruptions == (2 if run == "window" else 1) and goodput.recovery_seconds > 0
