"""``JobConfig``: the whole configuration of a job."""

from dataclasses import dataclass, field

from megatron_ft.config.checkpoint import CheckpointConfig
from megatron_ft.config.data import DataConfig
from megatron_ft.config.detector import DetectorConfig
from megatron_ft.config.launch import LaunchConfig
from megatron_ft.config.model import ModelConfig
from megatron_ft.config.optimizer import OptimizerConfig
from megatron_ft.config.parallel import ParallelConfig
from megatron_ft.config.placement import PlacementConfig
from megatron_ft.config.precision import PrecisionConfig
from megatron_ft.config.run import RunConfig
from megatron_ft.config.snapshot import SnapshotConfig
from megatron_ft.config.telemetry import TelemetryConfig
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
    detector: DetectorConfig = field(default_factory=DetectorConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    upstream_log: UpstreamLogConfig = field(default_factory=UpstreamLogConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    run: RunConfig = field(default_factory=RunConfig)
    dry_run: bool = False
    """Check everything, print the plan and exit; needs no ranks and no GPU."""
    dry_run_format: str = "table"
    """Format of the plan that ``dry_run`` prints: ``table`` or ``json``."""
