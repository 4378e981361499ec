"""The iteration in progress and its rollback record: enough to finish or undo it wherever it breaks."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_ft.mcore.model.names import unwrap
from megatron_ft.mcore.optimizer.commit import grad_scalers
from megatron_ft.planning.commit import Ballot, Decision, Vote


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackRecord:
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
    def take(cls, model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> "RollbackRecord":
        """Record the present state."""
        return cls(
            cpu_rng=torch.get_rng_state(),
            device_rng=torch.cuda.get_rng_state(),
            tracker_rng=get_cuda_rng_tracker().get_states(),
            # Megatron updates the bias in ``finalize_model_grads`` and the scale in ``prepare_grads``: before the vote.
            expert_bias=[bias.clone() for bias in _expert_biases(model_chunks)],
            grad_scalers=[_copied(scaler.state_dict()) for scaler in grad_scalers(optimizer)],
        )

    def restore(self, model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
        """Put the recorded state back."""
        torch.set_rng_state(self.cpu_rng)
        torch.cuda.set_rng_state(self.device_rng)
        get_cuda_rng_tracker().set_states(self.tracker_rng)
        self.restore_expert_bias(model_chunks)
        # ``finalize_model_grads`` empties these counts; an iteration that broke may not have reached it.
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
    """Routers that sum tokens over an iteration for a global auxiliary loss."""
    modules = [module for chunk in model_chunks for module in unwrap(chunk).modules()]
    return [module for module in modules if getattr(module, "global_tokens_per_expert", None) is not None]


def _router_buffers(model_chunks: list[torch.nn.Module], name: str) -> list[torch.Tensor]:
    modules = [module for chunk in model_chunks for module in unwrap(chunk).modules()]
    return [getattr(module, name) for module in modules if isinstance(getattr(module, name, None), torch.Tensor)]


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if torch.is_tensor(value) else value for key, value in state.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An iteration whose gradients are reduced and measured, and nothing else: it can still be undone."""

    ballot: Ballot
    undo: RollbackRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationResult:
    """One iteration as every rank knows it."""

    vote: Vote
    decision: Decision
    learning_rate: float
    median_loss: float = math.nan
    """Median of the committed losses before it; NaN where there are none."""
    expert_load: torch.Tensor | None = None
    """Tokens per expert over the job: int64 [num_layers, num_moe_experts], CPU; None where they are not needed."""
    pass_seconds: tuple[float, ...] = ()
    """Figures by rank, from its ballot."""


@dataclass(kw_only=True)
class IterationState:
    """One iteration, from before its forward pass until its decision is carried out."""

    iteration: int
    undo: RollbackRecord
    expert_load: torch.Tensor | None = None
    """Tokens per expert over the job, int64 [num_layers, num_moe_experts]; None where they are not needed."""
    contributed: bool = False
    """Whether this rank has given its ballot: from then on others may have settled the vote."""
    vote: Vote | None = None
    """Once it is settled here."""
    pass_seconds: tuple[float, ...] = ()
    """Figures by rank, from the ballots of that vote."""
    update: Literal["none", "begun", "done"] = "none"
    """Copies of master weights, moments and compute weights."""

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Update in a block; an exception inside leaves the state of no iteration."""
        self.update = "begun"
        # No ``finally``: after an exception it stays ``begun``, and this rank's state must not be used.
        yield
        self.update = "done"
