"""Selects the state from which a started run continues: a checkpoint, a window or nothing; and its placement."""

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ft.config.job import JobConfig
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.errors import CheckpointError
from megatron_ft.mcore.checkpoint.manager import CheckpointManager
from megatron_ft.mcore.snapshot.local_window import PLACEMENT, LocalWindow
from megatron_ft.mcore.snapshot.restorer import SnapshotRestorer

SHOWN_REASONS = 8
"""Largest number of reasons in one error message."""


def select_restore_source(
    config: JobConfig, context: RankContext, checkpoints: CheckpointManager, restorer: SnapshotRestorer
) -> tuple[Path | None, LocalWindow | None]:
    """Select the checkpoint or the window from which the run continues; neither for a fresh start. Collective.

    Raises:
        CheckpointError: a checkpoint is required and none verifies; all checkpoints belong to other runs; the newest
            state was written with other data, or with another model, optimizer or schedule than the job has; or the run
            has saved committed iterations, none is usable, and ``run.start_over`` is false.
    """
    found, run = None, config.run
    has_remote_windows = run.resume != "never" and config.snapshot.persist_url is not None
    if context.resume_from is not None or has_remote_windows:
        folder = context.resume_from or checkpoints.folder
        found = checkpoints.newest(folder)
        window = restorer.find(found)
        if window is None and found is None and checkpoints.foreign and not run.start_over:
            raise CheckpointError(
                f"{folder}: must contain a checkpoint of this run: {'; '.join(checkpoints.foreign)}. To start "
                "another run from one of these set checkpoint.load=<path>; to start this run at iteration 0 set "
                "run.start_over=true"
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
                f"run.resume=must: {folder} must contain a valid checkpoint, but has none{_listed(unusable)}"
            )
        check_start_over(unusable, run_dir=context.run_dir, start_over=run.start_over)
    elif run.resume == "auto" and (iteration := newest_iteration(context.run_dir)):
        restorer.choose_nothing(f"{context.run_dir} records {iteration} iterations, but no state was saved")
    load = config.checkpoint.load
    source = Path(load) if found is None and load is not None else found
    restorer.report_start(source, context.generation)
    return source, None


def check_start_over(unusable: Sequence[str], *, run_dir: Path, start_over: bool) -> None:
    """Refuse to start at iteration 0, or from another run's checkpoint, if saved state exists that cannot be used.

    Args:
        unusable: each piece of state with committed iterations, and the reason why it cannot be used.

    Raises:
        CheckpointError: there is such state, and ``run.start_over`` is false.
    """
    if unusable and not start_over:
        raise CheckpointError(
            f"cannot continue: {run_dir} contains committed iterations, but none of its checkpoints and windows "
            f"is usable{_listed(unusable)}. Repair them, or start at iteration 0 with run.start_over=true or with "
            "another run.name"
        )


def _listed(reasons: Sequence[str]) -> str:
    shown = "; ".join(reasons[:SHOWN_REASONS])
    hidden = len(reasons) - SHOWN_REASONS
    return f": {shown}{f'; and {hidden} more' if hidden > 0 else ''}" if reasons else ""


def newest_iteration(run_dir: Path) -> int:
    """Return the newest iteration in the records of a run; 0 if there are none or they cannot be read."""
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
    """Return the placement that was in force in the state from which the run continues."""
    if window is not None:
        return window.header(0, PLACEMENT)
    assert source is not None, "neither a window nor a checkpoint is given"
    return checkpoints.read_extra(source).get("placement")
