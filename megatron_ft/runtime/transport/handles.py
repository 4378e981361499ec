"""Process groups that stay the same objects while the connections behind them are replaced.

Model, gradient buffers and optimizer of Megatron reference their process groups in many places. ``Handle`` is a
process group that forwards every operation to an inner gloo group. Handles are created without communication.
``connect`` creates the inner groups, and ``disconnect`` removes them. So after the loss of a rank, all references stay
valid, and only the inner groups are replaced.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Backend, PrefixStore, ProcessGroup, ProcessGroupGloo

HANDLE = "handle"
"""Name of the torch backend whose process groups are instances of ``Handle``."""

FORWARDED = (
    "_allgather_base",
    "_end_coalescing",
    "_get_backend",
    "_get_backend_name",
    "_get_sequence_number_for_group",
    "_reduce_scatter_base",
    "_start_coalescing",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
"""Methods of torch's ``ProcessGroup`` that a ``Handle`` forwards to its inner group: methods that communicate, or that
return properties of the connection. Older versions of torch lack some of them."""


class Handle(ProcessGroup):
    """A process group that forwards its operations to an inner group, which can be replaced.

    ``torch.distributed.batch_isend_irecv`` makes one call per message, both for a subclass of ``ProcessGroup`` and for
    a gloo group. So handles do not change point-to-point messages on gloo.

    Args:
        rank: rank of this process in the group.
        size: number of ranks of the group.
        timeout: timeout of the inner groups.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank = rank
        self.timeout = timeout
        self.inner: ProcessGroup | None = None
        """The inner group, which communicates; None while the handle is not connected."""
        self._name, self._description = "", ""

    def rank(self) -> int:
        """Return the rank of this process in the group, which may change while the handle is not connected."""
        return self._rank

    # torch reads the following properties from a group's backends. A handle has no backend, so it defines them itself.

    @property
    def _device_types(self) -> list[torch.device]:
        return [] if self.inner is None else self.inner._device_types

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def group_desc(self) -> str:  # type: ignore[override]
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def shutdown(self) -> None:
        """Drop the inner group. torch calls this before it forgets the handle."""
        self.inner = None


def _forwarding(name: str) -> Callable[..., Any]:
    def forward(handle: Handle, *args: Any, **kwargs: Any) -> Any:
        inner = handle.inner
        if inner is None:
            raise RuntimeError(f"process group {handle.group_name} is not connected, so {name} cannot run")
        return getattr(inner, name)(*args, **kwargs)

    forward.__name__ = name
    return forward


for _name in FORWARDED:
    if hasattr(ProcessGroup, _name):
        setattr(Handle, _name, _forwarding(_name))


def register() -> None:
    """Register the backend ``HANDLE`` with torch. A second call does nothing."""
    if HANDLE.upper() in Backend._plugins:
        return
    Backend.register_backend(HANDLE, _create, devices=["cpu", "cuda"])


_reused: deque[Handle] = deque()


def _create(_: Any, rank: int, size: int, timeout: timedelta) -> Handle:
    if not _reused:
        return Handle(rank, size, timeout)
    handle = _reused.popleft()
    assert handle.inner is None and handle.size() == size, f"the handle has {handle.size()} ranks, the group {size}"
    handle._rank, handle.timeout = rank, timeout
    return handle


@contextmanager
def reusing(targets: Sequence[Handle]) -> Iterator[None]:
    """Let torch use the handles ``targets``, in this order, as this process's groups that the ``with`` block creates.
    torch then makes no new group objects, so references to the handles stay valid when this process gets another rank.
    torch must have forgotten these handles before. Each created group must have the size of its handle."""
    _reused.extend(targets)
    try:
        yield
        assert not _reused, f"{len(_reused)} of {len(targets)} handles were not used for new groups"
    finally:
        _reused.clear()


def handles() -> list[Handle]:
    """Return all ``Handle`` groups of this process that torch knows, in the order of their creation."""
    return [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, Handle)]


_MAPS = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")


@dataclass(frozen=True, slots=True)
class PutAway:
    """The groups that torch knew when ``put_away`` was called: copies of torch's internal tables of groups."""

    default: ProcessGroup
    maps: dict[str, dict[Any, Any]]
    num_named: int
    """Value of torch's counter of created groups, from which torch makes the names of the next groups."""


def put_away() -> PutAway:
    """Let torch forget all its process groups without destroying them, so that other groups can be created. All groups
    must be ``Handle`` objects without connections."""
    world = dist.distributed_c10d._world
    assert world.default_pg is not None, "there are no process groups"
    assert all(handle.inner is None for handle in handles()), "connected groups cannot be put away"
    found = PutAway(world.default_pg, {name: dict(getattr(world, name)) for name in _MAPS}, world.group_count)
    dist.destroy_process_group()
    return found


def put_back(found: PutAway) -> None:
    """Let torch use again the groups in ``found``, which ``put_away`` returned. torch must have no other groups now."""
    world = dist.distributed_c10d._world
    assert world.default_pg is None, "other process groups are in use"
    for name, content in found.maps.items():
        getattr(world, name).update(content)
    for group, name in world.pg_names.items():
        dist.distributed_c10d._register_process_group(name, group)
    world.group_count = found.num_named
    dist.distributed_c10d._update_default_pg(found.default)


def use_store(targets: Sequence[Handle], store: dist.Store) -> None:
    """Register ``store`` in torch as the store of the process groups ``targets``. If ``targets`` contains the default
    group, ``torch.distributed.new_group`` then uses ``store``. torch no longer references the previous store."""
    for handle in targets:
        dist.distributed_c10d._world.pg_map[handle] = (HANDLE, store)


def connect(targets: Sequence[Handle], store: dist.Store, *, is_shared: bool = True) -> None:
    """Give each handle of ``targets`` an inner gloo group, which exchanges addresses through ``store``.

    If ``is_shared``, handles of the same ranks share one inner group, which saves connections and threads. All ranks
    must then use these handles in the same order. Handles that contain only one rank always share an inner group.

    All ranks of the handles must call this function, with the handles in the order of their creation. This order must
    be the same on all ranks. Each call needs a store or prefix that no earlier call used.

    Raises:
        RuntimeError: a rank did not connect within the timeout, or the connections were shut down.
    """
    made: dict[tuple[int, ...], list[ProcessGroup]] = {}
    for handle in targets:
        ranks = tuple(dist.get_process_group_ranks(handle))
        found = made.setdefault(ranks, [])
        if not found or not (is_shared or len(ranks) == 1):
            # Do not use the group's name as key: it depends on the groups that a process has created before.
            key = hashlib.sha256(repr(ranks).encode()).hexdigest()
            found.append(_gloo_group(handle, PrefixStore(f"{key}-{len(found)}", store)))
        handle.inner = found[-1]


def _gloo_group(handle: Handle, store: dist.Store) -> ProcessGroup:
    backend = ProcessGroupGloo(store, handle.rank(), handle.size(), timeout=handle.timeout)
    group, kind = ProcessGroup(store, handle.rank(), handle.size()), ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, backend)
    group._set_group_name(handle.group_name)
    group._set_group_desc(handle.group_desc)
    return group


def disconnect(targets: Sequence[Handle]) -> list[ProcessGroup]:
    """Remove the inner groups from the handles ``targets``. Return each inner group once; the caller releases it."""
    found: dict[ProcessGroup, None] = {}
    for handle in targets:
        if handle.inner is not None:
            found[handle.inner] = None
            handle.inner = None
    return list(found)
