"""What strangers say to a fork server costs them their connection, and nobody else."""

import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.attacks import SILENT, connect, requests, throw
from megatron_ft.control.node import fork_server as forkserver
from tests.helpers.jobs import forkserver as started


@pytest.fixture(scope="module")
def path() -> Iterator[str]:
    """A fork server that has imported nothing of weight."""
    with started("json") as socket_path:
        yield socket_path


@pytest.fixture
def agent(path: str) -> Iterator[socket.socket]:
    """A client that was there before."""
    with connect(path) as sock:
        yield sock


def is_served(sock: socket.socket) -> bool:
    """Whether a connection has not been hung up on."""
    return not select.select([sock], [], [], 0)[0]


@pytest.mark.parametrize("data", requests().values(), ids=list(requests()))
def test_a_request_that_is_none_is_dropped(path: str, agent: socket.socket, data: bytes) -> None:
    assert throw(path, data, wait_seconds=10) == "refused"
    assert is_served(agent) and throw(path, b"\0\0") == SILENT


def test_of_too_many_clients_the_last_are_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "MAX_CLIENTS", 2)
    listener = forkserver.listen(tmp_path / "fork.sock")
    server = forkserver.ForkServer(listener, lambda _: 0, watch_stdin=False)
    clients = []
    for _ in range(3):
        clients.append(connect(str(tmp_path / "fork.sock")))
        server._accept()
    assert [is_served(client) for client in clients] == [True, True, False]
    for sock in (*clients, listener):
        sock.close()
