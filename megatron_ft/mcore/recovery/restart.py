"""Selects the state from which a run continues when a job starts: a checkpoint, a window, or nothing."""

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ft.config.job import JobConfig
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.errors import CheckpointError, UnreadableError
from megatron_ft.mcore.checkpoint.manager import CheckpointManager
from megatron_ft.mcore.snapshot.local_window import PLACEMENT, LocalWindow
from megatron_ft.mcore.snapshot.restorer import SnapshotRestorer

SHOWN_REASONS = 8
"""Largest number of reasons that one error message lists. The message gives only the number of the others."""


def select_restore_source(
    config: JobConfig, context: RankContext, checkpoints: CheckpointManager, restorer: SnapshotRestorer
) -> tuple[Path | None, LocalWindow | None]:
    """Select the state from which the run continues when a job starts. All ranks must call this.

    Returns:
        (checkpoint, window), of which at most one is not None. Both are None if the run starts at iteration 0.

    Raises:
        UnreadableError: the storage could not read the newest checkpoint, and no window is newer.
        CheckpointError: one of five cases. ``run.resume=must``, and there is no usable state. All checkpoints belong to
            other runs. The newest state has other data, or another model, optimizer or schedule, than this job. The run
            has saved state, but none of it is usable, and ``run.start_over`` is false. There is no state to evaluate,
            and ``training.evaluate_only`` is true.
    """
    found, run = None, config.run
    not_chosen: tuple[str, ...] = ()
    # Windows can be outside the run's folder: at a URL, or in the memory of snapshot servers that outlived their job.
    has_other_windows = config.snapshot.persist_url is not None or config.snapshot.outlive_job_seconds > 0
    if context.resume_from is not None or (run.resume != "never" and has_other_windows):
        folder = context.resume_from or checkpoints.folder
        unreadable = None
        try:
            found = checkpoints.newest(folder)
        except UnreadableError as error:
            unreadable, found = error, error.checkpoint
        if found is not None and not _may_use("checkpoint", config, context):
            not_chosen, found = (f"{found}: {_not_chosen(config)}",), None
        window = restorer.find(found)
        if window is not None and not _may_use("rollback", config, context):
            not_chosen = (f"window of iteration {window.window.start_iteration}: {_not_chosen(config)}",)
            restorer.choose_nothing(not_chosen[0])
            window = None
        if window is None and found is None and checkpoints.foreign and not run.start_over:
            raise CheckpointError(
                f"{folder} contains no checkpoint of this run: {'; '.join(checkpoints.foreign)}. To start another run "
                "from one of these checkpoints, set checkpoint.load=<path>; to start this run at iteration 0, set "
                "run.start_over=true"
            )
        if window is None and found is not None and unreadable is not None:
            raise unreadable
        # Rename checkpoints only after the checks above, so that a start that fails renames nothing.
        checkpoints.set_foreign_aside()
        if window is not None:
            restorer.report_start(None, context.generation)
            return None, window
        unusable = () if found is not None else (*checkpoints.unusable(folder), *restorer.unusable, *not_chosen)
        # If the memory with all windows was lost, only the run's events show that there were windows.
        if not unusable and found is None and context.generation > 0:
            unusable = _lost_windows(context.run_dir)
        # Only the first start of a job must find a checkpoint. A restart may come before the first save of the run.
        if found is None and run.resume == "must" and context.generation == 0:
            raise CheckpointError(
                f"run.resume=must: {folder} has no usable checkpoint, and there is no usable window{_listed(unusable)}"
            )
        _check_start_over(unusable, run_dir=context.run_dir, start_over=run.start_over)
    has_no_state = found is None and context.resume_from is None and not restorer.chosen.declined
    if has_no_state and run.resume == "auto" and (iteration := _newest_iteration(context.run_dir)):
        restorer.choose_nothing(
            f"{context.run_dir} has records of iterations up to {iteration}, but no saved state, so the run starts at "
            "iteration 0"
        )
    load = config.checkpoint.load
    source = Path(load) if found is None and load is not None else found
    if config.training.evaluate_only and source is None and config.checkpoint.load_weights is None:
        raise CheckpointError(f"training.evaluate_only=true: {context.run_dir} has no saved state to evaluate")
    restorer.report_start(source, context.generation)
    return source, None


def _may_use(strategy: str, config: JobConfig, context: RankContext) -> bool:
    # ``recovery.strategies`` does not limit generation 0, the start of a job: it may use any saved state.
    return context.generation == 0 or config.recovery.may_use(strategy)


def _not_chosen(config: JobConfig) -> str:
    return f"not chosen: recovery.strategies=[{','.join(config.recovery.strategies or ())}]"


def _check_start_over(unusable: Sequence[str], *, run_dir: Path, start_over: bool) -> None:
    """Check that a run without usable state may start at iteration 0, or from a checkpoint of another run.

    Args:
        unusable: checkpoints and windows of the run that cannot be used, with the reason for each.

    Raises:
        CheckpointError: ``unusable`` is not empty, and ``run.start_over`` is false.
    """
    if unusable and not start_over:
        raise CheckpointError(
            f"cannot continue the run in {run_dir}: none of its checkpoints and windows is usable"
            f"{_listed(unusable)}. Repair one of them, or start at iteration 0 with run.start_over=true or with "
            "another run.name"
        )


def _lost_windows(run_dir: Path) -> tuple[str, ...]:
    """Return why the newest committed window in ``events.jsonl`` is unusable, or () if no window was committed."""
    try:
        with (run_dir / "events.jsonl").open("rb") as file:
            committed = [line for line in file if b'"window_committed"' in line]
        start = json.loads(committed[-1])["start_iteration"]
    except (OSError, IndexError, ValueError, KeyError):
        return ()
    return (f"window of iteration {start}: it was committed, but no node has it in its memory any more",)


def _listed(reasons: Sequence[str]) -> str:
    shown = "; ".join(reasons[:SHOWN_REASONS])
    hidden = len(reasons) - SHOWN_REASONS
    return f": {shown}{f'; and {hidden} more' if hidden > 0 else ''}" if reasons else ""


def _newest_iteration(run_dir: Path) -> int:
    """Return the newest iteration in ``metrics.jsonl`` of a run, or 0 if the file does not exist or cannot be read."""
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
    """Return the placement in ``window``, or, if ``window`` is None, in the checkpoint ``source``."""
    if window is not None:
        return window.header(0, PLACEMENT)
    assert source is not None, "neither a window nor a checkpoint is given"
    return checkpoints.read_extra(source).get("placement")
