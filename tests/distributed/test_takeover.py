"""Tests whole jobs of dummy ranks whose controller is killed, stopped or started twice. The job makes the same
decisions."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_ft.control.controller.main import FOLDER, JOURNAL, ControllerSpec
from megatron_ft.control.rpc import RpcClient
from megatron_ft.errors import EXIT_INTERRUPTED, ControlError
from megatron_ft.testing.jobs import REPOSITORY
from tests.distributed.test_launch import LIMIT_SECONDS, eventually, records
from tests.distributed.test_lost_nodes import decisions, finish, reformed, start
from tests.helpers.sharing import chosen

KILL = 'kill(rank=3, at_iteration=5, phase="forward", generation=0)'


def journal(runs: Path) -> list[dict[str, Any]]:
    """Return the inputs in the controllers' journal, complete lines only."""
    path = runs / "dummy" / FOLDER / JOURNAL
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def orders(runs: Path) -> list[str]:
    return [entry["order"]["op"] for entry in journal(runs) if "order" in entry]


def access(runs: Path) -> dict[str, Any]:
    path = runs / "dummy" / "controller.json"
    eventually(path.exists, "the controller serves")
    assert path.stat().st_mode & 0o777 == 0o600
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def signal_controller_when(runs: Path, condition: Callable[[], bool], what: str, number: int = signal.SIGKILL) -> int:
    """Send a signal to the controller as soon as ``condition`` is true. Return its process id."""
    process_id = int(access(runs)["process_id"])
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
    os.kill(process_id, number)
    return process_id


def replaced(runs: Path) -> list[str]:
    return [record["reason"] for record in records(runs) if record["kind"] == "controller_replaced"]


def test_a_controller_killed_while_survivors_are_asked_is_replaced_and_the_next_one_decides(runs: Path) -> None:
    slow = 'delay(rank=0, seconds=2, phase="replay", generation=0)'  # it says late how far it is
    job = start(runs, KILL, slow, iterations=200)
    killed = signal_controller_when(runs, lambda: "break" in orders(runs), "ranks receive the loss")
    at_death = orders(runs)
    eventually(lambda: access(runs)["process_id"] != killed, "another one serves", seconds=LIMIT_SECONDS)
    assert access(runs)["epoch"] == 2
    finish(runs, job)
    assert at_death == ["start", "break"], "in the middle of a recovery"
    assert orders(runs) == ["start", "break", "reform", "end"]
    assert (reformed(runs, 1).previous_ranks, len(decisions(runs))) == ((0, 1, 4, 5), 1)
    assert replaced(runs) == ["the controller was killed by SIGKILL"]


@pytest.mark.parametrize(
    "lengths", chosen([(1, 5, 12), (3, 9, 14), (6, 15, 16), (11, 13, 18)], [(3, 9, 14), (11, 13, 18)]), ids=str
)
def test_a_controller_killed_again_and_again_changes_nothing(runs: Path, lengths: tuple[int, ...]) -> None:
    """The controller is killed when the journal reaches certain lengths. Each order is given once, each death is
    reported once, nothing is lost."""
    job = start(runs, KILL, 'kill(rank=2, phase="forward", generation=1)', iterations=1500)
    killed = 0
    for length in lengths:
        eventually(lambda last=killed: access(runs)["process_id"] != last, "one serves", seconds=LIMIT_SECONDS)
        killed = signal_controller_when(runs, lambda least=length: len(journal(runs)) >= least, f"{length} lines")
    eventually(lambda: orders(runs).count("reform") == 2, "the second loss", seconds=LIMIT_SECONDS)
    eventually(lambda: len(replaced(runs)) == len(lengths), "another one serves", seconds=LIMIT_SECONDS)
    os.kill(job.pid, signal.SIGINT)
    finish(runs, job, EXIT_INTERRUPTED)
    assert [found["generation"] for found in decisions(runs)] == [0, 1]
    assert orders(runs) == ["start", "break", "reform", "break", "reform", "stop", "end"]
    reported = [
        (record["rank"], record["next"]["generation"]) for record in records(runs) if record["kind"] == "reformed"
    ]
    assert len(reported) == len(set(reported)) == 4 + 2
    assert len([record for record in records(runs) if record["kind"] == "rank_failed"]) == 2


def test_a_stopped_controller_is_replaced_and_not_obeyed_when_it_would_wake(runs: Path) -> None:
    job = start(runs, KILL, iterations=1500)
    stopped = signal_controller_when(runs, lambda: "reform" in orders(runs), "survivors continue", signal.SIGSTOP)
    eventually(lambda: replaced(runs), "it gives no sign", seconds=LIMIT_SECONDS)
    assert not psutil.pid_exists(stopped), "two never live at a time"
    eventually(lambda: access(runs)["epoch"] == 2, "another one serves", seconds=LIMIT_SECONDS)
    os.kill(job.pid, signal.SIGINT)
    finish(runs, job, EXIT_INTERRUPTED)
    assert "did not answer" in replaced(runs)[0]


def test_a_second_controller_started_by_mistake_does_not_begin(runs: Path) -> None:
    job = start(runs, KILL, iterations=1500)
    about = access(runs)
    eventually(lambda: "reform" in orders(runs), "survivors continue")
    before = journal(runs)
    second = second_controller(runs, about["token"])
    assert second.returncode == ControlError.exit_code
    assert "another controller of this run is alive" in second.stderr
    client = RpcClient(about["address"], "Controller", token=about["token"])
    answer = client.call("poll", {"node": 0, "session": 0, "after": 0, "wait_seconds": 0}, timeout_seconds=5)
    client.close()
    assert answer["epoch"] == 1
    os.kill(job.pid, signal.SIGINT)
    finish(runs, job, EXIT_INTERRUPTED)
    assert journal(runs)[: len(before)] == before
    assert not replaced(runs)
    assert not (runs / "dummy" / "controller.json").exists(), "no controller can be reached any more"


def second_controller(runs: Path, token: str) -> "subprocess.CompletedProcess[str]":
    from megatron_ft.config.job import JobConfig
    from megatron_ft.config.serialize import to_dict

    spec = ControllerSpec(
        config=to_dict(JobConfig()),
        run_dir=str(runs / "dummy"),
        resume_from=None,
        entry="",
        working_dir=str(runs),
        token=token,
        launcher_descriptor=0,
    )
    command = [sys.executable, "-m", "megatron_ft.control.controller.main"]
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        input=spec.to_line().decode(),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


def test_controllers_that_get_nowhere_end_the_job(runs: Path) -> None:
    job = start(runs, iterations=1500)
    folder = runs / "dummy" / FOLDER
    about = access(runs)
    eventually(lambda: records(runs), "ranks report")
    with (folder / JOURNAL).open("a") as file:
        file.write("damaged\n{}\n")
    os.kill(about["process_id"], signal.SIGKILL)
    output = finish(runs, job, ControlError.exit_code)
    said = r"the controller failed 5 times in a row; last failure: the controller exited with code 8: "
    said += r"controller: .*: is not JSON"
    assert re.search(said, output), output
