"""Brings a rank whose membership broke to the iteration after which all ranks continue."""

from dataclasses import replace

from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.training.engine import TrainingEngine
from megatron_ft.mcore.training.iteration import IterationResult
from megatron_ft.planning.recovery.target import Position, Target


def position_of(engine: TrainingEngine, rank: int) -> Position:
    """Return the position of ``engine``, which is rank ``rank`` of its membership, wherever an iteration broke.

    Raises:
        RecoveryError: it broke in the middle of the update, so the state belongs to no iteration.
    """
    completed, contributed, vote = engine.iteration, engine.iteration, engine.newest_vote
    in_progress = engine.in_progress
    if in_progress is not None:
        # Some masters are updated and others are not, and `TrainState` has neither.
        if in_progress.update == "begun":
            raise RecoveryError(f"rank {rank}: iteration {in_progress.iteration} failed in the middle of its update")
        # Own state is complete; only parameters may not be gathered yet, which needs the others.
        if in_progress.update == "done":
            completed = in_progress.iteration
        if in_progress.contributed:
            contributed = in_progress.iteration
        vote = in_progress.vote or vote
    return Position(
        rank=rank, generation=engine.groups.generation, completed=completed, contributed=contributed, vote=vote
    )


def resolve_iteration(engine: TrainingEngine, target: Target) -> IterationResult | None:
    """Finish the iteration in progress from its kept gradients, or roll it back, so that the state is that after
    ``target``.

    Nothing is sent. The caller gathers the parameters of a sharded optimizer afterwards.

    Returns:
        The finished iteration, if ``run_iteration`` has not returned it.
    """
    in_progress = engine.in_progress
    if in_progress is None or in_progress.iteration != target.iteration:
        assert engine.iteration == target.iteration, (
            f"this rank is at iteration {engine.iteration}, the target is {target.iteration}"
        )
        engine.abort()
        return None
    # A target without a vote was completed by all, by this rank with its own vote.
    vote = target.vote or in_progress.vote
    assert vote is not None and in_progress.contributed, (
        f"this rank has no gradients or no vote of iteration {target.iteration}"
    )
    result = replace(engine.decide(vote), pass_seconds=())  # ranks have other numbers when it is reported
    # A skip or a stop may have been applied before the break: both put back recorded values, so twice is once.
    if in_progress.update == "none":
        engine.apply(result)
    if result.decision.action != "stop":
        engine.finish(vote, result.decision)
    return result
