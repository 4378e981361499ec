"""The state that is needed to finish or roll back an iteration after a failure at any point of it."""

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
    """Vote, decision and figures of one iteration, the same on every rank."""

    vote: Vote
    decision: Decision
    learning_rate: float
    median_loss: float = math.nan
    """Median loss of earlier committed iterations; NaN if there are none."""
    expert_load: torch.Tensor | None = None
    """Tokens of each expert, summed over all ranks: int64 [num_layers, num_moe_experts], on the CPU; None if not
    needed."""
    pass_seconds: tuple[float, ...] = ()
    """Seconds of a forward pass on each rank, from the ballots."""


@dataclass(kw_only=True)
class IterationState:
    """Progress of one iteration, from before its forward pass until its decision is carried out."""

    iteration: int
    before: TrainState
    """State before the forward pass, to which the iteration is rolled back."""
    expert_load: torch.Tensor | None = None
    """Tokens of each expert, summed over all ranks: int64 [num_layers, num_moe_experts]; None if not needed."""
    contributed: bool = False
    """Whether this rank may have sent its ballot. If true, other ranks may have the complete vote."""
    vote: Vote | None = None
    """The vote; None until it is complete on this rank."""
    pass_seconds: tuple[float, ...] = ()
    """Seconds of a forward pass on each rank, from the ballots; empty until the vote is complete."""
    update: Literal["none", "begun", "done"] = "none"
    """Progress of the update of master weights, moments and compute weights."""

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Set ``update`` to ``begun`` while the block runs, and to ``done`` after it."""
        self.update = "begun"
        # No ``finally``: after an exception the state is partly updated and unusable, so the value must stay ``begun``.
        yield
        self.update = "done"
