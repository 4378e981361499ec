"""Tests faults on processes that look like those of a job: which are hit, what is on disk before, and what is reported
if none is hit."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_ft.errors import ControlError
from megatron_ft.failures import injecting
from megatron_ft.failures.injecting import INJECTED_FILE, Injector, NotInjected
from megatron_ft.failures.processes import _node_of, processes_of
from megatron_ft.failures.schedule import FailureSchedule, MembershipEvent


class FakeJob:
    """Folder, processes that write to its logs, and a controller that refuses a given number of calls."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        (run_dir / "logs").mkdir(parents=True)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.calls: list[tuple[str, int]] = []
        self.refusals = 0

    def begin(self, *logs: str) -> None:
        """Start a process for each log. The standard output of a service is a pipe, and its standard error is the
        log."""
        for log in logs:
            with (self.run_dir / "logs" / log).open("ab") as output:
                is_service = log.startswith("node-") and log.count("-") > 1
                streams = {"stdout": subprocess.PIPE, "stderr": output} if is_service else {"stdout": output}
                command = [sys.executable, "-c", "input()"]
                self.processes[log] = subprocess.Popen(command, stdin=subprocess.PIPE, **streams)

    def begin_node(self, node: int) -> None:
        self.begin(f"node-{node:03d}.log", f"rank-{node:05d}.log")

    def drain(self, node: int) -> None:
        self._call("drain", node)

    def add(self, node: int) -> None:
        self._call("add", node)
        self.begin_node(node)

    def _call(self, name: str, node: int) -> None:
        self.calls.append((name, node))
        if self.refusals:
            self.refusals -= 1
            raise ControlError(f"{name}: refused: node {node} is a member")

    def injector(self, **changed: Any) -> Injector:
        values = {"run_dir": self.run_dir, "ranks_per_node": 1, "connect": lambda: contextlib.nullcontext(self)}
        return Injector(**{**values, "patience_seconds": 0.3, **changed})

    def injected(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / INJECTED_FILE).read_text().splitlines()]

    def living(self) -> list[str]:
        return sorted(log for log, process in self.processes.items() if process.poll() is None)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FakeJob]:
    fake = FakeJob(tmp_path / "run")
    yield fake
    fake.end()


@pytest.mark.parametrize(
    ("log", "node"),
    [
        ("node-003.log", 3),
        ("node-003-keeper.log", 3),
        ("rank-00006.log", 3),
        ("rank-00007.log", 3),
        ("rank-00007.records.jsonl", None),
        ("controller.log", None),
        ("node-3.log", None),
    ],
)
def test_logs_say_whose_process_it_is(log: str, node: int | None) -> None:
    assert _node_of(log, ranks_per_node=2) == node


def test_a_kill_ends_all_processes_of_its_nodes_and_no_other(job: FakeJob) -> None:
    job.begin("node-000.log", "rank-00000.log", "rank-00001.log", "forkserver.log")
    job.begin("node-001.log", "node-001-keeper.log", "rank-00002.log", "rank-00003.log")
    job.injector(ranks_per_node=2).kill([1, 1], at_iteration=7)
    victims = ["node-001.log", "node-001-keeper.log", "rank-00002.log", "rank-00003.log"]
    for log in victims:
        assert job.processes[log].wait(10) == -signal.SIGKILL
    assert job.living() == ["forkserver.log", "node-000.log", "rank-00000.log", "rank-00001.log"]
    (line,) = job.injected()
    assert (line["action"], line["nodes"], line["at_iteration"]) == ("kill", [1], 7)
    assert line["processes"] == {log: job.processes[log].pid for log in victims}
    assert list(line["processes"]) == victims, "the node's own first, or it would report its ranks' ends"


def test_another_runs_processes_are_not_touched(job: FakeJob, tmp_path: Path) -> None:
    other = FakeJob(tmp_path / "run-2")
    try:
        other.begin_node(1)
        job.begin_node(1)
        job.injector().kill([1])
        assert job.processes["rank-00001.log"].wait(10) == -signal.SIGKILL
        assert other.living() == ["node-001.log", "rank-00001.log"]
    finally:
        other.end()


def test_what_is_injected_is_on_disk_before_it_happens(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job.begin_node(0)
    synced: list[int] = []
    monkeypatch.setattr(injecting.os, "fsync", lambda descriptor: synced.append(descriptor))

    def send(processes: Any, number: signal.Signals) -> list[str]:
        assert len(synced) == 2, "the line and its folder"
        assert job.injected()[0]["action"] == "kill"
        return []

    monkeypatch.setattr(injecting, "_send", send)
    job.injector().kill([0])
    assert synced and job.living() == ["node-000.log", "rank-00000.log"]


def test_a_kill_without_processes_is_said_and_hits_nobody(job: FakeJob) -> None:
    job.begin_node(0)
    with pytest.raises(
        NotInjected, match=r"kill of nodes \[0, 4\]: the logs of the run name no running process of nodes \[4\]"
    ):
        job.injector().kill([0, 4])
    assert job.living() == ["node-000.log", "rank-00000.log"]
    assert [line["action"] for line in job.injected()] == ["kill_not_injected"]


def test_a_zombie_is_no_process_of_a_node(job: FakeJob) -> None:
    job.begin("rank-00000.log")
    process = job.processes["rank-00000.log"]
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with processes_of(job.run_dir, [0], 1) as found:
        assert found == {0: []}


def test_a_kill_waits_for_a_node_that_is_being_started(job: FakeJob) -> None:
    starter = threading.Timer(0.2, job.begin, ["node-002.log"])
    starter.start()
    job.injector(patience_seconds=20.0).kill([2])
    starter.join()
    assert job.processes["node-002.log"].wait(10) == -signal.SIGKILL


def test_a_stop_lasts_as_long_as_requested(job: FakeJob) -> None:
    job.begin_node(0)
    rank = psutil.Process(job.processes["rank-00000.log"].pid)
    seen: list[str] = []

    def pause(seconds: float) -> None:
        assert seconds == 2.5
        os.waitid(os.P_PID, rank.pid, os.WSTOPPED)
        seen.append(rank.status())
        job.processes["node-000.log"].kill()
        job.processes["node-000.log"].wait()

    assert job.injector(pause=pause).stop([0], 2.5) == ["node-000.log"], "it was killed meanwhile"
    assert seen == [psutil.STATUS_STOPPED]
    os.waitid(os.P_PID, rank.pid, os.WCONTINUED)
    assert job.living() == ["rank-00000.log"] and job.injected()[0]["seconds"] == 2.5


def test_a_stop_that_is_interrupted_leaves_nobody_stopped(job: FakeJob) -> None:
    job.begin_node(0)

    def interrupted(seconds: float) -> None:
        os.waitid(os.P_PID, job.processes["rank-00000.log"].pid, os.WSTOPPED)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.injector(pause=interrupted).stop([0], 60.0)
    os.waitid(os.P_PID, job.processes["rank-00000.log"].pid, os.WCONTINUED)


WRITER = """
import errno, sys
with open(sys.argv[1], "w") as file:
    for line in sys.stdin:
        try:
            file.write(line)
            file.flush()
            print("written", flush=True, file=sys.stderr)
        except OSError as error:
            print(errno.errorcode[error.errno], flush=True, file=sys.stderr)
            file = open(sys.argv[1], "a")
"""


def test_a_disk_error_fails_every_write_and_ends(job: FakeJob, tmp_path: Path) -> None:
    with (job.run_dir / "logs" / "rank-00000.log").open("ab") as log:
        rank = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "file")],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdout=log,
            text=True,
        )

    def write() -> str:
        assert rank.stdin is not None and rank.stderr is not None
        rank.stdin.write("x\n")
        rank.stdin.flush()
        return rank.stderr.readline().strip()

    seen: list[str] = []
    try:
        before = write()
        job.injector(pause=lambda seconds: seen.append(write())).fail_disk([0], 2.0)
        assert (before, seen, write()) == ("written", ["EFBIG"], "written")
    finally:
        rank.kill()
        rank.communicate()
    (line,) = job.injected()
    assert (line["action"], line["nodes"], line["seconds"]) == ("disk_error", [0], 2.0)


def test_an_addition_is_repeated_until_the_controller_knows_of_the_loss(job: FakeJob) -> None:
    job.refusals = 2
    job.injector(patience_seconds=20.0).add(3)
    assert job.calls == [("add", 3)] * 3
    assert [line["action"] for line in job.injected()] == ["add"]


@pytest.mark.parametrize("action", ["add", "drain"])
def test_a_controller_that_says_no_is_quoted(job: FakeJob, action: str) -> None:
    job.refusals = 1000
    with pytest.raises(NotInjected, match=rf"{action} of nodes \[3\]: {action}: refused: node 3 is a member"):
        getattr(job.injector(), action)(3)
    assert [line["action"] for line in job.injected()] == [action, f"{action}_not_injected"]


def replayed(job: FakeJob, **changed: Any) -> tuple[list[str], list[float]]:
    """Return the changes that a replay could not inject, and the time on its clock, which only pauses advance."""
    now = [100.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    events = (
        MembershipEvent(seconds=10.0, leaves=(0, 1)),
        MembershipEvent(seconds=20.0, leaves=(2,), joins=(0,)),
        MembershipEvent(seconds=30.0, leaves=(0,)),
    )
    schedule = FailureSchedule(source="t", most_nodes=4, num_initial_nodes=3, duration_seconds=40.0, events=events)
    schedule.validate()
    problems = job.injector(clock=lambda: now[0], pause=pause).replay(schedule, **changed)
    return problems, now


def test_a_replay_brings_every_event_in_at_its_time(job: FakeJob) -> None:
    for node in range(3):
        job.begin_node(node)
    problems, now = replayed(job)
    assert problems == [] and now[0] == pytest.approx(140.0), "it lasts as long as the schedule"
    found = [(line["action"], line["nodes"], line["event"]) for line in job.injected()]
    assert found == [("kill", [0, 1], 0), ("kill", [2], 1), ("add", [0], 1), ("kill", [0], 2)]
    assert [line["at_seconds"] for line in job.injected()] == pytest.approx([10.0, 20.0, 20.0, 30.0])


def test_a_replay_names_what_it_could_not_bring_in_and_goes_on(job: FakeJob) -> None:
    for node in range(2):
        job.begin_node(node)
    problems, _ = replayed(job)
    assert len(problems) == 1 and problems[0].startswith("event 1: kill of nodes [2]")
    assert [line["action"] for line in job.injected()] == ["kill", "kill_not_injected", "add", "kill"]


def test_a_replay_ends_with_its_job(job: FakeJob) -> None:
    for node in range(3):
        job.begin_node(node)
    problems, _ = replayed(job, until=lambda: (job.run_dir / INJECTED_FILE).exists())
    assert problems == ["events 1 to 2 were not injected: the job had ended"]
