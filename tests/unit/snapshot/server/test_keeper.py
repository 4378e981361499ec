"""Tests snapshot servers as processes: memory that outlives ranks, copies on other nodes, and refused requests."""

from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.snapshot.server import client as words
from megatron_ft.testing.snapshot_servers import begin, capture, cluster, content, fetch, find, wait_until, window


def test_a_window_reaches_its_peers_and_comes_back_from_them() -> None:
    with cluster(3) as nodes:
        first = nodes.client(0, node=0, peer_nodes=[1, 2])
        arena = first.allocate(8192)
        window(first, arena, 0, 0, 10)
        wait_until(lambda: arena.status(words.REPLICATED_START) == 10, "replication")
        assert arena.status(words.REPLICATED_BYTES) == 2 * 8192
        assert arena.status(words.WAITING_BYTES) == 0
        assert arena.status(words.HASHED_BYTES) == 8192
        first.committed(10)
        second = nodes.client(1, node=1, peer_nodes=[2])
        wait_until(lambda: len(find(second.inventory(0, ask_peers=True), committed=True)) == 3, "commit everywhere")
        held = second.inventory(0, ask_peers=True)
        assert [(entry.node, entry.where) for entry in held] == [(1, "copy"), (2, "copy"), (0, "own")]
        assert [entry.buffer for entry in held[1:]] == [None] * 2, "buffers of other nodes mean nothing here"
        for node in range(3):
            assert fetch(second, 0, 10, node=node) == [content(0, 10, 4096), content(0, 11, 4096)]
            found, _ = second.fetch(0, WindowKey(start_iteration=10, generation=1), node=node)
            assert found.plan == {"start": 10} and found.topology == {"dp": 4}
            assert [part.header for part in found.slices] == [{"vote": 10}, {"vote": 11}]
        assert first.problems() == []


def test_memory_outlives_the_rank() -> None:
    with cluster(1) as nodes:
        first = nodes.client(0, node=0, peer_nodes=[])
        arena = first.allocate(8000)
        window(first, arena, 0, 0, 10)
        wait_until(lambda: arena.status(words.REPLICATED_START) == 10, "hashes")
        begin(first, 1, 12)
        capture(first, arena, 0, 1, 12, 0)
        first.problems()
        first.close()
        again = nodes.client(0, node=0, peer_nodes=[], generation=2)
        arena = again.allocate(8000)
        assert bytes(arena.buffer(0)[:4096]) == content(0, 10, 4096)
        assert find(again.inventory(0), start_iteration=10, complete=True, generation=1)
        assert find(again.inventory(0), start_iteration=12, complete=False)
        assert arena.status(words.REPLICATED_START) == -1
        assert arena.window_bytes == 8192 == again.allocate(100).window_bytes, "what is large enough stays"
        (own,) = find(again.inventory(0), start_iteration=10)
        assert own.buffer == 0
        begin(again, 2, 11)
        assert [entry.start_iteration for entry in again.inventory(0)] == [10, 11]
