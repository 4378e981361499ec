"""Process groups of one generation: formed, handed over, dissolved. Nothing of ours reads them from globals."""

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
"""A store that is served is open by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups a rank trains with.

    ``pg_collection`` is Megatron's; ``vote`` spans the whole job and carries nothing but commit votes and
    other small agreements. It is always gloo: its values live on the host.
    """

    generation: int
    pg_collection: ProcessGroupCollection
    vote: dist.ProcessGroup
    transports: Transports
    """Connections to other ranks that all of these use."""

    def add(self, ranks: Sequence[int], *, timeout_seconds: float) -> dist.ProcessGroup | None:
        """A gloo group of ``ranks``; None on ranks that are not of it. Called by every rank of the job alike: names of
        groups that only some have called for depend on which others these have.

        Raises:
            RuntimeError: others did not come, or the connections were broken.
        """
        if dist.get_backend() == "nccl":
            # NCCL connects when it is first used: what is queued must have come so far before sockets are compared.
            torch.cuda.synchronize()
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
        timeout_seconds: longest wait for the others to come.
        store: that of the membership, where it is open here already.
        opening: what may break the connections that are made here.

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
    """The store of the membership of ``context``, which its rank 0 serves.

    Args:
        timeout_seconds: longest wait for the others to come.
        opening: what may break off the wait.

    Raises:
        RuntimeError: they did not come, or the wait was broken off.
    """
    if opening is not None and context.rank > 0:
        return _connect(context, timeout_seconds, opening)
    return _store(context, timeout_seconds)


def _connect(context: RankContext, timeout_seconds: float, opening: Opening) -> dist.TCPStore:
    """The store, once somebody serves it. Who was there may have gone again, and torch goes on trying: it gets short
    tries. A server that accepts and says nothing is waited for until ``opening`` breaks the connection."""
    where = f"{context.master_addr}:{context.master_port}"
    deadline, try_seconds = time.monotonic() + timeout_seconds, min(timeout_seconds, _TRY_SECONDS)
    while True:
        try:
            socket.create_connection((context.master_addr, context.master_port), timeout=try_seconds).close()
            # torch pauses between its own tries, where no connection is open that could be broken.
            store = waits.call(lambda: _store(context, try_seconds))
        except (OSError, dist.DistNetworkError) as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"nobody serves the store at {where} for {timeout_seconds} s: {error}") from error
        else:
            store.set_timeout(datetime.timedelta(seconds=timeout_seconds))
            return store
        if opening.pause(_RETRY_SECONDS):
            raise RuntimeError(f"ranks were lost before anybody served the store at {where}")


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
    """Form all groups on ``store``, under a prefix that belongs to ``generation``."""
    timeout, backend = datetime.timedelta(seconds=timeout_seconds), parallel.backend_on(device)
    before = open_sockets()
    dist.init_process_group(
        backend=backend,
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
        create_gloo_process_groups=False,
    )
    if backend == "nccl":
        # NCCL's sockets are not ours to shut down: it would report that as an error of a peer. It is aborted instead.
        before = open_sockets()
    vote = dist.new_group(backend="gloo", timeout=timeout)
    store_port = store.port if isinstance(store, dist.TCPStore) else None
    transports = Transports.among(open_sockets() - before, store_port=store_port)
    waits.use(transports.limit)
    return Groups(
        generation=generation,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        vote=vote,
        transports=transports,
    )


def dissolve_groups() -> None:
    """Drop Megatron's groups and torch's. The caller has let go of its ``Groups`` and of all that holds them.

    Where connections were shut down, operations may be blocked in the groups for good: those groups are held until
    their own timeout, and this returns. NCCL's are aborted first: to destroy one waits for peers that may be gone.
    """
    groups = []
    if waits.in_use().is_ended:
        groups = list(dist.distributed_c10d._world.pg_map)
        drop_broken_graph()
        if dist.is_initialized() and dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()
    parallel_state.destroy_model_parallel()
    # The one group that Megatron forgets to drop.
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
