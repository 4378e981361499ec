"""Tests the messages of a sender, with a peer that answers when the test lets it."""

import socket
from dataclasses import asdict

import pytest

from megatron_ft.planning.recovery.sources import StoredWindow
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.snapshot.server.client import REPLICATED_START, WAITING_BYTES, Arena
from megatron_ft.snapshot.server.store import Memory, OwnRank, Store
from megatron_ft.snapshot.server.windows import SendCommit
from megatron_ft.snapshot.server.wire import Wire
from megatron_ft.snapshot.server.workers import MAX_UNANSWERED, Sender, _Work
from megatron_ft.testing.snapshot_servers import (
    PAGE,
    TOKEN,
    Cluster,
    cluster,
    content,
    wait_replicated,
    wait_until,
    window,
)
from tests.unit.snapshot.server.test_own_windows import new

NUM_SLICES = MAX_UNANSWERED + 2


class Peer:
    """Listens at the address of a snapshot server, and answers only on request."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(20)
        host, port = self.listener.getsockname()
        self.address = f"{host}:{port}"

    def greet(self, held: list[dict[str, object]]) -> None:
        """Accept the next connection and send the list of windows."""
        sock, _ = self.listener.accept()
        self.wire = Wire(sock, stall_seconds=2)
        assert self.wire.receive()["op"] == "hello"
        self.wire.send({"op": "welcome", "held": held})

    def take(self, index: int) -> None:
        """Receive one slice. Send ``go`` if it waits."""
        announced = self.wire.receive(patient=True)
        assert (announced["op"], announced["slice"]) == ("slice", index)
        if announced["waits"]:
            self.wire.send({"op": "go"})
        payload = memoryview(bytearray(PAGE))
        self.wire.receive_into(payload)
        assert payload == content(0, 10 + index, PAGE)
        assert len(self.wire.receive()["hashes"]) == len(announced["record"]["pieces"])

    def answer(self, **message: object) -> None:
        """Send an answer."""
        self.wire.send(message)

    def close(self) -> None:
        """Close the connection."""
        self.wire.close()
        self.listener.close()


def test_slices_follow_each_other_up_to_a_limit() -> None:
    peer = Peer()
    with cluster(1) as nodes:
        arena = replicate(nodes, peer)
        # A sender that finds nothing more to send waits for an answer, and this peer gives none yet.
        wait_until(lambda: arena.status(WAITING_BYTES) == NUM_SLICES * PAGE, "all slices are there to be sent")
        peer.greet([])
        for index in range(MAX_UNANSWERED):
            peer.take(index)
        peer.wire._sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            peer.wire._sock.recv(1)
        peer.wire._sock.settimeout(None)
        assert arena.status(WAITING_BYTES) == NUM_SLICES * PAGE, "nothing has been acknowledged"
        for index in range(MAX_UNANSWERED, NUM_SLICES):
            peer.answer(op="ack")
            peer.take(index)
        assert arena.status(REPLICATED_START) == -1
        for _ in range(MAX_UNANSWERED):
            peer.answer(op="ack")
        wait_replicated(arena, 10)
        peer.close()


def test_what_was_not_acknowledged_is_asked_and_sent_again() -> None:
    peer = Peer()
    with cluster(1) as nodes:
        arena = replicate(nodes, peer)
        peer.greet([])
        for index in range(3):
            peer.take(index)
        peer.answer(op="ack")
        wait_until(lambda: arena.status(WAITING_BYTES) == (NUM_SLICES - 1) * PAGE, "the first is acknowledged")
        peer.answer(op="error", kind="hash", reason="slice=1 of window 10: was damaged in transfer")
        key = WindowKey(start_iteration=10, generation=1)
        held = StoredWindow(**asdict(key), num_slices=NUM_SLICES, num_held=1, where="copy", node=1, buffer=0)
        peer.wire.close()
        peer.greet([{"rank": 0, "window": asdict(held)}])
        for index in range(1, NUM_SLICES):
            peer.take(index)
            peer.answer(op="ack")
        wait_replicated(arena, 10)
        peer.close()


def test_an_answer_that_comes_after_its_time_limit_ends_only_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, store = Peer(), Store(0, TOKEN, Memory())
    sender = Sender(1, peer.address, store)
    sock = socket.create_connection(peer.listener.getsockname(), timeout=20)
    peer.wire = Wire(peer.listener.accept()[0])
    sender._wire = Wire(sock)
    own = OwnRank(settings=None)  # type: ignore[arg-type]
    sender._unanswered.append(_Work(own, SendCommit(window=new(10, 0))))
    take_answer = sender._take_answer

    def stall() -> None:
        monkeypatch.setattr(sender, "_take_answer", take_answer)
        peer.answer(op="ack")
        raise TimeoutError("no bytes were transferred for 30 s")

    monkeypatch.setattr(sender, "_take_answer", stall)
    assert sender._work_once(), "the thread goes on"
    assert sender._wire is None and not sender._unanswered
    peer.close()


def replicate(nodes: Cluster, peer: Peer) -> Arena:
    """Begin to replicate one window to ``peer``. Return the memory of its rank."""
    rank = nodes.client(0, node=0, peer_nodes=[1], peers={"0": nodes.nodes[0].address, "1": peer.address})
    arena = rank.allocate(NUM_SLICES * PAGE)
    window(rank, arena, 0, 0, 10, num_slices=NUM_SLICES)
    return arena
