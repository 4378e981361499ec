"""Tests that handles carry out the operations of their inner groups, and stay valid when these are replaced."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ft.runtime.transport.handles import FORWARDED, HANDLE, Handle, connect, disconnect, handles, register

LONG = timedelta(seconds=60)
OWN = {
    "BackendType",
    "_backend_id",
    "_enable_collectives_timing",
    "_has_hooks",
    "_id",
    "_register_backend",
    "_register_on_completion_hook",
    "_set_default_backend",
    "_set_group_desc",
    "_set_group_name",
    "_set_sequence_number_for_group",
    "_wait_for_pending_works",
    "abort",
    "boxed",
    "get_group_store",
    "merge_remote_group",
    "name",
    "rank",
    "set_timeout",
    "shutdown",
    "size",
    "split_group",
    "unbox",
}
"""Methods of torch's class that do not communicate in an existing group."""


@pytest.fixture
def world() -> Iterator[Handle]:
    """Yield the group of this process alone, connected."""
    register()
    dist.init_process_group(HANDLE, store=dist.HashStore(), rank=0, world_size=1, timeout=LONG)
    (group,) = handles()
    connect([group], dist.HashStore())
    yield group
    disconnect(handles())
    dist.destroy_process_group()


def test_every_method_of_torch_that_communicates_is_forwarded() -> None:
    """Without its method, a handle would search for a backend that it does not have."""
    methods = {name for name in vars(dist.ProcessGroup) if not name.startswith("__") and "pybind" not in name}
    methods = {name for name in methods if callable(getattr(dist.ProcessGroup, name))}
    assert methods - OWN <= set(FORWARDED)
    assert all(name in vars(Handle) for name in methods - OWN)


def test_collectives_of_torch_have_their_results(world: Handle) -> None:
    value = torch.arange(4.0)
    dist.all_reduce(value)
    gathered, scattered = torch.empty(4), torch.empty(4)
    dist.all_gather_into_tensor(gathered, value)
    dist.reduce_scatter_tensor(scattered, value)
    dist.all_to_all_single(torch.empty(4), value)
    dist.broadcast(value, src=0)
    dist.barrier()
    found: list[Any] = [None]
    dist.all_gather_object(found, "record")
    with dist.distributed_c10d._coalescing_manager(world, async_ops=True) as together:
        dist.all_reduce(value)
        dist.all_reduce(gathered)
    together.wait()
    assert value.tolist() == gathered.tolist() == scattered.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert found == ["record"]
    assert str(dist.get_backend()) == HANDLE and dist.get_process_group_ranks(world) == [0]


def test_groups_of_the_same_ranks_share_connections_and_keep_their_own_names(world: Handle) -> None:
    groups: list[Any] = [dist.new_group([0], backend=HANDLE, timeout=LONG) for _ in range(2)]
    assert handles() == [world, *groups]
    connect(groups, dist.HashStore())
    assert groups[0].inner is groups[1].inner is not world.inner
    assert len({group.group_name for group in handles()}) == 3
    assert [group.timeout for group in groups] == [LONG, LONG]
    assert len(disconnect(groups)) == 1


def test_a_handle_works_again_after_its_connections_are_replaced(world: Handle) -> None:
    value = torch.ones(2)
    assert len(disconnect([world])) == 1 and disconnect([world]) == []
    with pytest.raises(RuntimeError, match=f"process group {world.group_name} is not connected.*allreduce"):
        dist.all_reduce(value)
    connect([world], dist.HashStore())
    dist.all_reduce(value)
    assert value.tolist() == [1.0, 1.0] and dist.group.WORLD is world
