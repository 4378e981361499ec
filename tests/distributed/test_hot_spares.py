"""Tests jobs of dummy ranks whose layout has no rank for some processes: these wait as hot spares."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.control.rpc import RpcClient, RpcError
from megatron_ft.errors import EXIT_INTERRUPTED, EXIT_OK
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.testing.jobs import start_dummy_job
from tests.distributed.test_joining_nodes import rank_process
from tests.distributed.test_launch import eventually, records, started
from tests.distributed.test_lost_nodes import agent_process, decisions, finish, reformed
from tests.helpers.keys import dotted

LAYOUT = {"launch.num_nodes": 4, "parallel.pipeline_model_parallel_size": 2, "recovery.min_nodes": 2}
"""Nodes 0 and 1 have stage 0. With three nodes there is one rank for each stage, and one hot spare."""
LOST = 'kill(rank=1, at_iteration=5, phase="forward", generation=0)'


def start(runs: Path, *faults: str, iterations: int = 10000, **overrides: Any) -> Any:
    settings = {"training.train_iterations": iterations, "testing.failpoints": list(faults), **dotted(**overrides)}
    return start_dummy_job(runs, "run_surviving", overrides={**LAYOUT, **settings})


def spared(runs: Path) -> list[tuple[int, int]]:
    """Return (generation, node) of each hot spare."""
    return [(record["generation"], record["node"]) for record in records(runs) if record["kind"] == "spared"]


def begun(runs: Path, generation: int) -> int:
    """Return the number of ranks that have begun a membership."""
    found = [record["next"]["generation"] for record in records(runs) if record["kind"] == "reformed"]
    return found.count(generation)


def test_a_hot_spare_waits_while_others_train_and_ends_with_the_job(runs: Path) -> None:
    finish(runs, start(runs, LOST, iterations=100))
    following = reformed(runs, 1)
    assert (following.nodes, following.members) == ((0, 2), (0, 2, 3))
    assert following.previous_ranks == (0, 2)
    assert spared(runs) == [(1, 3)]
    assert records(runs)[-1] == {"kind": "closed", "exit_code": EXIT_OK, "reason": "all ranks have finished"}


def test_the_death_of_a_hot_spare_is_the_loss_of_its_node(runs: Path) -> None:
    job = start(runs, LOST)
    eventually(lambda: begun(runs, 1) == 2 and spared(runs), "two ranks continue")
    rank_process(runs, 3).send_signal(signal.SIGKILL)
    eventually(lambda: begun(runs, 2) == 2, "they continue again")
    job.send_signal(signal.SIGINT)
    finish(runs, job, EXIT_INTERRUPTED)
    following = reformed(runs, 2)
    assert (following.nodes, following.members, following.previous_ranks) == ((0, 2), (0, 2), (0, 1))


def test_a_hot_spare_has_a_rank_again_when_the_lost_node_returns(runs: Path) -> None:
    job = start(runs, LOST, restart_lost_nodes=True)
    eventually(lambda: begun(runs, 2) == 4, "four ranks continue")
    job.send_signal(signal.SIGINT)
    finish(runs, job, EXIT_INTERRUPTED)
    following = reformed(runs, 2)
    assert (following.nodes, following.previous_ranks) == ((0, 1, 2, 3), (0, None, 1, None))


def test_a_start_on_fewer_nodes_has_hot_spares_too(runs: Path) -> None:
    job = start(runs, 'raise(node=0, phase="forward", generation=1)', max_restarts=1)
    eventually(lambda: len(started(runs).get(0, [])) == 4, "all ranks run")
    agent_process(runs, 1).send_signal(signal.SIGKILL)
    eventually(lambda: len(started(runs).get(2, [])) == 2, "two ranks start again")
    agent_process(runs, 3).send_signal(signal.SIGKILL)
    eventually(lambda: begun(runs, 3) == 2, "the ranks continue without the hot spare")
    job.send_signal(signal.SIGINT)
    finish(runs, job, EXIT_INTERRUPTED)
    again = sorted(started(runs)[2], key=lambda record: record["rank"])
    assert [(record["rank"], record["node"]) for record in again] == [(0, 0), (1, 2)]
    assert NextMembership.from_json(decisions(runs)[-1]["next"]).previous_ranks == (0, 1)


def test_a_node_leaves_only_if_each_stage_keeps_its_weights(runs: Path) -> None:
    job = start(runs, LOST)
    eventually(lambda: begun(runs, 1) == 2 and spared(runs), "two ranks continue")
    access = json.loads((runs / "dummy" / "controller.json").read_text())
    client = RpcClient(access["address"], "Controller", token=access["token"])
    try:
        with pytest.raises(RpcError, match="no rank with the weights of pipeline stage 0, tensor part 0 would remain"):
            client.call("drain", {"node": 0}, timeout_seconds=10)
        client.call("drain", {"node": 3}, timeout_seconds=10)
        eventually(lambda: client.call("status", {}, timeout_seconds=10)["members"] == [0, 2], "the hot spare has left")
    finally:
        client.close()
    job.send_signal(signal.SIGINT)
    finish(runs, job, EXIT_INTERRUPTED)
    assert decisions(runs)[-1]["left_nodes"] == [3]
