"""Tests wandb: login detection without network, one run for all restarts, and failures that do not stop training."""

import builtins
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.telemetry import open_sinks
from megatron_ft.telemetry.read import read_events
from megatron_ft.telemetry.sinks.queued import Reported
from megatron_ft.telemetry.sinks.wandb import ID_FILE, _wandb_mode, run_id
from megatron_ft.testing.made_up_runs import RUN_STARTED, run_records
from tests.helpers.disk import note_steps

from .conftest import FakeClock, is_listed

WANDB_OWN = {"iteration", "_step", "_runtime", "_timestamp"}
KILLED_ATTEMPT = """
import io, os, signal, sys
from pathlib import Path
from megatron_ft.config.job import JobConfig
from megatron_ft.telemetry import open_sinks
from megatron_ft.testing.made_up_runs import RUN_STARTED, run_records

config = JobConfig()
config.telemetry.wandb = "offline"
sinks = open_sinks(config, Path(sys.argv[1]), world_size=2, stream=io.StringIO())
for record in [RUN_STARTED, *run_records(1, 7)]:
    sinks.write(record)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("asked", "environment", "login", "mode"),
    [
        ("auto", {}, None, "offline"),
        ("auto", {"WANDB_API_KEY": "k" * 40}, None, "online"),
        ("auto", {}, "machine api.wandb.ai login user password key", "online"),
        ("auto", {}, "machine example.org login user password key", "offline"),
        (
            "auto",
            {"WANDB_BASE_URL": "https://wandb.example.org:8443"},
            "machine wandb.example.org login u password k",
            "online",
        ),
        ("auto", {"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "offline"}, None, "offline"),
        ("offline", {"WANDB_API_KEY": "k" * 40}, None, "offline"),
        ("online", {}, None, "online"),
    ],
)
def test_mode(asked: str, environment: Mapping[str, str], login: str | None, mode: str, tmp_path: Path) -> None:
    if login is not None:
        (tmp_path / ".netrc").write_text(login + "\n")
        (tmp_path / ".netrc").chmod(0o600)
    assert _wandb_mode(asked, {"HOME": str(tmp_path)} | dict(environment)) == mode


def test_the_login_file_may_lie_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "login").write_text("machine api.wandb.ai login user password key\n")
    assert _wandb_mode("auto", {"HOME": "/nowhere", "NETRC": str(tmp_path / "login")}) == "online"


def test_the_run_id_is_chosen_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = note_steps(monkeypatch)
    first = run_id(tmp_path)
    assert steps == [f"fsync {ID_FILE}", f"rename {ID_FILE}", f"fsync {tmp_path.name}"], "a power cut takes no run away"
    assert run_id(tmp_path) == first == (tmp_path / ID_FILE).read_text().strip()
    assert len(first) == 8 and first.isalnum()


def test_wandb_missing_stops_nothing_and_is_reported_once(
    config: JobConfig, run_dir: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def without_wandb(name: str, *arguments: object, **keywords: object) -> object:
        if name == "wandb":
            raise ModuleNotFoundError("No module named 'wandb'")
        return real_import(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_wandb)
    config.telemetry.wandb = "offline"
    stream = io.StringIO()
    sinks = open_sinks(config, run_dir, world_size=2, clock=clock, stream=stream)
    for record in [RUN_STARTED, *run_records(1, 8)]:
        sinks.write(record)
    sinks.close(0, "done")
    assert (
        stream.getvalue().count("sink wandb no longer accepts records: ModuleNotFoundError: No module named 'wandb'")
        == 1
    )
    assert [event.kind for event in read_events(run_dir)].count("sink_failed") == 1
    assert "wandb" in json.loads((run_dir / "summary.json").read_text())["failed_sinks"]


def offline_history(run_dir: Path) -> list[dict[str, object]]:
    """Return all history records of all offline folders, read by wandb's own reader."""
    history = []
    for folder in sorted(run_dir.glob("wandb/offline-run-*")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
        lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
        records = [json.loads(line) for line in lines]
        history += [record["history"]["item"] for record in records if record["type"] == "history"]
    return history


def attempts(run_dir: Path) -> list[tuple[int, int | None]]:
    """Return the restart marker in the newest folder: number of each attempt, and the state from which it continued."""
    newest = sorted(run_dir.glob("wandb/offline-run-*"))[-1]
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(newest)]
    summary = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)
    return [(one["number"], one["resumed_from_iteration"]) for one in summary["config"]["attempts"]]


def test_history_ends_where_this_attempt_begins(config: JobConfig, run_dir: Path) -> None:
    sinks = open_sinks(config, run_dir, world_size=2, clock=FakeClock(), stream=io.StringIO())
    for record in [RUN_STARTED, *run_records(1, 3)]:
        sinks.write(record)
    reported = Reported.so_far(run_dir)
    for record in run_records(4, 5):
        sinks.write(record)
    sinks.close(0, "done")
    kinds = [(record.kind, getattr(record, "iteration", None)) for record in reported.records(loads_after=2)]
    assert kinds == [("run_started", None), *(("metrics", iteration) for iteration in (1, 2, 3)), ("expert_load", 3)]
    assert len(list(Reported.so_far(run_dir).records(loads_after=5))) == 8, "with an evaluation and the end"
    assert list(Reported.so_far(run_dir / "none").records(loads_after=0)) == []


@pytest.mark.slow
@pytest.mark.wandb
@pytest.mark.timeout(150)
def test_one_wandb_run_without_gap_or_duplicate_over_restarts(config: JobConfig, run_dir: Path) -> None:
    """The first attempt's process is killed. The second attempt repeats iterations, and so does the third."""
    pytest.importorskip("wandb")
    run_dir.mkdir()
    command = [sys.executable, "-c", KILLED_ATTEMPT, str(run_dir)]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    assert subprocess.run(command, timeout=60, check=False, env=environment).returncode == -9
    first_id = run_id(run_dir)

    config.telemetry.wandb = "offline"
    for resumed_from, last in ((4, 9), (6, 12)):
        sinks = open_sinks(config, run_dir, world_size=2, stream=io.StringIO())
        sinks.write(RUN_STARTED | {"resumed_from": "checkpoint", "resumed_from_iteration": resumed_from})
        for record in run_records(resumed_from + 1, last):
            sinks.write(record)
        sinks.close(0, "done")
        assert not sinks.failed

    assert run_id(run_dir) == first_id
    assert all(folder.name.endswith(first_id) for folder in run_dir.glob("wandb/offline-run-*"))
    history = offline_history(run_dir)
    assert [record["iteration"] for record in history] == list(range(1, 13))
    assert [record["_step"] for record in history] == list(range(1, 13))
    assert [record["loss"] for record in history] == [5.0 / iteration for iteration in range(1, 13)]
    assert [record["iteration"] for record in history if "evaluation_loss" in record] == [4, 8, 12]
    assert all(record["expert_load/layer_2_max_over_even"] == 4.0 for record in history)
    numbers = [record["job/attempt"] for record in history]
    assert numbers == sorted(numbers) and numbers[:4] == [1] * 4 and numbers[7:] == [2] * 2 + [3] * 3, numbers
    assert [name for record in history for name in record if not (is_listed(name) or name in WANDB_OWN)] == []
    assert attempts(run_dir) == [(1, None), (2, 4), (3, 6)]
