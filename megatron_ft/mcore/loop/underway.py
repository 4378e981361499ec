"""The iteration under way on one rank: how far it is, so that it can be finished or undone wherever it breaks."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_ft.mcore.loop.undo import UndoRecord
from megatron_ft.planning.commit import Ballot, Decision, Vote


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An iteration whose gradients are reduced and measured, and nothing else: it can still be undone."""

    ballot: Ballot
    undo: UndoRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationResult:
    """One iteration as every rank knows it."""

    vote: Vote
    decision: Decision
    learning_rate: float
    median_loss: float = math.nan
    """Median of the committed losses before it; NaN where there are none."""
    expert_load: torch.Tensor | None = None
    """Tokens per expert over the job: int64 [num_layers, num_moe_experts], CPU; None where nobody wants them."""
    pass_seconds: tuple[float, ...] = ()
    """By rank, as its ballot says it."""


@dataclass(kw_only=True)
class Underway:
    """One iteration, from before its forward pass until its decision is carried out."""

    iteration: int
    undo: UndoRecord
    expert_load: torch.Tensor | None = None
    """Tokens per expert over the job, int64 [num_layers, num_moe_experts]; None where nobody wants them."""
    contributed: bool = False
    """Whether this rank has given its ballot: from then on others may have settled the vote."""
    vote: Vote | None = None
    """Once it is settled here."""
    pass_seconds: tuple[float, ...] = ()
    """By rank, as the ballots of that vote say it."""
    update: Literal["none", "begun", "done"] = "none"
    """Of master weights, moments and compute weights."""

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Where this is left by an exception, the state is that of no iteration."""
        self.update = "begun"
        yield
        self.update = "done"
