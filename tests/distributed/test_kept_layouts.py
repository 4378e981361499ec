"""Tests which nodes take the places of lost nodes in jobs that keep their layout. Processes are real, but ranks have no
model."""

import signal
from pathlib import Path
from typing import Any

from megatron_ft.control.admin import AdminClient
from megatron_ft.errors import EXIT_INTERRUPTED, ControlError
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.testing.jobs import start_dummy_job
from tests.distributed.test_joining_nodes import reported, waiting
from tests.distributed.test_launch import LIMIT_SECONDS, eventually, records, started
from tests.distributed.test_lost_nodes import agent_process, decisions, failed, finish, reformed
from tests.distributed.test_takeover import orders, signal_controller_when
from tests.helpers.keys import dotted

LAYOUT = {
    "launch.num_nodes": 3,
    "launch.ranks_per_node": 2,
    "recovery.keep_layout": True,
    "snapshot.policy": {"_target_": "megatron_ft.planning.snapshot.sparse_window.SparseWindow"},
}


def start(runs: Path, *faults: str, iterations: int = 100, **overrides: Any) -> Any:
    """Start a job on three nodes with two ranks each, which keeps its layout."""
    settings = {"training.train_iterations": iterations, "testing.failpoints": list(faults)}
    settings |= dotted(**overrides)
    return start_dummy_job(runs, "run_surviving", overrides={**LAYOUT, **settings})


def test_a_spare_takes_a_place_in_the_middle_and_the_lost_node_the_next(runs: Path) -> None:
    job = start(runs, iterations=10000, num_spare_nodes=1, restart_lost_nodes=True)
    eventually(lambda: waiting(runs) == [3, 3], "the spare waits")
    agent_process(runs, 1).send_signal(signal.SIGKILL)
    eventually(lambda: len(reported(runs, 1)) == 6, "six ranks continue")
    eventually(lambda: waiting(runs) == [3, 3, 1, 1], "the lost node is back, as a spare")
    agent_process(runs, 0).send_signal(signal.SIGKILL)
    eventually(lambda: len(reported(runs, 2)) == 6, "six ranks continue again")
    job.send_signal(signal.SIGINT)
    finish(runs, job, EXIT_INTERRUPTED)
    first, second = reformed(runs, 1), reformed(runs, 2)
    assert (first.previous_ranks, first.nodes) == ((0, 1, None, None, 4, 5), (0, 0, 3, 3, 2, 2))
    assert (second.previous_ranks, second.nodes) == ((None, None, 2, 3, 4, 5), (1, 1, 3, 3, 2, 2))
    about = [(found["lost_nodes"], found["joined_nodes"]) for found in decisions(runs)]
    assert about == [([1], [3]), ([0], [1])]
    assert [position["rank"] for position in decisions(runs)[0]["positions"]] == [0, 1, 4, 5]


def test_a_nodes_own_ranks_are_started_again_also_when_they_die_while_the_membership_forms(runs: Path) -> None:
    faults = [
        'kill(rank=3, at_iteration=5, phase="forward", generation=0)',
        'kill(rank=3, phase="build", generation=1)',
    ]
    finish(runs, start(runs, *faults, restart_lost_nodes=True))
    reformed(runs, 2)
    for number, found in enumerate(decisions(runs)):
        following = NextMembership.from_json(found["next"])
        assert (following.generation, following.nodes) == (number + 1, (0, 0, 1, 1, 2, 2))
        assert following.previous_ranks == (0, 1, None, None, 4, 5)
    assert [(found["lost_nodes"], found["joined_nodes"]) for found in decisions(runs)] == [([1], [1])] * 2
    assert [death[:2] for death in failed(runs)] == [(3, 1), (3, 1)]
    # Two of the first start and two of the second; what a rank reports as it is killed may be lost with it.
    assert waiting(runs) in ([1, 1, 1], [1, 1, 1, 1])
    assert records(runs)[-1] == {"kind": "closed", "exit_code": 0, "reason": "all ranks have finished"}


def test_a_node_without_a_process_gets_one_while_its_place_waits(runs: Path) -> None:
    job = start(runs, iterations=150, restart_lost_nodes=True)
    eventually(lambda: len(started(runs).get(0, [])) == 6, "all ranks run")
    agent_process(runs, 0).send_signal(signal.SIGKILL)
    finish(runs, job)
    following = reformed(runs, 1)
    assert (following.previous_ranks, following.nodes) == ((None, None, 2, 3, 4, 5), (0, 0, 1, 1, 2, 2))


def test_a_place_that_nobody_can_take_ends_the_job_by_name(runs: Path) -> None:
    job = start(runs, iterations=10000, num_spare_nodes=1)
    eventually(lambda: waiting(runs) == [3, 3], "the spare waits")
    agent_process(runs, 0).send_signal(signal.SIGKILL)
    eventually(lambda: len(reported(runs, 1)) == 6, "six ranks continue")
    agent_process(runs, 2).send_signal(signal.SIGKILL)
    finish(runs, job, ControlError.exit_code)
    assert decisions(runs)[1]["declined"] == (
        "node 2 is lost and has no replacement: no spare is left, and the node is not started again, because "
        "nodes.restart_lost_nodes=false"
    )


def test_a_place_that_stays_empty_takes_its_node_from_the_job_which_grows_when_a_node_returns(runs: Path) -> None:
    job = start(runs, iterations=10000, num_nodes=4, num_spare_nodes=1, min_nodes=2, join_window_seconds=0.1)
    eventually(lambda: waiting(runs) == [4, 4], "the spare waits")
    agent_process(runs, 1).send_signal(signal.SIGKILL)
    eventually(lambda: len(reported(runs, 1)) == 8, "eight ranks continue")
    agent_process(runs, 2).send_signal(signal.SIGKILL)
    eventually(lambda: len(reported(runs, 2)) == 6, "six ranks continue")
    with AdminClient(runs / "dummy") as client:
        client.add(2)
    eventually(lambda: len(reported(runs, 3)) == 8, "eight ranks continue again")
    job.send_signal(signal.SIGINT)
    finish(runs, job, EXIT_INTERRUPTED)
    kept, fewer, grown = (reformed(runs, generation) for generation in (1, 2, 3))
    assert (kept.keeps_layout, kept.nodes) == (True, (0, 0, 4, 4, 2, 2, 3, 3))
    assert (fewer.keeps_layout, fewer.nodes) == (False, (0, 0, 4, 4, 3, 3))
    assert fewer.previous_ranks == (0, 1, 2, 3, 6, 7), "ranks keep their order"
    assert (grown.keeps_layout, grown.nodes) == (False, (0, 0, 4, 4, 3, 3, 2, 2))
    assert grown.previous_ranks == (0, 1, 2, 3, 4, 5, None, None)


def test_all_ranks_start_again_by_place_where_nobody_can_take_one(runs: Path) -> None:
    fault = 'kill(rank=0, phase="forward", generation=1)'
    job = start(runs, fault, iterations=150, num_spare_nodes=1, max_restarts=1)
    eventually(lambda: waiting(runs) == [3, 3], "the spare waits")
    agent_process(runs, 1).send_signal(signal.SIGKILL)
    finish(runs, job)
    assert decisions(runs)[1]["declined"].startswith("node 0 is lost and has no replacement: no spare is left")
    again = sorted((record["rank"], record["node"]) for record in started(runs)[2])
    assert again == list(enumerate((0, 0, 3, 3, 2, 2)))
    assert {tuple(record["nodes"]) for record in started(runs)[2]} == {(0, 0, 3, 3, 2, 2)}


RESTARTED = {"keep_processes": False, "max_restarts": 5, "restart_lost_nodes": True}


def nodes_of(runs: Path, generation: int) -> tuple[int, ...]:
    """Return the node of each rank that started in a generation; empty until all six ranks have started."""
    found = {record["rank"]: record["node"] for record in started(runs).get(generation, [])}
    return tuple(found[rank] for rank in sorted(found)) if len(found) == 6 else ()


def has_agent(runs: Path, node: int) -> bool:
    with AdminClient(runs / "dummy") as client:
        return str(node) in client.status()["nodes"]


def test_without_keeping_processes_spares_and_lost_nodes_take_places_in_a_restart(runs: Path) -> None:
    job = start(runs, iterations=10000, num_spare_nodes=1, **RESTARTED)
    eventually(lambda: nodes_of(runs, 0) != () and has_agent(runs, 3), "the spare has an agent")
    agent_process(runs, 1).send_signal(signal.SIGKILL)
    eventually(lambda: nodes_of(runs, 1) == (0, 0, 3, 3, 2, 2), "the spare has the place")
    eventually(lambda: has_agent(runs, 1), "the lost node is back, as a spare")
    agent_process(runs, 0).send_signal(signal.SIGKILL)
    eventually(lambda: nodes_of(runs, 2) == (1, 1, 3, 3, 2, 2), "the lost node has the next place")
    for agent in [agent_process(runs, node) for node in (1, 2)]:  # at the same time
        agent.send_signal(signal.SIGKILL)
    eventually(lambda: len(nodes_of(runs, 3)) == 6, "two places are filled at once")
    assert set(nodes_of(runs, 3)) <= {0, 1, 2, 3} and waiting(runs) == [], "no rank waits to join"
    job.send_signal(signal.SIGINT)
    finish(runs, job, EXIT_INTERRUPTED)


def test_a_controller_that_is_killed_while_nodes_are_replaced_is_replaced_itself(runs: Path) -> None:
    job = start(runs, iterations=10000, **RESTARTED)
    eventually(lambda: nodes_of(runs, 0) != (), "all ranks run")
    for agent in [agent_process(runs, node) for node in (1, 2)]:
        agent.send_signal(signal.SIGKILL)
    signal_controller_when(runs, lambda: "stop" in orders(runs), "the ranks are ended")
    eventually(lambda: nodes_of(runs, 1) == (0, 0, 1, 1, 2, 2), "all ranks start again", seconds=LIMIT_SECONDS)
    job.send_signal(signal.SIGINT)
    finish(runs, job, EXIT_INTERRUPTED)
    assert orders(runs)[:2] == ["start", "stop"] and orders(runs).count("start") == 2
