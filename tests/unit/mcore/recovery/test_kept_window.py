"""Tests where a rank whose stage does not replay finds its part of the committed window."""

from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.testing.snapshot_servers import PAGE, cluster, wait_replicated, window

KEY = WindowKey(start_iteration=10, generation=1)


def test_memory_of_the_own_node_comes_first_and_a_copy_has_the_size_of_its_buffer() -> None:
    from megatron_ft.mcore.recovery.localized import _stored

    with cluster(3) as nodes:
        rank = nodes.client(0, node=0, peer_nodes=[1])
        arena = rank.allocate(3 * PAGE)
        window(rank, arena, 0, 1, 10)
        wait_replicated(arena, 10)
        own = _stored(rank, 0, KEY)
        assert (own.where, own.node, own.buffer, own.buffer_bytes) == ("own", 0, 1, 3 * PAGE)
        nodes.nodes[0].kill()
        replaced = nodes.client(0, node=2, peer_nodes=[1], generation=2)
        copy = _stored(replaced, 0, KEY)
        assert (copy.where, copy.node, copy.buffer, copy.buffer_bytes) == ("copy", 1, None, 3 * PAGE)
        nodes.nodes[1].kill()
        lost = _stored(replaced, 0, KEY)
        assert (lost.key, lost.where, lost.complete, lost.buffer_bytes) == (KEY, "copy", True, 0)
