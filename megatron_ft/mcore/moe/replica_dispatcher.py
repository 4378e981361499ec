"""Token dispatch to expert replicas, in the six phases of Megatron's dispatchers.

Notation: T tokens on this rank, E experts, N ranks of the group, H hidden size, S rows sent, R rows received.
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
    """Sends each token to one copy of each of its experts; probabilities are applied when the rows return.

    Args:
        replicas: int64 [E, N]: copies of each expert on each rank of ``pg_collection.ep``.
        local_experts: distinct experts of this rank, ascending.
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
        """``hidden_states`` [sequence, batch, H] to rows [S, H] in sending order; ``probs`` [T, E] are not sent."""
        self._shape = hidden_states.shape
        self._probs = probs
        counts = gather_counts(routing_map, self.group)
        # Copied to the tokens' device once, not with every microbatch.
        self.replicas = self.replicas.to(counts.device)
        rank = self.group.rank()
        schedule = self.backend.schedule(counts, self.replicas, rank)
        self._handle: DispatchHandle = self.backend.plan(routing_map, schedule, rank, self.local_experts)
        rows = self.backend.permute(hidden_states.reshape(-1, self._shape[-1]), self._handle)
        return rows, probs

    def token_dispatch(self, rows: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [S, H] to [R, H] by an unpadded all-to-all."""
        return send_rows(rows, self._handle, self.group, self.bytes), probs

    def dispatch_postprocess(
        self, rows: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Group rows [R, H] by local expert; also return the number of rows of each."""
        return self.backend.sort_received(rows, self._handle), self._handle.tokens_per_local_expert, probs

    def combine_preprocess(self, rows: torch.Tensor) -> torch.Tensor:
        """Put rows [R, H] back into the order of arrival."""
        return self.backend.unsort(rows, self._handle)

    def token_combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [R, H] to [S, H] by the reverse all-to-all."""
        return return_rows(rows, self._handle, self.group, self.bytes)

    def combine_postprocess(self, rows: torch.Tensor) -> torch.Tensor:
        """Weigh and sum each token's rows [S, H] -> [sequence, batch, H]."""
        output = self.backend.unpermute(rows, self._probs, self._handle).view(self._shape)
        # Autograd keeps what the backward pass needs; these would keep the rest until the next microbatch.
        del self._probs, self._handle
        return output
