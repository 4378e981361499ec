"""Tests that a machine that vanishes from the network costs its node within seconds, and that neither a short
interruption, nor a suspended agent, nor load costs one. Processes and networks are real; most ranks have no model."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_ft.errors import EXIT_INTERRUPTED
from megatron_ft.testing.jobs import wait
from megatron_ft.testing.network_nodes import Network, network, why_impossible
from tests.distributed.test_launch import eventually, records
from tests.distributed.test_lost_nodes import decisions, finish, reformed

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(why_impossible() is not None, reason=str(why_impossible()))]

SETTINGS = {
    "launch.num_nodes": 3,
    "launch.ranks_per_node": 1,
    "recovery.min_nodes": 1,
    "training.train_iterations": 1_000_000,
}
LIMIT = "detector.vanished_seconds=2"


@pytest.fixture
def machines() -> Iterator[Network]:
    with network(3) as made:
        yield made


def begin(machines: Network, runs: Path, **settings: Any) -> "subprocess.Popen[str]":
    """Start a job on three machines, and return it when all its ranks have begun and all its machines are watched."""
    job = machines.start_job(runs, "run_surviving", {**SETTINGS, **settings})
    eventually(lambda: len([record for record in records(runs) if record["kind"] == "started"]) == 3, "ranks run", 60)
    eventually(lambda: all(is_watched(agent) for agent in agents(job)), "every machine is watched")
    return job


def agents(job: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Return the agents that live, in the order of their nodes."""
    children = psutil.Process(job.pid).children()
    return [child for child in children if child.is_running() and "megatron_ft.control.node.main" in words_of(child)]


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # it has ended
        return []


def is_watched(agent: psutil.Process) -> bool:
    """Whether the controller has a connection to the port at which the agent's machine answers."""
    # From the agent's network: psutil reads only connections of its own network.
    found = [line.split()[1:4] for line in Path(f"/proc/{agent.pid}/net/tcp").read_text().splitlines()[1:]]
    listening = {local for local, _, state in found if state == "0A"}
    return any(state == "01" and local in listening for local, _, state in found)


def continued(runs: Path) -> list[int]:
    """Return the ranks that have begun in a next membership."""
    return [record["rank"] for record in records(runs) if record["kind"] == "reformed"]


def end(runs: Path, job: Any) -> None:
    job.send_signal(signal.SIGINT)
    finish(runs, job, EXIT_INTERRUPTED)


def assert_nothing_lost(runs: Path, seconds: float) -> None:
    """Fail if a node is lost within ``seconds``."""
    path, deadline = runs / "dummy" / "decisions.jsonl", time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert not path.exists(), path.read_text()
        time.sleep(0.05)


@contextmanager
def load(num_processes: int) -> Iterator[None]:
    """Run processes that each use all the processor time that they get."""
    with ExitStack() as ending:
        for _ in range(num_processes):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            ending.callback(process.wait)
            ending.callback(process.kill)
        yield


def test_the_others_continue_within_three_seconds_after_a_machine_vanished(machines: Network, runs: Path) -> None:
    job = begin(machines, runs)
    machines.cut(1)
    cut_at, cut_unix = time.monotonic(), time.time()
    eventually(lambda: len(continued(runs)) == 2, "the others continue")
    assert time.monotonic() - cut_at < 3.5
    (decision,) = decisions(runs)
    assert decision["lost_nodes"] == [1]
    assert decision["reason"].startswith("node 1 was lost: its machine vanished") and LIMIT in decision["reason"]
    assert 2.0 <= decision["time_unix_seconds"] - cut_unix < 3.0
    assert reformed(runs, 1).nodes == (0, 2)
    # The agent that was declared lost is refused when its machine is back, and ends its ranks.
    machines.mend(1)
    eventually(lambda: len(agents(job)) == 2, "the lost agent ends by itself", 30)
    end(runs, job)


def test_a_short_interruption_and_a_suspended_agent_cost_no_node(machines: Network, runs: Path) -> None:
    job = begin(machines, runs)
    machines.cut(1)
    assert_nothing_lost(runs, 1.0)
    machines.mend(1)
    agents(job)[2].send_signal(signal.SIGSTOP)
    assert_nothing_lost(runs, 5.0)
    agents(job)[2].send_signal(signal.SIGCONT)
    eventually(lambda: all(is_watched(agent) for agent in agents(job)), "every machine is watched again")
    end(runs, job)


def test_a_cut_of_the_controllers_own_machine_costs_no_node(machines: Network, runs: Path) -> None:
    """The controller cannot know whether others vanished or its own machine is cut off, so heartbeats decide."""
    job = begin(machines, runs)
    machines.cut("head")
    assert_nothing_lost(runs, 5.0)
    machines.mend("head")
    # Longer than heartbeats may be missing: agents have connected again.
    assert_nothing_lost(runs, 8.0)
    machines.cut(2)
    eventually(lambda: len(continued(runs)) == 2, "the others continue", 4.0)
    end(runs, job)


@pytest.mark.extended
def test_a_load_of_twenty_costs_no_node(machines: Network, runs: Path) -> None:
    job = begin(machines, runs)
    with load(20):
        assert_nothing_lost(runs, 60.0)
    end(runs, job)


@pytest.mark.slow
@pytest.mark.extended
def test_a_job_that_trains_commits_iterations_again_within_seconds(machines: Network, runs: Path) -> None:
    job = machines.start_training(
        runs,
        [
            "model=moe_micro",
            "run.name=training",
            "launch.num_nodes=3",
            "recovery.min_nodes=2",
            "placement=overlap_search",
            "placement.min_replicas=2",
            "parallel.use_distributed_optimizer=false",
            "training.train_iterations=100000",
            "training.global_batch_size=12",
            "training.eval_interval_iterations=0",
            "telemetry.progress=plain",
        ],
    )
    run_dir = runs / "training"
    eventually(lambda: len(read(run_dir / "metrics.jsonl")) >= 5, "it trains", 120)
    machines.cut(1)
    cut_unix = time.time()
    changed = lambda: [line for line in read(run_dir / "events.jsonl") if line["kind"] == "membership_changed"]  # noqa: E731
    (change,) = eventually(changed, "the others continue", 30)
    num_before = len(read(run_dir / "metrics.jsonl"))
    eventually(lambda: len(read(run_dir / "metrics.jsonl")) > num_before + 1, "the others train", 30)
    job.send_signal(signal.SIGINT)
    output = wait(job, 120)
    assert job.returncode == EXIT_INTERRUPTED, output
    (decision,) = read(run_dir / "decisions.jsonl")
    assert decision["lost_nodes"] == [1] and LIMIT in change["reason"], output
    assert 2.0 <= decision["time_unix_seconds"] - cut_unix < 3.0, output
    assert change["time_unix_seconds"] - cut_unix < 4.0, output


def read(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of JSON lines."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
