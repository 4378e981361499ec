"""Executes a ``ReplayPlan``: loads slices and runs iterations again, until all operators are at the same iteration."""

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from megatron_ft.operators import OperatorId
from megatron_ft.planning.commit import Vote
from megatron_ft.planning.recovery.replay import ReplayPlan


class _ReplayEngine(Protocol):
    """Interface of one rank's engine during the replay of a window. All ranks that replay must make the same calls."""

    def load(self, index: int) -> None:
        """Load slice ``index`` of the window. Slice 0 also restores random number generators, counters and history."""
        ...

    def replay(self, vote: Vote, frozen: Collection[OperatorId]) -> None:
        """Run the iteration of the logged ``vote`` again. Do not update the operators in ``frozen``.

        Raises:
            RecoveryError: the new vote of this iteration differs from ``vote``.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Cost and result of a replay on this rank."""

    final_iteration: int
    """Last iteration that was run again: the replay ends with the complete state after it."""
    num_iterations: int
    load_seconds: float
    replay_seconds: float


def carry_out(plan: ReplayPlan, engine: _ReplayEngine) -> ReplayResult:
    """Bring ``engine`` to the complete state after ``plan.final_iteration``. All ranks that replay must call this.

    Raises:
        RecoveryError: the vote of a replayed iteration differs from the logged vote.
    """
    # Validate before the first step: a rank that fails later would leave the other ranks in a collective.
    plan.validate()
    load_seconds = replay_seconds = 0.0
    for step in plan.steps:
        started = time.monotonic()
        if step.load is not None:
            engine.load(step.load)
        loaded = time.monotonic()
        if step.vote is not None:
            engine.replay(step.vote, step.frozen)
        load_seconds += loaded - started
        replay_seconds += time.monotonic() - loaded
    return ReplayResult(
        final_iteration=plan.final_iteration,
        num_iterations=len(plan.iterations),
        load_seconds=load_seconds,
        replay_seconds=replay_seconds,
    )
