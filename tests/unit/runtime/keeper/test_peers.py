"""One connection of another keeper, served in this process."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from megatron_ft.errors import ControlError
from megatron_ft.runtime.keeper import peers
from megatron_ft.runtime.keeper.memory import Memory, Segment
from megatron_ft.runtime.keeper.peers import PeerSessions
from megatron_ft.runtime.keeper.store import Store
from megatron_ft.runtime.keeper.wire import Wire
from tests.unit.runtime.keeper.nodes import TOKEN
from tests.unit.runtime.keeper.test_refusals import GREETING, announcement


class SlowMemory(Memory):
    """Takes its time, until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def allocate(self, name: str, num_bytes: int) -> Segment:
        assert self.go_on.wait(60), "nobody let it go on"
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
    monkeypatch.setattr(peers, "SIGN_OF_LIFE_SECONDS", 0.2)
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


def test_strangers_are_counted(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MAX_STRANGERS", 2)
    store, sessions = Store(0, TOKEN, Memory()), PeerSessions()
    strangers = []
    for _ in range(3):
        strangers.append(socket.create_connection(listener.getsockname(), timeout=20))
        sessions.accept(listener.accept()[0], store)
    assert strangers[2].recv(1) == b"", "one too many"
    strangers[0].close()
    deadline = time.monotonic() + 20
    while not sessions._strangers.acquire(blocking=False):
        assert time.monotonic() < deadline, "a stranger that left is still counted"
        time.sleep(0.01)
    sessions.greeted()
    greeted(listener, store, sessions).close()
    strangers[1].close()
