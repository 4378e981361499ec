"""Tests whole jobs of dummy ranks that lose nodes: which ranks continue, after which iteration, and when the job ends
instead."""

import contextlib
import json
import signal
from pathlib import Path
from typing import Any

import psutil

from megatron_ft.errors import EXIT_INTERRUPTED, EXIT_OK, ControlError, RankFailed
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.testing.dummy_rank import LAST_COMPLETED
from megatron_ft.testing.jobs import start_dummy_job, wait
from tests.distributed.test_launch import (
    LIMIT_SECONDS,
    assert_nothing_left,
    eventually,
    processes_of,
    records,
    started,
)
from tests.helpers.keys import dotted

LAYOUT = {"launch.num_nodes": 3, "launch.ranks_per_node": 2, "recovery.min_nodes": 1}


def start(runs: Path, *faults: str, iterations: int = 100, **overrides: Any) -> Any:
    """Start a job on three nodes with two ranks each, which can continue with one node."""
    settings = {"training.train_iterations": iterations, "testing.failpoints": list(faults)}
    settings |= dotted(**overrides)
    return start_dummy_job(runs, "run_surviving", overrides={**LAYOUT, **settings})


def finish(runs: Path, job: Any, exit_code: int = EXIT_OK) -> str:
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == exit_code, output
    assert_nothing_left(runs)
    return output


def decisions(runs: Path) -> list[dict[str, Any]]:
    path = runs / "dummy" / "decisions.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def reformed(runs: Path, generation: int) -> NextMembership:
    """Return the membership that exactly its ranks have received and that is on disk."""
    reported = [record for record in records(runs) if record["kind"] == "reformed"]
    reported = [record for record in reported if record["next"]["generation"] == generation]
    (decided,) = [found["next"] for found in decisions(runs) if found["generation"] == generation - 1]
    assert all(record["next"] == decided for record in reported)
    following = NextMembership.from_json(decided)
    assert sorted((record["rank"], record["node"]) for record in reported) == list(enumerate(following.nodes))
    return following


def failed(runs: Path) -> list[tuple[int, int, int | None]]:
    """Return (rank, node, iteration) of every death in the events."""
    events = [record for record in records(runs) if record["kind"] == "rank_failed"]
    return [(event["rank"], event["node"], event["iteration"]) for event in events]


def test_the_others_go_on_without_the_node_of_a_killed_rank(runs: Path) -> None:
    finish(runs, start(runs, 'kill(rank=3, at_iteration=5, phase="forward", generation=0)'))
    following = reformed(runs, 1)
    assert (following.previous_ranks, following.nodes) == ((0, 1, 4, 5), (0, 0, 2, 2))
    assert following.target.iteration == LAST_COMPLETED
    assert following.reason == "rank 3 was killed by SIGKILL"
    assert failed(runs) == [(3, 1, 5)], "its neighbour was killed with it, the others continued"
    (decision,) = decisions(runs)
    assert decision["lost_nodes"] == [1]
    assert [position["rank"] for position in decision["positions"]] == [0, 1, 4, 5]
    assert records(runs)[-1] == {"kind": "closed", "exit_code": 0, "reason": "all ranks have finished"}


def test_a_job_loses_one_node_after_the_other_and_ranks_go_by_their_new_numbers(runs: Path) -> None:
    faults = [
        'kill(rank=0, at_iteration=5, phase="forward", generation=0)',
        'kill(rank=2, phase="forward", generation=1)',
    ]
    finish(runs, start(runs, *faults))
    assert reformed(runs, 1).previous_ranks == (2, 3, 4, 5)
    second = reformed(runs, 2)
    assert (second.previous_ranks, second.nodes) == ((0, 1), (1, 1))
    assert second.target.iteration == LAST_COMPLETED + 10
    assert [death[:2] for death in failed(runs)] == [(0, 0), (2, 2)]


def test_a_rank_that_dies_before_it_speaks_takes_its_node_along(runs: Path) -> None:
    faults = [
        'kill(rank=3, at_iteration=5, phase="forward", generation=0)',
        'kill(rank=4, phase="replay", generation=0)',
    ]
    finish(runs, start(runs, *faults))
    assert reformed(runs, 1).nodes == (0, 0)
    assert {death[:2] for death in failed(runs)} == {(3, 1), (4, 2)}


def test_a_rank_that_dies_while_it_goes_on_breaks_the_next_membership(runs: Path) -> None:
    faults = [
        'kill(rank=3, at_iteration=5, phase="forward", generation=0)',
        'kill(rank=3, phase="build", generation=1)',
    ]
    finish(runs, start(runs, *faults))
    (decision,) = [found for found in decisions(runs) if found["generation"] == 1]
    assert (decision["lost_nodes"], decision["next"]["nodes"]) == ([2], [0, 0])


def test_an_error_without_a_death_ends_the_job_with_the_rank_that_had_it(runs: Path) -> None:
    output = finish(runs, start(runs, 'raise(rank=2, at_iteration=3, phase="forward")', iterations=10000), 7)
    assert RankFailed.exit_code == 7
    assert "RANK 2 FAILED FIRST (node 1, iteration 3, phase replay)" in output
    assert "raised megatron_ft.failpoints.InjectedFault: injected fault (rank 2, iteration 3, forward)" in output
    assert "this process must end" not in output, "a wait for a lost rank is not a failure of this rank"
    (decision,) = decisions(runs)
    assert (decision["declined"], decision["lost_nodes"]) == ("rank 2 raised", [])


def test_a_lost_node_process_is_a_lost_node(runs: Path) -> None:
    job = start(runs, iterations=200)
    eventually(lambda: len(started(runs).get(0, [])) == 6, "all ranks run")
    agent_process(runs, 2).send_signal(signal.SIGKILL)
    finish(runs, job)
    following = reformed(runs, 1)
    assert following.nodes == (0, 0, 1, 1)
    assert following.reason == "node 2 was lost: its process was killed by SIGKILL"


def agent_process(runs: Path, node: int) -> psutil.Process:
    """Return the process of a node's agent, found by its log."""

    def find() -> psutil.Process | None:
        for process in processes_of(runs):
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                logs = [Path(f"/proc/{process.pid}/fd/1").readlink().name]
                if f"node-{node:03d}.log" in logs:
                    return process
        return None

    found = eventually(find, f"the process of node {node}")
    assert isinstance(found, psutil.Process)
    return found


def test_too_few_nodes_start_all_again(runs: Path) -> None:
    faults = ['kill(rank=3, at_iteration=5, phase="forward", generation=0)']
    finish(runs, start(runs, *faults, 'kill(rank=0, phase="forward", generation=1)', min_nodes=2, max_restarts=1))
    assert [found["generation"] for found in decisions(runs)] == [0, 1]
    assert decisions(runs)[1]["declined"] == "too few nodes are left: 1, below recovery.min_nodes=2"
    (restart,) = [record for record in records(runs) if record["kind"] == "ranks_restarted"]
    assert restart["generation"] == 2
    assert sorted(start["rank"] for start in started(runs)[2]) == list(range(6))


def test_too_few_nodes_and_no_restart_end_the_job(runs: Path) -> None:
    output = finish(runs, start(runs, 'kill(rank=3, at_iteration=5, phase="forward", generation=0)', min_nodes=3), 7)
    assert "RANK 3 FAILED FIRST (node 1, iteration 5, phase forward)" in output
    assert not (runs / "dummy" / "decisions.jsonl").exists()


def test_ranks_that_do_not_speak_in_time_end_the_job(runs: Path) -> None:
    faults = ['kill(rank=3, at_iteration=5, phase="forward", generation=0)', 'stop(rank=4, phase="replay")']
    output = finish(runs, start(runs, *faults, reconfigure_timeout_seconds=1.0), 7)
    assert "RANK 3 FAILED FIRST" in output
    (decision,) = decisions(runs)
    assert decision["declined"] == "recovery.reconfigure_timeout_seconds=1: timed out waiting for ranks [4]"
    logs = [(runs / "dummy" / "logs" / f"rank-{rank:05d}.log").read_text() for rank in range(6)]
    reported = f"{ControlError.__name__}: this process must end: {decision['declined']}"
    assert [rank for rank in range(6) if reported in logs[rank]] == [0, 1, 5], (
        "the rest of the lost node was killed first"
    )


def test_ctrl_c_stops_a_job_that_has_lost_a_node(runs: Path) -> None:
    job = start(runs, 'kill(rank=3, at_iteration=5, phase="forward", generation=0)', iterations=10000)
    eventually(
        lambda: len([record for record in records(runs) if record["kind"] == "reformed"]) == 4, "the ranks continue"
    )
    job.send_signal(signal.SIGINT)
    finish(runs, job, EXIT_INTERRUPTED)
