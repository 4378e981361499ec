"""Tests the watch over machines. Addresses of the loopback network stand for machines; a port that accepts no more
connections stands for a machine that does not answer."""

import queue
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from megatron_ft.control import presence
from megatron_ft.control.presence import PresenceEndpoint, PresencePort, PresenceWatch

HERE, FIRST, SECOND = "127.0.0.1", "127.0.0.2", "127.0.0.3"
VANISHED_SECONDS = 1.0


class Machine:
    """Machine whose port is served in a thread until it falls silent."""

    def __init__(self, address: str) -> None:
        self.selector = selectors.DefaultSelector()
        self.port = PresencePort(address, f"{HERE}:1")
        self.port.watch(self.selector)
        self.endpoint = self.port.endpoint
        self.num_connections = 0
        self.kept: list[socket.socket] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        while not self.over.is_set():
            for key, _ in self.selector.select(0.05):
                key.data()
            self.num_connections = len(self.port._connections)

    def close(self) -> None:
        """End like an agent: connections are closed and new ones refused."""
        self.over.set()
        self.thread.join()
        self.port.close()
        self.selector.close()
        for sock in self.kept:
            sock.close()

    def fall_silent(self) -> None:
        """Answer no more packets."""
        self.close()
        where = (self.endpoint.address, self.endpoint.port)
        silent = socket.socket()
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        silent.bind(where)
        silent.listen(0)
        self.kept = [silent, *(socket.socket() for _ in range(4))]
        for sock in self.kept[1:]:
            sock.setblocking(False)
            sock.connect_ex(where)  # the first ones fill the queue, and the kernel drops the packets of all others


class Watched:
    """Watch over machines, with what it has reported."""

    def __init__(self) -> None:
        self.found: queue.Queue[tuple[int, int, str]] = queue.Queue()
        self.watch = PresenceWatch(HERE, VANISHED_SECONDS, lambda *about: self.found.put(about))
        self.machines: dict[int, Machine] = {}
        self.watch.start()

    def add(self, node: int, address: str) -> Machine:
        machine = self.machines[node] = Machine(address)
        self.watch.watch(node, 70 + node, machine.endpoint)
        wait_until(lambda: machine.num_connections == 1)
        return machine


@pytest.fixture
def watched() -> Iterator[Watched]:
    found = Watched()
    with ExitStack() as ending:
        ending.callback(lambda: [machine.close() for machine in found.machines.values()])
        ending.callback(found.watch.stop)
        yield found


def wait_until(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def is_silent(watched: Watched, seconds: float) -> bool:
    """Whether nothing is reported for ``seconds``."""
    try:
        watched.found.get(timeout=seconds)
    except queue.Empty:
        return True
    return False


def test_a_machine_that_does_not_answer_is_reported_once(watched: Watched) -> None:
    watched.add(1, FIRST).fall_silent()
    began = time.monotonic()
    node, process_id, reason = watched.found.get(timeout=10)
    assert time.monotonic() - began >= VANISHED_SECONDS
    assert (node, process_id) == (1, 71)
    assert reason.endswith("its kernel does not answer (detector.vanished_seconds=1)")
    assert is_silent(watched, 2.0)


def test_an_ended_agent_is_an_answer_of_its_machine(watched: Watched) -> None:
    watched.add(1, FIRST).close()
    assert is_silent(watched, 3.0)


def test_nothing_is_reported_while_no_machine_answers(watched: Watched) -> None:
    """The cause is probably the network of the controller. When one machine answers, the other has vanished."""
    first, second = watched.add(1, FIRST), watched.add(2, SECOND)
    first.fall_silent()
    second.fall_silent()
    assert is_silent(watched, 4.0)
    watched.watch.forget(2)
    watched.add(3, SECOND)
    assert watched.found.get(timeout=10)[0] == 1
    assert is_silent(watched, 2.0)


def test_a_forgotten_machine_is_not_reported(watched: Watched) -> None:
    machine = watched.add(1, FIRST)
    watched.watch.forget(1)
    wait_until(lambda: machine.num_connections == 0)
    machine.fall_silent()
    assert is_silent(watched, 3.0)


def test_a_machine_that_never_answered_is_named_and_not_lost(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(presence, "_REPORT_SECONDS", 0.5)
    machine = watched.machines[1] = Machine(FIRST)
    machine.fall_silent()
    watched.watch.watch(1, 71, machine.endpoint)
    assert is_silent(watched, 3.0)
    message = capfd.readouterr().err
    assert message.count("node 1: nothing answers at 127.0.0.2 port") == 1
    assert "set detector.vanished_seconds=null" in message


def test_a_port_serves_the_controller_alone(watched: Watched) -> None:
    machine = watched.add(1, FIRST)
    where = (machine.endpoint.address, machine.endpoint.port)
    with socket.create_connection(where, source_address=(SECOND, 0)) as stranger:
        stranger.settimeout(10)
        assert stranger.recv(1) == b""
    assert machine.num_connections == 1
    # Connections of controllers that were replaced make room for new ones.
    with ExitStack() as ending:
        for _ in range(20):
            ending.enter_context(socket.create_connection(where))
        wait_until(lambda: machine.num_connections == 8)


def test_nodes_on_the_controllers_machine_are_not_watched(watched: Watched) -> None:
    watched.watch.watch(1, 71, PresenceEndpoint(address=HERE, port=9))
    watched.add(2, FIRST)
    assert list(watched.watch._machines) == [2]
