"""The iteration in progress: enough to finish or undo it wherever it breaks."""

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
    before: TrainState
    """State before the forward pass, to which the iteration is rolled back."""
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
