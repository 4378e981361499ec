"""Where a rank is when its membership breaks, and how it comes to the iteration that everybody continues after."""

from dataclasses import replace

from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.loop.engine import TrainingEngine
from megatron_ft.mcore.loop.underway import IterationResult
from megatron_ft.planning.recovery.target import Position, Target


def position_of(engine: TrainingEngine, rank: int) -> Position:
    """How far ``engine``, that of rank ``rank`` of its membership, is; wherever an iteration broke.

    Raises:
        RecoveryError: in the middle of the update: the state is that of no iteration.
    """
    completed, contributed, vote = engine.iteration, engine.iteration, engine.newest_vote
    underway = engine.underway
    if underway is not None:
        if underway.update == "begun":
            raise RecoveryError(f"rank {rank}: iteration {underway.iteration} broke in the middle of its update")
        if underway.update == "done":
            completed = underway.iteration
        if underway.contributed:
            contributed = underway.iteration
        vote = underway.vote or vote
    return Position(
        rank=rank, generation=engine.groups.generation, completed=completed, contributed=contributed, vote=vote
    )


def settle(engine: TrainingEngine, target: Target) -> IterationResult | None:
    """Finish the iteration under way from its kept gradients, or undo it: the state is that after ``target``.

    Nothing is sent. A sharded optimizer's parameters would have to be gathered: its ranks settle otherwise.

    Returns:
        The iteration that was finished, where ``run_iteration`` has not returned it.
    """
    underway = engine.underway
    if underway is None or underway.iteration != target.iteration:
        assert engine.iteration == target.iteration, f"at iteration {engine.iteration}, not {target.iteration}"
        if underway is not None:
            engine.abort(underway)
        return None
    vote = target.vote or underway.vote
    assert vote is not None and underway.contributed, f"no gradients or no vote of iteration {target.iteration}"
    result = replace(engine.judge(vote), pass_seconds=())  # ranks have other numbers when it is told
    if underway.update == "none":
        engine.carry_out(result)
    if result.decision.action != "stop":
        engine.advance(vote, result.decision)
    return result
