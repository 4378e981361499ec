"""The iteration in progress: enough to finish or roll it back after a failure at any point."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_ft.mcore.state.train_state import TrainState
from megatron_ft.planning.commit import Decision, Vote


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationResult:
    """Result of one iteration, the same on every rank."""

    vote: Vote
    decision: Decision
    learning_rate: float
    median_loss: float = math.nan
    """Median of the earlier committed losses; NaN if there are none."""
    expert_load: torch.Tensor | None = None
    """Tokens per expert over the job: int64 [num_layers, num_moe_experts], CPU; None if not needed."""
    pass_seconds: tuple[float, ...] = ()
    """Seconds of a forward pass by rank, from the ballots."""


@dataclass(kw_only=True)
class IterationState:
    """One iteration, from before its forward pass until its decision is carried out."""

    iteration: int
    before: TrainState
    """State before the forward pass, to which the iteration is rolled back."""
    expert_load: torch.Tensor | None = None
    """Tokens per expert over the job, int64 [num_layers, num_moe_experts]; None if not needed."""
    contributed: bool = False
    """Whether this rank has sent its ballot; from then on others may have the complete vote."""
    vote: Vote | None = None
    """The vote, once it is complete on this rank."""
    pass_seconds: tuple[float, ...] = ()
    """Seconds of a forward pass by rank, from the ballots of that vote."""
    update: Literal["none", "begun", "done"] = "none"
    """Progress of the update of master weights, moments and compute weights."""

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Mark the update in a block; after an exception inside, the state belongs to no iteration."""
        self.update = "begun"
        # No ``finally``: after an exception it stays ``begun``, and this rank's state must not be used.
        yield
        self.update = "done"
