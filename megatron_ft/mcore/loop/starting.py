"""What a started run continues from: a checkpoint, a window, or nothing; and the placement that goes with it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ft.config.job import JobConfig
from megatron_ft.control.worker import RankContext
from megatron_ft.errors import CheckpointError
from megatron_ft.events import RecoveryDecided
from megatron_ft.mcore.checkpoint import CheckpointManager
from megatron_ft.mcore.loop.held_window import PLACEMENT, HeldWindow
from megatron_ft.mcore.loop.recovering import Recovery

if TYPE_CHECKING:
    from megatron_ft.mcore.loop.trainer import Trainer


def find_source(
    config: JobConfig, context: RankContext, checkpoints: CheckpointManager, recovery: Recovery
) -> tuple[Path | None, HeldWindow | None]:
    """The checkpoint or the window that the run continues from; neither for a fresh start. Collective.

    Raises:
        CheckpointError: a checkpoint is demanded, and none verifies; those that are there are not this run's; or the
            newest state was written with other data, another model, optimizer or schedule than the job has.
    """
    found = None
    if context.resume_from is not None:
        found = checkpoints.newest(context.resume_from)
        window = recovery.find(found)
        if window is None and found is None and checkpoints.foreign:
            raise CheckpointError(
                f"{context.resume_from}: must hold a checkpoint of this run: {'; '.join(checkpoints.foreign)}. "
                "checkpoint.load=<path> begins another run from one of them on purpose"
            )
        checkpoints.set_foreign_aside()
        if window is not None:
            return None, window
        if found is None and config.run.resume == "must" and context.generation == 0:
            raise CheckpointError(
                f"run.resume=must: {context.resume_from} must hold a checkpoint that verifies; it holds none"
            )
    load = config.checkpoint.load
    return (found if found is not None or load is None else Path(load)), None


def recorded_placement(checkpoints: CheckpointManager, source: Path | None, window: HeldWindow | None) -> Any:
    """The placement that was in force in what is continued."""
    if window is not None:
        return window.header(0, PLACEMENT)
    assert source is not None, "a placement is restored from something"
    return checkpoints.read_extra(source).get("placement")


def decided(
    trainer: "Trainer", source: Path | None, window: HeldWindow | None, declined: tuple[str, ...]
) -> RecoveryDecided:
    """What ranks that were started again continue from, for the log."""
    rung = "window" if window is not None else "nothing" if source is None else "checkpoint"
    generation, iteration = trainer.context.generation, trainer.engine.iteration
    return RecoveryDecided(generation=generation, rung=rung, iteration=iteration, declined=declined)
