"""What a started run continues from: a checkpoint, a window, or nothing; and the placement that goes with it."""

from pathlib import Path
from typing import Any

from megatron_ft.config.job import JobConfig
from megatron_ft.control.worker import RankContext
from megatron_ft.errors import CheckpointError
from megatron_ft.mcore.checkpoint import CheckpointManager
from megatron_ft.mcore.loop.held_window import PLACEMENT, HeldWindow
from megatron_ft.mcore.loop.recovering import Recovery


def find_source(
    config: JobConfig, context: RankContext, checkpoints: CheckpointManager, recovery: Recovery
) -> tuple[Path | None, HeldWindow | None]:
    """The checkpoint or the window that the run continues from; neither for a fresh start. Collective.

    Raises:
        CheckpointError: a checkpoint is demanded, and none verifies.
    """
    found = None
    if context.resume_from is not None:
        found = checkpoints.newest(context.resume_from)
        window = recovery.find(found)
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
