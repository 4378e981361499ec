"""Tests sinks and events of other packages without a job. ``tests/functional/test_additions.py`` runs a job with
them."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.config.validate import validate
from megatron_ft.errors import ConfigError
from megatron_ft.telemetry import open_sinks
from megatron_ft.telemetry.read import read_events
from megatron_ft.telemetry.report.files import RunFiles
from megatron_ft.telemetry.report.model import RunReport
from megatron_ft.telemetry.report.page import render

from .conftest import FakeClock

USE_EVENT = """
import io, sys
from pathlib import Path

from megatron_ft.config.job import JobConfig
from megatron_ft.telemetry import open_sinks
from megatron_ft.telemetry.read import read_events
from tests.helpers.coffee_event import CoffeeFinished
from tools.document_telemetry import events_table

config, run_dir, stream = JobConfig(), Path(sys.argv[1]), io.StringIO()
config.telemetry.wandb, config.telemetry.progress = "disabled", "plain"
sinks = open_sinks(config, run_dir, world_size=2, stream=stream)
sinks.write({"kind": "coffee_finished", "cups": 12})
sinks.close(0, "done")
assert isinstance(read_events(run_dir)[0], CoffeeFinished)
print(stream.getvalue())
print(events_table())
"""


def test_an_event_is_one_class(tmp_path: Path) -> None:
    command = [sys.executable, "-c", USE_EVENT, str(tmp_path / "r")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    assert "! no coffee after 12 cups" in done.stdout
    assert "| **`coffee_finished`** | | | *The coffee machine of the data centre is empty.* |" in done.stdout
    assert "| | `cups` | int | Cups since it was filled. |" in done.stdout


def test_a_run_with_an_event_from_outside_has_a_page(config: JobConfig, run_dir: Path, clock: FakeClock) -> None:
    """The page is made in a process that does not know the event's class, like that of ``tools.report``."""
    sinks = open_sinks(config, run_dir, world_size=2, clock=clock, stream=io.StringIO())
    sinks.close(0, "done")
    with (run_dir / "events.jsonl").open("a") as lines:
        lines.write(json.dumps({"kind": "lunch_served", "menu": "<soup>", "time_unix_seconds": 1.7e9}) + "\n")
    (*_, lunch) = read_events(run_dir)
    assert lunch.kind == "lunch_served" and lunch.time_unix_seconds == 1.7e9
    page = render(RunReport.of(RunFiles.read(run_dir)))
    assert "2023-11-14 22:13:20" in page and 'lunch served: menu="&lt;soup&gt;"' in page


def test_a_sink_can_be_left_out(config: JobConfig, run_dir: Path, clock: FakeClock) -> None:
    config.telemetry.sinks["summary"] = None
    open_sinks(config, run_dir, world_size=2, clock=clock, stream=io.StringIO()).close(0, "done")
    assert [event.kind for event in read_events(run_dir)] == ["run_finished"]
    assert not (run_dir / "summary.json").exists()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"_target_": "nowhere.Sink"}, r"telemetry\.sinks\.other\._target_=.*must be importable"),
        ({"_target_": "pathlib.Path"}, r"telemetry\.sinks\.other\._target_=.*must name a subclass of Sink"),
        (
            {"_target_": "megatron_ft.telemetry.sinks.jsonl.JsonlSink", "metrics": True, "mood": 1},
            r"telemetry\.sinks\.other=.*must have exactly the keys that JsonlSink\.open accepts: .*mood",
        ),
    ],
)
def test_what_is_no_sink_is_refused_at_the_start(
    config: JobConfig, run_dir: Path, spec: dict[str, object], message: str
) -> None:
    config.telemetry.sinks["other"] = spec
    with pytest.raises(ConfigError, match=message):
        open_sinks(config, run_dir, world_size=2, stream=io.StringIO())


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda sinks: sinks.update(other="a.B"), r"telemetry\.sinks\.other"),
        (lambda sinks: sinks.update(other={"file": "x"}), r"telemetry\.sinks\.other"),
        (lambda sinks: sinks.update(events=None), r"telemetry\.sinks\.events"),
        (lambda sinks: sinks.pop("metrics"), r"telemetry\.sinks\.metrics"),
    ],
)
def test_what_cannot_be_a_sink_is_refused_by_its_key(
    config: JobConfig, change: Callable[[dict[str, object]], object], key: str
) -> None:
    change(config.telemetry.sinks)
    with pytest.raises(ConfigError, match=key):
        validate(config)


def test_a_configuration_of_an_older_run_has_the_same_sinks(config: JobConfig) -> None:
    from megatron_ft.config.serialize import from_dict, to_dict

    values = json.loads(json.dumps(to_dict(config)))
    del values["telemetry"]["sinks"]
    assert from_dict(values) == config
