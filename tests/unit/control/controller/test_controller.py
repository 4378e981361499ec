"""Tests which calls of agents a controller accepts, and which it refuses."""

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from megatron_ft.control.controller.controller import Controller
from megatron_ft.control.detector import DetectorPolicy
from megatron_ft.control.membership.events import DrainRequested, KillRequested, NodeLost
from megatron_ft.control.membership.state import (
    AgentState,
    Decision,
    FailedStart,
    MembershipPolicy,
    Outcome,
    Phase,
    Step,
)
from megatron_ft.control.messages import LaunchSpec
from megatron_ft.control.ports import StoreEndpoint
from megatron_ft.control.report import JobResult
from megatron_ft.control.rpc import RpcClient, RpcError, new_token
from megatron_ft.errors import FINAL_ERRORS, MegatronFtError
from megatron_ft.serde import encode
from megatron_ft.testing.attacks import malformed_items
from megatron_ft.testing.votes import vote_of
from tests.helpers.node_states import of_agents

TOKEN = new_token()
VOTE = vote_of(4)
POLICY = MembershipPolicy(
    num_nodes=2, ranks_per_node=1, start_timeout_seconds=60, stop_timeout_seconds=5, max_restarts=1
)


ONE_NODE_IS_ENOUGH = replace(POLICY, max_restarts=0, min_nodes=1)


PATIENT = DetectorPolicy(heartbeat_timeout_seconds=600.0, hang_seconds=None)
QUICK = DetectorPolicy(heartbeat_interval_seconds=0.05, heartbeat_timeout_seconds=0.4, hang_seconds=None)


def launch_spec(generation: int, members: Sequence[int], stores: Mapping[int, StoreEndpoint]) -> LaunchSpec:
    places = {str(node): encode(store) for node, store in stores.items()}
    return LaunchSpec(
        entry="package:function",
        config={"members": list(members), "stores": places},
        run_dir="run",
        working_dir=".",
        world_size=len(members),
        num_nodes=len(members),
        can_survive=True,
        master_addr="127.0.0.1",
        master_port=20000 + generation,
    )


def losses(job: "Running") -> list[int]:
    """Return the number of losses in a row of each node that has any."""
    return [record.num_losses for record in job.controller.state.nodes.records if record.num_losses]


class Running:
    """Controller in a thread, and a client that acts as the agents, which may stop calling."""

    def __init__(self, policy: MembershipPolicy = POLICY, detection: DetectorPolicy = PATIENT) -> None:
        self.decisions: list[Any] = []
        self.controller = Controller(
            policy,
            interface="127.0.0.1",
            token=TOKEN,
            launch_spec=launch_spec,
            record_decision=self.decisions.append,
            detection=detection,
        )
        self.records: list[Any] = []
        self.steps: queue.SimpleQueue[Step] = queue.SimpleQueue()
        self.sessions: dict[int, int] = {}
        self.start_of: dict[int, int] = {0: 0, 1: 0}
        self.end: JobResult | None = None
        self.details_at_restart: dict[int, Any] = {}
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.client = RpcClient(self.controller.address, "Controller", token=TOKEN)

    def _run(self) -> None:
        self.end = self.controller.run(lambda record, _origin: self.records.append(record), self._decided)

    def _decided(self, step: Step) -> None:
        self.steps.put(step)
        if step.decision is Decision.RESTART:
            self.details_at_restart = dict(self.controller.details)

    def start(self) -> dict[str, Any]:
        """Let both nodes register. Return the order that they get."""
        for node in (0, 1):
            service = {"socket": f"node-{node}.sock", "address": f"127.0.0.1:{9000 + node}"}
            self.join(node, sidecars={"keeper": service})
        return self.order(0)

    def join(self, node: int, process_id: int = 7, **body: Any) -> dict[str, Any]:
        joined = self.call("join", node=node, process_id=process_id, **body)
        self.sessions[node] = joined["session"]
        return joined

    def order(self, number: int) -> dict[str, Any]:
        """Return the order with this number as soon as it is given."""
        order: dict[str, Any] = self.call("poll", node=0, after=number, wait_seconds=10)["orders"][0]
        return order

    def call(self, method: str, **body: Any) -> dict[str, Any]:
        """Make a call as the present process of the named node."""
        session = {} if method not in ("poll", "deliver") else {"session": self.sessions.get(body["node"], 0)}
        return self.client.call(method, {**session, **body}, timeout_seconds=10)

    def deliver(self, node: int, first: int, *items: dict[str, Any]) -> int:
        return int(self.call("deliver", node=node, first=first, items=list(items))["next"])


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[Running]:
    """Yield a job. A test can set its policy by parametrization."""
    param = getattr(request, "param", POLICY)
    running = Running(*param) if isinstance(param, tuple) else Running(param)
    yield running
    running.controller.post(KillRequested())
    running.controller.post(KillRequested())
    state = running.controller.state
    for node in set(state.nodes.with_ranks & state.nodes.registered) & set(running.sessions):
        number = running.deliver(node, 10**6)
        running.deliver(node, number, exited(node, -9, running.controller.state.generation, running.start_of[node]))
    running.thread.join(timeout=20)
    assert not running.thread.is_alive()
    running.client.close()
    running.controller.close()


def test_an_order_knows_where_nodes_can_serve_a_store(job: Running) -> None:
    places = {node: {"address": f"10.0.0.{node}", "ports": [20000 + node]} for node in (0, 1)}
    for node, place in places.items():
        job.join(node, store=place)
    assert job.order(0)["config"]["stores"] == {str(node): place for node, place in places.items()}


def record(rank: int, number: int) -> dict[str, Any]:
    return {"op": "record", "rank": rank, "start": 0, "generation": 0, "record": {"n": number}}


def reported(rank: int, generation: int = 0, start: int = 0) -> dict[str, Any]:
    return {"op": "reported", "rank": rank, "start": start, "generation": generation}


def raised(rank: int, at_seconds: float, exit_code: int | None = None) -> dict[str, Any]:
    about = {"at_seconds": at_seconds, "exit_code": exit_code}
    return {"op": "raised", "rank": rank, "start": 0, "generation": 0, **about}


def exited(rank: int, returncode: int = 0, generation: int = 0, start: int = 0) -> dict[str, Any]:
    about = {"returncode": returncode, "at_seconds": 1.0, "done": returncode == 0}
    return {"op": "exited", "rank": rank, "start": start, "generation": generation, **about}


def test_a_job_from_start_to_end(job: Running) -> None:
    assert job.join(0) == {"session": 0, "after": 0, "epoch": 1}
    assert job.call("poll", node=0, after=0, wait_seconds=0)["orders"] == []
    job.join(1)
    (start,) = job.call("poll", node=1, after=0, wait_seconds=10)["orders"]
    assert (start["op"], start["generation"], start["ranks"]) == ("start", 0, {"0": [0], "1": [1]})
    for rank in (0, 1):
        job.deliver(rank, 0, reported(rank), record(rank, 7), exited(rank))
    (end,) = job.call("poll", node=0, after=1, wait_seconds=10)["orders"]
    job.thread.join(timeout=10)
    assert end["op"] == "end"
    assert job.end is not None and job.end.outcome is Outcome.FINISHED
    assert job.records == [{"n": 7}, {"n": 7}]


@pytest.mark.parametrize("about", [{"is_complete": True}, {"is_complete": False}, {}])
def test_agents_end_kept_servers_only_if_the_run_is_complete(job: Running, about: dict[str, bool]) -> None:
    """A journal of an earlier version does not tell whether the run is complete."""
    job.start()
    for rank in (0, 1):
        job.deliver(rank, 0, reported(rank), {**exited(rank), **about})
    assert job.order(1)["has_finished"] == about.get("is_complete", False)
    job.thread.join(timeout=10)
    assert job.end is not None and job.end.outcome is Outcome.FINISHED
    assert job.end.is_complete == about.get("is_complete", False)


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
        job.deliver(rank, number, reported(rank, 1, 1), exited(rank, 0, 1, 1))
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
    assert job.start()["sidecars"] == {"keeper": {"0": "127.0.0.1:9000", "1": "127.0.0.1:9001"}}


def test_what_is_delivered_twice_counts_once(job: Running) -> None:
    job.join(0)
    job.join(1)
    assert job.deliver(0, 0, record(0, 0), record(0, 1)) == 2
    assert job.deliver(0, 0, record(0, 0), record(0, 1), record(0, 2)) == 3
    assert job.deliver(1, 0, record(1, 9)) == 1
    job.deliver(0, 3, exited(0))
    job.deliver(1, 1, exited(1))
    job.thread.join(timeout=10)
    assert [entry["n"] for entry in job.records] == [0, 1, 2, 9]


@pytest.mark.parametrize(
    ("method", "body", "word"),
    [
        ("join", {"node": 2, "process_id": 7}, "must be from 0 to 1, the job's nodes"),
        ("join", {}, "malformed"),
        ("join", {"node": 1}, "malformed"),
        ("join", {"node": "x", "process_id": 7}, "malformed"),
        ("join", {"node": 1, "process_id": 7, "sidecars": {"keeper": {"socket": "s"}}}, "malformed"),
        ("join", {"node": 1, "process_id": 7, "sidecars": 7}, "malformed"),
        ("join", {"node": 1, "process_id": 7, "store": 7}, "malformed"),
        (
            "join",
            {"node": 1, "process_id": 7, "store": {"address": "10.0.0.1", "ports": [0]}},
            "must be from 1 to 65535",
        ),
        ("poll", {"node": 1, "after": 0, "wait_seconds": 0}, "session 0 of its agent has ended"),
        ("deliver", {"node": 1, "first": 0, "items": []}, "session 0 of its agent has ended"),
        ("deliver", {"node": 0, "session": 1, "first": 0, "items": []}, "session 1 of its agent has ended"),
        ("deliver", {"node": 0, "session": "x", "first": 0, "items": []}, "malformed"),
        ("poll", {"node": -1, "after": 0, "wait_seconds": 0}, "must be from 0 to 1, the job's nodes"),
        ("poll", {"node": 0, "after": 0}, "malformed"),
        ("deliver", {"node": 0, "first": 0, "items": [exited(1, -9)]}, "not belong to node 0"),
        ("deliver", {"node": 0, "first": 0, "items": [{"op": "decree", "rank": 0, "generation": 0}]}, "unknown report"),
        (
            "deliver",
            {"node": 0, "first": 0, "items": [{"op": "exited", "rank": 0, "start": 0, "generation": 0}]},
            "malformed",
        ),
        ("deliver", {"node": 0, "first": 0, "items": [{**exited(0), "iteration": "many"}]}, "malformed"),
        ("deliver", {"node": 0, "first": 0, "items": [{"op": "reported", "rank": 0}]}, "malformed"),
        ("deliver", {"node": 0, "first": 0, "items": [reported(0, 1)]}, "not in generation 1 of the job's membership"),
        ("deliver", {"node": 0, "first": 0, "items": [{"op": "reported", "rank": 0, "generation": 0}]}, "malformed"),
        ("deliver", {"node": 0, "first": 0, "items": [{**reported(0), "op": "progress"}]}, "malformed"),
        ("deliver", {"node": 0, "first": 0, "items": [{**reported(0), "op": "hung"}]}, "malformed"),
        ("deliver", {"node": 0, "first": 0, "items": [7]}, "malformed"),
        ("deliver", {"node": 0, "first": 0}, "malformed"),
    ],
)
def test_nonsense_changes_nothing(job: Running, method: str, body: dict[str, Any], word: str) -> None:
    job.join(0)
    with pytest.raises(RpcError, match=word):
        job.call(method, **{"node": 0, **body} if "node" not in body and method != "join" else body)
    assert job.controller.state.phase is Phase.FORMING
    assert job.controller.state.nodes.registered <= {0}
    assert not job.controller.state.failures


def broken(number: int, generation: int = 0, **changes: Any) -> dict[str, Any]:
    position = {"rank": number, "generation": generation, "completed": 4, "contributed": 4, "vote": None}
    position["has_state"] = True
    position["is_formed"] = True
    about = {"at_seconds": 1.0, "error": "peer", "traceback": "Traceback", "exit_code": None}
    position |= changes
    return {"op": "broken", "rank": number, "start": 0, "generation": generation, "position": position, **about}


@pytest.mark.parametrize("job", [ONE_NODE_IS_ENOUGH], indirect=True)
def test_the_next_membership_is_on_record_before_ranks_receive_it(job: Running) -> None:
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
        (broken(0, rank=1), "sent the training position of rank 1 of generation 0"),
        ({**broken(0), "position": broken(0, 1)["position"]}, "sent the training position of rank 0 of generation 1"),
        (broken(0, 1), "not in generation 1 of the job's membership"),
        (broken(0, completed="4"), "malformed (report broken: |training )position"),
        (broken(0, contributed=6), "malformed (report broken: |training )position"),
        (broken(0, has_state=1), "malformed (report broken: |training )position"),
        (broken(0, vote={"iteration": 4}), "malformed (report broken: |training )position"),
        (broken(0, vote=7), "malformed (report broken: |training )position"),
        (broken(0, vote={**asdict(VOTE), "grad_norm": "1.0"}), "malformed (report broken: |training )position"),
        (broken(0, more=1), "malformed (report broken: |training )position"),
        ({**broken(0), "position": None}, "malformed (report broken: |training )position"),
        ({name: value for name, value in broken(0).items() if name != "position"}, "position: is missing"),
        ({name: value for name, value in broken(0).items() if name != "at_seconds"}, "malformed"),
    ],
)
def test_a_position_that_is_none_or_another_ranks_is_refused(job: Running, item: dict[str, Any], word: str) -> None:
    job.join(0)
    with pytest.raises(RpcError, match=word):
        job.deliver(0, 0, item)
    assert not job.controller.state.broken and not job.controller.state.failures


GROWING = replace(ONE_NODE_IS_ENOUGH, max_nodes=3, join_window_seconds=0.0)


@pytest.mark.parametrize("job", [GROWING], indirect=True)
def test_a_node_joins_the_job_that_runs_and_another_leaves_it(job: Running) -> None:
    job.start()
    for rank in (0, 1):
        job.deliver(rank, 0, reported(rank))
    assert job.join(2) == {"session": 0, "after": 1, "epoch": 1}, "what was ordered before is not for it"
    job.start_of[2] = 1
    start = job.order(1)
    assert (start["op"], start["start"], start["ranks"], start["is_joining"]) == ("start", 1, {"2": [2]}, True)
    assert (start["nodes"], start["config"]["members"]) == ([0, 1], [0, 1])
    job.deliver(2, 0, reported(2, 0, 1))
    change = job.order(2)
    assert (change["op"], change["generation"], change["leaving"]) == ("change", 0, [])
    for rank in (0, 1):
        job.deliver(rank, 1, {**broken(rank), "planned": True})
    reform = job.order(3)
    assert (reform["next"]["previous_ranks"], reform["next"]["nodes"]) == ([0, 1, None], [0, 1, 2])
    job.controller.post(DrainRequested(0))
    change = job.order(4)
    assert (change["op"], change["generation"], change["leaving"]) == ("change", 1, [0])
    for rank, start_number, count in ((0, 0, 2), (1, 0, 2), (2, 1, 1)):
        job.deliver(rank, count, {**broken(rank, 1), "start": start_number, "planned": True})
    reform = job.order(5)
    assert (reform["leaving"], reform["lost"]) == ([0], [])
    assert (reform["next"]["previous_ranks"], reform["next"]["nodes"]) == ([1, 2], [1, 2])
    assert [(about["joined_nodes"], about["left_nodes"]) for about in job.decisions] == [([2], []), ([], [0])]
    job.deliver(0, 3, exited(0, 0, 1))
    job.deliver(1, 3, exited(1, 0, 2))
    job.deliver(2, 2, exited(2, 0, 2, 1))
    job.thread.join(timeout=10)
    assert job.end is not None and job.end.outcome is Outcome.FINISHED
    assert (job.end.num_reforms, job.end.survived) == (2, ("nodes joined or left on request",) * 2)
    assert job.end.details[2]["number"] == 1


@pytest.mark.parametrize("job", [GROWING], indirect=True)
def test_a_process_that_takes_the_place_of_another_starts_ranks_of_its_own(job: Running) -> None:
    job.start()
    for rank in (0, 1):
        job.deliver(rank, 0, reported(rank))
    assert job.join(0, process_id=7)["session"] == 0, "the same process may ask twice"
    joined = job.join(0, process_id=8)
    assert joined == {"session": 1, "after": 2, "epoch": 1}, "the loss of its predecessor was reported before"
    with pytest.raises(RpcError, match="session 0 of its agent has ended"):
        job.call("deliver", node=0, session=0, first=1, items=[exited(0)])
    assert job.order(1)["op"] == "break"
    job.deliver(1, 1, broken(1))
    assert job.order(2)["lost"] == [0]
    start = job.order(3)
    assert (start["start"], start["ranks"], start["generation"]) == (1, {"0": [0]}, 1)
    job.start_of[0] = 1
    job.deliver(0, 0, exited(0, -9, 1, 0))  # the report is about the previous process
    job.deliver(0, 1, reported(0, 1, 1))
    assert job.order(4)["op"] == "change"
    job.deliver(0, 2, exited(0, -9, 1, 1))
    kill = job.order(5)
    assert (kill["op"], kill["nodes"]) == ("kill", [0])
    assert job.end is None


@pytest.mark.parametrize("items", malformed_items(2).values(), ids=list(malformed_items(2)))
def test_an_item_of_the_wrong_shape_is_refused_and_the_controller_goes_on(job: Running, items: list[Any]) -> None:
    job.start()
    job.deliver(0, 0, reported(0))
    with pytest.raises(RpcError, match="FAILED_PRECONDITION|INVALID_ARGUMENT"):
        job.deliver(0, 1, *items)
    assert job.deliver(0, 1, record(0, 1)) == 2
    assert job.thread.is_alive()


def test_items_from_the_future_are_refused_for_those_between_would_be_lost(job: Running) -> None:
    job.start()
    with pytest.raises(RpcError, match="instead of report 0: reports are missing"):
        job.deliver(0, 10**9, record(0, 1))
    assert job.deliver(0, 0, record(0, 0)) == 1


@pytest.mark.parametrize("job", [(ONE_NODE_IS_ENOUGH, QUICK)], indirect=True)
def test_a_node_that_does_not_call_is_lost_and_may_not_come_back(job: Running) -> None:
    job.start()
    calls = threading.Event()
    caller = threading.Thread(target=lambda: [job.deliver(1, 10**6) for _ in iter(lambda: calls.wait(0.05), True)])
    caller.start()
    try:
        for rank in (0, 1):
            job.deliver(rank, 0, reported(rank))
        order = job.call("poll", node=1, after=1, wait_seconds=10)["orders"][0]
        assert (order["op"], order["lost"]) == ("break", [0])
        assert (
            order["reason"] == "node 0 was lost: no heartbeat from its agent (detector.heartbeat_timeout_seconds=0.4)"
        )
        for method, body in (
            ("poll", {"node": 0, "after": 1, "wait_seconds": 0}),
            ("deliver", {"node": 0, "first": 1, "items": []}),
            ("join", {"node": 0, "process_id": 7}),
        ):
            with pytest.raises(RpcError, match="session 0 of its agent has ended|cannot register") as refusal:
                job.call(method, **body)
            assert refusal.value.refused
    finally:
        calls.set()
        caller.join()


@pytest.mark.parametrize("job", [(ONE_NODE_IS_ENOUGH, replace(PATIENT, hang_seconds=0.3))], indirect=True)
def test_ranks_that_get_no_further_are_hung(job: Running) -> None:
    job.start()
    for rank in (0, 1):
        job.deliver(rank, 0, reported(rank), progress(rank, 5 + rank))
    order = job.order(1)
    assert (order["op"], order["lost"]) == ("break", [0])
    assert order["reason"] == "rank 0 made no progress for detector.hang_seconds=0.3: it is in iteration 5, phase data"
    assert job.controller.details[0]["hung"] == order["reason"].removeprefix("rank 0 ")


@pytest.mark.parametrize("job", [ONE_NODE_IS_ENOUGH], indirect=True)
def test_a_rank_that_its_agent_finds_hung_is_lost_with_its_node(job: Running) -> None:
    job.start()
    for rank in (0, 1):
        job.deliver(rank, 0, reported(rank))
    hung = {"at_seconds": 1.0, "hung": "was unresponsive for 600 s", "iteration": 4, "phase": "data"}
    job.deliver(0, 1, {**reported(0), "op": "hung", **hung}, exited(0, -9))
    order = job.order(1)
    assert order["reason"] == "rank 0 was unresponsive for 600 s"
    assert job.controller.state.failures[0].iteration == 4


def progress(rank: int, iteration: int) -> dict[str, Any]:
    about = {"iteration": iteration, "phase": "data", "step": 1}
    return {"op": "progress", "rank": rank, "start": 0, "generation": 0, **about}


@pytest.mark.parametrize("job", [replace(GROWING, max_nodes=4)], indirect=True)
def test_operators_see_the_job_and_have_nodes_leave_and_join(job: Running) -> None:
    job.start()
    for node in (2, 4):
        with pytest.raises(RpcError, match="the job is starting|not a member|0 to 3"):
            job.call("drain", node=node)
    for rank in (0, 1):
        job.deliver(rank, 0, reported(rank), progress(rank, 5 + rank))
    job.join(2)
    job.start_of[2] = 1
    assert job.order(1)["ranks"] == {"2": [2]}
    status = job.call("status")
    assert {name: status[name] for name in ("generation", "phase", "members", "waiting", "num_reforms", "epoch")} == {
        "generation": 0,
        "phase": "running",
        "members": [0, 1],
        "waiting": [2],
        "num_reforms": 0,
        "epoch": 1,
    }
    assert (status["lost"], status["draining"]) == ([], [])
    assert (status["keeps_layout"], status["replacements"], status["worn"]) == (False, [], [])
    assert sorted(status["nodes"]) == ["0", "1", "2"]
    assert (status["nodes"]["1"]["iteration"], status["nodes"]["1"]["phase"]) == (6, "data")
    assert status["nodes"]["2"]["iteration"] is None
    assert 0.0 <= status["nodes"]["0"]["seconds_since_word"] < 10.0
    for method, node, reason in (
        ("add", 0, "node 0 is a member"),
        ("add", 2, "node 2 is waiting to join already"),
        ("drain", 2, "node 2 is not a member"),
        ("drain", 4, "must be from 0 to 3, the numbers of the job's nodes"),
        ("add", -1, "must be from 0 to 3, the numbers of the job's nodes"),
    ):
        with pytest.raises(RpcError, match=reason) as refusal:
            job.call(method, node=node)
        assert refusal.value.refused
    for body in ({}, {"node": "x"}):
        with pytest.raises(RpcError, match="malformed"):
            job.call("drain", **body)
    assert job.call("drain", node=0) == {"epoch": 1}
    assert job.order(2)["leaving"] == [0]
    for node, reason in ((0, "leaving already"), (1, "nodes that would remain is 0, below recovery.min_nodes=1")):
        with pytest.raises(RpcError, match=reason):
            job.call("drain", node=node)
    assert job.call("status")["draining"] == [0]
    assert job.call("add", node=3) == {"epoch": 1}
    assert await_step(job, Decision.START_AGENTS).nodes == (3,)


@pytest.mark.parametrize("job", [replace(GROWING, restart_lost_nodes=True)], indirect=True)
def test_a_process_that_ends_before_it_registers_is_started_again(job: Running) -> None:
    job.start()
    for rank in (0, 1):
        job.deliver(rank, 0, reported(rank))
    assert job.call("add", node=2) == {"epoch": 1}
    await_step(job, Decision.START_AGENTS)
    job.controller.post(NodeLost(2, 1.0, "its process exited with code 8", 70))
    assert await_step(job, Decision.START_AGENTS).nodes == (2,), "of a node that never had another"
    job.join(2, process_id=71)
    job.start_of[2] = 1
    assert job.order(1)["ranks"] == {"2": [2]}
    job.controller.post(NodeLost(2, 2.0, "its process ended", 71))
    assert await_step(job, Decision.START_AGENTS).nodes == (2,)
    job.controller.post(NodeLost(2, 3.0, "its process ended", 72))
    assert await_step(job, Decision.START_AGENTS).nodes == (2,), "of one whose predecessor was given up"
    job.controller.post(NodeLost(2, 4.0, "its process ended", 73))
    assert eventually(lambda: not of_agents(job.controller.state, AgentState.STARTING)), (
        "as often as nodes.max_node_restarts=3 allows"
    )
    assert 2 not in job.controller.state.nodes.wanted


def await_step(job: Running, decision: Decision) -> Step:
    """Return the next step with this decision. Earlier steps are skipped."""
    while (step := job.steps.get(timeout=10)).decision is not decision:
        pass
    return step


@pytest.mark.parametrize("job", [replace(GROWING, restart_lost_nodes=True, max_node_restarts=1)], indirect=True)
def test_what_came_of_starts_is_passed_on_once(job: Running) -> None:
    job.start()
    for rank in (0, 1):
        job.deliver(rank, 0, reported(rank))
    job.call("add", node=2)
    await_step(job, Decision.START_AGENTS)
    job.controller.post(NodeLost(2, 1.0, "exited with code 8: no memory", 70))
    first = job.steps.get(timeout=10)
    assert first.decision is Decision.WAIT, "there is a pause before the next start"
    assert first.state.failed_starts == (FailedStart(2, "exited with code 8: no memory", starts_again=True),)
    assert await_step(job, Decision.START_AGENTS).state.failed_starts == ()
    job.controller.post(NodeLost(2, 1.0, "was killed by SIGKILL", 71))
    last = job.steps.get(timeout=10)
    assert last.decision is Decision.WAIT
    assert last.state.failed_starts == (FailedStart(2, "was killed by SIGKILL", starts_again=False),)
    assert job.call("drain", node=0) == {"epoch": 1}
    assert await_step(job, Decision.CHANGE).state.failed_starts == ()


IN_PLACE = replace(POLICY, num_nodes=3, max_restarts=0, restart_lost_nodes=True, keeps_layout=True)


@pytest.mark.parametrize("job", [IN_PLACE], indirect=True)
def test_ranks_that_were_started_for_a_lost_place_are_named_in_no_order_to_kill(job: Running) -> None:
    for node in range(3):
        job.join(node)
        job.start_of[node] = 0
    for rank in range(3):
        job.deliver(rank, 0, reported(rank))
    job.deliver(1, 1, exited(1, -9))
    assert (job.order(1)["op"], job.order(1)["lost"]) == ("break", [1])
    for rank in (0, 2):
        job.deliver(rank, 1, broken(rank))
    order = job.order(2)
    assert (order["op"], order["ranks"], order["is_joining"]) == ("start", {"1": [1]}, True)
    job.start_of[1] = 1
    job.deliver(2, 2, exited(2, -9))
    assert job.order(3)["lost"] == [2], "the new rank of node 1 survives"
    assert job.order(4)["ranks"] == {"2": [2]}
    job.start_of[2] = 2
    assert job.controller.details[1]["number"] == 1
    job.deliver(1, 2, reported(1, start=1))
    job.deliver(2, 3, reported(2, start=2))
    reform = job.order(5)
    assert (reform["op"], reform["lost"], reform["leaving"]) == ("reform", [], [])
    assert (reform["next"]["previous_ranks"], reform["next"]["nodes"]) == ([0, None, None], [0, 1, 2])
    (decision,) = job.decisions
    assert (decision["lost_nodes"], decision["joined_nodes"]) == ([1, 2], [1, 2])


@pytest.mark.parametrize("job", [replace(GROWING, restart_lost_nodes=True)], indirect=True)
def test_the_end_of_a_process_that_was_given_up_before_is_no_news(job: Running) -> None:
    job.start()
    for rank in (0, 1):
        job.deliver(rank, 0, reported(rank))
    job.join(2, process_id=71)
    job.start_of[2] = 1
    job.controller.post(NodeLost(2, 1.0, "no heartbeat from its agent"))
    assert eventually(lambda: of_agents(job.controller.state, AgentState.STARTING) == {2})
    job.controller.post(NodeLost(2, 2.0, "its process was killed by SIGKILL", 71))
    job.controller.post(NodeLost(2, 2.0, "its process was killed by SIGKILL", 71))
    assert job.call("status")["generation"] == 0
    assert of_agents(job.controller.state, AgentState.STARTING) == {2}, "the one that was killed was of another process"
    assert losses(job) == [1]
    job.controller.post(NodeLost(2, 3.0, "its process ended", 72))
    assert eventually(lambda: losses(job) == [2])


def test_a_process_that_asks_twice_to_take_a_place_has_it(job: Running) -> None:
    job.start()
    sessions = job.controller._server._sessions
    replaced = sessions.replaced(0, 8)
    assert replaced == 7
    for event in (NodeLost(0, 1.0, "another process has registered for this node", replaced),) * 2:
        job.controller.post(event)
    assert job.join(0, process_id=8)["session"] == 1
    job.controller.post(NodeLost(0, 1.0, "another process has registered for this node", replaced))
    assert job.call("poll", node=0, after=0, wait_seconds=0)["orders"], "the late word is of the one before"


def eventually(condition: Any) -> bool:
    """Return whether ``condition`` becomes true in time."""
    pause = threading.Event()
    return any(condition() or pause.wait(0.02) for _ in range(500))
