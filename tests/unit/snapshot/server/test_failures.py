"""Tests snapshot servers when ranks, peers, connections or bytes fail."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron_ft.errors import CheckpointError, ControlError
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.snapshot.server import client as words
from megatron_ft.snapshot.server.client import KeeperRefused
from megatron_ft.testing.snapshot_servers import (
    PAGE,
    Cluster,
    begin,
    capture,
    cluster,
    content,
    fetch,
    find,
    wait_replicated,
    wait_until,
    window,
)
from tests.unit.snapshot.server.proxy import proxy

LARGE = 8 << 20
HELLO_BYTES = 2048
"""Number of bytes that is larger than the first message and an announcement, and smaller than a slice."""

RANK = """
import json, os, signal, sys
from megatron_ft.snapshot.server.client import KeeperClient
from megatron_ft.testing.snapshot_servers import begin, capture, window
path, hello = sys.argv[1], json.loads(sys.argv[2])
client = KeeperClient(path, hello=hello)
arena = client.allocate(8192)
window(client, arena, 0, 0, 10)
begin(client, 1, 12)
capture(client, arena, 0, 1, 12, 0)
arena.buffer(1)[4096:6000] = bytes(1904)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_rank_leaves_its_windows_here_and_with_its_peers() -> None:
    with cluster(2) as nodes:
        hello = nodes.hello(0, node=0, peer_nodes=[1])
        command = [sys.executable, "-c", RANK, nodes.nodes[0].socket_path, json.dumps(hello)]
        killed = subprocess.run(command, timeout=60, check=False, cwd=Path(__file__).resolve().parents[4])
        assert killed.returncode == -signal.SIGKILL
        # Its last requests may still be in the socket: they do not count once a successor has greeted.
        other = nodes.client(1, node=0, peer_nodes=[1])
        wait_until(lambda: bool(find(other.inventory(0), start_iteration=12, num_held=1)), "all requests are served")
        same = nodes.client(0, node=0, peer_nodes=[1])
        wait_until(lambda: len(find(same.inventory(0, ask_peers=True), complete=True)) == 2, "the rest is replicated")
        again = nodes.client(0, node=0, peer_nodes=[1], generation=2)
        for node in (0, 1):
            assert fetch(again, 0, 10, node=node) == [content(0, 10, PAGE), content(0, 11, PAGE)]
        with pytest.raises(KeeperRefused, match="this server has no complete window"):
            fetch(again, 0, 12, node=0)


def test_a_node_that_was_lost_keeps_what_a_restart_may_need_until_a_commit_of_its_own() -> None:
    """The newer window of the other nodes is of fewer ranks. Only these two windows are of all ranks."""
    with cluster(2) as nodes:
        for rank in (0, 1):
            client = nodes.client(rank, node=rank, peer_nodes=[1 - rank], world_size=2)
            arena = client.allocate(2 * PAGE)
            window(client, arena, rank, 0, 10)
            wait_replicated(arena, 10)
            client.committed(10)
            client.problems()
        alone = nodes.client(0, node=0, peer_nodes=[], world_size=1, generation=2)
        arena = alone.allocate(2 * PAGE)
        window(alone, arena, 0, 1, 12)
        wait_replicated(arena, 12)
        alone.committed(12)
        assert [entry.start_iteration for entry in alone.inventory(0)] == [12] and not alone.inventory(1)
        back = nodes.client(1, node=1, peer_nodes=[], world_size=2, generation=3)
        for rank in (0, 1):
            assert find(back.inventory(rank), start_iteration=10, generation=1, complete=True)
        arena = back.allocate(2 * PAGE)
        window(back, arena, 1, 1, 14)
        wait_replicated(arena, 14)
        back.committed(14)
        assert [entry.start_iteration for entry in back.inventory(1)] == [14] and not back.inventory(0)


def test_a_replaced_rank_spares_the_only_copy_of_the_window_from_which_the_job_continued() -> None:
    with cluster(2) as nodes:
        rank = nodes.client(0, node=0, peer_nodes=[1])
        arena = rank.allocate(3 * PAGE)
        for buffer, start in enumerate([10, 12]):
            window(rank, arena, 0, buffer, start)
            wait_replicated(arena, start)
        rank.committed(10)
        rank.problems()
        other = nodes.client(1, node=1, peer_nodes=[])
        wait_until(lambda: bool(find(other.inventory(0), start_iteration=10, committed=True)), "the peer knows")
        # The other ranks have committed window 12, but this node is lost before the peer knows.
        nodes.nodes[0].kill()
        nodes.start(0)
        again = nodes.client(0, node=0, peer_nodes=[1], generation=2)
        (copy,) = find(again.inventory(0, ask_peers=True), start_iteration=12)
        assert copy.buffer_bytes == 3 * PAGE, "with buffers of another size, the peer would free its copies"
        arena = again.allocate(copy.buffer_bytes)
        again.keep(WindowKey(start_iteration=12, generation=1))
        window(again, arena, 0, 1, 14)
        wait_replicated(arena, 14)
        copies = find(again.inventory(0, ask_peers=True), node=1)
        assert sorted((copy.start_iteration, copy.committed) for copy in copies) == [(12, True), (14, False)]
        fetch(again, 0, 12, node=1)
        again.committed(14)
        assert again.problems() == []
        wait_until(lambda: len(find(again.inventory(0, ask_peers=True), node=1)) == 1, "window 14 replaces window 12")


def test_a_peer_killed_in_the_middle_of_a_slice_is_a_problem_and_its_successor_gets_everything() -> None:
    arrived = threading.Event()
    with cluster(2) as nodes:

        def stall(before: int, data: bytes) -> bytes | None:
            if before + len(data) > LARGE // 2:
                arrived.set()
                assert killed.wait(60), "the peer was never killed"
                return None
            return data

        killed = threading.Event()
        with proxy(nodes.nodes[1].address, stall) as between:
            peers = {"0": nodes.nodes[0].address, "1": between.address}
            rank = nodes.client(0, node=0, peer_nodes=[1], peers=peers)
            arena = rank.allocate(LARGE)
            window(rank, arena, 0, 0, 10, num_slices=1, num_bytes=LARGE)
            assert arrived.wait(60)
            nodes.nodes[1].kill()
            killed.set()
        wait_until(lambda: arena.status(words.NUM_PROBLEMS) == 1, "a problem is noted")
        (problem,) = rank.problems()
        assert (problem["what"], problem["start_iteration"]) == ("replicate", 10)
        assert "node 1" in problem["error"]
        assert rank.problems() == []
        assert arena.status(words.REPLICATED_START) == -1
        assert find(rank.inventory(0), start_iteration=10, complete=True), "the keeper itself continues"
        before = nodes.nodes[1]
        nodes.start(1)
        assert before.process.stdin is not None and before.process.stdout is not None
        before.process.stdin.close()
        before.process.stdout.close()
        again = nodes.client(0, node=0, peer_nodes=[1], generation=2)
        window(again, arena, 0, 1, 20, num_slices=1, num_bytes=LARGE)
        wait_replicated(arena, 20)
        fetch(again, 0, 20, node=1, generation=2)


def test_a_broken_connection_is_made_again_and_the_slice_sent_again() -> None:
    with cluster(2) as nodes:
        broken = []

        def cut(before: int, data: bytes) -> bytes | None:
            if before > LARGE // 2 and not broken:
                broken.append(before)
                return None
            return data

        with proxy(nodes.nodes[1].address, cut) as between:
            peers = {"0": nodes.nodes[0].address, "1": between.address}
            rank = nodes.client(0, node=0, peer_nodes=[1], peers=peers)
            arena = rank.allocate(2 * LARGE)
            window(rank, arena, 0, 0, 10, num_bytes=LARGE)
            wait_replicated(arena, 10)
            assert between.num_connections == 2
            assert arena.status(words.REPLICATED_BYTES) == 2 * LARGE
            fetch(rank, 0, 10, node=1)
            assert rank.problems() == []


def test_a_connection_that_always_breaks_is_a_problem() -> None:
    with cluster(2) as nodes:

        def cut(before: int, data: bytes) -> bytes | None:
            return None if len(data) > HELLO_BYTES else data

        with proxy(nodes.nodes[1].address, cut) as between:
            peers = {"0": nodes.nodes[0].address, "1": between.address}
            rank = nodes.client(0, node=0, peer_nodes=[1], peers=peers)
            arena = rank.allocate(2 * PAGE)
            window(rank, arena, 0, 0, 10)
            wait_until(lambda: arena.status(words.NUM_PROBLEMS) == 1, "it is noted")
            assert between.num_connections < 20, "it does not pause between tries"
        assert rank.problems()[0]["start_iteration"] == 10


@pytest.mark.parametrize("num_flips", [1, 10_000])
def test_a_byte_flipped_on_the_way_is_refused(num_flips: int) -> None:
    with cluster(2) as nodes:
        flips = []

        def flip(before: int, data: bytes) -> bytes | None:
            is_payload = len(data) > 2 * HELLO_BYTES and b'"op"' not in data
            if is_payload and len(flips) < num_flips:
                flips.append(before)
                middle = len(data) // 2
                return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            return data

        with proxy(nodes.nodes[1].address, flip) as between:
            peers = {"0": nodes.nodes[0].address, "1": between.address}
            rank = nodes.client(0, node=0, peer_nodes=[1], peers=peers)
            arena = rank.allocate(2 * LARGE)
            window(rank, arena, 0, 0, 10, num_bytes=LARGE)
            if num_flips == 1:
                wait_replicated(arena, 10)
                fetch(rank, 0, 10, node=1)
                assert rank.problems() == []
            else:
                wait_until(lambda: arena.status(words.NUM_PROBLEMS) == 1, "it is given up")
                assert "damaged" in rank.problems()[0]["error"]
                assert rank.buffer_states().given_up == {0: 10, 1: -1, 2: -1}
                assert arena.status(words.REPLICATED_START) == -1
                num_before = len(flips)
                window(rank, arena, 0, 1, 12, num_bytes=LARGE)
                wait_until(lambda: arena.status(words.NUM_PROBLEMS) == 2, "so is the next one")
                assert len(flips) >= num_before + 3
        assert len(flips) >= 1


def test_memory_changed_after_its_capture_is_refused_by_peers() -> None:
    with cluster(2) as nodes:
        rank = nodes.client(0, node=0, peer_nodes=[1])
        arena = rank.allocate(2 * PAGE)
        for number in range(2):
            window(rank, arena, 0, number, 10 + 2 * number)
            wait_replicated(arena, 10 + 2 * number)
        window(rank, arena, 0, 2, 14)
        wait_until(lambda: arena.status(words.HASHED_BYTES) == 6 * PAGE, "hashes")
        assert arena.status(words.WAITING_BYTES) == 2 * PAGE, "back-pressure: the peer has no free buffer"
        arena.buffer(2)[100] ^= 1
        rank.committed(10)
        rank.committed(12)
        wait_until(lambda: arena.status(words.NUM_PROBLEMS) == 1, "the peer refuses it")
        with pytest.raises(CheckpointError, match="damaged"):
            fetch(rank, 0, 14, node=0)
        window(rank, arena, 0, 0, 16)
        wait_replicated(arena, 16)


def test_a_copy_that_rotted_is_found_by_who_fetches_it() -> None:
    with cluster(2) as nodes:
        rank = nodes.client(0, node=0, peer_nodes=[1])
        arena = rank.allocate(2 * PAGE)
        window(rank, arena, 0, 0, 10)
        wait_replicated(arena, 10)
        folder = f"/proc/{nodes.nodes[1].process.pid}/fd"
        memory = next(name for name in os.listdir(folder) if "copy-rank-0" in os.readlink(f"{folder}/{name}"))
        with open(f"{folder}/{memory}", "r+b") as file:
            file.seek(PAGE + 17)
            file.write(b"\xff")
        with pytest.raises(CheckpointError, match="node 1: damaged: .*iteration 11: checksum"):
            fetch(rank, 0, 10, node=1)
        fetch(rank, 0, 10, node=0)


def test_an_absent_peer_holds_up_nobody() -> None:
    with cluster(3) as nodes:
        nodes.nodes[1].kill()
        rank = nodes.client(0, node=0, peer_nodes=[1, 2])
        arena = rank.allocate(2 * PAGE)
        window(rank, arena, 0, 0, 10)
        wait_until(lambda: arena.status(words.REPLICATED_BYTES) == 2 * PAGE, "the other peer has it")
        wait_until(lambda: arena.status(words.NUM_PROBLEMS) == 1, "the absent one is a problem")
        assert arena.status(words.REPLICATED_START) == -1
        window(rank, arena, 0, 1, 12)
        wait_until(lambda: arena.status(words.REPLICATED_BYTES) == 4 * PAGE, "the other peer has the next")
        held = rank.inventory(0, ask_peers=True)
        assert sorted((entry.node, entry.start_iteration) for entry in held) == [
            (0, 10),
            (0, 12),
            (2, 10),
            (2, 12),
        ]
        assert rank.unreachable == ["node 1 did not list its windows: [Errno 111] Connection refused"]
        with pytest.raises(KeeperRefused, match="the transfer of .* failed"):
            fetch(rank, 0, 10, node=1)


def test_a_request_for_a_list_of_windows_is_repeated_after_a_reset() -> None:
    with cluster(2) as nodes:
        other = nodes.client(1, node=1, peer_nodes=[])
        arena = other.allocate(2 * PAGE)
        window(other, arena, 1, 0, 10)
        wait_replicated(arena, 10)
        num_resets = 3

        def reset(before: int, data: bytes) -> bytes | None:
            return None if between.num_connections <= num_resets else data

        with proxy(nodes.nodes[1].address, reset) as between:
            peers = {"0": nodes.nodes[0].address, "1": between.address}
            rank = nodes.client(0, node=0, peer_nodes=[], peers=peers)
            assert [entry.node for entry in rank.inventory(1, ask_peers=True)] == [1]
            assert between.num_connections == num_resets + 1 and rank.unreachable == []


def test_a_keeper_that_is_stopped_is_named_and_holds_its_ranks_up_no_longer_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with cluster(1) as nodes:
        asking, telling = [nodes.client(rank, node=0, peer_nodes=[]) for rank in range(2)]
        arena = telling.allocate(PAGE)
        begin(telling, 0, 0, num_slices=words.MAX_UNREAD + 1)
        stopped = nodes.nodes[0].process
        stopped.send_signal(signal.SIGSTOP)
        # Until all its threads have stopped, the server may still answer.
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
        monkeypatch.setattr(words, "ANSWER_SECONDS", 0.2)
        stuck = f"snapshot server at {nodes.nodes[0].socket_path}: no answer within 0.2 s"
        with pytest.raises(ControlError, match=stuck):
            asking.problems()
        with pytest.raises(ControlError, match=stuck):
            for index in range(words.MAX_UNREAD):
                capture(telling, arena, 1, 0, 0, index, num_bytes=0)
        with pytest.raises(ControlError, match=stuck):
            nodes.client(2, node=0, peer_nodes=[])
        nodes.nodes[0].process.send_signal(signal.SIGCONT)


def run_windows(nodes: Cluster, first: int, num_windows: int) -> None:
    """Run windows of two ranks that replicate to each other, committed one after the other. Their number must be a
    multiple of three."""
    ranks = [nodes.client(0, node=0, peer_nodes=[1]), nodes.client(1, node=1, peer_nodes=[0])]
    arenas = [rank.allocate(2 * PAGE) for rank in ranks]
    for number in range(num_windows):
        start = first + 2 * number
        for index, rank in enumerate(ranks):
            window(rank, arenas[index], index, number % 3, start)
        for index, rank in enumerate(ranks):
            wait_replicated(arenas[index], start)
            rank.committed(start)
    for index, rank in enumerate(ranks):
        assert rank.problems() == []
        assert len(rank.inventory(index)) == 1
        rank.close()
        arenas[index].close()


def test_nothing_grows_over_two_hundred_windows() -> None:
    with cluster(2) as nodes:
        run_windows(nodes, 0, 42)
        wait_until(lambda: all(node.num_threads <= 6 for node in nodes.nodes.values()), "ranks have left")
        before = [(node.num_descriptors, node.num_threads, node.memory_bytes) for node in nodes.nodes.values()]
        run_windows(nodes, 84, 200)
        earlier = [entry[1] for entry in before]
        wait_until(
            lambda: all(n.num_threads <= most for n, most in zip(nodes.nodes.values(), earlier, strict=True)),
            "threads end",
        )
        for node, (num_descriptors, _, memory_bytes) in zip(nodes.nodes.values(), before, strict=True):
            assert node.num_descriptors <= num_descriptors
            assert node.memory_bytes < memory_bytes + (1 << 20)


def test_a_window_begun_again_while_it_is_sent_is_no_problem() -> None:
    with cluster(2) as nodes:
        rank = nodes.client(0, node=0, peer_nodes=[1])
        arena = rank.allocate(LARGE)
        for number in range(20):
            begin(rank, 0, number, num_slices=1)
            capture(rank, arena, 0, 0, number, 0, num_bytes=LARGE)
        wait_replicated(arena, 19)
        assert rank.problems() == []
        fetch(rank, 0, 19, node=1)
