"""What a controller takes from agents, and what it refuses."""

import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from megatron_ft.control.controller import FINAL_ERRORS, Controller, JobEnd
from megatron_ft.control.facts import KillRequested
from megatron_ft.control.membership_state import Decision, MembershipPolicy, Outcome, Phase, Step
from megatron_ft.control.rpc import RpcClient, RpcError, new_token
from megatron_ft.errors import MegatronFtError
from tests.helpers.votes import vote_of

TOKEN = new_token()
VOTE = vote_of(4)
POLICY = MembershipPolicy(
    num_nodes=2, ranks_per_node=1, start_timeout_seconds=60, stop_timeout_seconds=5, max_restarts=1
)


ONE_NODE_IS_ENOUGH = replace(POLICY, max_restarts=0, min_nodes=1)


def start_order(generation: int) -> dict[str, Any]:
    return {"config": 1, "master_addr": "127.0.0.1", "master_port": 20000 + generation}


class Running:
    """A controller in a thread, and a client that plays agents."""

    def __init__(self, policy: MembershipPolicy = POLICY) -> None:
        self.decisions: list[Any] = []
        self.controller = Controller(
            policy,
            interface="127.0.0.1",
            token=TOKEN,
            start_order=start_order,
            record_decision=self.decisions.append,
        )
        self.records: list[Any] = []
        self.end: JobEnd | None = None
        self.details_at_restart: dict[int, Any] = {}
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.client = RpcClient(self.controller.address, "Controller", token=TOKEN)

    def _run(self) -> None:
        self.end = self.controller.run(self.records.append, self._decided)

    def _decided(self, step: Step) -> None:
        if step.decision is Decision.RESTART:
            self.details_at_restart = dict(self.controller.details)

    def start(self) -> dict[str, Any]:
        """Let both nodes join; the order they get."""
        for node in (0, 1):
            service = {"socket": f"node-{node}.sock", "address": f"127.0.0.1:{9000 + node}"}
            self.call("join", node=node, services={"keeper": service})
        return self.order(0)

    def order(self, number: int) -> dict[str, Any]:
        """The order of that number, as soon as it is given."""
        order: dict[str, Any] = self.call("poll", node=0, after=number, wait_seconds=10)["orders"][0]
        return order

    def call(self, method: str, **body: Any) -> dict[str, Any]:
        return self.client.call(method, body, timeout_seconds=10)

    def deliver(self, node: int, first: int, *items: dict[str, Any]) -> int:
        return int(self.call("deliver", node=node, first=first, items=list(items))["next"])


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[Running]:
    """A job; a test that parametrizes it says by which policy."""
    running = Running(getattr(request, "param", POLICY))
    yield running
    running.controller.post(KillRequested())
    running.controller.post(KillRequested())
    for node in running.controller.state.members:
        number = running.deliver(node, 10**6)
        running.deliver(node, number, exited(node, -9, running.controller.state.generation))
    running.thread.join(timeout=20)
    assert not running.thread.is_alive()
    running.client.close()
    running.controller.close()


def record(rank: int, number: int) -> dict[str, Any]:
    return {"op": "record", "rank": rank, "generation": 0, "record": {"n": number}}


def reported(rank: int, generation: int = 0) -> dict[str, Any]:
    return {"op": "reported", "rank": rank, "generation": generation}


def raised(rank: int, at_seconds: float, exit_code: int | None = None) -> dict[str, Any]:
    return {"op": "raised", "rank": rank, "generation": 0, "at_seconds": at_seconds, "exit_code": exit_code}


def exited(rank: int, returncode: int = 0, generation: int = 0) -> dict[str, Any]:
    about = {"returncode": returncode, "at_seconds": 1.0, "done": returncode == 0}
    return {"op": "exited", "rank": rank, "generation": generation, **about}


def test_a_job_from_start_to_end(job: Running) -> None:
    assert job.call("poll", node=0, after=0, wait_seconds=0)["orders"] == []
    for node in (0, 1):
        job.call("join", node=node)
    (start,) = job.call("poll", node=1, after=0, wait_seconds=10)["orders"]
    assert (start["op"], start["generation"], start["ranks"], start["config"]) == ("start", 0, {"0": [0], "1": [1]}, 1)
    for rank in (0, 1):
        job.deliver(rank, 0, reported(rank), record(rank, 7), exited(rank))
    (end,) = job.call("poll", node=0, after=1, wait_seconds=10)["orders"]
    job.thread.join(timeout=10)
    assert end["op"] == "end"
    assert job.end is not None and job.end.outcome is Outcome.FINISHED
    assert job.records == [{"n": 7}, {"n": 7}]


def test_ranks_start_again_after_a_failure_with_an_order_of_their_own(job: Running) -> None:
    job.start()
    for rank in (0, 1):
        job.deliver(rank, 0, reported(rank))
    job.deliver(1, 1, {**exited(1, -9), "iteration": 4, "phase": "backward"})
    assert job.order(1)["op"] == "stop"
    job.deliver(0, 1, raised(0, 1.5), exited(0, 1))
    start = job.order(2)
    assert (start["op"], start["generation"], start["master_port"]) == ("start", 1, 20001)
    assert start["ranks"] == {"0": [0], "1": [1]}
    assert {rank: about["returncode"] for rank, about in job.details_at_restart.items()} == {0: 1, 1: -9}
    assert job.controller.state.furthest_iteration == 4
    for rank, number in ((0, 3), (1, 2)):
        job.deliver(rank, number, reported(rank, 1), exited(rank, generation=1))
    job.thread.join(timeout=10)
    assert job.end is not None and job.end.outcome is Outcome.FINISHED
    assert job.end.survived == ("rank 1 was killed by SIGKILL",)


@pytest.mark.parametrize("error", FINAL_ERRORS)
def test_an_error_that_another_try_cannot_mend_ends_the_job(job: Running, error: type[MegatronFtError]) -> None:
    job.start()
    for rank in (0, 1):
        job.deliver(rank, 0, raised(rank, 1.0, error.exit_code))
        job.deliver(rank, 1, exited(rank, error.exit_code))
    job.thread.join(timeout=10)
    assert job.end is not None and job.end.outcome is Outcome.FAILED
    assert job.end.survived == ()


def test_every_node_learns_where_the_services_of_all_listen(job: Running) -> None:
    assert job.start()["services"] == {"keeper": {"0": "127.0.0.1:9000", "1": "127.0.0.1:9001"}}


def test_what_is_delivered_twice_counts_once(job: Running) -> None:
    assert job.deliver(0, 0, record(0, 0), record(0, 1)) == 2
    assert job.deliver(0, 0, record(0, 0), record(0, 1), record(0, 2)) == 3
    assert job.deliver(1, 0, record(1, 9)) == 1
    job.controller.post(KillRequested())
    job.thread.join(timeout=10)
    assert [entry["n"] for entry in job.records] == [0, 1, 2, 9]


@pytest.mark.parametrize(
    ("method", "body", "word"),
    [
        ("join", {"node": 2}, "nodes 0 to 1"),
        ("join", {}, "malformed"),
        ("join", {"node": "x"}, "malformed"),
        ("join", {"node": 0, "services": {"keeper": {"socket": "s"}}}, "malformed"),
        ("join", {"node": 0, "services": 7}, "malformed"),
        ("poll", {"node": -1, "after": 0, "wait_seconds": 0}, "nodes 0 to 1"),
        ("poll", {"node": 0, "after": 0}, "malformed"),
        ("deliver", {"node": 0, "first": 0, "items": [exited(1, -9)]}, "not of node 0"),
        ("deliver", {"node": 0, "first": 0, "items": [{"op": "decree", "rank": 0, "generation": 0}]}, "unknown item"),
        ("deliver", {"node": 0, "first": 0, "items": [{"op": "exited", "rank": 0, "generation": 0}]}, "malformed"),
        ("deliver", {"node": 0, "first": 0, "items": [{**exited(0), "iteration": "many"}]}, "malformed"),
        ("deliver", {"node": 0, "first": 0, "items": [{"op": "reported", "rank": 0}]}, "malformed"),
        ("deliver", {"node": 0, "first": 0, "items": [reported(0, 1)]}, "not of generation 1"),
        ("deliver", {"node": 0, "first": 0, "items": [7]}, "malformed"),
        ("deliver", {"node": 0, "first": 0}, "malformed"),
    ],
)
def test_nonsense_changes_nothing(job: Running, method: str, body: dict[str, Any], word: str) -> None:
    with pytest.raises(RpcError, match=word):
        job.call(method, **body)
    assert job.controller.state.phase is Phase.FORMING
    assert not job.controller.state.joined
    assert not job.controller.state.failures


def broken(number: int, generation: int = 0, **changes: Any) -> dict[str, Any]:
    position = {"rank": number, "generation": generation, "completed": 4, "contributed": 4, "vote": None}
    about = {"at_seconds": 1.0, "error": "peer", "traceback": "Traceback", "exit_code": None}
    return {"op": "broken", "rank": number, "generation": generation, "position": {**position, **changes}, **about}


@pytest.mark.parametrize("job", [ONE_NODE_IS_ENOUGH], indirect=True)
def test_the_next_membership_is_on_record_before_anybody_is_told(job: Running) -> None:
    job.start()
    for rank in (0, 1):
        job.deliver(rank, 0, reported(rank))
    job.deliver(0, 1, exited(0, -9))
    order = job.order(1)
    assert (order["op"], order["generation"], order["lost"]) == ("break", 0, [0])
    job.deliver(1, 1, broken(1))
    order = job.order(2)
    assert order["op"] == "reform"
    assert (order["next"]["previous_ranks"], order["next"]["nodes"]) == ([1], [1])
    assert (order["next"]["generation"], order["next"]["master_port"]) == (1, 20001)
    (decision,) = job.decisions
    assert decision["next"] == order["next"]
    assert (decision["generation"], decision["lost_nodes"]) == (0, [0])
    assert decision["positions"] == [broken(1)["position"]]
    job.deliver(1, 2, {**record(1, 7), "generation": 1}, exited(1, generation=1))
    job.thread.join(timeout=10)
    assert job.end is not None and job.end.outcome is Outcome.FINISHED
    assert (job.end.survived, job.end.num_reforms) == (("rank 0 was killed by SIGKILL",), 1)
    assert job.records == [{"n": 7}]


@pytest.mark.parametrize("job", [ONE_NODE_IS_ENOUGH], indirect=True)
def test_a_rank_fails_with_its_first_error_and_by_its_number_in_the_membership(job: Running) -> None:
    job.start()
    for rank in (0, 1):
        job.deliver(rank, 0, reported(rank))
    job.deliver(0, 1, exited(0, -9))
    job.deliver(1, 1, broken(1))
    assert job.order(2)["op"] == "reform"
    error = {**broken(1, 1, rank=0), "error": "ValueError: its own", "exit_code": 3}
    job.deliver(1, 2, error)
    stop = job.order(3)
    assert (stop["op"], stop["survivors_end"]) == ("stop", True)
    waited = {**raised(1, 3.0, 8), "generation": 1, "error": "ControlError: the job ends", "traceback": "other"}
    job.deliver(1, 3, waited, exited(1, 8, generation=1))
    job.thread.join(timeout=10)
    assert job.end is not None and job.end.first_failure is not None
    assert job.end.reason == "rank 0 raised", "the first of one, though it was started as rank 1"
    details = job.end.details[job.end.first_failure.rank]
    assert (details["number"], details["error"], details["exit_code"]) == (0, "ValueError: its own", 3)
    assert job.decisions[-1]["declined"] == "rank 0 raised"


@pytest.mark.parametrize(
    ("item", "word"),
    [
        (broken(0, rank=1), "speaks for"),
        ({**broken(0), "position": broken(0, 1)["position"]}, "speaks for"),
        (broken(0, 1), "not of generation 1"),
        (broken(0, completed="4"), "malformed position"),
        (broken(0, contributed=6), "malformed position"),
        (broken(0, vote={"iteration": 4}), "malformed position"),
        (broken(0, vote=7), "malformed position"),
        (broken(0, vote={**asdict(VOTE), "grad_norm": "1.0"}), "malformed position"),
        (broken(0, more=1), "malformed position"),
        ({**broken(0), "position": None}, "malformed position"),
        ({name: value for name, value in broken(0).items() if name != "position"}, "malformed position"),
        ({name: value for name, value in broken(0).items() if name != "at_seconds"}, "malformed"),
    ],
)
def test_a_position_that_is_none_or_another_ranks_is_refused(job: Running, item: dict[str, Any], word: str) -> None:
    with pytest.raises(RpcError, match=word):
        job.deliver(0, 0, item)
    assert not job.controller.state.broken and not job.controller.state.failures
