"""A router that ignores padding microbatches and counts the tokens of each expert.

Notation: T tokens of a microbatch on this rank, E experts.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, save_to_aux_losses_tracker, z_loss_func
from megatron.core.transformer.moe.router import TopKRouter


class PaddingAwareRouter(TopKRouter):
    """Megatron's top-k router, which treats each microbatch with a ``padding_mask`` as padding.

    A padding microbatch is routed and dispatched, because the all-to-all is collective. But it adds nothing to
    auxiliary losses, z-loss, router bias and load counts. Masking the loss would not be enough, because Megatron
    attaches auxiliary losses through an autograd function that does not depend on the loss.

    ``load`` [E] int64 is the number of tokens that were routed to each expert since the iteration began.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_padding = False
        self.load = torch.zeros(self.config.num_moe_experts, dtype=torch.int64, device=torch.cuda.current_device())

    def start_iteration(self, iteration: int) -> None:
        """Reset ``load`` at the start of ``iteration``. In an evaluation, ``iteration`` is 0: do nothing."""
        if iteration:
            self.load.zero_()

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route the tokens with ``logits`` [sequence, batch, E]. Return probs [T, E] and routing_map [T, E]."""
        self.is_padding = padding_mask is not None
        probs, routing_map = super().routing(logits)
        # Full recomputation routes each microbatch twice, but only the second time with gradients.
        if self.training and torch.is_grad_enabled() and not self.is_padding:
            self.load += routing_map.sum(dim=0)
        return probs, routing_map

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attach the z-loss (ST-MoE, arXiv 2202.08906, eq. 5) to ``logits`` [T, E], unless they are padding."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or self.is_padding or not (self.training and torch.is_grad_enabled()):
            return logits
        z_loss = z_loss_func(logits, coefficient / self._num_shares())
        save_to_aux_losses_tracker("z_loss", z_loss / coefficient, self.layer_number, self.config.num_layers)
        # The loss is a mean over this microbatch, so it is multiplied by the number of tokens of the microbatch. Later,
        # gradients are divided by the number of tokens of the iteration (``calculate_per_token_loss``).
        return MoEAuxLossAutoScaler.apply(logits, z_loss * (logits.shape[0] * self._num_shares()))

    def attach_and_log_load_balancing_loss(
        self,
        activation: torch.Tensor,
        aux_loss_coeff: float,
        aux_loss: torch.Tensor,
        aux_loss_name: str,
        reduce_group: dist.ProcessGroup,
        reduce_group_has_dp: bool = False,
        valid_token_count: int | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attach a balancing loss to ``activation`` [T, E], unless it is padding.

        With per-token losses, Megatron multiplies the loss by ``valid_token_count``. This weight is too small if a rank
        has only a part of a microbatch's tokens, if data-parallel ranks share one loss, and, for the sequence-level
        loss, with several sequences per microbatch. This method uses a weight that does not depend on how the batch is
        divided.
        """
        if self.is_padding:
            return activation
        num_shares = self._num_shares()
        # Greater than one only for ``global_aux_loss``, whose group contains data-parallel ranks.
        num_microbatches = reduce_group.size() // num_shares
        return super().attach_and_log_load_balancing_loss(
            activation,
            aux_loss_coeff,
            aux_loss if num_microbatches == 1 else aux_loss * num_microbatches,
            aux_loss_name,
            reduce_group,
            reduce_group_has_dp,
            valid_token_count=activation.shape[0] * num_shares,
        )

    def _num_shares(self) -> int:
        return self.tp_cp_group.size()

    def _apply_global_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        # Also called for padding, because this loss is reduced with data-parallel ranks that have real microbatches.
        counted = torch.zeros_like(routing_map) if self.is_padding else routing_map
        return super()._apply_global_aux_loss(probs, scores_for_aux_loss, counted, with_padding_mask)

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        if self.enable_expert_bias and torch.is_grad_enabled() and not self.is_padding:
            with torch.no_grad():
                self.local_tokens_per_expert += routing_map.sum(dim=0)
