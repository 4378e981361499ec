"""Recovery strategies ``checkpoint`` and ``start_over``: all ranks load a dense checkpoint, or start at iteration 0.

Both strategies are tried last. They need no living rank. Any number of ranks can load a dense checkpoint.
"""

from dataclasses import dataclass
from typing import ClassVar

from megatron_ft.config.requirements import REQUIREMENTS, Requirement
from megatron_ft.planning.recovery.facts import RecoveryFacts
from megatron_ft.planning.recovery.strategy import Cost, Loss, SavedKind
from megatron_ft.planning.state.declined import Declined


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All ranks restart from the newest dense checkpoint that passes verification."""

    name: ClassVar[str] = "checkpoint"
    requirements: ClassVar[tuple[Requirement, ...]] = REQUIREMENTS[name]
    reads: ClassVar[tuple[SavedKind, ...]] = ("checkpoint",)

    def cost(self, loss: Loss, facts: RecoveryFacts) -> Cost | Declined:
        """Compute the cost of the recovery; iterations since the checkpoint run again."""
        again: int | None = facts.config.checkpoint.save_interval_iterations
        if loss.stored is not None and loss.stored.checkpoint is not None:
            again = loss.stored.again_from(loss.stored.checkpoint)
        elif not again:
            reason = "checkpoint.save_interval_iterations=0: no dense checkpoint is saved while the job trains"
            return Declined(strategy=self.name, reason=reason)
        elif loss.stored is not None:
            return Declined(strategy=self.name, reason="the run has no complete checkpoint yet")
        return Cost.of_restart(self.name, loss, facts, again)


@dataclass(frozen=True, slots=True)
class StartOver:
    """The run starts again at iteration 0."""

    name: ClassVar[str] = "start_over"
    requirements: ClassVar[tuple[Requirement, ...]] = ()
    reads: ClassVar[tuple[SavedKind, ...]] = ()

    def cost(self, loss: Loss, facts: RecoveryFacts) -> Cost | Declined:
        """Return the cost: all iterations so far are lost. This strategy is always possible."""
        again = facts.config.training.train_iterations if loss.stored is None else loss.stored.iteration
        is_automatic = loss.restart is not None and not _has_unusable_state(loss, facts)
        return Cost.of_restart(self.name, loss, facts, again, is_recoverable=False, is_automatic=is_automatic)


def _has_unusable_state(loss: Loss, facts: RecoveryFacts) -> bool:
    """Whether saved state may exist that ranks are unable to load or that ``recovery.strategies`` forbids to load.
    If so, ranks refuse to start at iteration 0 unless ``run.start_over=true``."""
    if loss.stored is None:
        return facts.snapshot is not None or facts.config.checkpoint.save_interval_iterations > 0
    stored = (loss.stored.memory_start, loss.stored.persisted_start, loss.stored.checkpoint)
    return any(start is not None for start in stored)
