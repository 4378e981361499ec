"""Megatron's MoE layer with named failpoints."""

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_ft import failpoints


class MixtureLayer(MoELayer):
    """Megatron's MoE layer; the engine announces each iteration to it."""

    iteration: int = 0

    def start_iteration(self, iteration: int) -> None:
        """Announce the next iteration (0 is an evaluation), for failpoints in the dispatch and for forced routing."""
        self.iteration = iteration
        self.router.start_iteration(iteration)

    def dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send tokens to the ranks of their experts (all-to-all)."""
        failpoints.hit("dispatch", self.iteration)
        return super().dispatch(hidden_states, probs)
