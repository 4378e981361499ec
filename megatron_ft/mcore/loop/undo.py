"""What forward, backward and gradient reduction change before the vote, kept so that it can be taken back."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_ft.mcore.model.names import unwrap
from megatron_ft.mcore.optimizer.commit import grad_scalers


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoRecord:
    """State before an iteration: random numbers, router bias, loss scale.

    Data position and schedule are functions of the iteration and need no undo; gradients are kept in their
    buffers until the next iteration starts; auxiliary trackers are emptied with the vote. Expert counts are zero
    between iterations.
    """

    cpu_rng: torch.Tensor
    device_rng: torch.Tensor
    tracker_rng: dict[str, torch.Tensor]
    expert_bias: list[torch.Tensor]
    grad_scalers: list[dict[str, Any]]

    @classmethod
    def take(cls, model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> "UndoRecord":
        """Record the present state."""
        return cls(
            cpu_rng=torch.get_rng_state(),
            device_rng=torch.cuda.get_rng_state(),
            tracker_rng=get_cuda_rng_tracker().get_states(),
            expert_bias=[bias.clone() for bias in _expert_biases(model_chunks)],
            grad_scalers=[_copied(scaler.state_dict()) for scaler in grad_scalers(optimizer)],
        )

    def restore(self, model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
        """Put the recorded state back."""
        torch.set_rng_state(self.cpu_rng)
        torch.cuda.set_rng_state(self.device_rng)
        get_cuda_rng_tracker().set_states(self.tracker_rng)
        self.restore_expert_bias(model_chunks)
        for counts in _expert_counts(model_chunks):
            counts.zero_()
        for router in _routers(model_chunks):
            router.reset_global_aux_loss_tracker()
        for scaler, state in zip(grad_scalers(optimizer), self.grad_scalers, strict=True):
            scaler.load_state_dict(state)

    def restore_expert_bias(self, model_chunks: list[torch.nn.Module]) -> None:
        """Take back the router bias update only: an iteration that is skipped has still drawn its numbers."""
        for bias, old in zip(_expert_biases(model_chunks), self.expert_bias, strict=True):
            bias.copy_(old)


def _expert_biases(model_chunks: list[torch.nn.Module]) -> list[torch.Tensor]:
    return _router_buffers(model_chunks, "expert_bias")


def _expert_counts(model_chunks: list[torch.nn.Module]) -> list[torch.Tensor]:
    """Tokens per expert since the last update of the bias."""
    return _router_buffers(model_chunks, "local_tokens_per_expert")


def _routers(model_chunks: list[torch.nn.Module]) -> list[Any]:
    """Those that sum tokens over an iteration for a global auxiliary loss."""
    modules = [module for chunk in model_chunks for module in unwrap(chunk).modules()]
    return [module for module in modules if getattr(module, "global_tokens_per_expert", None) is not None]


def _router_buffers(model_chunks: list[torch.nn.Module], name: str) -> list[torch.Tensor]:
    modules = [module for chunk in model_chunks for module in unwrap(chunk).modules()]
    return [getattr(module, name) for module in modules if isinstance(getattr(module, name, None), torch.Tensor)]


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if torch.is_tensor(value) else value for key, value in state.items()}
