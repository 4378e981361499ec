"""Tests whole jobs of dummy ranks whose nodes are killed from outside, including sidecars. Each node returns
afterwards."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.errors import EXIT_INTERRUPTED
from megatron_ft.failures.processes import processes_of as processes_of_nodes
from megatron_ft.testing.jobs import start_dummy_job
from tests.distributed.test_joining_nodes import reported
from tests.distributed.test_launch import eventually, records, started
from tests.distributed.test_lost_nodes import finish
from tests.helpers.keys import dotted

SIDECARS = {"dummy": "megatron_ft.testing.dummy_sidecar"}
REPLICAS = {"recovery.min_nodes": 1, "nodes.join_window_seconds": 0.2}
IN_PLACE = {
    "recovery.keep_layout": True,
    "snapshot.policy": {"_target_": "megatron_ft.planning.snapshot.sparse_window.SparseWindow"},
}
WHOLE_NODE = ["node-001.log", "node-001-dummy.log", "rank-00002.log", "rank-00003.log"]


def start(runs: Path, layout: dict[str, Any], *, manner: str = "", **overrides: Any) -> Any:
    """Start a job on three nodes with two ranks and one service each. Lost nodes are started again."""
    settings: dict[str, Any] = {"launch.num_nodes": 3, "launch.ranks_per_node": 2, "nodes.restart_lost_nodes": True}
    settings |= {**layout, "training.train_iterations": 100000}
    settings |= dotted(**overrides)
    environment = {"DUMMY_SERVICE": manner}
    return start_dummy_job(runs, "run_surviving", overrides=settings, sidecars=SIDECARS, environment=environment)


def kill(runs: Path, logs: Sequence[str]) -> None:
    """Send SIGKILL at one instant to the processes of node 1 that write to ``logs``."""
    with processes_of_nodes(runs / "dummy", [1], ranks_per_node=2) as found:
        victims = [process for process in found[1] if process.log in logs]
        assert sorted(process.log for process in victims) == sorted(logs)
        hit = [process.log for process in victims if process.send(signal.SIGKILL)]
    assert hit[:1] == logs[:1], "the kernel may have killed the others already, because their parent is gone"


def num_memberships(runs: Path) -> int:
    """Return the number of memberships of all three nodes that all six ranks have reported, the first one included."""
    generations = {record["next"]["generation"] for record in records(runs) if record["kind"] == "reformed"}
    return 1 + sum(len(reported(runs, generation)) == 6 for generation in generations)


@pytest.mark.parametrize(
    "layout", [pytest.param(REPLICAS, id="replicas", marks=pytest.mark.extended), pytest.param(IN_PLACE, id="in_place")]
)
def test_a_killed_node_is_back_whatever_of_it_was_killed(
    runs: Path, short_tmpdir: Path, layout: dict[str, Any]
) -> None:
    """No start fails: node 1 is started once more than it has died, and no other node is started again."""
    job = start(runs, layout, max_node_restarts=3)
    eventually(lambda: len(started(runs).get(0, [])) == 6, "all ranks run")
    for number, logs in enumerate((WHOLE_NODE[:1], WHOLE_NODE[:2], WHOLE_NODE), start=2):
        kill(runs, logs)
        eventually(lambda number=number: num_memberships(runs) == number, f"node 1 is back after {logs} were killed")
    (runtime_dir,) = short_tmpdir.glob("megatron-ft-*")
    sockets = sorted(path.name for path in runtime_dir.glob("001-*.sock"))
    assert len(sockets) == 2, f"those of the living agent and of its service, none of the dead: {sockets}"
    job.send_signal(signal.SIGINT)
    finish(runs, job, EXIT_INTERRUPTED)
    assert (runs / "dummy" / "logs" / "node-001-dummy.log").read_text() == "serving node 1\n" * 4
    assert failed_starts(runs) == []


def test_a_node_whose_starts_fail_is_tried_again_and_each_failure_is_reported(runs: Path) -> None:
    """From the second start on, the node's service gets no memory; it gets memory again at the fourth start."""
    job = start(runs, REPLICAS, manner="fails_if_full", max_node_restarts=4)
    eventually(lambda: len(started(runs).get(0, [])) == 6, "all ranks run")
    full = runs / "dummy" / "logs" / "full"
    full.touch()
    kill(runs, WHOLE_NODE)
    told_of = eventually(lambda: len(failed_starts(runs)) >= 2 and failed_starts(runs), "two starts have failed")
    full.unlink()
    eventually(lambda: num_memberships(runs) == 2, "node 1 is back")
    job.send_signal(signal.SIGINT)
    output = finish(runs, job, EXIT_INTERRUPTED)
    assert {(event["node"], event["starts_again"]) for event in told_of} == {(1, True)}
    said = "node agent: sidecar dummy exited with code 3 while the job ran, the last line of its log: dummy"
    assert all(event["reason"].startswith(f"its process exited with code 8: {said}") for event in told_of)
    assert "Traceback" not in output


def test_a_node_that_can_never_start_is_given_up(runs: Path) -> None:
    job = start(runs, REPLICAS, manner="fails_if_full", max_node_restarts=2)
    eventually(lambda: len(started(runs).get(0, [])) == 6, "all ranks run")
    (runs / "dummy" / "logs" / "full").touch()
    kill(runs, WHOLE_NODE)
    eventually(lambda: [event["starts_again"] for event in failed_starts(runs)] == [True, False], "it is given up")
    job.send_signal(signal.SIGINT)
    finish(runs, job, EXIT_INTERRUPTED)
    assert len(failed_starts(runs)) == 2


def failed_starts(runs: Path) -> list[dict[str, Any]]:
    """Return the reported failed starts of nodes."""
    return [record for record in records(runs) if record["kind"] == "node_start_failed"]
