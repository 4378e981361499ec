"""Tests one connection of another snapshot server, served in this process."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from megatron_ft.errors import ControlError
from megatron_ft.snapshot.server import peer_session
from megatron_ft.snapshot.server.peer_session import PeerSessions, _PeerSession
from megatron_ft.snapshot.server.store import Memory, Segment, Store
from megatron_ft.snapshot.server.wire import Refused, Wire
from megatron_ft.testing.snapshot_servers import PAGE, TOKEN, slice_of
from tests.unit.snapshot.server.served import Interrupted
from tests.unit.snapshot.server.test_refusals import GREETING, announcement


class SlowMemory(Memory):
    """Memory whose allocation waits until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.go_on = threading.Event(), threading.Event()

    def allocate(self, name: str, num_bytes: int) -> Segment:
        self.has_begun.set()
        assert self.go_on.wait(60), "timed out"
        return super().allocate(name, num_bytes)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


def greeted(
    listener: socket.socket, store: Store, sessions: PeerSessions, *, stall_seconds: int = 20, **changes: object
) -> Wire:
    """Return a connection to ``store`` that has presented the token."""
    wire = Wire(socket.create_connection(listener.getsockname()), stall_seconds=stall_seconds)
    sessions.accept(listener.accept()[0], store)
    assert wire.call({"op": "hello", **GREETING, **changes})["op"] == "welcome"
    return wire


def thread_of(sessions: PeerSessions) -> _PeerSession:
    """Return the thread of the only connection."""
    (found,) = [each for each in threading.enumerate() if isinstance(each, _PeerSession) and each._sessions is sessions]
    return found


def send_slice(wire: Wire, payload: bytes = bytes(PAGE)) -> None:
    """Send the bytes of an announced slice, and their hashes."""
    hashes = slice_of(10).hash_pieces(memoryview(payload))
    wire.send_bytes(memoryview(payload))
    wire.send({"op": "hashes", "hashes": list(hashes)})


def test_taking_much_memory_is_not_standing_still(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_session, "KEEPALIVE_SECONDS", 0.2)
    memory = SlowMemory()
    wire = greeted(listener, Store(0, TOKEN, memory), PeerSessions(), stall_seconds=2)
    timer = threading.Timer(3.0, memory.go_on.set)
    timer.start()
    before = time.monotonic()
    assert wire.call(announcement()) == {"op": "go"}
    assert time.monotonic() - before > 2
    timer.join()
    wire.close()


def test_a_second_connection_of_a_node_ends_the_first(listener: socket.socket) -> None:
    store, sessions = Store(0, TOKEN, Memory()), PeerSessions()
    first = greeted(listener, store, sessions)
    assert first.call(announcement()) == {"op": "go"}
    second = greeted(listener, store, sessions)
    with pytest.raises((ControlError, OSError)):
        first.answer()
    assert second.call(announcement()) == {"op": "go"}
    first.close()
    second.close()


def test_a_connection_that_cannot_be_ended_keeps_every_later_one_out(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All later connections are refused, because the thread may write to the same buffers as long as it lives."""
    monkeypatch.setattr(peer_session, "REPLACE_SECONDS", 0.05)
    memory = SlowMemory()
    store, sessions = Store(0, TOKEN, memory), PeerSessions()
    first = greeted(listener, store, sessions)
    first.send(announcement())
    assert memory.has_begun.wait(60), "timed out"
    thread = thread_of(sessions)
    for _ in range(3):
        with pytest.raises(Refused, match="node=7: an earlier connection did not end within 0.05 s"):
            greeted(listener, store, sessions)
    memory.go_on.set()
    thread.join(60)
    last = greeted(listener, store, sessions)
    assert last.call(announcement()) == {"op": "go"}
    first.close()
    last.close()


def test_memory_that_arrives_after_a_newer_membership_is_not_kept(listener: socket.socket) -> None:
    memory = SlowMemory()
    store, sessions = Store(0, TOKEN, memory), PeerSessions()
    stale = greeted(listener, store, sessions)
    stale.send(announcement())
    assert memory.has_begun.wait(60), "timed out"
    newer = greeted(listener, store, sessions, node=8, generation=2)
    memory.go_on.set()
    with pytest.raises(Refused, match="generation=1: is stale"):
        stale.answer()
    assert store.copies == {}
    stale.close()
    newer.close()


def test_two_connections_that_need_memory_for_one_rank_share_it(listener: socket.socket) -> None:
    """The rank has moved, and the server of its former node may still be sending."""
    memory = SlowMemory()
    store, sessions = Store(0, TOKEN, memory), PeerSessions()
    wires = [greeted(listener, store, sessions, node=node) for node in (7, 8)]
    for wire in wires:
        wire.send(announcement())
    memory.go_on.set()
    refusals = []
    for wire in wires:
        try:
            assert wire.answer() == {"op": "go"}
        except Refused as refused:
            refusals.append(str(refused))
    assert refusals == ["buffer=0: another connection is writing to it"]
    assert memory.used_bytes == store.copies[0].segment.num_bytes
    for wire in wires:
        wire.close()


def test_a_slice_whose_memory_was_replaced_is_not_acknowledged(listener: socket.socket) -> None:
    """Its sender would count it as a copy, but no recovery could find it."""
    store, sessions = Store(0, TOKEN, Memory()), PeerSessions()
    wire, other = (greeted(listener, store, sessions, node=node) for node in (7, 8))
    assert wire.call(announcement()) == {"op": "go"}
    assert other.call(announcement(window_bytes=4 * PAGE)) == {"op": "go"}
    send_slice(wire)
    with pytest.raises(Refused, match="rank=0: the memory for copies was freed during the transfer"):
        wire.answer()
    send_slice(other)
    assert other.answer() == {"op": "ack"}
    assert [entry.num_held for entry in store.inventory(0)] == [1]
    wire.close()
    other.close()


def test_a_commit_of_a_membership_that_ends_meanwhile_forgets_nothing(listener: socket.socket) -> None:
    """The commit supersedes other windows, among them some that a newer membership has committed."""
    store, sessions = Store(0, TOKEN, Memory()), PeerSessions()
    wire = greeted(listener, store, sessions)
    assert wire.call(announcement(num_slices=1)) == {"op": "go"}
    send_slice(wire)
    assert wire.answer() == {"op": "ack"}
    thread = thread_of(sessions)
    newer: list[Wire] = []
    about = {"rank": 0, "start_iteration": 10, "generation": 1}
    greet = lambda: newer.append(greeted(listener, store, sessions, node=8, generation=2))  # noqa: E731
    with pytest.raises(Refused, match="generation=1: is stale"):
        thread._committed(Interrupted(greet, "rank", op="committed", **about))
    assert [entry.committed for entry in store.inventory(0)] == [False]
    wire.close()
    newer[0].close()


def test_a_new_connection_replaces_the_oldest_unauthenticated_one(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_session, "MAX_UNAUTHENTICATED", 2)
    store, sessions = Store(0, TOKEN, Memory()), PeerSessions()
    waiting = []
    for _ in range(2):
        waiting.append(socket.create_connection(listener.getsockname(), timeout=20))
        sessions.accept(listener.accept()[0], store)
        waiting[-1].sendall(b"\0")  # a byte now and then, as if more came
    wire = greeted(listener, store, sessions)
    assert waiting[0].recv(1) == b"", "the oldest one"
    second = greeted(listener, store, sessions)
    assert second.call({"op": "inventory", "rank": 0})["windows"] == []
    assert sessions.expire() is not None, "the other one still counts, those with the token do not"
    waiting[1].close()
    for opened in (waiting[0], wire, second):
        opened.close()


def test_an_unauthenticated_connection_has_a_limited_time(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions, store = PeerSessions(), Store(0, TOKEN, Memory())
    wire = greeted(listener, store, sessions)
    assert sessions.expire() is None
    waiting = socket.create_connection(listener.getsockname(), timeout=20)
    sessions.accept(listener.accept()[0], store)
    waiting.sendall(b"\0")
    left = sessions.expire()
    assert left is not None and 0 < left <= peer_session.GREETING_SECONDS
    monkeypatch.setattr(peer_session, "GREETING_SECONDS", 0.0)
    assert sessions.expire() is None
    assert waiting.recv(1) == b""
    assert wire.call({"op": "inventory", "rank": 0})["windows"] == []
    waiting.close()
    wire.close()


def test_an_unauthenticated_connection_that_has_ended_is_not_counted(listener: socket.socket) -> None:
    sessions = PeerSessions()
    socket.create_connection(listener.getsockname(), timeout=20).close()
    sessions.accept(listener.accept()[0], Store(0, TOKEN, Memory()))
    deadline = time.monotonic() + 20
    while sessions.expire() is not None:
        assert time.monotonic() < deadline, "a connection that has ended is still counted"
        time.sleep(0.01)
