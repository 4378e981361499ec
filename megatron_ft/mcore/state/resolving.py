"""After a failure, finishes or rolls back the iteration in progress, so that all ranks are at the same iteration."""

from dataclasses import replace

from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.training.engine import TrainingEngine
from megatron_ft.mcore.training.iteration import IterationResult
from megatron_ft.planning.recovery.target import Position, Target


def position_of(engine: TrainingEngine, rank: int) -> Position:
    """Return which iterations ``engine``, with rank ``rank`` of its membership, has completed and voted for.

    Raises:
        RecoveryError: an iteration failed in the middle of its update, so the state is unusable.
    """
    completed, contributed, vote = engine.iteration, engine.iteration, engine.newest_vote
    in_progress = engine.in_progress
    if in_progress is not None:
        # Only some master weights are updated, and ``TrainState`` cannot restore them.
        if in_progress.update == "begun":
            raise RecoveryError(
                f"rank {rank}: iteration {in_progress.iteration} failed in the middle of its update, so the state of "
                "this rank is unusable"
            )
        # This rank's own state is updated. Weights of a sharded optimizer may still have to be gathered.
        if in_progress.update == "done":
            completed = in_progress.iteration
        if in_progress.contributed:
            contributed = in_progress.iteration
        vote = in_progress.vote or vote
    return Position(
        rank=rank, generation=engine.groups.generation, completed=completed, contributed=contributed, vote=vote
    )


def resolve_iteration(engine: TrainingEngine, target: Target) -> IterationResult | None:
    """Finish or roll back the iteration in progress, so that ``engine`` has the state after the target's iteration.

    This needs no communication, because the gradients still exist. Later, the caller must gather the parameters of a
    sharded optimizer.

    Returns:
        Result of the finished iteration; None if no iteration was finished.
    """
    in_progress = engine.in_progress
    if in_progress is None or in_progress.iteration != target.iteration:
        assert engine.iteration == target.iteration, (
            f"this rank is at iteration {engine.iteration}, but the target is iteration {target.iteration}"
        )
        engine.abort()
        return None
    # If the target has no vote, all ranks have completed its iteration, and this rank has its own vote.
    vote = target.vote or in_progress.vote
    assert vote is not None and in_progress.contributed, (
        f"this rank has no ballot or no vote of iteration {target.iteration}"
    )
    result = replace(engine.decide(vote), pass_seconds=())  # ranks may be renumbered before the result is reported
    # A skip or a stop may have been applied before the failure. Both restore recorded values, so they can be repeated.
    if in_progress.update == "none":
        engine.apply(result)
    if result.decision.action != "stop":
        engine.finish(vote, result.decision)
    return result
