"""Tests event files of TensorBoard: each iteration once over restarts, no gaps, and a missing package."""

import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.errors import ConfigError
from megatron_ft.events import Metrics, Record
from megatron_ft.telemetry import check_sinks, open_sinks
from megatron_ft.telemetry.sinks import tensorboard
from megatron_ft.testing.made_up_runs import RUN_STARTED, run_records

from .conftest import FakeClock, is_listed

SINK = {"_target_": "megatron_ft.telemetry.sinks.tensorboard.TensorBoardSink"}
KILLED_ATTEMPT = """
import io, os, signal, sys
from pathlib import Path
from megatron_ft.config.job import JobConfig
from megatron_ft.telemetry import open_sinks
from megatron_ft.testing.made_up_runs import RUN_STARTED, run_records

config = JobConfig()
config.telemetry.wandb = "disabled"
config.telemetry.sinks["tensorboard"] = {"_target_": "megatron_ft.telemetry.sinks.tensorboard.TensorBoardSink"}
sinks = open_sinks(config, Path(sys.argv[1]), world_size=2, stream=io.StringIO())
for record in [RUN_STARTED, *run_records(1, 7)]:
    sinks.write(record)
os.kill(os.getpid(), signal.SIGKILL)
"""


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) pairs by name as TensorBoard shows them, read by its own reader."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run_dir / tensorboard.FOLDER), size_guidance={"tensors": 0, "scalars": 0})
    read.Reload()
    return {
        tag: [(event.step, float(event.tensor_proto.float_val[0])) for event in read.Tensors(tag)]
        for tag in read.Tags()["tensors"]
    } | {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def attempt(config: JobConfig, run_dir: Path, records: list[Record | dict[str, object]]) -> None:
    config.telemetry.sinks["tensorboard"] = SINK
    sinks = open_sinks(config, run_dir, world_size=2, clock=FakeClock(), stream=io.StringIO())
    for record in records:
        sinks.write(record)
    sinks.close(0, "done")
    assert not sinks.failed


def resumed(after: int) -> dict[str, object]:
    return RUN_STARTED | {"resumed_from": "checkpoint", "resumed_from_iteration": after}


def test_repeated_iterations_show_the_values_of_the_newest_attempt_once(config: JobConfig, run_dir: Path) -> None:
    pytest.importorskip("tensorboard")
    attempt(config, run_dir, [RUN_STARTED, *run_records(1, 7)])
    again = [Metrics(iteration=number, values={"loss": 100.0 + number}) for number in (5, 6)]
    attempt(config, run_dir, [resumed(4), *again])
    shown = scalars(run_dir)
    assert [step for step, _ in shown["loss"]] == [1, 2, 3, 4, 5, 6], "7 is void until it is trained again"
    assert [value for _, value in shown["loss"]] == pytest.approx([5.0, 5 / 2, 5 / 3, 5 / 4, 105.0, 106.0])
    assert [step for step, _ in shown["evaluation_loss"]] == [4]
    assert all(is_listed(name) for name in shown)
    attempt(config, run_dir, [resumed(6), *run_records(7, 9)])
    assert [step for step, _ in scalars(run_dir)["loss"]] == list(range(1, 10))


def test_a_restart_within_one_attempt_shows_no_iteration_twice(config: JobConfig, run_dir: Path) -> None:
    """All ranks start again from a window while the launcher, and so the event file, continues."""
    pytest.importorskip("tensorboard")
    attempt(config, run_dir, [RUN_STARTED, *run_records(1, 6), resumed(3), *run_records(4, 8)])
    assert len(list((run_dir / tensorboard.FOLDER).iterdir())) == 1
    assert [step for step, _ in scalars(run_dir)["loss"]] == list(range(1, 9))


def test_a_killed_attempt_leaves_no_gap(config: JobConfig, run_dir: Path) -> None:
    """Steps that were reported to the run's files, but not to TensorBoard, are written by the next attempt."""
    pytest.importorskip("tensorboard")
    run_dir.mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", KILLED_ATTEMPT, str(run_dir)]
    assert subprocess.run(command, timeout=60, check=False, env=environment).returncode == -9
    attempt(config, run_dir, [resumed(7), *run_records(8, 9)])
    assert [step for step, _ in scalars(run_dir)["loss"]] == list(range(1, 10))


def test_an_unfinished_event_of_a_killed_attempt_is_written_again(config: JobConfig, run_dir: Path) -> None:
    pytest.importorskip("tensorboard")
    attempt(config, run_dir, [RUN_STARTED, *run_records(1, 5)])
    (file,) = (run_dir / tensorboard.FOLDER).iterdir()
    file.write_bytes(file.read_bytes()[:-10])
    attempt(config, run_dir, [resumed(5), *run_records(6, 7)])
    assert [step for step, _ in scalars(run_dir)["loss"]] == list(range(1, 8))


def test_files_are_in_the_order_of_attempts_even_if_the_clock_goes_back(
    config: JobConfig, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    attempt(config, run_dir, [RUN_STARTED, *run_records(1, 3)])
    monkeypatch.setattr(tensorboard.time, "time", lambda: 1_000_000_000.0)
    attempt(config, run_dir, [resumed(3), *run_records(4, 5)])
    first, second = sorted(path.name for path in (run_dir / tensorboard.FOLDER).iterdir())
    assert int(second.split(".")[3]) == int(first.split(".")[3]) + 1
    assert [step for step, _ in scalars(run_dir)["loss"]] == list(range(1, 6))


def test_a_missing_package_is_refused_by_name(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name))
    check_sinks(config)
    config.telemetry.sinks["tensorboard"] = SINK
    with pytest.raises(
        ConfigError, match=r"telemetry\.sinks\.tensorboard: needs the package tensorboard, which is not"
    ):
        check_sinks(config)
    config.telemetry.sinks["tensorboard"] = None
    check_sinks(config)
