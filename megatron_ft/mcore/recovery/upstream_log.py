"""Keeps the upstream log of a rank as long as windows need it, and drops what is committed."""

from typing import TYPE_CHECKING

from megatron_ft.events import UpstreamLogFull, UpstreamLogPlanned
from megatron_ft.mcore.model.transformer_config import DTYPES
from megatron_ft.mcore.snapshot.local_window import LocalWindow
from megatron_ft.mcore.snapshot.restorer import SnapshotRestorer
from megatron_ft.planning.pipeline import sends
from megatron_ft.planning.snapshot.plan import WindowPlan
from megatron_ft.planning.upstream_log import (
    check_limit,
    iterations_kept,
    largest_node_bytes,
    largest_rank_bytes,
    pipeline_shape,
    tensor_shape,
)
from megatron_ft.runtime.upstream_log.log import DIRECTIONS, UpstreamLog

if TYPE_CHECKING:
    from megatron_ft.mcore.training.trainer import Trainer


def keep_log(trainer: "Trainer") -> None:
    """Drop iterations that no replay needs any more, provide space for the plan in force, and report an iteration that
    was not logged for lack of space.

    Raises:
        ConfigError: see ``keep_room``; the same on every rank.
    """
    snapshots = trainer.snapshots
    if not trainer.config.recovery.keep_layout or snapshots is None or snapshots.plan is None:
        return
    keep_room(trainer, snapshots.plan)
    log, kept = trainer.engine.boundaries.log, snapshots.kept
    assert log is not None, "the upstream log has no memory"
    if kept is not None:
        # By the job's committed window, which all ranks learn from the same vote: no neighbour needs anything older.
        log.trim(kept.start_iteration)
    gap = log.take_gap()
    if gap is not None:
        trainer.report(UpstreamLogFull(iteration=gap, iterations_kept=log.num_iterations))


def replay_window(trainer: "Trainer", restorer: SnapshotRestorer, window: LocalWindow) -> None:
    """Replay ``window`` at a start, and log the sent messages like those of the original iterations.

    Raises:
        RecoveryError: see ``SnapshotRestorer.replay``.
    """
    if trainer.config.recovery.keep_layout:
        keep_room(trainer, window.plan_in_force)
    restorer.replay(trainer.engine, window)


def keep_room(trainer: "Trainer", plan: WindowPlan) -> None:
    """Provide a log from which windows of ``plan`` can be replayed; its present content is kept.

    Raises:
        ConfigError: logs need more than ``upstream_log.memory_limit_bytes`` on some node; nothing was allocated.
    """
    config, engine = trainer.config, trainer.engine
    needed = iterations_kept(plan.num_iterations, config.upstream_log.commit_lag_iterations, plan.interval_iterations)
    log = engine.boundaries.log
    if log is not None and log.num_iterations >= needed:
        return
    # Before memory is taken, and from the configuration alone: all ranks refuse, or none does.
    node_bytes = largest_node_bytes(config, needed)
    check_limit(node_bytes, config.upstream_log.memory_limit_bytes)
    shape, stage = pipeline_shape(config), engine.pg.pp.rank()
    larger = UpstreamLog(
        num_iterations=needed,
        sends={direction: sends(shape, stage, direction) for direction in DIRECTIONS},
        shape=tensor_shape(config),
        dtype=DTYPES[config.precision.params_dtype],
        device=engine.device,
    )
    if log is not None:
        larger.grown(log)
    engine.boundaries.log = larger
    trainer.report(
        UpstreamLogPlanned(
            iteration=engine.iteration,
            iterations_kept=needed,
            log_bytes=largest_rank_bytes(config, needed),
            node_bytes=node_bytes,
        )
    )
