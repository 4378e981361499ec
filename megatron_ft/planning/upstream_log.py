"""Estimates the memory of the upstream log, which contains tensors that stages have sent to their neighbours.

A tensor is needed as long as a neighbouring stage may replay the tensor's iteration. A replay starts from the first
slice of the newest committed window. While a window is captured, the newest committed window is at best the window
before it. So the log covers two windows, plus the iterations until all ranks know the commit (MoEvement, section 3.4).
The estimate uses the shape and type of the tensors that Megatron sends between stages.
"""

from dataclasses import asdict, dataclass
from typing import Any

from megatron_ft.config.job import JobConfig
from megatron_ft.planning.cost.memory import BYTES_PER_VALUE
from megatron_ft.planning.iteration import BatchPlan
from megatron_ft.planning.pipeline import PipelineShape, sends
from megatron_ft.planning.snapshot.memory import within_limit
from megatron_ft.planning.snapshot.report import SnapshotReport
from megatron_ft.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamLogReport:
    """Estimate of the upstream log that ``dry_run`` prints; the event ``upstream_log_planned`` has the actual sizes."""

    commit_lag_iterations: int
    iterations_kept: int | None
    """Largest number of iterations in the log. It is None if the length of a window depends on measurements that do not
    exist yet; ``rank_bytes`` and ``node_bytes`` are then None as well."""
    num_entries: tuple[int, ...]
    """Number of tensors that a rank of each stage logs in one iteration."""
    iteration_bytes: tuple[int, ...]
    """Bytes that a rank of each stage logs in one iteration."""
    rank_bytes: tuple[int, ...] | None
    """Largest size of the log of one rank, for each stage."""
    node_bytes: tuple[int, ...] | None
    """Largest size of the logs of all ranks of a node together, for each node."""
    memory_limit_bytes: int | None

    @property
    def host_bytes(self) -> int:
        """Bytes that the logs need on the node that needs most; 0 if the length of a window is not known yet."""
        return 0 if self.node_bytes is None else max(self.node_bytes)

    def validate(self) -> None:
        """Check the memory limit of the configuration.

        Raises:
            ConfigError: a node needs more than ``memory_limit_bytes``.
        """
        check_limit(self.host_bytes, self.memory_limit_bytes)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "host_bytes": self.host_bytes}

    @classmethod
    def of(cls, config: JobConfig, snapshot: SnapshotReport | None) -> "UpstreamLogReport | None":
        """Estimate the upstream log of ``config``; return None if the job has no upstream log.

        Args:
            snapshot: estimate of the job's snapshots; None without snapshots.

        Raises:
            ConfigError: the logs of a node need more than ``upstream_log.memory_limit_bytes``.
        """
        if not config.replays_stages or config.parallel.pipeline_model_parallel_size == 1:
            return None
        stages, nodes = range(config.parallel.pipeline_model_parallel_size), range(config.launch.num_nodes)
        kept, lag = None, config.upstream_log.commit_lag_iterations
        if snapshot is not None and snapshot.window_iterations is not None:
            kept = iterations_kept(snapshot.window_iterations, lag, snapshot.interval_iterations)
        report = cls(
            commit_lag_iterations=lag,
            iterations_kept=kept,
            num_entries=tuple(num_entries(config, stage) for stage in stages),
            iteration_bytes=tuple(_iteration_log_bytes(config, stage) for stage in stages),
            rank_bytes=None if kept is None else tuple(log_bytes(config, stage, kept) for stage in stages),
            node_bytes=None if kept is None else tuple(_node_log_bytes(config, node, kept) for node in nodes),
            memory_limit_bytes=config.upstream_log.memory_limit_bytes,
        )
        report.validate()
        return report


def check_limit(needed_bytes: int, limit_bytes: int | None) -> None:
    """Check that a node's logs need at most ``upstream_log.memory_limit_bytes``. Raises ConfigError otherwise."""
    within_limit(
        limit_bytes,
        "upstream_log.memory_limit_bytes",
        needed_bytes,
        "the memory of upstream logs on the node that needs most memory for them; use shorter windows, lower "
        "upstream_log.commit_lag_iterations, or spread stages over more nodes",
    )


def iterations_kept(window_iterations: int, commit_lag_iterations: int, interval_iterations: int | None = None) -> int:
    """Return the largest number of iterations in the log: from the start of a window until the next window's commit.

    The commit lag is added twice for the case of a second failure: after a recovery, a dense snapshot (all operators at
    once) is captured. If ranks fail again before the commit of this snapshot, the second replay starts from the same
    window as the first, and up to ``commit_lag_iterations`` more iterations are in the log.

    Args:
        window_iterations: number of iterations of a window (W).
        commit_lag_iterations: iterations from a window's last slice to the vote that commits it.
        interval_iterations: iterations from the start of a window to the start of the next; None means W.
    """
    interval = window_iterations if interval_iterations is None else interval_iterations
    assert window_iterations >= 1, f"window_iterations={window_iterations} must be at least 1"
    assert interval >= window_iterations, (
        f"interval_iterations={interval} must be at least window_iterations={window_iterations}"
    )
    assert commit_lag_iterations >= 0, f"commit_lag_iterations={commit_lag_iterations} must be at least 0"
    return interval + window_iterations + 2 * commit_lag_iterations


def pipeline_shape(config: JobConfig) -> PipelineShape:
    """Return the numbers of stages, model chunks and microbatches, which determine the pipeline schedule of a job."""
    topology = _topology(config)
    return PipelineShape(
        num_stages=topology.pipeline_model_parallel_size,
        num_chunks=topology.virtual_pipeline_model_parallel_size,
        num_microbatches=BatchPlan.of(config, topology).num_microbatches,
    )


def tensor_shape(config: JobConfig) -> tuple[int, int, int]:
    """Return the shape (sequence, microbatch, hidden) of the tensors, and gradients, that stages send to each other.

    Context parallelism splits the sequence, and so does tensor parallelism (by sequence parallelism).
    """
    parallel, model = config.parallel, config.model
    per_rank = model.seq_length // parallel.context_parallel_size // parallel.tensor_model_parallel_size
    return per_rank, config.training.micro_batch_size, model.hidden_size


def _tensor_bytes(config: JobConfig) -> int:
    """Return the bytes of a tensor of ``tensor_shape`` in the compute format (FP8 is only used inside layers)."""
    sequence, microbatch, hidden = tensor_shape(config)
    return sequence * microbatch * hidden * BYTES_PER_VALUE[config.precision.params_dtype]


def num_entries(config: JobConfig, stage: int) -> int:
    """Return the number of tensors that a rank of ``stage`` logs in one iteration, including padding microbatches."""
    shape = pipeline_shape(config)
    return len(sends(shape, stage, "forward")) + len(sends(shape, stage, "backward"))


def _iteration_log_bytes(config: JobConfig, stage: int) -> int:
    """Return the bytes that a rank of ``stage`` logs in one iteration."""
    return num_entries(config, stage) * _tensor_bytes(config)


def log_bytes(config: JobConfig, stage: int, num_iterations: int) -> int:
    """Return the bytes that a rank of ``stage`` logs in ``num_iterations`` iterations."""
    return _iteration_log_bytes(config, stage) * num_iterations


def _node_log_bytes(config: JobConfig, node: int, num_iterations: int) -> int:
    """Return the bytes that all ranks of ``node`` together log in ``num_iterations`` iterations."""
    topology, places = _topology(config), config.rank_places
    # Ranks of a node may belong to several stages, whose logs differ in size.
    stages = [topology.coordinates(rank).pp for rank, place in enumerate(places) if place == node]
    return sum(log_bytes(config, stage, num_iterations) for stage in stages)


def largest_node_bytes(config: JobConfig, num_iterations: int) -> int:
    """Return the bytes logged in ``num_iterations`` iterations on the node that logs most. All ranks get this value."""
    # All ranks check the same value, so they fail together. Otherwise some would wait in a collective for failed ranks.
    return max(_node_log_bytes(config, node, num_iterations) for node in range(config.launch.num_nodes))


def largest_rank_bytes(config: JobConfig, num_iterations: int) -> int:
    """Return the bytes that a rank logs in ``num_iterations`` iterations, for the stage whose ranks log most."""
    stages = range(config.parallel.pipeline_model_parallel_size)
    return max(log_bytes(config, stage, num_iterations) for stage in stages)


def _topology(config: JobConfig) -> Topology:
    return Topology.of(config.parallel, config.world_size)
