"""Forms and destroys the process groups of one generation. The project passes them on, and never uses globals."""

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

from megatron_ft.config.job import JobConfig, ParallelConfig
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.runtime.transport import waits
from megatron_ft.runtime.transport.hang_up import Opening, Transports, open_sockets
from megatron_ft.runtime.transport.held_groups import drop_broken_graph, release

_RETRY_SECONDS = 0.02
_TRY_SECONDS = 2.0
"""Time limit of one connection attempt. A running store accepts a connection within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The process groups of one rank in one generation.

    ``pg_collection`` contains Megatron's groups. ``vote`` is a group of all ranks of the job, for commit votes and
    other small agreements. It always uses gloo, because its values are in host memory.
    """

    generation: int
    pg_collection: ProcessGroupCollection
    vote: dist.ProcessGroup
    transports: Transports
    """The connections that these groups use."""

    def add(self, ranks: Sequence[int], *, timeout_seconds: float) -> dist.ProcessGroup | None:
        """Create a gloo group of ``ranks``. Return None on all other ranks. Every rank of the job must call this.

        Raises:
            RuntimeError: a rank of the group did not connect within the timeout, or the connections were shut down.
        """
        if dist.get_backend() == "nccl":
            # NCCL opens sockets at its first use. This must end before the new sockets of gloo are searched.
            torch.cuda.synchronize()
        # Each process counts its groups, and torch makes the group's name from this count. So all ranks must create it.
        before, timeout = open_sockets(), datetime.timedelta(seconds=timeout_seconds)
        group = dist.new_group(list(ranks), backend="gloo", timeout=timeout)
        self.transports.include(open_sockets() - before)
        return group if dist.get_rank() in ranks else None

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
        timeout, backend = datetime.timedelta(seconds=timeout_seconds), parallel.backend_on(device)
        before = open_sockets()
        dist.init_process_group(
            backend=backend,
            # Each generation has its own keys, so a late rank of another generation cannot connect to ranks of this
            # one.
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
            # Megatron needs these groups only for checkpoints that one rank per data-parallel group writes. Every rank
            # writes its own part instead.
            create_gloo_process_groups=False,
        )
        if backend == "nccl":
            # NCCL's sockets are left out: NCCL would report their shutdown as an error of a peer. It is aborted
            # instead.
            before = open_sockets()
        vote = dist.new_group(backend="gloo", timeout=timeout)
        store_port = store.port if isinstance(store, dist.TCPStore) else None
        transports = Transports.among(open_sockets() - before, store_port=store_port)
        # Waits that begin after this line use the limit of these connections, no longer the limit of ``Opening``.
        transports.limit.use()
        return cls(
            generation=generation,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            vote=vote,
            transports=transports,
        )

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
    ) -> "Groups":
        """Form the process groups of the membership of ``context``. All ranks of the membership must call this.

        Args:
            timeout_seconds: longest wait for the store of the membership.
            store: store of the membership, if this process has opened it already.
            opening: lets another thread break the new connections after a failure.

        Raises:
            RuntimeError: other ranks did not connect in time, or ``opening`` broke the connections.
        """
        if opening is not None:
            opening.limit.use()
        if store is None:
            store = open_store(context, timeout_seconds=timeout_seconds, opening=opening)
        return Groups.form(
            config.parallel,
            store=store,
            rank=context.rank,
            world_size=context.world_size,
            generation=context.generation,
            device=device,
            timeout_seconds=config.training.distributed_timeout_seconds,
        )


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
            # In a worker thread, because torch pauses between its own attempts without a socket to shut down.
            store = waits.call(lambda: _store(context, try_seconds))
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


def dissolve_groups() -> None:
    """Destroy all process groups of Megatron and torch. The caller must have released all objects that use them.
    If connections were shut down, operations may stay blocked in some groups until their timeout. This function does
    not wait for these operations; their groups are destroyed later."""
    groups = []
    if waits.WaitLimit.in_use().is_ended:
        # ``release`` gets these groups, because the destructor of a gloo group waits for its blocked operations.
        groups = list(dist.distributed_c10d._world.pg_map)
        drop_broken_graph()
        # NCCL is aborted before any group is destroyed: destroying an NCCL group waits for peers that may be lost.
        if dist.is_initialized() and dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()
    parallel_state.destroy_model_parallel()
    # ``destroy_model_parallel`` does not drop this group.
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
    # Reference cycles are collected: a group with references keeps its connections open, which blocks its peers.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    else:
        # torch has counted the groups that could not be formed. The next groups would get other names on other ranks.
        dist.distributed_c10d._world.group_count = 0
    release(groups)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
