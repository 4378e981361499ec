"""Tests that invalid messages to a fork server close only the connection of their sender."""

import errno
import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.control.node import fork_server as forkserver
from megatron_ft.framing import FrameReader, send
from megatron_ft.testing.attacks import SILENT, connect, requests, throw
from megatron_ft.testing.jobs import forkserver as started


@pytest.fixture(scope="module")
def path() -> Iterator[str]:
    """Yield the socket of a fork server that has imported no large modules."""
    with started("json") as socket_path:
        yield socket_path


@pytest.fixture
def agent(path: str) -> Iterator[socket.socket]:
    """Return a client that was connected before."""
    with connect(path) as sock:
        yield sock


def is_served(sock: socket.socket) -> bool:
    """Return whether a connection is still open."""
    return not select.select([sock], [], [], 0)[0]


@pytest.mark.parametrize("data", requests().values(), ids=list(requests()))
def test_a_request_that_is_none_is_dropped(path: str, agent: socket.socket, data: bytes) -> None:
    assert throw(path, data, wait_seconds=10) == "refused"
    assert is_served(agent) and throw(path, b"\0\0") == SILENT


def test_of_too_many_clients_the_last_are_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "MAX_CLIENTS", 2)
    listener = forkserver.listen(tmp_path / "fork.sock")
    server = forkserver._ForkServer(listener, lambda _: 0, watch_stdin=False)
    clients = []
    for _ in range(3):
        clients.append(connect(str(tmp_path / "fork.sock")))
        server._accept()
    assert [is_served(client) for client in clients] == [True, True, False]
    for sock in (*clients, listener):
        sock.close()


@pytest.mark.parametrize("call", ["fork", "pidfd_open"])
def test_a_rank_that_cannot_be_forked_fails_alone(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses to create a process (EAGAIN) or a descriptor (EMFILE)."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    listener = forkserver.listen(tmp_path / "fork.sock")
    server = forkserver._ForkServer(listener, lambda _: signal.pause() or 0, watch_stdin=False)
    log = tmp_path / "rank.log"

    def spawn(rank: int) -> dict[str, object]:
        """Request a rank, and return the answer."""
        with log.open("wb") as file:
            send(agent, {"op": "spawn", "rank": rank, "spec": {}}, [file.fileno()])
        server._read(server._clients[0])
        assert server._clients, "the client has not been dropped"
        (answer,), _ = reader.pump()
        return answer

    with connect(str(tmp_path / "fork.sock")) as agent:
        server._accept()
        reader = FrameReader(agent)
        other = spawn(0)["process_id"]
        with monkeypatch.context() as limited:
            limited.setattr(os, call, refuse)
            answer = spawn(1)
        assert (answer["op"], answer["rank"], answer["returncode"]) == ("exited", 1, 1)
        assert log.read_text() == "rank 1 could not be started: [Errno 11] Resource temporarily unavailable\n"
        assert set(server._clients[0].children) == {other}, "the other rank lives"
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, []), "the server can still be ended"
        assert spawn(1)["op"] == "spawned", "and tries again"
        server._drop(server._clients[0])
    listener.close()
