"""Tests that a controller with a backlog loses no healthy node, and wakes only calls whose own input was processed."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.control.controller import server
from megatron_ft.control.controller.controller import Controller
from megatron_ft.control.controller.journal import Journal
from megatron_ft.control.detector import DetectorPolicy
from megatron_ft.control.membership.events import AddRequested, KillRequested, NodeLost
from megatron_ft.control.membership.state import Decision, MembershipPolicy, Phase, Step
from megatron_ft.control.rpc import RpcClient, new_token
from megatron_ft.framing import Message
from tests.unit.control.controller.test_controller import PATIENT, broken, eventually, launch_spec, record, reported

TOKEN = new_token()
POLICY = MembershipPolicy(
    num_nodes=4, ranks_per_node=1, start_timeout_seconds=60, stop_timeout_seconds=5, min_nodes=1, max_nodes=5
)


ATTENTIVE = DetectorPolicy(heartbeat_interval_seconds=0.05, heartbeat_timeout_seconds=1.2, hang_seconds=None)


class SlowDisk(Journal):
    """Disk that takes some time for every entry."""

    seconds = 0.0

    def append(self, entry: Message) -> None:
        threading.Event().wait(self.seconds)
        super().append(entry)


class SteppedClock:
    """Monotonic clock that a test can stop and move forward."""

    def __init__(self) -> None:
        self.ahead_seconds = 0.0
        self.stopped_at: float | None = None

    def __call__(self) -> float:
        return (time.monotonic() if self.stopped_at is None else self.stopped_at) + self.ahead_seconds


class Job:
    """Controller whose clock and thread the test can stop, and its agents."""

    def __init__(self, path: Path, policy: MembershipPolicy = POLICY, detection: DetectorPolicy = PATIENT) -> None:
        self.clock = SteppedClock()
        self.path, self.journal = path, SlowDisk(path)
        self.controller = Controller(
            policy,
            interface="127.0.0.1",
            token=TOKEN,
            launch_spec=launch_spec,
            record_decision=lambda _: None,
            detection=detection,
            journal=self.journal,
            clock=self.clock,
        )
        self.hold_at: Decision | None = None
        self.held, self.go = threading.Event(), threading.Event()
        self.steps: list[Step] = []
        self.thread = threading.Thread(target=self.controller.run, args=(lambda *_: None, self._decided))
        self.thread.start()
        self.client = RpcClient(self.controller.address, "Controller", token=TOKEN)
        self.calls = ThreadPoolExecutor(64)
        self.num_nodes = policy.num_nodes

    def _decided(self, step: Step) -> None:
        self.steps.append(step)
        if step.decision is self.hold_at:
            self.held.set()
            assert self.go.wait(30)

    def call(self, method: str, **body: Any) -> Message:
        return self.client.call(
            method, ({"session": 0} if method in ("poll", "deliver") else {}) | body, timeout_seconds=30
        )

    def deliver(self, node: int, first: int, *items: Message) -> int:
        return int(self.call("deliver", node=node, first=first, items=list(items))["next"])

    def run(self) -> None:
        """Let all nodes register and all ranks report."""
        for node in range(self.num_nodes):
            self.call("join", node=node, process_id=7)
        for node in range(self.num_nodes):
            self.deliver(node, 0, reported(node))
        assert self.controller.state.phase is Phase.RUNNING

    def close(self) -> None:
        self.go.set()
        self.journal.seconds = 0.0
        state = self.controller.state
        for _ in range(2):
            self.controller.post(KillRequested())
        for node in sorted(state.nodes.registered):
            self.controller.post(NodeLost(node, 1.0, "the test is over"))
        self.thread.join(timeout=20)
        assert not self.thread.is_alive()
        self.calls.shutdown()
        self.client.close()
        self.controller.close()
        self.journal.close()


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(*arguments: Any) -> Job:
        jobs.append(Job(tmp_path / f"journal-{len(jobs)}.jsonl", *arguments))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


def test_positions_that_came_while_the_controller_was_busy_are_in_time(begin: Callable[..., Job]) -> None:
    job = begin()
    job.run()
    job.deliver(1, 1, broken(1))
    job.hold_at = Decision.BREAK
    job.controller.post(NodeLost(0, 1.0, "its process was killed by SIGKILL", 7))
    assert job.held.wait(10)
    waiting = [job.calls.submit(job.deliver, node, 1, broken(node)) for node in (2, 3)]
    assert eventually(lambda: job.controller._server._inbox._queue.qsize() == 2)
    job.clock.ahead_seconds = POLICY.position_timeout_seconds + 1
    job.go.set()
    assert [call.result(timeout=20) for call in waiting] == [2, 2]
    assert eventually(lambda: job.controller.state.generation == 1)
    reform = job.steps[-1].reform
    assert reform is not None and reform.lost == (0,), "the one that has died, and no healthy one"
    assert job.controller.state.members == (1, 2, 3)


def test_a_position_that_came_too_late_is_too_late(begin: Callable[..., Job]) -> None:
    job = begin()
    job.run()
    job.deliver(1, 1, broken(1))
    job.deliver(2, 1, broken(2))
    job.hold_at = Decision.BREAK
    job.controller.post(NodeLost(0, 1.0, "its process was killed by SIGKILL", 7))
    assert job.held.wait(10)
    job.clock.ahead_seconds = POLICY.position_timeout_seconds + 1
    waiting = job.calls.submit(job.deliver, 3, 1, broken(3))
    assert eventually(lambda: job.controller._server._inbox._queue.qsize() == 1)
    job.go.set()
    assert waiting.result(timeout=20) == 2
    assert eventually(lambda: job.controller.state.generation == 1)
    assert job.controller.state.members == (1, 2)


def test_a_limit_counts_from_the_decision_and_not_from_what_led_to_it(begin: Callable[..., Job]) -> None:
    """The loss waits in the queue for longer than the time limit in which ranks must report their positions."""
    job = begin()
    job.run()
    job.hold_at = Decision.START_AGENTS
    job.controller.post(AddRequested(4))
    assert job.held.wait(10)
    first = job.calls.submit(job.deliver, 1, 1, broken(1))
    assert eventually(lambda: job.controller._server._inbox._queue.qsize() == 1)
    job.controller.post(NodeLost(0, 1.0, "its process was killed by SIGKILL", 7))
    job.clock.ahead_seconds = POLICY.position_timeout_seconds + 1
    job.hold_at = None
    job.go.set()
    orders = job.call("poll", node=1, after=1, wait_seconds=10)["orders"]
    assert [order["op"] for order in orders] == ["break"]
    assert first.result(timeout=10) == 2
    for node in (2, 3):
        job.deliver(node, 1, broken(node))
    assert job.controller.state.members == (1, 2, 3)


def test_a_node_lives_as_long_as_it_waits_to_be_taken_in(begin: Callable[..., Job]) -> None:
    """The backlog takes longer than the heartbeat timeout."""
    job = begin(replace(POLICY, num_nodes=1, max_nodes=2), ATTENTIVE)
    job.call("join", node=0, process_id=7)
    job.deliver(0, 0, reported(0))
    over = threading.Event()
    signs = job.calls.submit(lambda: [job.deliver(0, 1) for _ in iter(lambda: over.wait(0.05), True)])
    job.journal.seconds = 0.05
    for _ in range(40):
        job.controller.post(AddRequested(0))
    joined = job.call("join", node=1, process_id=8)
    assert job.call("poll", node=1, session=joined["session"], after=joined["after"], wait_seconds=10)["orders"]
    over.set()
    signs.result(timeout=10)
    events = [entry["event"] for entry in Journal(job.path).entries if "event" in entry]
    assert events.count("AddRequested") == 40 and "NodeLost" not in events


def test_a_node_that_has_called_since_it_was_found_silent_is_not_lost(begin: Callable[..., Job]) -> None:
    """Two nodes exceed the timeout at the same moment. The second one calls while the loss of the first is handled."""
    job = begin(POLICY, ATTENTIVE)
    job.clock.stopped_at = time.monotonic()
    job.run()
    job.hold_at = Decision.BREAK
    for _ in range(2):
        job.clock.ahead_seconds += 0.5
        for node in (2, 3):
            job.deliver(node, 10**6)
        assert eventually(lambda: job.controller._detector._nodes._asked_at == job.clock())
    job.clock.ahead_seconds += 0.5
    assert job.held.wait(20)
    assert [(event.node, job.steps[-1].nodes) for event in job.controller._found] == [(1, (0,))]
    job.deliver(1, 10**6)
    job.go.set()
    for node in (1, 2, 3):
        job.deliver(node, 1, broken(node))
    assert job.controller.state.members == (1, 2, 3)
    job.clock.stopped_at = None


def test_what_is_delivered_again_while_it_waits_is_queued_once(
    begin: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = begin()
    job.run()
    job.hold_at = Decision.START_AGENTS
    job.controller.post(AddRequested(4))
    assert job.held.wait(10)
    items = [record(2, 0), record(2, 1)]
    monkeypatch.setattr(server, "ACCEPT_SECONDS", 0.1)
    assert job.deliver(2, 1, *items) == 1, "not in time"
    assert job.deliver(2, 1, *items, record(2, 2)) == 1
    assert job.controller._server._inbox._queue.qsize() == 3
    monkeypatch.undo()
    job.go.set()
    assert job.deliver(2, 1, *items, record(2, 2)) == 4


def test_a_call_is_woken_by_its_own_item_alone(begin: Callable[..., Job]) -> None:
    """The kernel counts how often the threads that serve calls sleep while 40 polls wait for an order."""
    job = begin(replace(POLICY, num_nodes=40, max_nodes=40))
    job.run()
    polls = [job.calls.submit(job.call, "poll", node=node, after=1, wait_seconds=30) for node in range(40)]
    assert eventually(lambda: len(job.controller._server._new_order._waiters) == 40)
    before = num_sleeps()
    num_calls = 100
    for number in range(num_calls):
        job.deliver(0, 1 + number, record(0, number))
    assert num_sleeps() - before < 20 * num_calls, "40 for each item where all are woken by all"
    job.controller.post(NodeLost(1, 1.0, "its process was killed by SIGKILL", 7))
    assert {poll.result(timeout=20)["orders"][0]["op"] for poll in polls} == {"break"}


class Counted(dict[str, Any]):
    """Counts the calls of a method."""

    num_readings = 0

    def items(self) -> Any:
        Counted.num_readings += 1
        return super().items()


def test_an_order_is_encoded_once_for_all_who_fetch_it(begin: Callable[..., Job]) -> None:
    job = begin(replace(POLICY, num_nodes=20, max_nodes=20))
    job.run()
    polls = [job.calls.submit(job.call, "poll", node=node, after=1, wait_seconds=30) for node in range(20)]
    assert eventually(lambda: len(job.controller._server._new_order._waiters) == 20)
    job.controller._server.give({"op": "kill", "nodes": [], "about": Counted(large=1)})
    assert all(
        poll.result(timeout=20)["orders"] == [{"op": "kill", "nodes": [], "about": {"large": 1}}] for poll in polls
    )
    assert Counted.num_readings == 1


def num_sleeps() -> int:
    """Return the number of voluntary context switches of the service's threads."""
    total = 0
    for thread in threading.enumerate():
        if thread.name.startswith("rpc"):
            text = Path(f"/proc/{os.getpid()}/task/{thread.native_id}/status").read_text()
            total += int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return total
