"""Tests that a new controller reaches the state of its predecessor, wherever the predecessor ended."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.control.controller.controller import Controller
from megatron_ft.control.controller.journal import Journal
from megatron_ft.control.controller.main import _clock_after
from megatron_ft.control.membership.events import NodeLost, StopRequested
from megatron_ft.control.membership.state import State, Step
from megatron_ft.control.rpc import ControllerClient, RpcClient, RpcError, RpcServer, new_token
from tests.unit.control.controller.test_controller import (
    ONE_NODE_IS_ENOUGH,
    broken,
    exited,
    launch_spec,
    record,
    reported,
)

TOKEN = new_token()
POLICY = replace(ONE_NODE_IS_ENOUGH, num_nodes=3, min_nodes=2)


class Life:
    """One controller with a journal, and the results of its decisions."""

    def __init__(self, path: Path, epoch: int = 1) -> None:
        journal = Journal(path)
        self.decisions: list[Any] = []
        self.steps: list[Step] = []
        self.records: list[tuple[Any, Any]] = []
        self.controller = Controller(
            POLICY,
            interface="127.0.0.1",
            token=TOKEN,
            launch_spec=launch_spec,
            record_decision=self.decisions.append,
            journal=journal,
            epoch=epoch,
            clock=_clock_after(journal.entries),
        )
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self.controller.run(lambda *about: self.records.append(about), self.steps.append)

    def take_over(self) -> tuple[State, list[Any]]:
        """Return the state and the orders that follow from the journal alone."""
        self.controller._take_over(self.steps.append)
        return self.controller.state, self.controller._server._orders


def a_job_that_loses_a_node(life: Life) -> None:
    """Run a job that loses a node."""
    life.thread.start()
    client = RpcClient(life.controller.address, "Controller", token=TOKEN)

    def call(method: str, **body: Any) -> dict[str, Any]:
        return client.call(method, body, timeout_seconds=10)

    def deliver(node: int, first: int, *items: dict[str, Any]) -> None:
        answer = call("deliver", node=node, session=0, first=first, items=list(items))
        assert answer["next"] == first + len(items)

    for node in range(3):
        call("join", node=node, process_id=70 + node, sidecars={"keeper": {"address": f"127.0.0.1:{9000 + node}"}})
    for node in range(3):
        deliver(node, 0, reported(node), record(node, 1))
    life.controller.post(NodeLost(2, 5.0, "its process was killed by SIGKILL", 72), 0)
    assert call("poll", node=0, session=0, after=1, wait_seconds=10)["orders"][0]["op"] == "break"
    for node in (0, 1):
        deliver(node, 2, broken(node), record(node, 2))
    assert call("poll", node=0, session=0, after=2, wait_seconds=10)["orders"][0]["op"] == "reform"
    life.controller.post(StopRequested(), 1)
    assert call("poll", node=0, session=0, after=3, wait_seconds=10)["orders"][0]["op"] == "stop"
    for node in (0, 1):
        deliver(node, 4, exited(node, generation=1))
    life.thread.join(timeout=10)
    assert not life.thread.is_alive()
    client.close()
    life.controller.close()


def test_from_every_beginning_of_the_journal_the_story_is_the_same(tmp_path: Path) -> None:
    life = Life(tmp_path / "journal.jsonl")
    a_job_that_loses_a_node(life)
    lines = (tmp_path / "journal.jsonl").read_text().splitlines(keepends=True)
    entries = [json.loads(line) for line in lines]
    orders = [entry["order"] for entry in entries if "order" in entry]
    assert [order["op"] for order in orders] == ["start", "break", "reform", "stop", "end"]
    states = []
    for length in range(1, len(lines) + 1):
        path = tmp_path / f"begins-{length:03d}.jsonl"
        path.write_text("".join(lines[:length]))
        then = Life(path)
        state, given = then.take_over()
        then.controller.close()
        num_known = sum("order" in entry for entry in entries[:length])
        assert given[:num_known] == orders[:num_known], "agents get the same orders again"
        assert len(given) - num_known in (0, 1), "the order that its predecessor did not come to"
        assert [order["op"] for order in given] == [order["op"] for order in orders[: len(given)]]
        assert [order["op"] for order in (e["order"] for e in Journal(path).entries if "order" in e)] == [
            order["op"] for order in given
        ]
        assert len(then.decisions) == sum(order["op"] == "reform" for order in given)
        is_new = given[num_known:] and given[-1]["op"] == "reform"
        assert is_new or then.decisions == life.decisions[: len(then.decisions)]
        states.append(state)
    assert states[-1] == life.controller.state
    assert [step.decision for step in then.steps] == [step.decision for step in life.steps]


def test_what_was_received_before_is_not_taken_in_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    a_job_that_loses_a_node(Life(path))
    lines = path.read_text().splitlines(keepends=True)
    until = next(number for number, line in enumerate(lines) if '"op":"reform"' in line)
    path.write_text("".join(lines[:until]))
    life = Life(path)
    life.thread.start()
    client = RpcClient(life.controller.address, "Controller", token=TOKEN)
    life.controller.post(NodeLost(2, 5.0, "its process was killed by SIGKILL", 72), 0)
    items = [reported(0), record(0, 1), broken(0), record(0, 2)]
    answer = client.call("deliver", {"node": 0, "session": 0, "first": 0, "items": items}, timeout_seconds=10)
    assert answer["next"] == 4
    assert life.controller.state.generation == 1
    late = NodeLost(1, 6.0, "of the process before", 17)
    life.controller.post(late)
    again = client.call("join", {"node": 0, "process_id": 70}, timeout_seconds=10)
    assert again["session"] == 0, "the same process asks again"
    assert life.controller.state.survived[0][0].node == 2 and not life.controller.state.failures
    assert life.records == [({"n": 2}, (0, 0, 3))], "the launcher knows by its number that it has it already"
    for _ in range(2):
        life.controller.post(StopRequested(), 1)
    for node, first in ((0, 4), (1, 4)):
        answer = client.call(
            "deliver",
            {"node": node, "session": 0, "first": first, "items": [exited(node, generation=1)]},
            timeout_seconds=10,
        )
    life.thread.join(timeout=10)
    assert not life.thread.is_alive()
    client.close()
    life.controller.close()


def test_time_goes_on_where_it_was() -> None:
    """The time without a controller does not count: agents could deliver no report, so no deadline may pass."""
    for unix in (0.0, 4e9):
        assert 5000.0 <= _clock_after([{"now": 4000.0, "unix": 1.0}, {"now": 5000.0, "unix": unix}])() < 5001.0


def test_an_older_answer_that_another_thread_is_late_with_does_not_undo_the_fence() -> None:
    is_read, newer_is_in = threading.Event(), threading.Event()

    class Late(ControllerClient):
        """Delays the thread ``late`` after it has read the epoch, until the other thread has its answer or waits."""

        @property
        def _epoch(self) -> int:
            known = self._known
            if threading.current_thread().name == "late":
                is_read.set()
                newer_is_in.wait(0.5)
            return known

        @_epoch.setter
        def _epoch(self, epoch: int) -> None:
            self._known = epoch

    answers = {"join": {"epoch": 1}, "poll": {"epoch": 2}}
    methods = {name: lambda _, name=name: answers[name] for name in answers}
    server = RpcServer("Controller", methods, interface="127.0.0.1", token=TOKEN)
    server.start()
    client = Late(server.address, token=TOKEN)
    late = threading.Thread(target=client.call, args=("join", {}), kwargs={"timeout_seconds": 20}, name="late")
    late.start()
    assert is_read.wait(20)
    client.call("poll", {}, timeout_seconds=20)
    newer_is_in.set()
    late.join()
    with pytest.raises(RpcError, match="of epoch 1, which the controller of epoch 2 has replaced"):
        client.call("join", {}, timeout_seconds=20)
    server.stop()


def test_an_agent_obeys_the_highest_epoch_alone(tmp_path: Path) -> None:
    answers = iter([{"epoch": 2}, {"epoch": 1, "orders": ["kill"]}, {"epoch": 3}])
    server = RpcServer("Controller", {"poll": lambda _: next(answers)}, interface="127.0.0.1", token=TOKEN)
    server.start()
    client = ControllerClient(server.address, token=TOKEN)
    assert client.call("poll", {}, timeout_seconds=5) == {"epoch": 2}
    with pytest.raises(RpcError, match="of epoch 1, which the controller of epoch 2 has replaced") as caught:
        client.call("poll", {}, timeout_seconds=5)
    assert not caught.value.refused, "the right one is asked again"
    assert client.call("poll", {}, timeout_seconds=5) == {"epoch": 3}
    server.stop()
