"""Executes a ``ReplayPlan``: load a slice, run an iteration again, until the state is dense."""

import time
from dataclasses import dataclass

from megatron_ft.planning.recovery.replay import ReplayPlan
from megatron_ft.runtime.engine import ReplayEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Cost and result of a replay on this rank."""

    final_iteration: int
    """Iteration of the dense state that the replay reached."""
    num_iterations: int
    load_seconds: float
    replay_seconds: float


def carry_out(plan: ReplayPlan, engine: ReplayEngine) -> ReplayResult:
    """Bring ``engine`` to the dense state after ``plan.final_iteration``; collective.

    Raises:
        RecoveryError: a replayed iteration differs from the logged one.
    """
    # Before the first step: load and replay are collective, and every rank takes them in the order of this plan.
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
