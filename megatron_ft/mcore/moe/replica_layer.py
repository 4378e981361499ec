"""An MoE layer with slots: any number of ranks, any number of copies of each expert."""

from collections.abc import Sequence

import torch
from megatron.core import utils
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoECudaGraphTensorStore
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ft.mcore.moe.layer import MixtureLayer
from megatron_ft.mcore.moe.replica_dispatcher import ReplicaTokenDispatcher
from megatron_ft.mcore.moe.replica_experts import ReplicaExperts
from megatron_ft.runtime.dispatch.backend import DispatchBackend


class ReplicaMixtureLayer(MixtureLayer):
    """Megatron's MoE layer with a placement.

    Its constructor takes the placement; everything after construction is Megatron's.

    Args:
        slots: for each rank of ``pg_collection.ep``, the expert of each slot. Several copies of an expert on one rank
            are one set of weights with a larger share of the tokens.
        backend: computes schedule and permutation.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        layer_number: int | None = None,
        *,
        slots: Sequence[Sequence[int]],
        backend: DispatchBackend,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        # Not ``MoELayer.__init__``, which asserts that EP divides the experts and gives each rank a contiguous block.
        MegatronModule.__init__(self, config)
        rank = utils.get_pg_rank(pg_collection.ep)
        assert len(slots) == utils.get_pg_size(pg_collection.ep), "one row of slots for each rank of the stage"
        self.submodules = submodules
        self.layer_number = layer_number
        self.ep_group, self.tp_group, self.attn_tp_group = pg_collection.ep, pg_collection.tp, pg_collection.tp
        self.local_expert_indices = sorted(set(slots[rank]))
        self.num_local_experts = len(self.local_expert_indices)
        self.use_shared_expert = config.moe_shared_expert_intermediate_size is not None
        # The overlap is a feature of Megatron's own dispatchers (``set_shared_experts``).
        self.shared_expert_overlap = False
        selective = config.recompute_granularity == "selective"
        self.moe_layer_recompute = selective and "moe" in config.recompute_modules
        self.shared_experts_recompute = selective and "shared_experts" in config.recompute_modules
        self.cudagraph_tensor_store = MoECudaGraphTensorStore()
        self.fwd_execution_map = ["route", "expert_compute", "postprocess"]
        self.router = submodules.router(config=config, pg_collection=pg_collection)
        self.token_dispatcher = ReplicaTokenDispatcher(
            config,
            replicas=replica_matrix(slots, config.num_moe_experts),
            local_experts=self.local_expert_indices,
            backend=backend,
            pg_collection=pg_collection,
        )
        self.experts = ReplicaExperts(
            config,
            submodules.experts.submodules,
            expert_ids=self.local_expert_indices,
            holders=[holders(slots, expert) for expert in self.local_expert_indices],
            rank=rank,
            pg_collection=pg_collection,
        )
        self.shared_experts = None
        if self.use_shared_expert:
            self.shared_experts = build_module(
                submodules.shared_experts,
                config=config,
                pg_collection=pg_collection,
                gate=config.moe_shared_expert_gate,
            )


def replica_matrix(slots: Sequence[Sequence[int]], num_experts: int) -> torch.Tensor:
    """Count the copies of each expert on each rank: int64 [num_experts, ranks]."""
    matrix = torch.zeros((num_experts, len(slots)), dtype=torch.int64)
    for rank, experts in enumerate(slots):
        for expert in experts:
            matrix[expert, rank] += 1
    return matrix


def holders(slots: Sequence[Sequence[int]], expert: int) -> list[int]:
    """List the ranks that hold ``expert``, ascending."""
    return [rank for rank, experts in enumerate(slots) if expert in experts]
