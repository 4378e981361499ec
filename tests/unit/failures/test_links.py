"""Tests that a node in a separate network namespace is cut off and connected again, and that one in the same namespace
is refused."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_ft.failures.injecting import CannotCut, Injector, NotInjected, _links_to, _switch

HERE, THERE = "10.89.0.1", "10.89.0.2"
ECHO = """
import socket
with socket.create_server(("0.0.0.0", 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    while data := connection.recv(100):
        connection.sendall(data)
"""
needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter"))),
    reason="needs root, ip and nsenter: namespaces are made",
)


@dataclass
class Node:
    """Process that echoes, in a separate namespace, as node 1 of a run."""

    run_dir: Path
    process: "subprocess.Popen[bytes]"
    link: str
    connection: socket.socket

    def answers(self, text: bytes, seconds: float) -> bool:
        """Return whether sent bytes come back in time."""
        self.connection.settimeout(seconds)
        try:
            self.connection.sendall(text)
            return self.connection.recv(100) == text
        except TimeoutError:
            return False


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=10)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    name = f"mft{secrets.token_hex(3)}"
    log = tmp_path / "run" / "logs" / "rank-00001.log"
    log.parent.mkdir(parents=True)
    with contextlib.ExitStack() as ending:
        ip("netns", "add", name)
        ending.callback(ip, "netns", "del", name)
        ip("link", "add", f"{name}0", "type", "veth", "peer", "name", "eth0", "netns", name)
        ending.callback(ip, "link", "del", f"{name}0")  # a connection that waits would keep the namespace for minutes
        ip("-n", name, "addr", "add", f"{THERE}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("link", "add", f"{name}b", "type", "bridge")
        ending.callback(ip, "link", "del", f"{name}b")
        ip("addr", "add", f"{HERE}/24", "dev", f"{name}b")
        ip("link", "set", f"{name}0", "master", f"{name}b", "up")
        ip("link", "set", f"{name}b", "up")
        with log.open("ab") as output:
            process = subprocess.Popen(["ip", "netns", "exec", name, sys.executable, "-c", ECHO], stdout=output)
        ending.callback(process.wait)
        ending.callback(process.kill)
        while not (text := log.read_text()).endswith("\n"):
            assert process.poll() is None
        connection = ending.enter_context(socket.create_connection((THERE, int(text)), timeout=10))
        yield Node(tmp_path / "run", process, f"{name}0", connection)


def injector(run_dir: Path, **changed: object) -> Injector:
    values: dict[str, object] = {"connect": contextlib.nullcontext, "patience_seconds": 0.3, **changed}
    return Injector(run_dir=run_dir, ranks_per_node=1, **values)  # type: ignore[arg-type]


@needs_namespaces
def test_a_partition_cuts_open_connections_and_new_ones_and_ends(node: Node) -> None:
    seen: list[tuple[bool, int]] = []

    def look(seconds: float) -> None:
        with socket.socket() as other:
            other.settimeout(0.3)
            new = other.connect_ex((THERE, 9))  # refused at once while the node is reached
        seen.append((node.answers(b"lost", 0.3), new))

    assert node.answers(b"before", 10)
    injector(node.run_dir, pause=look).partition([1], 5.0)
    ((answered, new),) = seen
    assert not answered and new != 0 and node.process.poll() is None
    node.connection.settimeout(30)
    assert node.connection.recv(100) == b"lost", "nothing was lost but time: it was sent again"
    assert node.answers(b"after", 30)
    lines = (node.run_dir / "injected.jsonl").read_text()
    assert '"action": "partition"' in lines and '"rank-00001.log"' in lines


@needs_namespaces
def test_the_links_of_a_namespace_are_found_and_switched(node: Node) -> None:
    assert _links_to([node.process.pid]) == [node.link]
    with pytest.raises(CannotCut, match="nolink"):
        _switch(["nolink", node.link], on=False)
    state = Path("/sys/class/net") / node.link / "operstate"
    assert state.read_text().strip() == "down", "one that fails keeps no other from being switched"


@pytest.mark.skipif(not Path("/proc/self/ns/net").exists(), reason="needs Linux")
def test_a_node_that_shares_our_network_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "node-002.log"
    log.parent.mkdir()
    with log.open("ab") as output:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=output)
    try:
        with pytest.raises(NotInjected, match="in the same network namespace"):
            injector(tmp_path).partition([2], 1.0)
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
