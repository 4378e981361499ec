"""Process groups of one generation: formed, handed over, dissolved. Nothing of ours reads them from globals."""

import datetime
import gc
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ft.config.parallel import ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups a rank trains with.

    ``pg_collection`` is Megatron's; ``vote`` spans the whole job and carries nothing but commit votes and
    other small agreements. It is always gloo: its values live on the host.
    """

    generation: int
    pg_collection: ProcessGroupCollection
    vote: dist.ProcessGroup


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
    timeout = datetime.timedelta(seconds=timeout_seconds)
    dist.init_process_group(
        backend="nccl" if device == "cuda" else "gloo",
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
    vote = dist.new_group(backend="gloo", timeout=timeout)
    return Groups(generation=generation, pg_collection=ProcessGroupCollection.use_mpu_process_groups(), vote=vote)


def dissolve_groups() -> None:
    """Drop Megatron's groups and torch's. The caller has let go of its ``Groups`` and of all that holds them."""
    parallel_state.destroy_model_parallel()
    # The one group that Megatron forgets to drop.
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
    # A process group that is still referenced keeps its transports open, and its peers blocked.
    gc.collect()
    dist.destroy_process_group()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
