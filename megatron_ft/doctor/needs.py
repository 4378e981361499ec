"""Computes what a job needs of a machine, from the job's configuration and plan. The functions are pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_ft.config.checks.parallel import needs_transformer_engine
from megatron_ft.config.job import JobConfig
from megatron_ft.config.validate import on_device
from megatron_ft.errors import ConfigError
from megatron_ft.planning.compilers import kernels_of
from megatron_ft.planning.cost.memory import BYTES_PER_VALUE, FP32_BYTES, OPTIMIZER_BYTES
from megatron_ft.planning.job import JobPlan
from megatron_ft.planning.rank_environment import rank_environment
from megatron_ft.planning.snapshot.memory import NUM_OWN_BUFFERS


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNeeds:
    """Needs of a job on one machine (memory, disk, ports, software). Checks compare them with what the machine has.
    ``dry_run`` prints the same sizes."""

    mode: str
    interface: str
    master_port: int
    run_dir: str
    run_name: str | None
    """Name of the run; None for a new run that gets the next free name."""
    nodes_here: int
    """Number of the job's nodes on this machine."""
    num_nodes: int
    """Largest number of nodes of the whole job, including spares."""
    ranks_per_node: int
    ranks_per_gpu: int
    world_size: int
    """Largest number of ranks that can train together."""
    device: str
    """Device on which ranks train according to the plan: ``cpu`` or ``cuda``."""
    device_reason: str
    """Reason why the plan chose ``device``."""
    uses_transformer_engine: bool
    host_bytes: int
    """Host memory that one node needs, including windows of its snapshots and copies of other nodes' windows."""
    snapshot_server_bytes: int
    """Memory of one node's snapshot server: windows of the node's ranks, and copies of other nodes' windows."""
    largest_file_bytes: int
    """Size of the largest memory file of a snapshot server; 0 without snapshots."""
    checkpoint_bytes: int
    """Size of one dense checkpoint."""
    num_checkpoints: int
    """Largest number of checkpoints on disk at once, including one that is being written."""
    persisted_bytes: int
    """Largest total size of the windows of snapshots that are on disk at once; 0 if none are written to disk."""
    device_bytes: int = 0
    """Device memory of the rank with the largest need."""
    gpu_memory_bytes: int | None = None
    """Value of ``limits.gpu_memory_bytes`` (None if not set), with which the plan was already compared on ``cuda``."""
    other_device: str = ""
    """Text about ranks on other machines that may train on another device; empty if all ranks train on ``device``."""
    is_refused_there: bool = False
    """Whether the plan would refuse the job if its ranks trained on the device that ``other_device`` describes."""
    starts_elsewhere: bool = False
    """Whether nodes of the job run on other machines than the one that starts the job."""
    is_batch_job: bool = False
    """Whether the job runs in a Slurm allocation. Then ``control.interface`` is resolved on the batch host, and may be
    the name of a network interface."""
    kernels: Mapping[str, str] = field(default_factory=dict)
    """Kernels that ranks must compile: maps a configuration key to the kind of its kernels, ``cpp`` or ``cuda``."""
    uses_fp8: bool = False
    """Whether linear layers have FP8 operands (``precision.fp8``)."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the job sets for ranks on CUDA, unless they are already set."""

    @property
    def ranks_here(self) -> int:
        """Number of the job's ranks on this machine."""
        return self.nodes_here * self.ranks_per_node

    @classmethod
    def of(cls, config: JobConfig, plan: JobPlan, *, nodes_here: int | None = None) -> "JobNeeds":
        """Compute the needs of a job.

        Args:
            nodes_here: number of the job's nodes on this machine. None means all nodes in mode ``local``, otherwise
                one.

        Raises:
            ConfigError: ``nodes_here`` is not from 1 to the number of nodes of the job.
        """
        launch, snapshot = config.launch, plan.snapshot
        if nodes_here is None:
            # Spares need memory while they wait, so they count.
            nodes_here = config.most_nodes if launch.mode == "local" else 1
        if not 1 <= nodes_here <= config.most_nodes:
            raise ConfigError.of(
                "--nodes-here", nodes_here, f"must be from 1 to {config.most_nodes}, the job's number of nodes"
            )
        return cls(
            mode=launch.mode,
            interface=config.control.interface,
            master_port=launch.master_port,
            run_dir=config.run.dir,
            run_name=config.run.name,
            nodes_here=nodes_here,
            num_nodes=config.most_nodes,
            ranks_per_node=launch.ranks_per_node,
            ranks_per_gpu=launch.ranks_per_gpu,
            world_size=config.most_members * launch.ranks_per_node,
            device=plan.device,
            device_reason=plan.device_reason,
            uses_transformer_engine=_uses_transformer_engine(config),
            host_bytes=plan.host_bytes_per_node,
            snapshot_server_bytes=0 if snapshot is None else snapshot.host_bytes,
            largest_file_bytes=0 if snapshot is None else NUM_OWN_BUFFERS * snapshot.window_bytes,
            checkpoint_bytes=plan.num_parameters * _bytes_per_parameter(config),
            num_checkpoints=_num_checkpoints(config),
            persisted_bytes=_persisted_bytes(config, plan),
            device_bytes=plan.device_bytes,
            gpu_memory_bytes=config.limits.gpu_memory_bytes,
            other_device=plan.other_device,
            is_refused_there=plan.is_refused_there,
            kernels=kernels_of(config, plan.device),
            uses_fp8=config.precision.fp8 is not None,
            environment=rank_environment(on_device(config, plan.device)),
            is_batch_job=launch.mode == "local" and launch.node_launcher in ("srun", "none"),
            starts_elsewhere=launch.mode != "local" or launch.node_launcher != "local",
        )


def _uses_transformer_engine(config: JobConfig) -> bool:
    return config.training.transformer_impl == "transformer_engine" or bool(needs_transformer_engine(config))


def _bytes_per_parameter(config: JobConfig) -> int:
    value_bytes = BYTES_PER_VALUE[config.precision.params_dtype]
    if config.parallel.use_distributed_optimizer:
        # Megatron's distributed optimizer writes master weights even if the weights are FP32.
        return value_bytes + OPTIMIZER_BYTES
    return value_bytes + (0 if value_bytes == FP32_BYTES else FP32_BYTES) + 2 * FP32_BYTES


def _num_checkpoints(config: JobConfig) -> int:
    # Returns the largest number of checkpoints at once. A run that deletes none (``keep_last=0``) counts two.
    checkpoint = config.checkpoint
    if not checkpoint.save_interval_iterations:
        return 1 if checkpoint.save_at_end else 0
    # An old checkpoint is deleted only when the next one is complete.
    return (checkpoint.keep_last or 1) + 1


def _persisted_bytes(config: JobConfig, plan: JobPlan) -> int:
    snapshot = config.snapshot
    if plan.snapshot is None or not snapshot.persist_interval_windows or snapshot.persist_url is not None:
        return 0
    window = sum(node.own_bytes for node in plan.snapshot.nodes) // NUM_OWN_BUFFERS
    return window * ((snapshot.keep_persisted or 1) + 1)
