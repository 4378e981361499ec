"""Tests which connections and messages a snapshot server refuses."""

import json
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.errors import ControlError
from megatron_ft.framing import MAX_FRAME_BYTES
from megatron_ft.snapshot.server import client as words
from megatron_ft.snapshot.server.client import KeeperClient, KeeperRefused
from megatron_ft.snapshot.server.wire import GREETING_BYTES, Refused, connect, host_and_port
from megatron_ft.snapshot.storage.window_file import WindowFile
from megatron_ft.snapshot.window import WINDOW_FORMAT_VERSION
from megatron_ft.testing.snapshot_servers import (
    PAGE,
    TOKEN,
    WAIT_SECONDS,
    begin,
    cluster,
    content,
    find,
    slice_of,
    wait_replicated,
    wait_until,
    window,
)

GREETING = {"token": TOKEN, "node": 7, "generation": 1, "run_id": "a-run", "replicates": True}


def announcement(**changes: object) -> dict[str, Any]:
    """Return the message that precedes the bytes of a slice."""
    about = {"run_id": "a-run", "generation": 1, "rank": 0, "world_size": 4, "topology": {}, "plan": {}}
    about |= {"start_iteration": 10, "num_slices": 2, "slices": [], "format_version": WINDOW_FORMAT_VERSION}
    record = slice_of(10).to_json()
    for part in (about, record):
        part |= {name: changes.pop(name) for name in list(changes) if name in part}
    place = {"buffer": 0, "window_bytes": 2 * PAGE, "slice": 0}
    message = {"op": "slice", "waits": True, "window": about, **place, "record": record, **changes}
    return json.loads(json.dumps(message))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "token",
    ["", TOKEN[:-1], TOKEN + "0", None, 7, "\ud800" * 64],
    ids=["empty", "short", "long", "none", "number", "surrogates"],
)
def test_a_wrong_token_opens_neither_door(token: object) -> None:
    with cluster(1) as nodes:
        with pytest.raises(KeeperRefused, match="token"):
            nodes.client(0, node=0, peer_nodes=[], token=token)
        with pytest.raises(Refused, match="token"):
            connect(nodes.nodes[0].address, {**GREETING, "token": token})
        nodes.client(0, node=0, peer_nodes=[]).problems()


def test_the_first_message_must_be_a_greeting() -> None:
    with cluster(1) as nodes, pytest.raises(Refused, match="hello"):
        connect(nodes.nodes[0].address, {**GREETING, "op": "inventory", "rank": 0})


def test_a_stale_rank_is_refused_and_a_newer_one_takes_its_place() -> None:
    with cluster(1) as nodes:
        old = nodes.client(0, node=0, peer_nodes=[], generation=1)
        other = nodes.client(1, node=0, peer_nodes=[], generation=1)
        nodes.client(0, node=0, peer_nodes=[], generation=2).problems()
        with pytest.raises(ControlError, match="lost"):
            old.problems()
        with pytest.raises(KeeperRefused, match="generation=1: is stale; the newest generation is 2"):
            other.problems()
        with pytest.raises(KeeperRefused, match="is stale"):
            nodes.client(0, node=0, peer_nodes=[], generation=1)


def test_a_stale_peer_is_refused_in_the_middle_of_its_connection() -> None:
    with cluster(1) as nodes:
        wire, _ = connect(nodes.nodes[0].address, GREETING)
        assert wire.call(announcement()) == {"op": "go"}
        nodes.client(0, node=0, peer_nodes=[], generation=2).problems()
        wire.receive_into(memoryview(b""))
        wire.send_bytes(memoryview(bytes(PAGE)))
        wire.send({"op": "hashes", "hashes": []})
        with pytest.raises(Refused) as refused:
            wire.answer()
        assert refused.value.kind in ("hash", "stale")
        with pytest.raises((Refused, OSError)):
            wire.call(announcement())
        wire.close()
        with pytest.raises(Refused, match="is stale"):
            connect(nodes.nodes[0].address, GREETING)


def test_a_peer_of_a_newer_generation_fences_the_ranks_here() -> None:
    with cluster(1) as nodes:
        rank = nodes.client(0, node=0, peer_nodes=[], generation=1)
        wire, answer = connect(nodes.nodes[0].address, {**GREETING, "generation": 3})
        assert answer["held"] == []
        wire.close()
        with pytest.raises(KeeperRefused, match="generation=1: is stale; the newest generation is 3"):
            rank.problems()


def test_another_run_is_refused() -> None:
    with cluster(1) as nodes:
        nodes.client(0, node=0, peer_nodes=[])
        with pytest.raises(Refused, match="run_id"):
            connect(nodes.nodes[0].address, {**GREETING, "run_id": "another"})


@pytest.mark.parametrize("size", [GREETING_BYTES + 1, 2**32 - 1])
def test_an_unauthenticated_peer_cannot_announce_a_long_message(size: int) -> None:
    with cluster(1) as nodes:
        before = nodes.nodes[0].memory_bytes
        with socket.create_connection(host_and_port(nodes.nodes[0].address), timeout=WAIT_SECONDS) as sock:
            sock.sendall(size.to_bytes(4, "big"))
            answer = b"".join(iter(lambda: sock.recv(4096), b""))
        assert b"announced a message" in answer
        assert nodes.nodes[0].memory_bytes < before + (1 << 20)


def test_a_rank_cannot_announce_a_long_message() -> None:
    with cluster(1) as nodes, socket.socket(socket.AF_UNIX) as sock:
        sock.connect(nodes.nodes[0].socket_path)
        sock.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
        assert sock.recv(1) == b""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_bytes": 1 << 30}, "memory_limit_bytes"),
        ({"window_bytes": 1 << 60}, "window_bytes"),
        ({"window_bytes": PAGE + 1}, "multiple"),
        ({"window_bytes": PAGE, "offset": PAGE}, "next multiple"),
        ({"num_bytes": 3 * PAGE}, "the buffer has only"),
        ({"num_bytes": 10}, "beyond the slice of 10 bytes"),
        ({"buffer": 2}, "buffer"),
        ({"slice": 1}, "slice 1: must be slice 0, the next slice of the window"),
        ({"waits": False}, "no memory for windows of 8192 bytes; send waits=true to get it"),
        ({"num_slices": 0}, "num_slices"),
        ({"rank": -1}, "rank"),
        ({"rank": "0/../1"}, "rank"),
        ({"generation": 2}, "generation"),
        ({"format_version": 3}, "format_version"),
        ({"pieces": [["../a", 0, "master", "float32", 0, 1, 0, 4]]}, "parameter"),
        ({"pieces": [["a", 0, "master", "float32", 0, 1, 0, 1 << 40]]}, "num_bytes"),
        ({"record": []}, "slice: must be an object"),
        ({"window": []}, "window: must be an object"),
        ({"op": "__class__"}, "op="),
        ({"op": ["slice"]}, "op="),
    ],
)
def test_a_slice_that_cannot_be_is_refused_before_memory_is_taken(changes: dict[str, Any], message: str) -> None:
    with cluster(1, memory_limit_bytes=1 << 20) as nodes:
        wire, _ = connect(nodes.nodes[0].address, GREETING)
        with pytest.raises(Refused, match=message):
            wire.call(announcement(**changes))
        wire.close()
        wire, answer = connect(nodes.nodes[0].address, GREETING)
        assert answer["held"] == []
        assert wire.call(announcement()) == {"op": "go"}
        wire.close()


def test_an_arena_over_the_limit_is_refused() -> None:
    with cluster(1, memory_limit_bytes=1 << 20) as nodes:
        rank = nodes.client(0, node=0, peer_nodes=[])
        with pytest.raises(KeeperRefused, match="the limit is 1048576"):
            rank.allocate(1 << 20)
        for _ in range(20):
            rank.allocate(PAGE).close()
            rank.allocate(64 * PAGE).close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 4}, "rank=4"),
        ({"node": 3}, "node=3: must be 0, the node of this server"),
        ({"peer_nodes": [5]}, "node 5"),
        ({"peer_nodes": [0]}, "node 0"),
        ({"peers": {"1": "nowhere"}}, "host:port"),
        ({"peers": {"1": "a:99999"}}, "host:port"),
        ({"peers": {"9" * 5000: "a:1"}}, "node"),
        ({"generation": True}, "generation"),
        ({"run_id": "a\nb"}, "run_id"),
        ({"run_id": "a/b"}, "run_id"),
        ({"topology": {"dp": "4"}}, "topology.dp"),
    ],
)
def test_a_greeting_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with cluster(1) as nodes:
        hello = {**nodes.hello(0, node=0, peer_nodes=[]), **changes}
        with pytest.raises(KeeperRefused, match=message):
            KeeperClient(nodes.nodes[0].socket_path, hello=hello)


def test_requests_out_of_order_are_refused_and_the_connection_goes_on() -> None:
    with cluster(1) as nodes:
        rank = nodes.client(0, node=0, peer_nodes=[])
        begin(rank, 0, 10)
        with pytest.raises(KeeperRefused, match="no memory"):
            rank.problems()
        arena = rank.allocate(2 * PAGE)
        with pytest.raises(KeeperRefused, match="persist_url"):
            rank.persist(10)
        rank.committed(10)
        with pytest.raises(KeeperRefused, match="no complete window"):
            rank.problems()
        rank.captured(0, 0, slice_of(10))
        with pytest.raises(KeeperRefused, match="no window was begun"):
            rank.allocate(2 * PAGE)
        window(rank, arena, 0, 0, 10)
        wait_replicated(arena, 10)
        rank.committed(10)
        begin(rank, 0, 12)
        with pytest.raises(KeeperRefused, match="newest committed"):
            rank.problems()


def test_due_windows_are_written_and_old_ones_deleted(tmp_path: Path) -> None:
    with cluster(1) as nodes:
        place = {"persist_every": 2, "persist_url": str(tmp_path), "num_persisted": 2, "world_size": 1}
        rank = nodes.client(0, node=0, peer_nodes=[], **place)
        arena = rank.allocate(2 * PAGE)
        for number in range(8):
            is_free = lambda buffer=number % 3: not arena.status(words.PINNED_BUFFERS) & (1 << buffer)  # noqa: E731
            wait_until(is_free, f"buffer {number % 3} is written to storage")
            window(rank, arena, 0, number % 3, 2 * number)
            wait_replicated(arena, 2 * number)
            rank.committed(2 * number)
        wait_until(lambda: arena.status(words.PERSISTED_START) == 14, "the last one is written")
        wait_until(lambda: len(list(tmp_path.glob("window_*"))) == 2, "old ones are deleted")
        names = sorted(path.name for path in tmp_path.glob("window_*"))
        assert names == ["window_0000010.1", "window_0000014.1"]
        assert arena.status(words.PERSISTED_BYTES) == 4 * 2 * PAGE, "every second of 8 windows"
        with WindowFile.open(tmp_path / names[1] / "rank-00000.window") as opened:
            opened.verify()
            assert bytes(opened.read_slice(1)) == content(0, 15, PAGE)
        assert rank.problems() == []


def test_a_window_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with cluster(1) as nodes:
        place = {"persist_every": 1, "persist_url": str(tmp_path / "file" / "windows")}
        rank = nodes.client(0, node=0, peer_nodes=[], **place)
        arena = rank.allocate(2 * PAGE)
        window(rank, arena, 0, 0, 10)
        wait_replicated(arena, 10)
        rank.committed(10)
        wait_until(lambda: arena.status(words.NUM_PROBLEMS) == 1, "a problem")
        assert [(one["what"], one["start_iteration"]) for one in rank.problems()] == [("persist", 10)]
        assert arena.status(words.PERSISTED_START) == -1
        assert find(rank.inventory(0), committed=True)


@pytest.mark.parametrize("interface", ["0.0.0.0", "::", "[::]", "*", "0"])
def test_every_interface_at_once_is_refused(tmp_path: Path, interface: str) -> None:
    assert ended({"socket_path": str(tmp_path / "s"), "interface": interface, "token": TOKEN, "node": 0}) == 2


@pytest.mark.parametrize("change", [{"token": "short"}, {"node": -1}, {"socket_path": ""}, {"other": 1}])
def test_a_spec_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    tmp_path.chmod(0o700)
    spec = {"socket_path": str(tmp_path / "s"), "interface": "127.0.0.1", "token": TOKEN, "node": 0}
    assert ended({**spec, **change}) == 8


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert ended({"socket_path": str(tmp_path / "s"), "interface": "127.0.0.1", "token": TOKEN, "node": 0}) == 8


def ended(spec: dict[str, object]) -> int:
    """Return the exit code of a snapshot server that reads this and nothing else."""
    line = json.dumps(spec).encode() + b"\n"
    process = subprocess.run(
        [sys.executable, "-m", "megatron_ft.snapshot.server"], input=line, capture_output=True, timeout=60, check=False
    )
    assert process.stdout == b"", "it listens"
    return process.returncode


def test_a_keeper_ends_with_its_standard_input_and_leaves_nothing() -> None:
    with cluster(1) as nodes:
        node = nodes.nodes[0]
        rank = nodes.client(0, node=0, peer_nodes=[])
        rank.allocate(PAGE)
        assert node.process.stdin is not None
        node.process.stdin.close()
        assert node.process.wait(WAIT_SECONDS) == 0
        assert not Path(node.socket_path).exists()
        with pytest.raises(ControlError, match="lost"):
            rank.problems()
        with pytest.raises(ControlError, match="snapshot server at"):
            KeeperClient(node.socket_path, hello={})


PARENT = """
import subprocess, sys
keeper = subprocess.Popen([sys.executable, "-m", "megatron_ft.snapshot.server"], stdin=0, stdout=subprocess.PIPE)
keeper.stdout.readline()
print(keeper.pid, flush=True)
sys.stdin.buffer.raw.read()
"""


def test_a_keeper_dies_with_its_parent(tmp_path: Path) -> None:
    """Another process still holds the other end of its standard input."""
    tmp_path.chmod(0o700)
    spec = {"socket_path": str(tmp_path / "s"), "interface": "127.0.0.1", "token": TOKEN, "node": 0}
    read, write = os.pipe()
    os.write(write, json.dumps(spec).encode() + b"\n")
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=read, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        keeper = int(parent.stdout.readline())
        pidfd = os.pidfd_open(keeper)
        parent.kill()
        assert select.select([pidfd], [], [], WAIT_SECONDS)[0], "the keeper outlives its parent"
        os.close(pidfd)
    os.close(read)
    os.close(write)
