"""A token dispatcher for expert replicas, with the six phases of Megatron's dispatchers.

Notation: T tokens on this rank, E experts, N ranks of the group, H hidden size, S sent rows, R received rows. A row is
one token for one of its experts.
"""

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ft.runtime.dispatch.backend import DispatchBackend
from megatron_ft.runtime.dispatch.exchange import ExchangeCounter, gather_counts, return_rows, send_rows
from megatron_ft.runtime.dispatch.handle import DispatchHandle


class ReplicaTokenDispatcher(MoETokenDispatcher):
    """Sends each token to one copy of each of its experts, and applies the probabilities when the rows return.

    Args:
        replicas: int64 [E, N], number of copies of each expert on each rank of ``pg_collection.ep``.
        local_experts: distinct experts of this rank, in ascending order.
        backend: computes the schedule and orders the rows.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        replicas: torch.Tensor,
        local_experts: list[int],
        backend: DispatchBackend,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.replicas = replicas
        self.local_experts = local_experts
        self.backend = backend
        self.group: dist.ProcessGroup = pg_collection.ep
        self.bytes = ExchangeCounter()

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy ``hidden_states`` [sequence, batch, H] to rows [S, H] in sending order. ``probs`` [T, E] stay here."""
        self._shape = hidden_states.shape
        self._probs = probs
        counts = gather_counts(routing_map, self.group)
        schedule = self.backend.schedule(counts, self.replicas)
        self._handle: DispatchHandle = self.backend.plan(routing_map, schedule, self.group.rank(), self.local_experts)
        rows = self.backend.permute(hidden_states.reshape(-1, self._shape[-1]), self._handle)
        return rows, probs

    def token_dispatch(self, rows: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send ``rows`` [S, H] and receive [R, H] with an all-to-all without padding."""
        return send_rows(rows, self._handle, self.group, self.bytes), probs

    def dispatch_postprocess(
        self, rows: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sort ``rows`` [R, H] by local expert. Return them, the number of rows of each local expert, and ``probs``."""
        return self.backend.sort_received(rows, self._handle), self._handle.tokens_per_local_expert, probs

    def combine_preprocess(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows`` [R, H] to their order of arrival."""
        return self.backend.unsort(rows, self._handle)

    def token_combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Send ``rows`` [R, H] back and receive [S, H] with the reverse all-to-all."""
        return return_rows(rows, self._handle, self.group, self.bytes)

    def combine_postprocess(self, rows: torch.Tensor) -> torch.Tensor:
        """Sum the ``rows`` [S, H] of each token, weighted with their probabilities, to [sequence, batch, H]."""
        output = self.backend.unpermute(rows, self._probs, self._handle).view(self._shape)
        # Autograd keeps the tensors that the backward pass needs. These references would keep all until the next call.
        del self._probs, self._handle
        return output
