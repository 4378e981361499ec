"""Selects what a started run continues from: a checkpoint, a window or nothing; and the placement with it."""

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ft.config.job import JobConfig
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.errors import CheckpointError
from megatron_ft.mcore.checkpoint import CheckpointManager
from megatron_ft.mcore.snapshot.local_window import PLACEMENT, LocalWindow
from megatron_ft.mcore.snapshot.restorer import SnapshotRestorer

SHOWN_REASONS = 8
"""Pieces of state named one by one in an error."""


def select_restore_source(
    config: JobConfig, context: RankContext, checkpoints: CheckpointManager, restorer: SnapshotRestorer
) -> tuple[Path | None, LocalWindow | None]:
    """The checkpoint or the window that the run continues from; neither for a fresh start. Collective.

    Raises:
        CheckpointError: a checkpoint is demanded, and none verifies; those that are there are not this run's; the
            newest state was written with other data, another model, optimizer or schedule than the job has; or the run
            has saved committed iterations, none can be used, and ``run.start_over`` does not allow to start without.
    """
    found, run = None, config.run
    has_remote_windows = run.resume != "never" and config.snapshot.persist_url is not None
    if context.resume_from is not None or has_remote_windows:
        folder = context.resume_from or checkpoints.folder
        found = checkpoints.newest(folder)
        window = restorer.find(found)
        if window is None and found is None and checkpoints.foreign and not run.start_over:
            raise CheckpointError(
                f"{folder}: must hold a checkpoint of this run: {'; '.join(checkpoints.foreign)}. "
                "checkpoint.load=<path> begins another run from one of them on purpose, run.start_over=true begins "
                "this run at iteration 0"
            )
        # After the refusal above: where nothing else is left, nothing is renamed.
        checkpoints.set_foreign_aside()
        if window is not None:
            restorer.report_start(None, context.generation)
            return None, window
        unusable = () if found is not None else (*checkpoints.unusable(folder), *restorer.unusable)
        # A restart may come before the run's first save: only the job's own start has to find a checkpoint.
        if found is None and run.resume == "must" and context.generation == 0:
            raise CheckpointError(
                f"run.resume=must: {folder} must hold a checkpoint that verifies; it holds none{_listed(unusable)}"
            )
        check_start_over(unusable, run_dir=context.run_dir, start_over=run.start_over)
    elif run.resume == "auto" and (iteration := newest_iteration(context.run_dir)):
        restorer.choose_nothing(f"{context.run_dir} records {iteration} iterations, and has saved no state of them")
    load = config.checkpoint.load
    source = Path(load) if found is None and load is not None else found
    restorer.report_start(source, context.generation)
    return source, None


def check_start_over(unusable: Sequence[str], *, run_dir: Path, start_over: bool) -> None:
    """Refuse to start at iteration 0, or from another run's checkpoint, beside saved state that cannot be used.

    Args:
        unusable: each piece of state with committed iterations, and why it cannot be used.

    Raises:
        CheckpointError: there is such state, and ``run.start_over`` is false.
    """
    if unusable and not start_over:
        raise CheckpointError(
            f"nothing is left to continue from: {run_dir} has saved committed iterations, and none can be used"
            f"{_listed(unusable)}. Mend what is named, or start at iteration 0 on purpose: run.start_over=true, or "
            "another run.name"
        )


def _listed(reasons: Sequence[str]) -> str:
    """The first reasons, and the number of the others."""
    shown = "; ".join(reasons[:SHOWN_REASONS])
    hidden = len(reasons) - SHOWN_REASONS
    return f": {shown}{f'; and {hidden} more' if hidden > 0 else ''}" if reasons else ""


def newest_iteration(run_dir: Path) -> int:
    """The newest iteration that the records of a run name; 0 where there are none, or they cannot be read."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            newest = deque(file, maxlen=2)
    except OSError:
        return 0
    for line in reversed(newest):  # the last line may be cut off
        try:
            return int(json.loads(line)["iteration"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


def recorded_placement(checkpoints: CheckpointManager, source: Path | None, window: LocalWindow | None) -> Any:
    """The placement that was in force in what is continued."""
    if window is not None:
        return window.header(0, PLACEMENT)
    assert source is not None, "a placement is restored from something"
    return checkpoints.read_extra(source).get("placement")
