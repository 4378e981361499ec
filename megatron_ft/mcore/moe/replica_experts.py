"""Experts of a rank when experts have replicas: any subset of them, each once."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig


class ReplicaExperts(SequentialMLP):
    """The experts ``expert_ids`` (ascending) of a layer, one set of weights each.

    Args:
        holders: for each expert, the ranks of the expert group that hold it, ascending.
        rank: this rank's number in that group.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        *,
        expert_ids: Sequence[int],
        holders: Sequence[Sequence[int]],
        rank: int,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(len(expert_ids), config, submodules, pg_collection=pg_collection)
        self.expert_ids = list(expert_ids)
        self.copy_numbers = [list(ranks).index(rank) for ranks in holders]
        self._mark_copies()

    def _mark_copies(self) -> None:
        # Let each expert count once in the gradient norm: on the first rank that holds it.
        # Megatron leaves parameters with ``shared`` out of the norm (``param_is_not_shared``).
        for expert, copy_number in zip(self.local_experts, self.copy_numbers, strict=True):
            for parameter in expert.parameters():
                parameter.shared = copy_number > 0

    def forward(
        self, tokens: torch.Tensor, tokens_per_expert: Sequence[int], permuted_probs: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None]:
        """Run ``tokens`` [rows, H], grouped by expert; probabilities are applied later, on the ranks that sent the
        tokens."""
        outputs = []
        # Experts without rows run too: a bucket is reduced once each of its parameters has a gradient.
        for expert, rows in zip(self.local_experts, torch.split(tokens, list(tokens_per_expert)), strict=True):
            output, bias = expert(self._padded(rows))
            outputs.append((output if bias is None else output + bias)[: len(rows)])
        return torch.cat(outputs), None

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        if not (self.config.fp8 or self.config.fp4):
            return rows
        padded, _ = self._pad_tensor_for_quantization(rows, rows.new_zeros(len(rows)))
        return padded

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return Megatron's form, keyed by expert; the copies of an expert are replicas of one tensor."""
        assert metadata is not None and metadata.get("singleton_local_shards"), (
            "metadata must have singleton_local_shards: each expert with replicas is saved as tensors of its own"
        )
        state: ShardedStateDict = {}
        for number, expert in enumerate(self.local_experts):
            local = f"{prefix}local_experts.{number}."
            of_expert = expert.sharded_state_dict(local, sharded_offsets, metadata)
            replace_prefix_for_sharding(of_expert, local, f"{prefix}experts.{self.expert_ids[number]}.")
            # Of all copies Megatron writes the one whose ``replica_id`` is zero.
            for tensor in of_expert.values():
                tensor.replica_id = (*tensor.replica_id[:2], self.copy_numbers[number])
            state.update(of_expert)
        return state
