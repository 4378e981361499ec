"""Tests that unauthenticated connections are few and short, and that connections with the token stay open."""

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.control.rpc import (
    RpcClient,
    RpcServer,
    _peer_of,
    _UnauthenticatedConnections,
    max_connections,
    new_token,
)
from megatron_ft.testing.attacks import crowd, headers_without_body
from tests.unit.control.controller.test_controller import eventually

TOKEN = new_token()
REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def server() -> Iterator[RpcServer]:
    served = RpcServer("Test", {"echo": lambda request: request}, interface="127.0.0.1", token=TOKEN)
    served._server.start()  # without its own watch: the test looks itself
    yield served
    served.stop()


def is_closed(sock: socket.socket) -> bool:
    """Return whether the server has closed a connection, after reading what it had sent before."""
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while sock.recv(4096):
            pass
        return True
    return False


def test_the_oldest_unauthenticated_connections_are_closed(server: RpcServer) -> None:
    host, _, port = server.address.rpartition(":")
    strangers = _UnauthenticatedConnections(int(port), max_connections=19)
    client = RpcClient(server.address, "Test", token=TOKEN)
    gone = RpcClient(server.address, "Test", token=TOKEN)
    for caller in (client, gone):
        assert caller.call("echo", {"n": 1}, timeout_seconds=5) == {"n": 1}
    gone.close()
    for peer in server._unauthenticated._named:
        strangers.has_shown_token(peer)
    socks = [socket.create_connection((host, int(port))) for _ in range(3)]
    try:
        # The order of connections that the same look finds first is not known, so the oldest have a look of their own.
        assert eventually(lambda: len(strangers._connections()) == 4), "gRPC has taken all of them"
        assert strangers.look(99.0) == 3
        socks += [socket.create_connection((host, int(port))) for _ in range(9)]
        assert eventually(lambda: len(strangers._connections()) == 13)
        assert strangers.look(100.0) == 9, "half of what the friend leaves free"
        assert not strangers._named, "a closed connection's port may be reused by another client"
        assert eventually(lambda: [is_closed(sock) for sock in socks] == [True] * 3 + [False] * 9)
        assert eventually(lambda: len(strangers._connections()) == 10), "gRPC has closed what was shut down"
        assert strangers.look(109.0) == 9
        assert strangers.look(110.0) == 0, "they have had their time"
        assert eventually(lambda: all(is_closed(sock) for sock in socks))
        assert client.call("echo", {"n": 2}, timeout_seconds=5) == {"n": 2}
        assert eventually(lambda: strangers.look(200.0) == 0 and len(strangers._authenticated) == 1)
        client.close()
        assert eventually(lambda: strangers.look(300.0) == 0 and not strangers._authenticated)
    finally:
        for sock in socks:
            sock.close()


@pytest.mark.parametrize("token", [None, "0" * 64])
def test_calls_without_the_token_do_not_make_a_friend(server: RpcServer, token: str | None) -> None:
    strangers = server._unauthenticated
    with crowd(server.address, 4, headers_without_body("/Test/echo", token)):
        assert eventually(lambda: strangers.look(0.0) == 4)
        assert strangers.look(1000.0) == 0


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("ipv4:127.0.0.1:50000", ("127.0.0.1", 50000)),
        ("ipv6:%5B::1%5D:50000", ("::1", 50000)),
        ("ipv6:%5B::ffff:10.0.0.1%5D:7", ("10.0.0.1", 7)),
        ("ipv6:%5Bfe80::1%25eth0%5D:7", ("fe80::1", 7)),
        ("unix:", None),
        ("unix:socket", None),
    ],
)
def test_peers_are_read_as_grpc_writes_them(text: str, peer: tuple[str, int] | None) -> None:
    assert _peer_of(text) == peer


def test_a_server_leaves_descriptors_for_all_else() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))\n"
        "from megatron_ft.control.rpc import max_connections, raise_descriptor_limit\n"
        "print(max_connections(), raise_descriptor_limit(), max_connections())"
    )
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True).stdout
    first, limit, second = map(int, output.split())
    assert 160 < first < 256 - 64 and limit == 512 and second - first == 256


def test_a_job_with_more_nodes_than_descriptors_does_not_begin() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "from megatron_ft.control.rpc import check_descriptors\n"
        "check_descriptors(80); check_descriptors(250)"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert "250 nodes can belong to the job" in ended.stderr and "may open 256 files and needs 5" in ended.stderr


SERVE = """
import resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from megatron_ft.control.rpc import RpcServer
server = RpcServer("Test", {"files": lambda _: {"n": len([open("/dev/null") for _ in range(20)])}},
                   interface="127.0.0.1", token=sys.argv[1])
server.start()
print(server.address, flush=True)
sys.stdin.read()
"""


def test_many_unauthenticated_connections_block_no_call_and_no_file() -> None:
    """The connections are opened again as soon as they are closed."""
    command = [sys.executable, "-c", SERVE, TOKEN]
    served = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert served.stdin is not None and served.stdout is not None
    over = threading.Event()
    try:
        address = served.stdout.readline().strip()
        host, _, port = address.rpartition(":")
        early = RpcClient(address, "Test", token=TOKEN)
        assert early.call("files", {}, timeout_seconds=10) == {"n": 20}
        held: list[socket.socket] = []

        def press() -> None:
            while not over.is_set():
                held[:] = [sock for sock in held if not is_closed(sock)]
                while len(held) < 400 and not over.is_set():
                    with contextlib.suppress(OSError):
                        held.append(socket.create_connection((host, int(port)), timeout=1))
                over.wait(0.05)

        crowd_thread = threading.Thread(target=press)
        crowd_thread.start()
        assert eventually(lambda: len(held) >= 300)
        assert early.call("files", {}, timeout_seconds=10) == {"n": 20}
        late = RpcClient(address, "Test", token=TOKEN)
        assert late.call("files", {}, timeout_seconds=20, wait_for_peer=True) == {"n": 20}
        for client in (early, late):
            client.close()
    finally:
        over.set()
        served.stdin.close()
        served.wait(timeout=20)
        crowd_thread.join()
        for sock in held:
            sock.close()


def test_the_limit_is_that_of_this_process() -> None:
    assert max_connections() > 16
