"""Process groups of one generation: formed, handed over, destroyed. The project never reads them from globals."""

import datetime
import gc
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ft.config.job import JobConfig
from megatron_ft.config.parallel import ParallelConfig
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.runtime.transport import waits
from megatron_ft.runtime.transport.hang_up import Opening, Transports, open_sockets
from megatron_ft.runtime.transport.held_groups import drop_broken_graph, release

_RETRY_SECONDS = 0.02
_TRY_SECONDS = 2.0
"""Length of one connection attempt; an existing store accepts a connection within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups with which a rank trains.

    ``pg_collection`` is Megatron's; ``vote`` contains the whole job and is only used for commit votes and other small
    agreements. It always uses gloo, because its values live on the host.
    """

    generation: int
    pg_collection: ProcessGroupCollection
    vote: dist.ProcessGroup
    transports: Transports
    """Connections to other ranks that all of these groups use."""

    def add(self, ranks: Sequence[int], *, timeout_seconds: float) -> dist.ProcessGroup | None:
        """Create a gloo group of ``ranks``; None on ranks outside of it. Every rank of the job must call it.

        Raises:
            RuntimeError: others did not come, or the connections were broken.
        """
        if dist.get_backend() == "nccl":
            # NCCL connects at its first use: all queued work must be done before sockets are compared.
            torch.cuda.synchronize()
        # torch names a group by a count of each process: a rank that left one out would wait under another name.
        before, timeout = open_sockets(), datetime.timedelta(seconds=timeout_seconds)
        group = dist.new_group(list(ranks), backend="gloo", timeout=timeout)
        self.transports.include(open_sockets() - before)
        return group if dist.get_rank() in ranks else None


def join(
    config: JobConfig,
    context: RankContext,
    *,
    device: str,
    timeout_seconds: float,
    store: dist.Store | None = None,
    opening: Opening | None = None,
) -> Groups:
    """Form the groups of the membership of ``context`` with all its other ranks.

    Args:
        timeout_seconds: longest wait for the others.
        store: store of the membership, if this process has opened it already.
        opening: breaks the connections that are made here.

    Raises:
        RuntimeError: others did not come, or the connections were broken.
    """
    if opening is not None:
        waits.use(opening.limit)
    if store is None:
        store = open_store(context, timeout_seconds=timeout_seconds, opening=opening)
    return form_groups(
        config.parallel,
        store=store,
        rank=context.rank,
        world_size=context.world_size,
        generation=context.generation,
        device=device,
        timeout_seconds=config.training.distributed_timeout_seconds,
    )


def open_store(context: RankContext, *, timeout_seconds: float, opening: Opening | None = None) -> dist.TCPStore:
    """Open the store of the membership of ``context``, which its rank 0 serves.

    Args:
        timeout_seconds: longest wait for the others.
        opening: interrupts the wait.

    Raises:
        RuntimeError: they did not come, or the wait was interrupted.
    """
    if opening is not None and context.rank > 0:
        return _connect(context, timeout_seconds, opening)
    return _store(context, timeout_seconds)


def _connect(context: RankContext, timeout_seconds: float, opening: Opening) -> dist.TCPStore:
    # The server may have ended again while torch keeps trying, so each attempt is short. A server that accepts and does
    # not answer is waited for until ``opening`` breaks the connection.
    where = f"{context.master_addr}:{context.master_port}"
    deadline, try_seconds = time.monotonic() + timeout_seconds, min(timeout_seconds, _TRY_SECONDS)
    while True:
        try:
            socket.create_connection((context.master_addr, context.master_port), timeout=try_seconds).close()
            # torch pauses between its own attempts, without an open connection that could be broken.
            store = waits.call(lambda: _store(context, try_seconds))
        except (OSError, dist.DistNetworkError) as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"found no store at {where} within {timeout_seconds} s: {error}") from error
        else:
            store.set_timeout(datetime.timedelta(seconds=timeout_seconds))
            return store
        if opening.pause(_RETRY_SECONDS):
            raise RuntimeError(f"a rank was lost before the store at {where} was started")


def _store(context: RankContext, timeout_seconds: float) -> dist.TCPStore:
    return dist.TCPStore(
        context.master_addr,
        context.master_port,
        context.world_size,
        is_master=context.rank == 0,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )


def form_groups(
    parallel: ParallelConfig,
    *,
    store: dist.Store,
    rank: int,
    world_size: int,
    generation: int,
    device: str,
    timeout_seconds: float,
) -> Groups:
    """Form all groups on ``store``, under a prefix of ``generation``."""
    timeout, backend = datetime.timedelta(seconds=timeout_seconds), parallel.backend_on(device)
    before = open_sockets()
    dist.init_process_group(
        backend=backend,
        # A late rank of another generation uses other keys: it cannot meet ranks of this one in the same store.
        store=dist.PrefixStore(f"generation-{generation}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, round(timeout_seconds / 60)),
        # Megatron would use them to save through one rank of each data-parallel group; here every rank writes its part.
        create_gloo_process_groups=False,
    )
    if backend == "nccl":
        # Shutting down NCCL's sockets would be reported as an error of a peer. NCCL is aborted instead.
        before = open_sockets()
    vote = dist.new_group(backend="gloo", timeout=timeout)
    store_port = store.port if isinstance(store, dist.TCPStore) else None
    transports = Transports.among(open_sockets() - before, store_port=store_port)
    # From here on a wait ends with these connections, no longer with those that were being made.
    waits.use(transports.limit)
    return Groups(
        generation=generation,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        vote=vote,
        transports=transports,
    )


def dissolve_groups() -> None:
    """Destroy Megatron's groups and torch's. The caller has released its ``Groups`` and all objects that use them.

    If connections were shut down, operations may be blocked in the groups until their own timeout. Those groups are
    kept until then, and this returns at once.
    """
    groups = []
    if waits.in_use().is_ended:
        # Held until the operations in them end: the destructor of a gloo group joins its threads.
        groups = list(dist.distributed_c10d._world.pg_map)
        drop_broken_graph()
        # Before anything is destroyed: destroying an NCCL group waits for peers that may be gone.
        if dist.is_initialized() and dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()
    parallel_state.destroy_model_parallel()
    # Megatron forgets to drop this one group.
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
    # A process group that is still referenced keeps its transports open, and its peers blocked.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    else:
        # Groups that could not be formed have been counted: names of the next ones would differ between ranks.
        dist.distributed_c10d._world.group_count = 0
    release(groups)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
