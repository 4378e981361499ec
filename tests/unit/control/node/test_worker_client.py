"""Tests the client of a rank that survives other ranks: which messages it accepts from the agent, in which order, and
which it refuses."""

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.control.node.worker_client import AgentClient, Identity, InProcessClient, MembershipOrder, StopFlag
from megatron_ft.errors import ControlError, TrainingStopped
from megatron_ft.framing import FrameReader, send
from megatron_ft.planning.recovery.membership import NextMembership, Position, Target

SECONDS = 10.0
POSITION = Position(rank=2, generation=0, completed=4, contributed=4, vote=None)
NEXT = NextMembership(
    generation=1,
    previous_ranks=(0, 2),
    nodes=(0, 2),
    target=Target(iteration=4, vote=None),
    master_addr="127.0.0.1",
    master_port=20001,
    reason="rank 1 was killed by SIGKILL",
)
DEFAULTS = {"local_ranks": (), "members": ()}
JOINED = replace(NEXT, previous_ranks=(0, 1, None), nodes=(0, 1, 2), reason="node 2 joins", **DEFAULTS)
LATER = replace(NEXT, generation=2, previous_ranks=(1,), nodes=(2,), **DEFAULTS)


class Rank:
    """Rank 2 of generation 0 on node 2, and the agent's end of its socket."""

    def __init__(self, path: Path, *, can_survive: bool, is_joining: bool) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            flag = StopFlag()
            who = Identity(number=2, rank=2, node=2, local_rank=0, generation=0, start=7, is_joining=is_joining)
            self.client = AgentClient(str(path), who, stop=flag, can_survive=can_survive)
            self.agent, _ = listener.accept()
        self.reader = FrameReader(self.agent)
        assert self.received() == {"op": "hello", "rank": 2, "start": 7}
        self.hung_up: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.pool = ThreadPoolExecutor(1)

    def received(self) -> dict[str, Any]:
        (message,), _ = self.reader.pump()
        return message

    def say(self, **message: Any) -> None:
        send(self.agent, message)

    def say_break(self, generation: int = 0, reason: str = "gone") -> None:
        self.say(op="break", generation=generation, reason=reason)

    def survive(self, position: Position = POSITION, error: BaseException | str = "peer") -> Future[NextMembership]:
        """Call ``survive`` in a thread. Return when the agent has received the position."""
        future = self.pool.submit(self.client.survive, position, error)
        self.last = self.received()
        return future


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    started: list[Rank] = []

    def start(*, can_survive: bool = True, is_joining: bool = False) -> Rank:
        path = tmp_path / f"agent-{len(started)}.sock"
        started.append(Rank(path, can_survive=can_survive, is_joining=is_joining))
        return started[-1]

    yield start
    for rank in started:
        with contextlib.suppress(OSError):  # the test has closed it
            rank.agent.shutdown(socket.SHUT_RDWR)
        rank.client.close()
        rank.agent.close()
        rank.pool.shutdown()


def test_a_break_is_reported_once_in_each_membership_by_another_thread(start: Callable[..., Rank]) -> None:
    rank = start()
    threads: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    rank.client.on_break(lambda reason: threads.put((reason, threading.get_ident())))
    rank.say_break(1, "of another membership")
    rank.say_break()
    rank.say_break(reason="again")
    reason, thread = threads.get(timeout=SECONDS)
    assert reason == "gone" and thread != threading.get_ident()
    future = rank.survive()
    rank.say_break(reason="and again")
    rank.say(op="reform", next=NEXT.to_json())
    assert future.result(SECONDS) == NEXT
    rank.say_break(1, "the next one")
    assert threads.get(timeout=SECONDS)[0] == "the next one"
    assert threads.empty()


def test_a_rank_that_takes_long_to_break_connections_still_answers_pings(start: Callable[..., Rank]) -> None:
    rank = start()
    has_begun, may_end = threading.Event(), threading.Event()

    def abort(reason: str) -> None:
        has_begun.set()
        may_end.wait(SECONDS)

    rank.client.on_break(abort)
    rank.say_break()
    assert has_begun.wait(SECONDS)
    rank.agent.settimeout(SECONDS / 2)
    try:
        rank.say(op="ping")
        assert rank.received() == {"op": "pong"}
    finally:
        may_end.set()


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_rank_that_ends_says_whether_the_run_is_complete(start: Callable[..., Rank], is_complete: bool) -> None:
    rank = start()
    rank.client.done(is_complete=is_complete)
    assert rank.received() == {"op": "done", "is_complete": is_complete}


def test_a_break_that_comes_before_anybody_listens_is_kept(start: Callable[..., Rank]) -> None:
    rank = start()
    future = rank.survive()
    rank.say_break(0)
    rank.say(op="reform", next=NEXT.to_json())
    rank.say_break(1, "the next one")
    future.result(SECONDS)
    rank.client.on_break(rank.hung_up.put)
    assert rank.hung_up.get(timeout=SECONDS) == "the next one"


def test_a_rank_says_how_far_it_is_and_why_and_goes_by_its_new_number(start: Callable[..., Rank]) -> None:
    rank = start()
    future = rank.survive(error=TrainingStopped("loss is NaN"))
    assert rank.last["op"] == "broken"
    assert Position.from_json(rank.last["position"]) == POSITION
    assert rank.last["error"] == "megatron_ft.errors.TrainingStopped: loss is NaN"
    assert rank.last["exit_code"] == TrainingStopped.exit_code
    rank.say(op="reform", next=NEXT.to_json())
    assert future.result(SECONDS) == NEXT
    with pytest.raises(ControlError, match="rank 1 of generation 1 cannot report"):
        rank.client.survive(POSITION, "peer")
    future = rank.survive(replace(POSITION, rank=1, generation=1))
    rank.say(op="reform", next=LATER.to_json())
    assert future.result(SECONDS) == LATER


def test_the_end_of_the_job_ends_the_wait_and_every_later_one(start: Callable[..., Rank]) -> None:
    rank = start()
    future = rank.survive()
    rank.say(op="end", reason="too few nodes are left")
    for _ in range(2):
        with pytest.raises(ControlError, match="too few nodes are left"):
            future.result(SECONDS)
        future = rank.survive()


@pytest.mark.parametrize("end", ["close", "nonsense", "another's membership"])
def test_an_agent_that_is_lost_or_speaks_nonsense_ends_the_wait(
    start: Callable[..., Rank], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # the listener's error goes to the rank's log
    rank = start()
    future = rank.survive()
    if end == "close":
        rank.agent.close()
    elif end == "nonsense":
        rank.say(op="decree")
    else:
        rank.say(op="reform", next=replace(NEXT, previous_ranks=(0, 1)).to_json())
    with pytest.raises(ControlError, match="the connection to the node's agent is closed"):
        future.result(SECONDS)


def test_a_rank_of_a_job_that_needs_all_nodes_does_not_wait(start: Callable[..., Rank]) -> None:
    rank = start(can_survive=False)
    assert not rank.client.can_survive
    with pytest.raises(ControlError, match=r"recovery\.min_nodes"):
        rank.client.survive(POSITION, "peer")
    alone = InProcessClient(lambda _: None, stop=StopFlag())
    assert not alone.can_survive
    with pytest.raises(ControlError, match="without an agent"):
        alone.survive(POSITION, "peer")


def test_a_joining_node_sends_only_its_identity_until_a_membership_names_it(
    start: Callable[..., Rank],
) -> None:
    rank = start(is_joining=True)
    future = rank.pool.submit(rank.client.await_membership)
    rank.say_break()  # of the membership that runs without it
    rank.say(op="change", generation=0, leaving=[], reason="it joins")
    assert not rank.client.change_requested()
    rank.say(op="reform", next=JOINED.to_json())
    assert future.result(SECONDS) == JOINED
    rank.client.on_break(rank.hung_up.put)
    assert rank.hung_up.empty(), "the membership before was not its own"
    rank.say_break(1, "its first membership ends")
    assert rank.hung_up.get(timeout=SECONDS) == "its first membership ends"
    future = rank.survive(replace(POSITION, generation=1))
    rank.say(op="reform", next=replace(LATER, previous_ranks=(2,)).to_json())
    assert future.result(SECONDS).generation == 2


def test_a_job_that_ends_ends_the_wait_of_joining_nodes(start: Callable[..., Rank]) -> None:
    rank = start(is_joining=True)
    future = rank.pool.submit(rank.client.await_membership)
    rank.say(op="end", reason="all ranks have finished")
    with pytest.raises(ControlError, match="all ranks have finished"):
        future.result(SECONDS)
    with pytest.raises(ControlError, match="was started with the job"):
        start().client.await_membership()


def test_a_membership_that_takes_a_member_for_a_joining_rank_is_refused(
    start: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # the listener's error goes to the rank's log
    member = start()
    future = member.survive()
    member.say(op="reform", next=JOINED.to_json())
    with pytest.raises(ControlError, match="the connection to the node's agent is closed"):
        future.result(SECONDS)
    newcomer = start(is_joining=True)
    newcomer.say(op="reform", next=NEXT.to_json())
    with pytest.raises(ControlError, match="the connection to the node's agent is closed"):
        newcomer.client.await_membership()


def test_a_rank_stands_at_the_boundary_and_continues_with_joining_nodes(start: Callable[..., Rank]) -> None:
    rank = start()
    assert not rank.client.change_requested()
    order = rank.pool.submit(rank.client.awaited_change)
    rank.say(op="change", generation=1, leaving=[0], reason="of another membership")
    rank.say(op="change", generation=0, leaving=[1], reason="node 1 leaves")
    assert order.result(SECONDS) == MembershipOrder((1,))
    assert rank.client.change_requested()
    future = rank.pool.submit(rank.client.change, POSITION)
    output = rank.received()
    assert (output["op"], output["planned"], Position.from_json(output["position"])) == ("broken", True, POSITION)
    assert "traceback" not in output and "error" not in output
    rank.say(op="reform", next=NEXT.to_json())
    assert future.result(SECONDS) == NEXT
    assert not rank.client.change_requested(), "each order is of one membership"


def test_a_rank_whose_node_leaves_is_informed(start: Callable[..., Rank]) -> None:
    rank = start()
    future = rank.pool.submit(rank.client.change, POSITION)
    rank.received()
    rank.say(op="leave", generation=1, reason="of another membership")
    rank.say(op="leave", generation=0, reason="node 2 leaves")
    assert future.result(SECONDS) is None
    with pytest.raises(ControlError, match="leaves the job"):
        rank.client.survive(POSITION, "peer")


def test_a_hot_spare_waits_for_a_membership_with_a_rank_or_leaves(start: Callable[..., Rank]) -> None:
    rank = start()
    future = rank.survive()
    spares = replace(NEXT, previous_ranks=(0,), nodes=(0,), local_ranks=(0,), members=(0, 2))
    rank.say(op="reform", next=spares.to_json())
    assert future.result(SECONDS) == spares and spares.rank_on(2, 0) is None
    future = rank.pool.submit(rank.client.stand_by)
    rank.say_break(1, "it has no connections to break")
    rank.say(op="reform", next=replace(spares, generation=2).to_json())
    assert future.result(SECONDS).generation == 2
    again = replace(JOINED, generation=4, previous_ranks=(0, None, None))
    rank.say(op="reform", next=replace(spares, generation=3).to_json())
    rank.say(op="reform", next=again.to_json())
    assert rank.client.stand_by().generation == 3, "it sees all memberships, in order"
    assert rank.pool.submit(rank.client.stand_by).result(SECONDS) == again
    future = rank.survive(replace(POSITION, rank=2, generation=4))
    rank.say(op="reform", next=replace(spares, generation=5).to_json())
    assert future.result(SECONDS).generation == 5
    future = rank.pool.submit(rank.client.stand_by)
    rank.say(op="leave", generation=5, reason="its node leaves")
    assert future.result(SECONDS) is None


def test_the_end_of_the_job_ends_the_wait_at_the_boundary(start: Callable[..., Rank]) -> None:
    rank = start()
    order = rank.pool.submit(rank.client.awaited_change)
    rank.say(op="end", reason="rank 0 raised")
    with pytest.raises(ControlError, match="rank 0 raised"):
        order.result(SECONDS)
    with pytest.raises(ControlError, match="rank 0 raised"):
        rank.client.change(POSITION)


@pytest.mark.parametrize("can_survive", [True, False])
def test_a_busy_rank_answers_pings(start: Callable[..., Rank], can_survive: bool) -> None:
    rank = start(can_survive=can_survive)
    for _ in range(3):
        rank.say(op="ping")
        assert rank.received() == {"op": "pong"}


def test_ranks_without_an_agent_or_of_a_fixed_job_see_nobody_join(start: Callable[..., Rank]) -> None:
    fixed = start(can_survive=False).client
    alone = InProcessClient(lambda _: None, stop=StopFlag())
    for client, word in ((fixed, r"recovery\.min_nodes"), (alone, "without an agent")):
        assert not client.change_requested()
        with pytest.raises(ControlError, match=word):
            client.change(POSITION)
        with pytest.raises(ControlError, match=word):
            client.awaited_change()
    with pytest.raises(ControlError, match="without an agent"):
        alone.await_membership()
