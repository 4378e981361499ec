"""One connection of another keeper, served in this process."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from megatron_ft.errors import ControlError
from megatron_ft.snapshot.server import peer_session
from megatron_ft.snapshot.server.memory import Memory, Segment
from megatron_ft.snapshot.server.peer_session import PeerSessions
from megatron_ft.snapshot.server.store import Store
from megatron_ft.snapshot.server.wire import Wire
from megatron_ft.testing.snapshot_servers import TOKEN
from tests.unit.snapshot.server.test_refusals import GREETING, announcement


class SlowMemory(Memory):
    """Takes its time, until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def allocate(self, name: str, num_bytes: int) -> Segment:
        assert self.go_on.wait(60), "timed out"
        return super().allocate(name, num_bytes)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


def greeted(listener: socket.socket, store: Store, sessions: PeerSessions) -> Wire:
    """A connection to ``store`` that has shown the token."""
    wire = Wire(socket.create_connection(listener.getsockname()), stall_seconds=2)
    sessions.accept(listener.accept()[0], store)
    assert wire.call({"op": "hello", **GREETING})["op"] == "welcome"
    return wire


def test_taking_much_memory_is_not_standing_still(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_session, "KEEPALIVE_SECONDS", 0.2)
    memory = SlowMemory()
    wire = greeted(listener, Store(0, TOKEN, memory), PeerSessions())
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
