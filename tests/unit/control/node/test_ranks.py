"""Tests the messages between an agent and its ranks, and which of them the agent forwards."""

import os
import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.control.node import ranks
from megatron_ft.control.node.fork_server import listen
from megatron_ft.control.node.ranks import Outbox, Ranks
from megatron_ft.framing import FrameReader, encode, send
from megatron_ft.testing.attacks import greetings

NUMBER = 5
HEARTBEAT_SECONDS = 10.0


class Node:
    """Node 2 with one rank, which the test simulates."""

    def __init__(self, folder: Path) -> None:
        path = folder / "node.sock"
        self.listener = listen(path)
        self.listener.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.outbox = Outbox(lambda: None)
        self.ranks = Ranks(2, self.listener, self.selector, self.outbox, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
        self.ranks.expect(NUMBER, start=4, generation=0, log=folder / "rank.log")
        self.rank = socket.socket(socket.AF_UNIX)
        self.rank.connect(str(path))
        self.say(op="hello", rank=NUMBER, start=4)
        self.ranks.accept()
        self.read()

    def say(self, **message: Any) -> None:
        send(self.rank, message)

    def read(self) -> None:
        """Run one round of the agent's main loop."""
        for key, _ in self.selector.select(timeout=10):
            key.data()

    def passed_on(self) -> list[dict[str, Any]]:
        return self.outbox.wait_batch()[1]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    started = Node(tmp_path)
    yield started
    for sock in (started.rank, started.listener):
        sock.close()


def test_what_a_rank_says_bears_its_first_number_and_the_generation_it_was_said_in(node: Node) -> None:
    node.say(op="record", record={"n": 1})
    node.read()
    node.ranks.generation = 1
    node.say(op="broken", position={"rank": 3}, error="peer", at_seconds=1.0)
    node.read()
    node.rank.close()
    node.ranks.exited({"op": "exited", "rank": NUMBER, "returncode": -9, "at_seconds": 2.0})
    output = node.passed_on()
    assert [item["op"] for item in output] == ["reported", "record", "broken", "exited"]
    assert [(item["rank"], item["generation"]) for item in output] == [(NUMBER, 0)] * 2 + [(NUMBER, 1)] * 2
    assert output[2]["position"] == {"rank": 3} and output[2]["node"] == 2
    assert node.ranks.numbers == []


@pytest.mark.parametrize("is_complete", [False, True])
def test_the_exit_of_a_rank_says_whether_the_run_is_complete(node: Node, is_complete: bool) -> None:
    node.say(op="done", is_complete=is_complete)
    node.rank.close()
    node.ranks.exited({"op": "exited", "rank": NUMBER, "returncode": 0, "at_seconds": 2.0})
    exited = node.passed_on()[-1]
    assert (exited["done"], exited["is_complete"]) == (True, is_complete)


def test_ranks_receive_messages_while_theirs_are_read(node: Node) -> None:
    assert node.ranks.broadcast({"op": "break", "reason": "gone"}) == []
    assert FrameReader(node.rank).pump() == ([{"op": "break", "reason": "gone"}], False)
    node.say(op="record", record={"n": 2})
    node.read()
    assert node.passed_on()[-1]["record"] == {"n": 2}


@pytest.mark.parametrize("manner", ["gone", "does not listen"])
def test_a_rank_that_takes_nothing_is_named(node: Node, manner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_SEND_SECONDS", 0.05)
    if manner == "gone":
        node.rank.close()
    assert node.ranks.broadcast({"op": "break", "reason": "x" * 4_000_000}) == [NUMBER]


def stranger(node: Node, data: bytes = b"") -> socket.socket:
    """Return a connection that has sent ``data``, after the agent has accepted it."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect(node.listener.getsockname())
    sock.sendall(data)
    node.ranks.accept()
    return sock


@pytest.mark.parametrize("data", greetings(NUMBER).values(), ids=list(greetings(NUMBER)))
def test_a_greeting_that_is_no_rank_of_ours_is_closed_and_the_rank_stays(node: Node, data: bytes) -> None:
    with stranger(node, data) as sock:
        node.read()
        assert sock.recv(1) == b""
    node.say(op="record", record={"n": 1})
    node.read()
    assert [item["op"] for item in node.passed_on()] == ["reported", "record"]


def test_of_too_many_unauthenticated_connections_the_oldest_are_closed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "MAX_UNAUTHENTICATED", 2)
    held = [stranger(node) for _ in range(3)]
    try:
        assert held[0].recv(1) == b"", "the oldest is closed"
        for sock in held[1:]:
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.recv(1)
    finally:
        for sock in held:
            sock.close()


def test_a_rank_may_say_more_than_a_greeting_at_once(tmp_path: Path) -> None:
    node = Node(tmp_path)
    try:
        node.ranks.expect(NUMBER + 1, start=4, generation=0, log=tmp_path / "rank.log")
        hello = {"op": "hello", "rank": NUMBER + 1, "start": 4}
        record = {"op": "record", "record": {"text": "x" * 2 * ranks.GREETING_BYTES}}
        with stranger(node, encode(hello) + encode(record)):
            node.read()
            assert [item["op"] for item in node.passed_on()] == ["reported", "reported", "record"]
    finally:
        node.rank.close()
        node.listener.close()


def see(node: Node, *, start: float, seconds: int) -> list[int]:
    """Return the unresponsive ranks that the agent finds if it checks every second."""
    return [rank for second in range(seconds) for rank in node.ranks.check_life(start + second)]


def test_a_rank_that_answers_no_ping_is_hung_and_said_so_once(node: Node) -> None:
    begin = time.monotonic()
    assert see(node, start=begin, seconds=5) == []
    assert FrameReader(node.rank).pump() == ([{"op": "ping"}], False), "one is enough"
    node.say(op="pong")
    node.read()
    assert see(node, start=begin + 5, seconds=5) == []
    assert see(node, start=begin + 10, seconds=10) == [NUMBER]
    assert [item["op"] for item in node.passed_on()] == ["reported", "hung"]


def test_a_rank_that_is_not_read_owes_no_answer(node: Node) -> None:
    begin = time.monotonic()
    for _ in range(ranks.HIGH_WATER_ITEMS):
        node.outbox.put({"op": "record"})
    node.say(op="record", record={})
    node.read()
    assert see(node, start=begin, seconds=25) == []
    node.outbox.acknowledge(ranks.HIGH_WATER_ITEMS)
    node.ranks.resume()
    assert see(node, start=begin + 25, seconds=20) == [NUMBER]


def test_a_silent_rank_that_uses_a_processor_is_busy(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    used = [0.0]
    monkeypatch.setattr(ranks, "processor_seconds", lambda _process_id: used[0])
    begin = time.monotonic()
    assert see(node, start=begin, seconds=5) == []
    used[0] = 3.0
    assert see(node, start=begin + 5, seconds=10) == []
    assert see(node, start=begin + 15, seconds=10) == [NUMBER], "it does nothing any more"


def test_how_far_a_rank_is_goes_on_once_in_each_round(node: Node) -> None:
    for iteration, phase in ((6, "update"), (7, "data"), (7, "forward")):
        node.say(op="progress", iteration=iteration, phase=phase)
    node.read()
    see(node, start=time.monotonic(), seconds=3)
    about = {"rank": NUMBER, "start": 4, "generation": 0}
    assert node.passed_on()[1:] == [{"op": "progress", "iteration": 7, "phase": "forward", "step": 2, **about}]


def test_the_processor_time_of_a_process() -> None:
    assert ranks.processor_seconds(os.getpid()) > 0.0
    assert ranks.processor_seconds(None) == 0.0
