"""Megatron's MoE layer with failpoints."""

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_ft import failpoints


class MixtureLayer(MoELayer):
    """Megatron's MoE layer with a failpoint in its dispatch. The engine calls ``start_iteration``."""

    iteration: int = 0

    def start_iteration(self, iteration: int) -> None:
        """Set the iteration, which failpoints and forced routing need; 0 is an evaluation."""
        self.iteration = iteration
        self.router.start_iteration(iteration)

    def dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send tokens to the ranks of their experts, with an all-to-all."""
        failpoints.hit("dispatch", self.iteration)
        return super().dispatch(hidden_states, probs)
