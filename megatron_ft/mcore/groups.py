"""Forms and destroys the process groups of one generation, and exchanges records, ballots and tensors in a group.

Process groups are passed as arguments, not through global variables. Tensors are exchanged as bytes, because
collectives support few dtypes: gloo, for example, does not support float8.
"""

import datetime
import gc
import itertools
import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ft import failpoints
from megatron_ft.config.job import JobConfig, ParallelConfig
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.planning.iteration import BALLOT_FIELDS, Ballot
from megatron_ft.runtime.transport import abort
from megatron_ft.runtime.transport.abort import Opening, Transports, drop_broken_graph, open_sockets, release
from megatron_ft.runtime.transport.handles import (
    HANDLE,
    Handle,
    PutAway,
    connect,
    disconnect,
    handles,
    put_away,
    put_back,
    register,
    reusing,
    use_store,
)

# Collectives support few dtypes: gloo, for example, does not support float8. Every dtype can be sent as ``uint8``.


def exchange_tensors(
    outgoing: Sequence[Sequence[torch.Tensor]],
    incoming: Sequence[Sequence[torch.Tensor]],
    group: dist.ProcessGroup,
) -> None:
    """Send ``outgoing[r]`` to each rank r of ``group`` and fill ``incoming[r]`` with the tensors from r, in order.

    All ranks of the group must call this. A sender and its receiver must list the same tensors: same order, shapes and
    dtypes.
    """
    device = _device(group)
    sent = _joined([_bytes(tensor) for of_rank in outgoing for tensor in of_rank], device)
    send_sizes = [sum(_num_bytes(tensor) for tensor in of_rank) for of_rank in outgoing]
    receive_sizes = [sum(_num_bytes(tensor) for tensor in of_rank) for of_rank in incoming]
    received = torch.empty(sum(receive_sizes), dtype=torch.uint8, device=device)
    # Sender and receiver know all sizes, so sizes are not exchanged. Ranks without tensors must take part, too.
    dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=group)
    targets = [tensor for of_rank in incoming for tensor in of_rank]
    for target, part in zip(targets, received.split([_num_bytes(tensor) for tensor in targets]), strict=True):
        # Cloned, because a view needs an address that is aligned for its dtype, and a part may begin anywhere.
        target.copy_(part.clone().view(target.dtype).view(target.shape))


def exchange_one(
    sent: tuple[int, torch.Tensor] | None, received: tuple[int, torch.Tensor] | None, group: dist.ProcessGroup
) -> None:
    """Send at most one tensor to a rank of ``group``, and receive at most one. Contiguous tensors are not copied if
    they are on the device with which the group communicates. All ranks of the group must call this.

    Args:
        sent: rank in the group that receives, and the tensor for it; None to send nothing.
        received: rank in the group that sends, and the contiguous tensor to fill; None to receive nothing.
    """
    device, nothing = _device(group), (-1, torch.empty(0, dtype=torch.uint8))
    (target, outgoing), (source, incoming) = sent or nothing, received or nothing
    content, buffer = _bytes(outgoing).to(device), _bytes(incoming).to(device)
    send_sizes, receive_sizes = [0] * group.size(), [0] * group.size()
    if sent is not None:
        send_sizes[target] = len(content)
    if received is not None:
        receive_sizes[source] = len(buffer)
    dist.all_to_all_single(buffer, content, receive_sizes, send_sizes, group=group)
    if received is not None and buffer.device != incoming.device:
        _bytes(incoming).copy_(buffer)


def wait_for_all(group: dist.ProcessGroup) -> None:
    """Wait until all ranks of ``group`` have called this, even if the group communicates on a GPU."""
    flag = torch.zeros(1, device=_device(group))
    dist.all_reduce(flag, group=group)
    flag.item()  # on a GPU, the collective is only queued, and reading the value waits for it


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _joined(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.cat([part.to(device) for part in parts]) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def _device(group: dist.ProcessGroup) -> torch.device:
    # The group's backend, not the tensors, determines the device, because a rank without tensors takes part, too.
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def exchange(ballot: Ballot, group: dist.ProcessGroup) -> list[Ballot]:
    """All-gather the ballots (votes) of all ranks of ``group``, and return them in rank order. Each ballot is float64
    [BALLOT_FIELDS]. The ballots are not all-reduced, because the caller compares their values bit for bit, and sums
    them in a fixed order."""
    mine = torch.tensor(ballot.to_row(), dtype=torch.float64)
    rows = torch.empty((group.size(), BALLOT_FIELDS), dtype=torch.float64)
    # Asynchronous, so that the failpoint can kill this rank while other ranks are inside the collective.
    work = dist.all_gather_into_tensor(rows.view(-1), mine, group=group, async_op=True)
    failpoints.hit("vote_inside", ballot.iteration)
    work.wait()
    return [Ballot.from_row(row) for row in rows.tolist()]


class Collectives:
    """Collectives over ``group``. All ranks of the group must call the same methods in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.num_ranks: int = group.size()
        on_gpu = "nccl" in str(dist.get_backend(group))
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on at least one rank."""
        value = torch.tensor([int(flag)], dtype=torch.int32, device=self._device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return bool(value.item())

    def all(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on every rank."""
        return not self.any(not flag)

    def gather(self, record: Any) -> list[Any]:
        """Return, on every rank, the records of all ranks in rank order. ``record`` must be serializable as JSON."""
        # ``all_gather_object`` is not used, because it unpickles bytes of other ranks, and pickle can run code.
        content = json.dumps(record).encode()
        # All-gather needs the same shape on all ranks, so the ranks exchange the lengths of their records first.
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.num_ranks)]
        dist.all_gather(sizes, torch.tensor([len(content)], dtype=torch.int64, device=self._device), group=self.group)
        longest = max(int(size.item()) for size in sizes)
        mine = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        mine[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._device)
        everyone = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(everyone, mine, group=self.group)
        return [
            json.loads(buffer[: int(size.item())].cpu().numpy().tobytes())
            for buffer, size in zip(everyone, sizes, strict=True)
        ]

    def from_first(self, record: Any) -> Any:
        """Return the ``record`` of the first rank on every rank. The arguments of other ranks are ignored."""
        return self.from_rank(0, record)

    def from_rank(self, rank: int, record: Any) -> Any:
        """Return the ``record`` of ``rank`` on every rank. The arguments of other ranks are ignored."""
        return self.gather(record if self.rank == rank else None)[rank]

    def errors(self, error: str | None) -> str | None:
        """Return one text with the errors of all ranks, the same on every rank, or None if no rank has an error."""
        # ``any`` gives all ranks the same result, so either all of them call ``gather`` or none does.
        if not self.any(error is not None):
            return None
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(self.gather(error)) if text is not None)


_RETRY_SECONDS = 0.02
_TRY_SECONDS = 2.0
"""Time limit of one connection attempt. A running store accepts a connection within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The process groups of one rank in one generation (membership).

    ``pg_collection`` contains Megatron's groups. ``vote`` is a group of all ranks of the job, for commit votes and
    other small messages. It always uses gloo, because the messages are in host memory.
    """

    generation: int
    pg_collection: ProcessGroupCollection
    vote: dist.ProcessGroup
    transports: Transports
    """Network connections of these process groups."""
    store: dist.Store
    """Key-value store of the generation, through which ranks exchange their addresses."""
    handles: tuple[Handle, ...]
    """Groups that ``reconnect`` connects again. ``vote`` is the last of them; with NCCL, it is the only one."""
    is_shared: bool
    """Whether groups of the same ranks share connections. Groups do not share connections if gradients are reduced
    during the backward pass, because these reductions would delay other collectives."""
    num_added: Iterator[int] = field(default_factory=itertools.count)
    """Counter of the groups that ``add`` creates in this generation."""

    @property
    def world(self) -> dist.ProcessGroup:
        """Group of all ranks of the job, for tensors. It uses the backend of the device."""
        group = dist.group.WORLD
        assert group is not None, "the process groups are destroyed"
        return group

    def add(self, ranks: Sequence[int], *, timeout_seconds: float) -> dist.ProcessGroup | None:
        """Create a gloo group. Return it on ``ranks``, and None on all others. All ranks of the job must call this.

        Raises:
            RuntimeError: a rank of the group did not connect within the timeout, or the connections were shut down.
        """
        if dist.get_backend() == "nccl":
            # NCCL opens sockets at its first use. Wait until they are open, so that all sockets found below are gloo's.
            torch.cuda.synchronize()
        before, store = open_sockets(), dist.PrefixStore(f"added-{next(self.num_added)}", self.store)
        group = _new_handle(ranks, timeout_seconds)
        if dist.get_rank() not in ranks:
            return None
        connect([group], store)
        self.transports.include(open_sockets() - before)
        return group

    @classmethod
    def form(
        cls,
        parallel: ParallelConfig,
        *,
        store: dist.Store,
        rank: int,
        world_size: int,
        generation: int,
        device: str,
        timeout_seconds: float,
    ) -> "Groups":
        """Form the process groups of ``generation`` with all ranks that use ``store``."""
        keys = _keys(store, generation)
        groups = cls._create(
            parallel, keys, rank=rank, world_size=world_size, device=device, timeout_seconds=timeout_seconds
        )
        transports = _connect_all(groups.handles, keys, store, groups.is_shared)
        return replace(groups, generation=generation, transports=transports)

    @classmethod
    def form_offline(cls, parallel: ParallelConfig, *, rank: int, world_size: int, timeout_seconds: float) -> "Groups":
        """Create the process groups of a rank on a CPU without communication. ``reconnect`` connects them."""
        return cls._create(
            parallel, dist.HashStore(), rank=rank, world_size=world_size, device="cpu", timeout_seconds=timeout_seconds
        )

    @classmethod
    def _create(
        cls,
        parallel: ParallelConfig,
        keys: dist.Store,
        *,
        rank: int,
        world_size: int,
        device: str,
        timeout_seconds: float,
    ) -> "Groups":
        register()
        backend = parallel.backend_on(device)
        # Handles are created without communication. With NCCL, torch's own groups are used instead, because a handle
        # could replace its communicator only after an abort, and aborts could not be tested without GPUs.
        dist.init_process_group(
            backend=backend if backend == "nccl" else HANDLE,
            store=keys,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_seconds),
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
            context_parallel_size=parallel.context_parallel_size,
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
            distributed_timeout_minutes=max(1, round(timeout_seconds / 60)),
            # Megatron needs these groups only for checkpoints that one rank per data-parallel group writes. Every rank
            # writes its own part instead.
            create_gloo_process_groups=False,
        )
        vote = _new_handle(range(world_size), timeout_seconds)
        return cls(
            generation=0,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            vote=vote,
            transports=Transports(()),
            store=keys,
            handles=tuple(handles()),
            is_shared=not parallel.overlap_grad_reduce,
        )

    def move(self, parallel: ParallelConfig, *, rank: int, world_size: int, timeout_seconds: float) -> "Groups":
        """Create the process groups of another rank, ``rank``. This object's groups must not be connected: the new
        groups reuse their handles. A model that was built with these handles thereby becomes the model of ``rank``, so
        it must have the layers, the tensor-parallel part and the experts of ``rank``."""
        # The order of the handles fits: ranks with the same model part create the same kinds of groups in this order.
        _forget_groups()
        with reusing(self.handles):
            return Groups.form_offline(parallel, rank=rank, world_size=world_size, timeout_seconds=timeout_seconds)

    def put_away(self) -> "GroupsPutAway":
        """Remove these groups from torch and Megatron, so that others can be created. They must not be connected."""
        variables = {name: value for name, value in vars(parallel_state).items() if _is_state(name, value)}
        found = GroupsPutAway(self, put_away(), variables)
        _forget_groups()
        return found

    def reconnect(self, *, store: dist.Store, generation: int) -> "Groups":
        """Connect these groups again, as groups of ``generation``, with all ranks that use ``store``. Some of these
        ranks may call ``form`` instead. ``disconnect`` must have been called before.

        Raises:
            RuntimeError: other ranks did not connect in time, or the connections were shut down.
        """
        of_generation = _keys(store, generation)
        use_store(self.handles, of_generation)
        transports = _connect_all(self.handles, of_generation, store, self.is_shared)
        num_added = itertools.count()
        return replace(self, generation=generation, transports=transports, store=of_generation, num_added=num_added)

    def disconnect(self) -> None:
        """Close all connections, and destroy groups that ``add`` created. The other groups can be connected again."""
        inner = disconnect(handles())
        for group in handles():
            if group not in self.handles:
                dist.destroy_process_group(group)
        use_store(self.handles, dist.HashStore())
        # A failed batch of collectives leaves its list behind, and torch would refuse to begin the next batch.
        dist.distributed_c10d._world.pg_coalesce_state.clear()
        _destroy(inner)

    @classmethod
    def join(
        cls,
        config: JobConfig,
        context: RankContext,
        *,
        device: str,
        timeout_seconds: float,
        store: dist.Store | None = None,
        opening: Opening | None = None,
        former: "Groups | None" = None,
    ) -> "Groups":
        """Form the process groups of the membership of ``context``. All ranks of the membership must call this.

        Args:
            timeout_seconds: longest wait for the store of the membership.
            store: store of the membership, if this process has opened it already.
            opening: lets another thread break the new connections after a failure.
            former: disconnected groups of this rank to connect again; None to create new groups.

        Raises:
            RuntimeError: other ranks did not connect in time, or ``opening`` broke the connections.
        """
        if opening is not None:
            opening.limit.use()
        if store is None:
            store = open_store(context, timeout_seconds=timeout_seconds, opening=opening)
        if former is not None:
            return former.reconnect(store=store, generation=context.generation)
        return Groups.form(
            config.parallel,
            store=store,
            rank=context.rank,
            world_size=context.world_size,
            generation=context.generation,
            device=device,
            timeout_seconds=config.training.distributed_timeout_seconds,
        )


@dataclass(frozen=True, slots=True)
class GroupsPutAway:
    """Process groups that were removed from torch and Megatron, and can be registered again."""

    groups: Groups
    of_torch: PutAway
    of_megatron: Mapping[str, Any]
    """Values of the global variables of Megatron's ``parallel_state`` for these groups."""

    def put_back(self) -> Groups:
        """Register the groups with torch and Megatron again. No other groups may be registered at that time."""
        put_back(self.of_torch)
        for name, value in self.of_megatron.items():
            setattr(parallel_state, name, value)
        return self.groups


def open_store(context: RankContext, *, timeout_seconds: float, opening: Opening | None = None) -> dist.TCPStore:
    """Open the store of the membership of ``context``. Rank 0 starts the store's server, and all other ranks connect.

    Args:
        timeout_seconds: longest wait for the server, and on rank 0 for the other ranks.
        opening: lets another thread interrupt this wait after a failure.

    Raises:
        RuntimeError: the server or other ranks did not answer in time, or ``opening`` interrupted the wait.
    """
    if opening is not None and context.rank > 0:
        return _connect(context, timeout_seconds, opening)
    return _store(context, timeout_seconds)


def _connect(context: RankContext, timeout_seconds: float, opening: Opening) -> dist.TCPStore:
    # Each attempt is short, because torch would not notice that the server is lost and would continue to try. If a
    # server accepts the connection and does not answer, only ``opening`` ends the wait.
    where = f"{context.master_addr}:{context.master_port}"
    deadline, try_seconds = time.monotonic() + timeout_seconds, min(timeout_seconds, _TRY_SECONDS)
    while True:
        try:
            socket.create_connection((context.master_addr, context.master_port), timeout=try_seconds).close()
            # In a worker thread, which can be abandoned: between torch's own attempts, no socket exists to shut down.
            store = abort.call(lambda: _store(context, try_seconds))
        except (OSError, dist.DistNetworkError) as error:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"rank {context.rank} could not connect to the store of rank 0 at {where} within "
                    f"{timeout_seconds:g} s: {error}"
                ) from error
        else:
            store.set_timeout(datetime.timedelta(seconds=timeout_seconds))
            return store
        if opening.pause(_RETRY_SECONDS):
            raise RuntimeError(f"a rank was lost before rank {context.rank} had connected to the store at {where}")


def _store(context: RankContext, timeout_seconds: float) -> dist.TCPStore:
    return dist.TCPStore(
        context.master_addr,
        context.master_port,
        context.world_size,
        is_master=context.rank == 0,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )


def _keys(store: dist.Store, generation: int) -> dist.Store:
    # Each generation has its own keys, so a late rank of another generation cannot connect to ranks of this one.
    return dist.PrefixStore(f"generation-{generation}", store)


def _connect_all(formed: Sequence[Handle], keys: dist.Store, store: dist.Store, is_shared: bool) -> Transports:
    # ``transports`` must not contain sockets that are open already, because NCCL's are among them. NCCL would report
    # the shutdown of a socket as an error of a peer, so NCCL is aborted instead.
    before = open_sockets()
    world = [handle for handle in formed if handle is dist.group.WORLD]
    # The group of all ranks shares no connections: with two stages, Megatron sends in both directions between the same
    # ranks, and uses this group to keep the directions apart.
    connect(world, dist.PrefixStore("world", keys))
    connect(formed[len(world) : -1], dist.PrefixStore("model", keys), is_shared=is_shared)
    connect(formed[-1:], dist.PrefixStore("vote", keys))
    store_port = store.port if isinstance(store, dist.TCPStore) else None
    transports = Transports.among(open_sockets() - before, store_port=store_port)
    # From here on, ``transports.limit`` limits all waits, instead of the limit of ``Opening``.
    transports.limit.use()
    return transports


def _new_handle(ranks: Sequence[int], timeout_seconds: float) -> Any:
    # Each process counts its groups, and torch names a group after this count. So all ranks must create every group.
    return dist.new_group(list(ranks), backend=HANDLE, timeout=datetime.timedelta(seconds=timeout_seconds))


def _destroy(groups: list[dist.ProcessGroup]) -> None:
    # Empties ``groups``. After a failure, the destructor of a gloo group waits for its blocked operations, so
    # ``release`` calls it in another thread.
    if abort.WaitLimit.in_use().is_ended:
        drop_broken_graph()
        release(groups)
    groups.clear()


def dissolve_groups() -> None:
    """Destroy all process groups of Megatron and torch. The caller must have released all objects that use them.
    If connections were shut down, operations may stay blocked in some groups until their timeout. This function does
    not wait for these operations; their groups are destroyed later."""
    groups = disconnect(handles())
    is_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    if is_nccl and abort.WaitLimit.in_use().is_ended:
        groups += [group for group in dist.distributed_c10d._world.pg_map if not isinstance(group, Handle)]
        drop_broken_graph()
        # NCCL is aborted before any group is destroyed: destroying an NCCL group waits for peers that may be lost.
        dist.distributed_c10d._abort_process_group()
    _forget_groups(collects=is_nccl)
    _destroy(groups)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _is_state(name: str, value: object) -> bool:
    # The other global names of ``parallel_state`` are functions, modules and constants.
    return name.startswith("_") and not name.startswith("__") and not callable(value)


def _forget_groups(*, collects: bool = False) -> None:
    parallel_state.destroy_model_parallel()
    # ``destroy_model_parallel`` leaves this group in place.
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
    if collects:
        # Reference cycles are collected: an NCCL group with references keeps its connections open, which blocks peers.
        gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    else:
        # torch may have counted groups whose creation failed. Reset the count, or names would differ between ranks.
        dist.distributed_c10d._world.group_count = 0
