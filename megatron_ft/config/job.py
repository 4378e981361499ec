"""``JobConfig``: the whole configuration of a job."""

from dataclasses import dataclass, field

from megatron_ft.config.checkpoint import CheckpointConfig
from megatron_ft.config.control import ControlConfig
from megatron_ft.config.data import DataConfig
from megatron_ft.config.detector import DetectorConfig
from megatron_ft.config.launch import LaunchConfig
from megatron_ft.config.limits import LimitsConfig
from megatron_ft.config.model import ModelConfig
from megatron_ft.config.nodes import NodesConfig
from megatron_ft.config.optimizer import OptimizerConfig
from megatron_ft.config.parallel import ParallelConfig
from megatron_ft.config.placement import PlacementConfig
from megatron_ft.config.precision import PrecisionConfig
from megatron_ft.config.recovery import RecoveryConfig
from megatron_ft.config.run import RunConfig
from megatron_ft.config.snapshot import SnapshotConfig
from megatron_ft.config.telemetry import TelemetryConfig
from megatron_ft.config.testing import TestingConfig
from megatron_ft.config.topology import TopologyConfig
from megatron_ft.config.training import TrainingConfig
from megatron_ft.config.upstream_log import UpstreamLogConfig


@dataclass
class JobConfig:
    """Configuration of a job. Each field is a Hydra group of the same name."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    nodes: NodesConfig = field(default_factory=NodesConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    detector: DetectorConfig = field(default_factory=DetectorConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    upstream_log: UpstreamLogConfig = field(default_factory=UpstreamLogConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    run: RunConfig = field(default_factory=RunConfig)
    testing: TestingConfig = field(default_factory=TestingConfig)
    dry_run: bool = False
    """Check everything, print the plan and exit; needs no ranks and no GPU."""
    dry_run_format: str = "table"
    """Format of the plan that ``dry_run`` prints: ``table`` or ``json``."""

    @property
    def fewest_nodes(self) -> int:
        """Return the smallest number of nodes with which the job continues."""
        return self.launch.num_nodes if self.recovery.min_nodes is None else self.recovery.min_nodes

    @property
    def most_nodes(self) -> int:
        """Return the largest number of nodes, including spares. Node numbers are below it."""
        most = self.nodes.max_nodes
        return self.launch.num_nodes + self.nodes.num_spare_nodes if most is None else most

    @property
    def most_members(self) -> int:
        """Return the largest number of nodes that train at the same time."""
        return self.most_nodes - self.nodes.num_spare_nodes

    @property
    def member_domains(self) -> list[str]:
        """Return the failure domain of each node that the job starts with; ``failure_domains`` also names those of
        spares."""
        num_nodes = self.launch.num_nodes
        return self.topology.failure_domains[:num_nodes] or [f"node{node}" for node in range(num_nodes)]

    @property
    def may_lose_nodes(self) -> bool:
        """Return whether the job continues in its processes when nodes are lost, leave or join."""
        return self.recovery.keep_layout or self.fewest_nodes < self.most_nodes

    @property
    def why_nodes_change(self) -> str | None:
        """Return the key that makes ``may_lose_nodes`` true, e.g. ``recovery.min_nodes=1``; None if it is false."""
        if not self.may_lose_nodes:
            return None
        if self.recovery.keep_layout:
            return "recovery.keep_layout=true"
        if self.fewest_nodes < self.launch.num_nodes:
            return f"recovery.min_nodes={self.recovery.min_nodes}"
        if self.nodes.max_nodes is not None:
            return f"nodes.max_nodes={self.nodes.max_nodes}"
        return f"nodes.num_spare_nodes={self.nodes.num_spare_nodes}"
