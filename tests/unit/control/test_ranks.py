"""What an agent tells its ranks, and what it passes on of them."""

import selectors
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.control import ranks
from megatron_ft.control.forkserver import listen
from megatron_ft.control.outbox import Outbox
from megatron_ft.control.ranks import Ranks
from megatron_ft.framing import FrameReader, send

NUMBER = 5


class Node:
    """Node 2 with one rank, which the test plays."""

    def __init__(self, folder: Path) -> None:
        path = folder / "node.sock"
        self.listener = listen(path)
        self.listener.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.outbox = Outbox(lambda: None)
        self.ranks = Ranks(2, self.listener, self.selector, self.outbox)
        self.ranks.expect(NUMBER, 0, folder / "rank.log")
        self.rank = socket.socket(socket.AF_UNIX)
        self.rank.connect(str(path))
        self.say(op="hello", rank=NUMBER, generation=0)
        self.ranks.accept()
        self.read()

    def say(self, **message: Any) -> None:
        send(self.rank, message)

    def read(self) -> None:
        """One round of the agent's main loop."""
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
    said = node.passed_on()
    assert [item["op"] for item in said] == ["reported", "record", "broken", "exited"]
    assert [(item["rank"], item["generation"]) for item in said] == [(NUMBER, 0)] * 2 + [(NUMBER, 1)] * 2
    assert said[2]["position"] == {"rank": 3} and said[2]["node"] == 2
    assert node.ranks.numbers == []


def test_ranks_are_told_and_go_on_being_read(node: Node) -> None:
    assert node.ranks.tell({"op": "break", "reason": "gone"}) == []
    assert FrameReader(node.rank).pump() == ([{"op": "break", "reason": "gone"}], False)
    node.say(op="record", record={"n": 2})
    node.read()
    assert node.passed_on()[-1]["record"] == {"n": 2}


@pytest.mark.parametrize("manner", ["gone", "does not listen"])
def test_a_rank_that_takes_nothing_is_named(node: Node, manner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_TELL_SECONDS", 0.05)
    if manner == "gone":
        node.rank.close()
    assert node.ranks.tell({"op": "break", "reason": "x" * 4_000_000}) == [NUMBER]
