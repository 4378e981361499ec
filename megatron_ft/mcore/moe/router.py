"""Router that ignores padding microbatches, and counts the routed tokens.

Notation: T tokens of a microbatch on this rank, E experts.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, save_to_aux_losses_tracker, z_loss_func
from megatron.core.transformer.moe.router import TopKRouter


class PaddingAwareRouter(TopKRouter):
    """Megatron's top-k router, except that a microbatch with a ``padding_mask`` is padding.

    Such a microbatch is routed and dispatched like any other (the all-to-all is collective) but adds nothing to
    auxiliary losses, z-loss, router bias or load counts. Megatron attaches auxiliary losses through an autograd
    function whatever the loss value is, so masking only the loss is not enough.

    ``load`` [E] int64 holds the tokens given to each expert since the iteration began.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_padding = False
        self.load = torch.zeros(self.config.num_moe_experts, dtype=torch.int64, device=torch.cuda.current_device())

    def start_iteration(self, iteration: int) -> None:
        """Restart counting before the microbatches of an iteration; 0 is an evaluation."""
        if iteration:
            self.load.zero_()

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route ``logits`` [sequence, batch, E]; returns probs [T, E] and routing_map [T, E]."""
        self.is_padding = padding_mask is not None
        probs, routing_map = super().routing(logits)
        # Under full recomputation only the second pass runs with gradients: count once.
        if self.training and torch.is_grad_enabled() and not self.is_padding:
            self.load += routing_map.sum(dim=0)
        return probs, routing_map

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attach the z-loss (ST-MoE, arXiv 2202.08906, eq. 5) to ``logits`` [T, E], except for padding."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or self.is_padding or not (self.training and torch.is_grad_enabled()):
            return logits
        z_loss = z_loss_func(logits, coefficient / self._num_shares())
        save_to_aux_losses_tracker("z_loss", z_loss / coefficient, self.layer_number, self.config.num_layers)
        # Gradients are divided by the tokens of the iteration later (``calculate_per_token_loss``): a mean over this
        # microbatch has to be multiplied by its tokens first.
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
        """Attach a balancing loss to ``activation`` [T, E], except for padding.

        Each rank of ``reduce_group`` contributes its share of ``aux_loss``. With per-token losses Megatron weights it
        by ``valid_token_count``. That is too little if ranks hold a part of a microbatch's tokens, if ranks of all
        data-parallel groups share one loss, and, for the sequence-level loss, by the microbatch's size. Here the weight
        does not depend on the split of the batch.
        """
        if self.is_padding:
            return activation
        num_shares = self._num_shares()
        # More than one for ``global_aux_loss`` only, whose group spans data-parallel ranks.
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
        # This loss reduces over data-parallel ranks, some of which may have a real microbatch.
        counted = torch.zeros_like(routing_map) if self.is_padding else routing_map
        return super()._apply_global_aux_loss(probs, scores_for_aux_loss, counted, with_padding_mask)

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        if self.enable_expert_bias and torch.is_grad_enabled() and not self.is_padding:
            with torch.no_grad():
                self.local_tokens_per_expert += routing_map.sum(dim=0)
