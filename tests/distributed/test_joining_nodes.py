"""Tests whole jobs of dummy ranks in which nodes join and leave, or which restart on the remaining nodes."""

import contextlib
import json
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_ft.control.rpc import RpcClient, RpcError
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.testing.jobs import start_dummy_job
from tests.distributed.test_launch import eventually, processes_of, records, started
from tests.distributed.test_lost_nodes import agent_process, decisions, failed, finish, reformed
from tests.helpers.keys import dotted
from tests.helpers.sharing import chosen

LAYOUT = {"launch.num_nodes": 3, "launch.ranks_per_node": 2, "recovery.min_nodes": 1, "nodes.join_window_seconds": 0.2}


def start(runs: Path, *faults: str, iterations: int = 200, **overrides: Any) -> Any:
    """Start a job on three nodes with two ranks each, which can continue with one node."""
    settings = {"training.train_iterations": iterations, "testing.failpoints": list(faults)}
    settings |= dotted(**overrides)
    return start_dummy_job(runs, "run_surviving", overrides={**LAYOUT, **settings})


def waiting(runs: Path) -> list[int]:
    """Return the joining nodes that have reported."""
    return [record["node"] for record in records(runs) if record["kind"] == "waiting"]


def test_a_spare_takes_the_place_of_a_lost_node(runs: Path) -> None:
    job = start(runs, iterations=10000, num_spare_nodes=1)
    eventually(lambda: waiting(runs) == [3, 3], "the spare waits")
    assert not (runs / "dummy" / "decisions.jsonl").exists(), "the node has not joined yet"
    agent_process(runs, 0).send_signal(signal.SIGKILL)
    eventually(lambda: len(reported(runs, 1)) == 6, "six ranks continue")
    job.send_signal(signal.SIGINT)
    finish(runs, job, 130)
    following = reformed(runs, 1)
    assert (following.previous_ranks, following.nodes) == ((2, 3, 4, 5, None, None), (1, 1, 2, 2, 3, 3))
    (decision,) = decisions(runs)
    assert (decision["lost_nodes"], decision["joined_nodes"], decision["left_nodes"]) == ([0], [3], [])


def reported(runs: Path, generation: int) -> list[dict[str, Any]]:
    reforms = [record for record in records(runs) if record["kind"] == "reformed"]
    return [record for record in reforms if record["next"]["generation"] == generation]


@pytest.mark.parametrize("lost", chosen(["rank", "agent"], ["rank"]))
def test_a_lost_node_is_started_again_and_joins(runs: Path, lost: str) -> None:
    faults = ['kill(rank=3, at_iteration=5, phase="forward", generation=0)'] if lost == "rank" else []
    job = start(runs, *faults, iterations=10000, restart_lost_nodes=True)
    if lost == "agent":
        eventually(lambda: len(started(runs).get(0, [])) == 6, "all ranks run")
        agent_process(runs, 1).send_signal(signal.SIGKILL)
    eventually(lambda: len(reported(runs, 2)) == 6, "six ranks continue")
    job.send_signal(signal.SIGINT)
    finish(runs, job, 130)
    assert reformed(runs, 1).previous_ranks == (0, 1, 4, 5)
    second = reformed(runs, 2)
    assert (second.previous_ranks, second.nodes) == ((0, 1, None, None, 2, 3), (0, 0, 1, 1, 2, 2))
    assert second.reason == "nodes [1] join"
    assert [death[:2] for death in failed(runs)] == ([(3, 1)] if lost == "rank" else [])


def test_a_joining_node_that_dies_in_its_first_membership_is_lost_again(runs: Path) -> None:
    faults = [
        'kill(rank=3, at_iteration=5, phase="forward", generation=0)',
        'kill(node=1, phase="build", generation=2)',
    ]
    job = start(runs, *faults, iterations=10000, restart_lost_nodes=True)
    eventually(lambda: len(reported(runs, 4)) == 6, "six ranks continue")
    job.send_signal(signal.SIGINT)
    finish(runs, job, 130)
    assert [NextMembership.from_json(found["next"]).nodes for found in decisions(runs)] == [
        (0, 0, 2, 2),
        (0, 0, 1, 1, 2, 2),
        (0, 0, 2, 2),
        (0, 0, 1, 1, 2, 2),
    ]


def test_the_nodes_that_are_left_start_again_without_the_others(runs: Path) -> None:
    faults = ['raise(node=0, phase="forward", generation=1)']
    job = start(runs, *faults, max_restarts=1, iterations=10000)
    eventually(lambda: len(started(runs).get(0, [])) == 6, "all ranks run")
    agent_process(runs, 1).send_signal(signal.SIGKILL)
    eventually(lambda: len(started(runs).get(2, [])) == 4, "the ranks of two nodes start again")
    job.send_signal(signal.SIGINT)
    finish(runs, job, 130)
    assert decisions(runs)[1]["declined"].endswith("raised")
    again = sorted(started(runs)[2], key=lambda record: record["rank"])
    assert [(record["rank"], record["node"]) for record in again] == [(0, 0), (1, 0), (2, 2), (3, 2)]
    assert {(record["world_size"], record["num_nodes"]) for record in again} == {(4, 2)}
    assert {tuple(record["nodes"]) for record in again} == {(0, 0, 2, 2)}


LIMIT = "(detector.heartbeat_timeout_seconds)"


def test_operators_have_a_node_leave_and_join_again(runs: Path) -> None:
    job = start(runs, iterations=10000, num_nodes=2, max_nodes=3)
    eventually(lambda: len(started(runs).get(0, [])) == 4, "all ranks run")
    path = runs / "dummy" / "controller.json"
    access = json.loads(path.read_text())
    assert path.stat().st_mode & 0o777 == 0o600 and access["epoch"] == 1
    client = RpcClient(access["address"], "Controller", token=access["token"])

    def ask(method: str, **body: int) -> dict[str, Any]:
        return client.call(method, body, timeout_seconds=10)

    try:
        eventually(lambda: ask("status")["phase"] == "running", "it runs")
        ask("drain", node=0)
        eventually(lambda: ask("status")["members"] == [1], "node 0 has left")
        with pytest.raises(RpcError, match="the number of nodes that would remain is 0"):
            ask("drain", node=1)
        ask("add", node=2)  # which has no process yet
        ask("add", node=0)  # whose process lives
        eventually(lambda: ask("status")["members"] == [0, 1, 2], "both have joined")
        status = eventually(lambda: iterating(ask("status")), "their progress is known")
        assert all(about["seconds_since_word"] < 10.0 for about in status["nodes"].values())
    finally:
        client.close()
    job.send_signal(signal.SIGINT)
    finish(runs, job, 130)
    assert not path.exists()
    first, *others = decisions(runs)
    assert (first["left_nodes"], first["next"]["previous_ranks"]) == ([0], [2, 3])
    assert sorted(node for decision in others for node in decision["joined_nodes"]) == [0, 2]
    left = [record for record in records(runs) if record["kind"] == "left"]
    assert sorted(record["rank"] for record in left) == [0, 1]
    assert {tuple(record["leaving"]) for record in left} == {(0,)}
    assert failed(runs) == []


def iterating(status: dict[str, Any]) -> dict[str, Any] | None:
    """Return the job's status when all nodes have reported their progress."""
    return status if all(about["iteration"] for about in status["nodes"].values()) else None


SOON = {"detector.heartbeat_interval_seconds": 0.25, "detector.heartbeat_timeout_seconds": 2.0}


def test_a_stopped_rank_is_found_and_the_others_go_on(runs: Path) -> None:
    fault = 'stop(rank=3, at_iteration=5, phase="forward", generation=0)'
    overrides = {**LAYOUT, **SOON, "recovery.min_nodes": 2, "testing.failpoints": [fault]}
    job = start_dummy_job(runs, "run_surviving", overrides={**overrides, "training.train_iterations": 10000})
    eventually(lambda: len(reported(runs, 1)) == 4, "four ranks continue")
    hit = json.loads((runs / "dummy" / "failpoints.jsonl").read_text().splitlines()[0])
    (death,) = [record for record in records(runs) if record["kind"] == "rank_failed"]
    assert 1.0 < death["time_unix_seconds"] - hit["time_unix_seconds"] < 4.0
    assert (death["rank"], death["node"], death["error"]) == (3, 1, f"was unresponsive for 2 s {LIMIT}")
    job.send_signal(signal.SIGINT)
    finish(runs, job, 130)
    assert reformed(runs, 1).reason == f"rank 3 was unresponsive for 2 s {LIMIT}"


def test_ranks_that_all_stand_at_the_same_place_start_again(runs: Path) -> None:
    fault = 'delay(seconds=1000.0, at_iteration=5, phase="forward", generation=0)'
    settings = {"detector.hang_seconds": 1.0, "recovery.max_restarts": 1, "testing.failpoints": [fault]}
    job = start_dummy_job(runs, "run_surviving", overrides={**LAYOUT, **SOON, **settings})
    finish(runs, job)
    (restart,) = [record for record in records(runs) if record["kind"] == "ranks_restarted"]
    reason = "no rank made progress for detector.hang_seconds=1: all are in iteration 5, phase forward"
    assert (restart["generation"], restart["reason"]) == (1, reason)


def test_a_rank_that_is_stopped_for_a_moment_goes_on(runs: Path) -> None:
    settings = {"training.train_iterations": 150, "detector.heartbeat_timeout_seconds": 4.0}
    job = start_dummy_job(runs, "run_surviving", overrides={**LAYOUT, **SOON, **settings})
    eventually(lambda: len(started(runs).get(0, [])) == 6, "all ranks run")
    rank = rank_process(runs, 3)
    rank.send_signal(signal.SIGSTOP)
    time.sleep(1.0)  # the pause itself: there is nothing to wait for
    rank.send_signal(signal.SIGCONT)
    finish(runs, job)
    assert not (runs / "dummy" / "decisions.jsonl").exists()
    assert failed(runs) == []


def test_a_stopped_node_process_is_a_lost_node_and_ends_by_itself_when_it_wakes(runs: Path) -> None:
    job = start_dummy_job(runs, "run_surviving", overrides={**LAYOUT, **SOON, "training.train_iterations": 10000})
    eventually(lambda: len(started(runs).get(0, [])) == 6, "all ranks run")
    agent = agent_process(runs, 1)
    agent.send_signal(signal.SIGSTOP)
    eventually(lambda: len(reported(runs, 1)) == 4, "four ranks continue")
    agent.send_signal(signal.SIGCONT)
    eventually(lambda: not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE, "it ends")
    log = (runs / "dummy" / "logs" / "node-001.log").read_text()
    assert "the agent ends the ranks of this node" in log and "session 0 of its agent has ended" in log
    eventually(lambda: rank_process(runs, 3) is None, "its ranks have ended")
    job.send_signal(signal.SIGINT)
    finish(runs, job, 130)
    assert reformed(runs, 1).nodes == (0, 0, 2, 2)


def rank_process(runs: Path, number: int) -> Any:
    """Return the process of a rank, found by its log; None if it has ended."""
    for process in processes_of(runs):
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            if Path(f"/proc/{process.pid}/fd/1").readlink().name == f"rank-{number:05d}.log":
                return process
    return None
