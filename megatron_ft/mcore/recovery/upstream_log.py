"""Allocates a rank's upstream log (messages to adjacent stages), and discards what no replay needs any more."""

from collections.abc import Callable

from megatron_ft.events import UpstreamLogFull, UpstreamLogPlanned
from megatron_ft.mcore.model.transformer_config import DTYPES
from megatron_ft.mcore.snapshot.local_window import LocalWindow
from megatron_ft.mcore.snapshot.restorer import SnapshotRestorer
from megatron_ft.mcore.snapshot.snapshotter import Snapshotter
from megatron_ft.mcore.training.engine import TrainingEngine
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
from megatron_ft.records import Record
from megatron_ft.runtime.upstream_log.log import DIRECTIONS, UpstreamLog


def keep_log(engine: TrainingEngine, snapshots: Snapshotter, report: Callable[[Record], None]) -> None:
    """Discard logged iterations that no replay needs any more. Enlarge the log if the current plan of windows needs
    this. Report if an iteration was not logged because the log was full.

    Raises:
        ConfigError: the logs would need too much memory; see ``keep_room``.
    """
    if not engine.config.replays_stages or snapshots.plan is None:
        return
    keep_room(engine, snapshots.plan, report)
    log, kept = engine.boundaries.log, snapshots.kept
    assert log is not None, "the upstream log is not allocated"
    if kept is not None:
        # ``kept`` is committed, so no replay begins earlier, and no rank needs messages of earlier iterations.
        log.trim(kept.start_iteration)
    gap = log.take_gap()
    if gap is not None:
        report(UpstreamLogFull(iteration=gap, iterations_kept=log.num_iterations))


def replay_window(
    engine: TrainingEngine, restorer: SnapshotRestorer, window: LocalWindow, report: Callable[[Record], None]
) -> None:
    """Replay ``window`` at the start of a run, and log the messages that the replay sends.

    Raises:
        RecoveryError: the window cannot be replayed; see ``SnapshotRestorer.replay``.
    """
    if engine.config.replays_stages:
        keep_room(engine, window.plan_in_force, report)
    restorer.replay(engine, window)


def keep_room(engine: TrainingEngine, plan: WindowPlan, report: Callable[[Record], None]) -> None:
    """Allocate a larger log if the current log has too few slots to replay windows of ``plan``. Keep its content.

    Raises:
        ConfigError: on some node, the logs would need more than ``upstream_log.memory_limit_bytes``. Nothing was
            allocated. All ranks raise this error.
    """
    config = engine.config
    needed = iterations_kept(plan.num_iterations, config.upstream_log.commit_lag_iterations, plan.interval_iterations)
    log = engine.boundaries.log
    if log is not None and log.num_iterations >= needed:
        return
    # Check before the allocation. The result is the same on all ranks, because it depends only on the configuration.
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
    report(
        UpstreamLogPlanned(
            iteration=engine.iteration,
            iterations_kept=needed,
            log_bytes=largest_rank_bytes(config, needed),
            node_bytes=node_bytes,
        )
    )
