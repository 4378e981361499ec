"""Tests the time measurement of ``kill-to-commit`` with a made-up job, and how it judges figures."""

import argparse
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import kill_peers
from benchmarks.kill_peers import Fault, Measured, percentile
from benchmarks.kill_to_commit import ELASTIC, LAYOUTS, REPLICAS, Job, Scenario, judge
from megatron_ft.config.validate import validate
from megatron_ft.testing.ranks import compose

PAUSE_SECONDS = 0.3


class MadeUpJob:
    """Folder in which a thread commits iterations. Node 2 has an agent and a rank; when these end, the membership
    changes."""

    def __init__(self, run_dir: Path, *, reports_change: bool = True, iterations_back: int = 0) -> None:
        self.run_dir = run_dir.resolve()
        (self.run_dir / "logs").mkdir(parents=True)
        self.agent, self.rank = (self._begin(name) for name in ("node-002", "rank-00002"))
        self.stopped = threading.Event()
        self.committed_at = 0.0
        self._reports_change, self._iterations_back = reports_change, iterations_back
        self.thread = threading.Thread(target=self._train)
        self.thread.start()

    def _begin(self, name: str) -> "subprocess.Popen[bytes]":
        with (self.run_dir / "logs" / f"{name}.log").open("wb") as log:
            return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=log)

    def _train(self) -> None:
        iteration, changed = 0, False
        while not self.stopped.wait(0.01):
            if self.rank.poll() is not None and not changed:
                changed = True
                self.stopped.wait(PAUSE_SECONDS)
                iteration -= self._iterations_back
                if self._reports_change:
                    self._write("events", kind="membership_changed", nodes=[0, 1, 3], iteration=iteration, seconds=0.1)
            iteration += 1
            if changed and not self.committed_at:
                self.committed_at = time.time()
            self._write("metrics", iteration=iteration, iteration_seconds=0.01)

    def _write(self, name: str, **record: Any) -> None:
        with (self.run_dir / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps({"time_unix_seconds": time.time(), **record}) + "\n")

    def job(self) -> Job:
        return Job(self.run_dir, psutil.Process(), [2])

    def end(self) -> None:
        self.stopped.set()
        self.thread.join()
        for process in (self.agent, self.rank):
            process.kill()
            process.communicate()


@pytest.fixture
def made_up(tmp_path: Path) -> Iterator[MadeUpJob]:
    job = MadeUpJob(tmp_path / "run")
    yield job
    job.end()


def test_a_fault_lasts_from_the_signal_to_the_next_committed_iteration(made_up: MadeUpJob) -> None:
    job = made_up.job()
    fault = job.fault(random.Random(1), signal.SIGKILL)
    assert PAUSE_SECONDS <= fault.seconds < PAUSE_SECONDS + 5
    assert fault.iterations_lost == 0 and fault.details["node"] == 2
    assert fault.details["processes"] == ["node-002.log", "rank-00002.log"]
    assert made_up.rank.wait() == made_up.agent.wait() == -signal.SIGKILL


def test_a_signal_that_is_no_kill_goes_to_the_rank_alone(made_up: MadeUpJob) -> None:
    fault = made_up.job().fault(random.Random(1), signal.SIGTERM)
    assert fault.details["processes"] == ["rank-00002.log"]
    assert made_up.rank.wait() == -signal.SIGTERM and made_up.agent.poll() is None


def test_iterations_that_are_run_again_are_counted(tmp_path: Path) -> None:
    made_up = MadeUpJob(tmp_path / "run", iterations_back=3)
    try:
        assert made_up.job().fault(random.Random(1), signal.SIGKILL).iterations_lost >= 3
    finally:
        made_up.end()


def test_a_fault_that_the_job_does_not_name_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kill_peers, "LONGEST_SECONDS", 1.0)
    made_up = MadeUpJob(tmp_path / "run", reports_change=False)
    try:
        with pytest.raises(TimeoutError, match="a membership without node 2: took too long"):
            made_up.job().fault(random.Random(1), signal.SIGKILL)
    finally:
        made_up.end()


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(50, 0, -1)]
    assert [percentile(values, percent) for percent in (50, 95, 100)] == [25.0, 48.0, 50.0]
    assert percentile([7.0], 95) == 7.0


def faults(*seconds: float, lost: int = 0) -> Measured:
    return Measured(faults=[Fault(seconds=s, iterations_lost=lost, iteration_seconds=0.5) for s in seconds])


def judged(tmp_path: Path, ours: Measured, stopped: Measured, layouts: dict[str, Measured]) -> dict[str, Any]:
    out = tmp_path / "out.json"
    missing = Measured(problems=["torchft 0.2.0 cannot be installed here: no network"])
    peers = {"torchft": missing, "torchrun": faults(14.0)}
    numbers = {"num_faults": 20, "num_stops": 2, "num_layout_faults": 2}
    code = judge(argparse.Namespace(out=out, quick=False), ours, stopped, peers, layouts, **numbers)
    result: dict[str, Any] = json.loads(out.read_text())
    assert result["passed"] is (code == 0)
    return result


@pytest.mark.parametrize("scenario", (REPLICAS, *LAYOUTS), ids=lambda scenario: scenario.name)
def test_each_kind_of_job_can_start(scenario: Scenario) -> None:
    validate(compose(*scenario.words, *ELASTIC))


@pytest.mark.parametrize(
    ("seconds", "passes"),
    [
        ([(0.8, 1.3), (1.3, 1.3), (1.3, 1.3), (1.3, 1.3)], True),
        ([(0.81, 1.3), (1.3, 1.3), (1.3, 1.3), (1.3, 1.3)], False),  # a spare that has built in advance has less time
        ([(0.8, 1.31), (1.3, 1.3), (1.3, 1.3), (1.3, 1.3)], False),
        ([(0.8, 1.3), (1.31, 1.31), (1.3, 1.3), (1.3, 1.3)], False),
        ([(0.8, 1.3), (1.3, 1.3), (1.3, 1.3), (1.3,)], False),
    ],
)
def test_each_kind_of_job_with_stages_is_judged(tmp_path: Path, seconds: list[tuple[float, ...]], passes: bool) -> None:
    layouts = {scenario.name: faults(*found) for scenario, found in zip(LAYOUTS, seconds, strict=True)}
    assert judged(tmp_path, faults(*[1.0] * 20), faults(3.0, 3.3), layouts)["passed"] is passes


@pytest.mark.parametrize(
    ("ours", "stopped", "passes"),
    [
        (faults(*[1.0] * 19, 2.6), faults(3.0, 3.3), True),
        (faults(*[1.0] * 18, 1.4, 1.4), faults(3.0, 3.3), False),
        (faults(*[0.9] * 9, *[1.1] * 11), faults(3.0, 3.3), False),
        (faults(*[1.0] * 19, 5.0), faults(3.0, 3.3), False),
        (faults(*[1.0] * 20, lost=1), faults(3.0, 3.3), False),
        (faults(*[1.0] * 19), faults(3.0, 3.3), False),
        (Measured(), faults(3.0, 3.3), False),
        (faults(*[1.0] * 20), faults(3.0, 3.4), False),
        (faults(*[1.0] * 20), faults(3.0), False),
    ],
    ids=[
        "one late value of 20",
        "p95 is late",
        "p50 is late",
        "near a timeout",
        "iterations lost",
        "a fault is missing",
        "nothing",
        "silence is found late",
        "one was not found",
    ],
)
def test_only_our_own_figures_are_judged(tmp_path: Path, ours: Measured, stopped: Measured, passes: bool) -> None:
    result = judged(tmp_path, ours, stopped, {scenario.name: faults(0.6, 0.7) for scenario in LAYOUTS})
    assert result["passed"] is passes
    assert "torchft not measured (torchft 0.2.0 cannot be installed here" in result["figure"]
    assert "torchrun p50 14.00 s" in result["figure"]
