"""Starts real snapshot servers on this machine for tests, and clients that write windows with known bytes into the
servers' memory."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ft.planning.recovery.sources import StoredWindow
from megatron_ft.planning.snapshot.plan import Piece, WindowKey
from megatron_ft.snapshot.server.client import REPLICATED_START, Arena, KeeperClient
from megatron_ft.snapshot.window import Slice

PAGE = 4096
WAIT_SECONDS = 20.0
TOKEN = secrets.token_hex(32)


@dataclass
class Node:
    """Process of the snapshot server of one node."""

    number: int
    socket_path: str
    process: "subprocess.Popen[bytes]"
    address: str

    def kill(self) -> None:
        """Kill the snapshot server with SIGKILL, and wait until it has ended."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT_SECONDS)

    @property
    def num_descriptors(self) -> int:
        """Return the number of open file descriptors of the snapshot server."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def num_threads(self) -> int:
        """Return the number of threads of the snapshot server."""
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    @property
    def memory_bytes(self) -> int:
        """Return the server's resident memory that belongs to no file, in bytes. A memory leak would increase it."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("the kernel does not report RssAnon in /proc/PID/status")


@dataclass
class Cluster:
    """Snapshot servers of one imaginary job, one per node."""

    directory: Path
    nodes: dict[int, Node] = field(default_factory=dict)

    def start(self, number: int, **spec: object) -> Node:
        """Start the snapshot server of node ``number``, for the first time or after it was killed."""
        folder = Path(tempfile.mkdtemp(dir=self.directory))
        path = str(folder / "keeper.sock")
        content = {"socket_path": path, "interface": "127.0.0.1", "token": TOKEN, "node": number, **spec}
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_ft.snapshot.server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(content).encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, f"snapshot server {number} ended with exit code {process.wait(WAIT_SECONDS)}"
        self.nodes[number] = Node(number, path, process, json.loads(line)["address"])
        return self.nodes[number]

    def stop(self) -> None:
        """End all snapshot servers by closing their standard input."""
        for node in self.nodes.values():
            for stream in (node.process.stdin, node.process.stdout):
                assert stream is not None
                stream.close()
        for node in self.nodes.values():
            node.process.wait(WAIT_SECONDS)

    def hello(self, rank: int, *, node: int, peer_nodes: list[int], **changes: object) -> dict[str, Any]:
        """Return the first message of a rank to its snapshot server."""
        return {
            "token": TOKEN,
            "rank": rank,
            "world_size": 4,
            "node": node,
            "generation": 1,
            "run_id": "a-run",
            "topology": {"dp": 4},
            "peers": {str(number): known.address for number, known in self.nodes.items()},
            "peer_nodes": peer_nodes,
            "persist_every": 0,
            "persist_url": None,
            "num_persisted": 2,
            **changes,
        }

    def client(self, rank: int, *, node: int, peer_nodes: list[int], **changes: object) -> KeeperClient:
        """Connect a rank to its node's snapshot server."""
        hello = self.hello(rank, node=node, peer_nodes=peer_nodes, **changes)
        return KeeperClient(self.nodes[node].socket_path, hello=hello)


@contextlib.contextmanager
def cluster(num_nodes: int, **spec: object) -> Iterator[Cluster]:
    """Start ``num_nodes`` snapshot servers. End the servers after the block."""
    with tempfile.TemporaryDirectory() as directory:
        started = Cluster(Path(directory))
        try:
            for number in range(num_nodes):
                started.start(number, **spec)
            yield started
        finally:
            started.stop()


def content(rank: int, iteration: int, num_bytes: int) -> bytes:
    """Return ``num_bytes`` known bytes. Different ranks and iterations have different bytes."""
    seed = bytes((rank * 31 + iteration * 7 + index) % 256 for index in range(256))
    return (seed * (num_bytes // 256 + 1))[:num_bytes]


def slice_of(iteration: int, num_bytes: int = PAGE, *, offset: int = 0) -> Slice:
    """Return a slice (the part of a window captured in one iteration) with two pieces of float32 state."""
    half = num_bytes // 8 * 4
    pieces = (
        Piece("decoder.a", 0, "master", "float32", 0, half // 4, 0, half),
        Piece("decoder.a", 0, "exp_avg", "float32", 0, (num_bytes - half) // 4, half, num_bytes - half),
    )
    header = {"vote": iteration}
    return Slice(iteration=iteration, offset=offset, num_bytes=num_bytes, header=header, pieces=pieces)


def begin(client: KeeperClient, buffer: int, start: int, *, num_slices: int = 2) -> None:
    """Tell the snapshot server that a window of ``num_slices`` slices begins at iteration ``start``."""
    client.begin(buffer, start_iteration=start, num_slices=num_slices, plan={"start": start})


def capture(
    client: KeeperClient, arena: Arena, rank: int, buffer: int, start: int, index: int, *, num_bytes: int = PAGE
) -> None:
    """Write slice ``index`` of a window into shared memory, and report the slice to the snapshot server."""
    offset = index * -(-num_bytes // PAGE) * PAGE
    arena.buffer(buffer)[offset : offset + num_bytes] = content(rank, start + index, num_bytes)
    client.captured(buffer, index, slice_of(start + index, num_bytes, offset=offset))


def window(
    client: KeeperClient,
    arena: Arena,
    rank: int,
    buffer: int,
    start: int,
    *,
    num_slices: int = 2,
    num_bytes: int = PAGE,
) -> None:
    """Begin a window of snapshots, and capture all slices of the window."""
    begin(client, buffer, start, num_slices=num_slices)
    for index in range(num_slices):
        capture(client, arena, rank, buffer, start, index, num_bytes=num_bytes)


def wait_until(condition: Callable[[], bool], what: str, *, seconds: float = WAIT_SECONDS) -> None:
    """Wait until ``condition`` is true. Fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timed out after {seconds} s waiting for: {what}"
        time.sleep(0.002)


def wait_replicated(arena: Arena, start: int) -> None:
    """Wait until the newest replicated window (copied to peer nodes) is the window that starts at ``start``."""
    wait_until(lambda: arena.status(REPLICATED_START) == start, f"window {start} is replicated")


def find(windows: list[StoredWindow], **wanted: object) -> list[StoredWindow]:
    """Return those of the stored ``windows`` whose fields have the values ``wanted``."""
    return [entry for entry in windows if all(getattr(entry, name) == value for name, value in wanted.items())]


def fetch(client: KeeperClient, rank: int, start: int, *, node: int, generation: int = 1) -> list[bytes]:
    """Fetch all slices of a window from the snapshot server of ``node``, and verify the checksum of each slice."""
    key = WindowKey(start_iteration=start, generation=generation)
    found, payload = client.fetch(rank, key, node=node)
    assert found.key == key and found.rank == rank
    slices = [payload[part.offset : part.end] for part in found.slices]
    for part, view in zip(found.slices, slices, strict=True):
        part.check_payload(view, f"window {start} on node {node}")
    return [bytes(view) for view in slices]
