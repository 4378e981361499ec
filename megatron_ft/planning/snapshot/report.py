"""Estimate of a job's snapshots before anything runs: window, bytes, and host memory of every node."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_ft.config.checks.primitives import within_limit
from megatron_ft.config.job import JobConfig
from megatron_ft.config.policy import build_policy
from megatron_ft.operator_state import StateShard
from megatron_ft.planning.snapshot.estimate import estimate_demand
from megatron_ft.planning.snapshot.memory import NodeMemory, host_bytes
from megatron_ft.planning.snapshot.peers import assign_peers
from megatron_ft.planning.snapshot.pieces import window_bytes
from megatron_ft.planning.snapshot.plan import Unit, WindowPlan
from megatron_ft.planning.snapshot.policy import SnapshotContext, SnapshotPolicy
from megatron_ft.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotReport:
    """Estimate that ``dry_run`` prints; the event ``snapshot_planned`` holds the actual plan."""

    policy: str
    window_iterations: int | None
    """W; None if bandwidth or iteration time is not measured yet; sizes are then those of a dense window."""
    interval_iterations: int | None
    window_bytes: int
    """Bytes of a window on the rank that captures most."""
    dense_bytes: int
    """Bytes of a dense snapshot on the rank that captures most."""
    num_peer_copies: int
    peers: tuple[tuple[int, ...], ...]
    """Nodes that keep copies of each node."""
    nodes: tuple[NodeMemory, ...]
    host_memory_limit_bytes: int | None
    reason: str

    @property
    def host_bytes(self) -> int:
        """Memory of windows and copies on the largest node."""
        return max(node.total_bytes for node in self.nodes)

    def validate(self) -> None:
        """Check the memory limit of the configuration.

        Raises:
            ConfigError: a node needs more.
        """
        check_limit(self.host_bytes, self.host_memory_limit_bytes)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "host_bytes": self.host_bytes}


def check_limit(needed_bytes: int, limit_bytes: int | None) -> None:
    """Check that windows do not take more than ``snapshot.host_memory_limit_bytes``. Raises ConfigError."""
    within_limit(
        limit_bytes,
        "snapshot.host_memory_limit_bytes",
        needed_bytes,
        "the memory of windows and peer copies on the largest node; lower snapshot.num_peer_copies, spread the "
        "model over more nodes, or choose snapshot=none",
    )


def report_snapshots(config: JobConfig, tokenizer_vocab_size: int | None) -> SnapshotReport | None:
    """Estimate the snapshots of ``config``; None without snapshots.

    Raises:
        ConfigError: the policy cannot be built, or cannot plan with this configuration.
    """
    snapshot, launch = config.snapshot, config.launch
    if snapshot.policy is None:
        return None
    topology = Topology.of(config.parallel, launch.num_nodes * launch.ranks_per_node)
    # Only this is an estimate, by parameter counts: the policy plans as it will on the ranks.
    demand = estimate_demand(config, topology, tokenizer_vocab_size)
    policy: SnapshotPolicy = build_policy("snapshot.policy", snapshot.policy)
    dense = dense_plan(tuple(shard for shards in demand.shards_by_rank for shard in shards))
    plan, is_known = dense, False
    if snapshot.bandwidth_bytes_per_second is not None and snapshot.iteration_seconds is not None:
        context = SnapshotContext(
            bandwidth_bytes_per_second=snapshot.bandwidth_bytes_per_second,
            iteration_seconds=snapshot.iteration_seconds,
        )
        plan, is_known = policy.plan(demand, context), True
    assignment = assign_peers(config.member_domains, snapshot.num_peer_copies)
    plans_again = snapshot.replan_interval_windows > 0
    report = SnapshotReport(
        policy=type(policy).__name__,
        window_iterations=plan.num_iterations if is_known else None,
        interval_iterations=plan.interval_iterations if is_known else None,
        window_bytes=max(window_bytes(plan, shards) for shards in demand.shards_by_rank),
        dense_bytes=max(window_bytes(dense, shards) for shards in demand.shards_by_rank),
        num_peer_copies=snapshot.num_peer_copies,
        peers=assignment.peers,
        nodes=host_bytes(plan, demand.shards_by_rank, launch.ranks_per_node, assignment, plans_again=plans_again),
        host_memory_limit_bytes=snapshot.host_memory_limit_bytes,
        reason=plan.reason if is_known else "unknown until bandwidth and iteration time are measured",
    )
    report.validate()
    return report


def whole_plan(shards_by_rank: Sequence[tuple[StateShard, ...]], interval_iterations: int) -> WindowPlan:
    """The whole state of the job as one slice."""
    operators = sorted({shard.operator for shards in shards_by_rank for shard in shards}, key=str)
    units = tuple(Unit(operator=operator) for operator in operators)
    return WindowPlan(
        slices=(units,), interval_iterations=interval_iterations, reason="whole state at once, after a recovery"
    )


def dense_plan(shards: tuple[StateShard, ...]) -> WindowPlan:
    """The whole state of ``shards`` as one slice."""
    operators = sorted({shard.operator for shard in shards}, key=str)
    return WindowPlan(slices=(tuple(Unit(operator=operator) for operator in operators),), interval_iterations=1)
