"""``JobPlan``: everything a configuration amounts to before anything runs."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ft.config.inputs import JobInputs
from megatron_ft.config.job import JobConfig
from megatron_ft.corpus.check import DataSummary
from megatron_ft.errors import ConfigError
from megatron_ft.operators import Operator, num_active_parameters, num_parameters, operators_of
from megatron_ft.planning.batch import BatchPlan
from megatron_ft.planning.cost.memory import PROCESS_BYTES, RankMemory, memory_of_stage
from megatron_ft.planning.cost.parameters import RankParameters, parameters_of_stage
from megatron_ft.planning.cost.saving import SavingMemory, saving_of_stage
from megatron_ft.planning.devices import DeviceChoice, other_device
from megatron_ft.planning.placement.report import PlacementReport, report_placement
from megatron_ft.planning.recovery.loss_cost import LossCost
from megatron_ft.planning.recovery.means import (
    costs_of_nodes,
    idle_copies,
    means_of,
    why_no_replicas,
    windows_serve,
)
from megatron_ft.planning.snapshot.report import SnapshotReport, report_snapshots
from megatron_ft.planning.trace import RoutingTrace
from megatron_ft.planning.upstream_log import UpstreamLogReport, report_upstream_log
from megatron_ft.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One pipeline stage; its numbers are those of each of its ranks."""

    pipeline_stage: int
    layers: tuple[int, ...]
    parameters: RankParameters
    memory: RankMemory
    saving: SavingMemory

    @property
    def device_bytes(self) -> int:
        """Most a rank needs on its device: training, or gathering its state for a checkpoint."""
        return self.memory.state_bytes + max(self.memory.activations_bytes, self.saving.device_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """The resolved plan of a job: layout, parameters, memory, batches, data."""

    model: str
    device: str
    params_dtype: str
    num_nodes: int
    ranks_per_node: int
    topology: Topology
    num_parameters: int
    num_active_parameters: int
    published_parameters: int | None
    published_active_parameters: int | None
    published_parameters_source: str
    stages: tuple[StagePlan, ...]
    host_bytes_per_node: int
    """Estimate for the node that needs most."""
    gpu_memory_bytes: int | None
    """Limit from the configuration; null checks nothing."""
    host_memory_bytes: int | None
    """Limit from the configuration; null checks nothing."""
    train_iterations: int
    num_microbatches: int
    """Per iteration, over all ranks, without padding."""
    num_microbatches_per_rank: int
    num_padding_microbatches: int
    """Masked microbatches per iteration, over all ranks, that make every rank run the same number."""
    tokens_per_iteration: int
    data: DataSummary
    placement: PlacementReport | None = None
    """None without replica slots."""
    snapshot: SnapshotReport | None = None
    """None without snapshots."""
    upstream_log: UpstreamLogReport | None = None
    """None where no layout is kept, or there is one stage."""
    routing: str | None = None
    """The recording that routing follows; None where it is learned."""
    losses: tuple[LossCost, ...] = ()
    """What losing each node alone costs; empty where nobody asks."""
    notes: tuple[str, ...] = ()
    """What a job does otherwise than its keys may suggest."""
    device_reason: str = ""
    """Why ``device`` is the device that this plan is for."""
    other_device: str = ""
    """What ranks meet where they find the other device; empty where they cannot."""
    is_refused_there: bool = False
    """Whether the other device refuses the job."""
    why_no_replicas: str = ""
    """Why a lost node is never survived by expert replicas; empty where it can be."""
    windows_serve: str = ""
    """Which failures the windows of snapshots serve; empty without snapshots."""

    @property
    def device_bytes(self) -> int:
        """Most that a rank needs on its device."""
        return max(stage.device_bytes for stage in self.stages)

    def validate(self) -> None:
        """The plan fits the memory that the configuration grants.

        Raises:
            ConfigError: a rank or a node needs more.
        """
        needed = self.device_bytes
        if self.device == "cuda" and self.gpu_memory_bytes is not None and needed > self.gpu_memory_bytes:
            raise ConfigError.of(
                "launch.gpu_memory_bytes",
                self.gpu_memory_bytes,
                f"must be at least {needed}, what the largest rank needs (activations estimated); use more ranks, "
                "larger parallel sizes, training.recompute_granularity=full or a smaller training.micro_batch_size",
            )
        if self.host_memory_bytes is not None and self.host_bytes_per_node > self.host_memory_bytes:
            raise ConfigError.of(
                "launch.host_memory_bytes",
                self.host_memory_bytes,
                f"must be at least {self.host_bytes_per_node}, what a node needs (estimated); use more nodes, "
                "fewer ranks_per_node or a smaller model",
            )

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the parallel coordinates of every rank."""
        places = [{"rank": rank, **dataclasses.asdict(place)} for rank, place in self.topology.ranks()]
        named = {"placement": self.placement, "snapshot": self.snapshot, "upstream_log": self.upstream_log}
        reports = {name: None if report is None else report.to_json() for name, report in named.items()}
        return {**dataclasses.asdict(self), **reports, "ranks": places}


def plan_job(
    config: JobConfig,
    data: DataSummary,
    inputs: JobInputs | None = None,
    *,
    device: str,
    with_losses: bool = False,
    choice: DeviceChoice | None = None,
    refused: Mapping[str, str] | None = None,
) -> JobPlan:
    """Plan a validated configuration. ``device`` is ``cpu`` or ``cuda``, already decided.

    Args:
        inputs: files of placement and routing, needed where the configuration names some.
        with_losses: say what the loss of each node would cost, and warn of what makes it dearer.
        choice: how ``device`` was decided, and with ``refused`` what holds on the other one; None says nothing of that.
        refused: by device the reason why it refuses the configuration, empty where it accepts it.

    Raises:
        ConfigError: through ``JobPlan.validate``, or for inputs that do not fit the job.
    """
    assert device in ("cpu", "cuda"), f"device {device!r} is not decided"
    launch, model, training = config.launch, config.model, config.training
    topology = Topology.of(config.parallel, launch.num_nodes * launch.ranks_per_node)
    operators = operators_of(model, data.tokenizer_vocab_size)
    batch = BatchPlan.of(config, topology)
    stages = _stages(config, operators, data, topology, device)
    placement = _placement(config, inputs or JobInputs(), stages)
    trace = _trace(config, inputs or JobInputs())
    snapshot = report_snapshots(config, data.tokenizer_vocab_size)
    upstream_log = report_upstream_log(config, snapshot)
    captured = sum(0 if report is None else report.host_bytes for report in (snapshot, upstream_log))
    wrap = None if trace is None else trace.wrap(training.train_iterations)
    losses, warnings = _losses(config, inputs or JobInputs(), placement, snapshot) if with_losses else ((), ())
    other = "" if choice is None else other_device(choice, refused or {})
    is_refused_there = choice is not None and not choice.is_certain and any((refused or {}).values())
    needed = max(stage.device_bytes for stage in stages)
    plan = JobPlan(
        model=model.name,
        device=device,
        params_dtype=config.precision.params_dtype,
        num_nodes=launch.num_nodes,
        ranks_per_node=launch.ranks_per_node,
        topology=topology,
        num_parameters=num_parameters(operators),
        num_active_parameters=num_active_parameters(model, operators),
        published_parameters=model.published_parameters,
        published_active_parameters=model.published_active_parameters,
        published_parameters_source=model.published_parameters_source,
        stages=stages,
        host_bytes_per_node=_host_bytes_per_node(config, stages, topology, device) + captured,
        gpu_memory_bytes=launch.gpu_memory_bytes,
        host_memory_bytes=launch.host_memory_bytes,
        train_iterations=training.train_iterations,
        num_microbatches=batch.num_real_microbatches,
        num_microbatches_per_rank=batch.num_microbatches,
        num_padding_microbatches=batch.num_padding_microbatches,
        tokens_per_iteration=training.global_batch_size * model.seq_length,
        data=data,
        placement=placement,
        snapshot=snapshot,
        upstream_log=upstream_log,
        routing=None if trace is None else trace.summary(),
        losses=losses,
        notes=(
            *(() if placement is None else placement.notes),
            *(() if wrap is None else (wrap,)),
            *_copies_after_a_loss(config),
            *_unknown_domains(config),
            *((other,) if is_refused_there else ()),
            *_unchecked_gpu_memory(config, device, needed),
            *idle_copies(config),
            *warnings,
        ),
        device_reason="" if choice is None else choice.reason,
        other_device=other,
        is_refused_there=is_refused_there,
        why_no_replicas=why_no_replicas(config),
        windows_serve="" if snapshot is None else windows_serve(config),
    )
    plan.validate()
    return plan


def _placement(config: JobConfig, inputs: JobInputs, stages: tuple[StagePlan, ...]) -> PlacementReport | None:
    if config.placement.algorithm is None:
        return None
    return report_placement(config, inputs, [stage.parameters.num_dense for stage in stages])


def _losses(
    config: JobConfig, inputs: JobInputs, placement: PlacementReport | None, snapshot: SnapshotReport | None
) -> tuple[tuple[LossCost, ...], tuple[str, ...]]:
    """(the cost of each node's loss, warnings)."""
    means = means_of(config, () if placement is None else placement.stages, snapshot)
    return costs_of_nodes(config, means, inputs), means.warnings


def _copies_after_a_loss(config: JobConfig) -> tuple[str, ...]:
    """That two losses in a row can end the job, though the first one leaves nodes enough."""
    launch, placement, num_experts = config.launch, config.placement, config.model.num_moe_experts or 0
    num_left = launch.num_nodes - 1
    if placement.algorithm is None or launch.keep_layout or not launch.fewest_nodes <= num_left:
        return ()
    num_copies, num_ranks = min(placement.min_replicas, num_left), num_left * launch.ranks_per_node
    num_slots = (placement.num_slots_per_rank or 0) * num_ranks
    if num_slots >= num_copies * num_experts:
        return ()
    enough = -(-num_copies * num_experts // num_ranks)
    return (
        f"placement.num_slots_per_rank={placement.num_slots_per_rank}: without one node {num_slots} slots are left, "
        f"too few for {num_copies} copies of {num_experts} experts "
        f"(placement.min_replicas={placement.min_replicas}): while a node is missing, the loss of another one can end "
        f"the job; {enough} slots per rank are enough",
    )


def _unknown_domains(config: JobConfig) -> tuple[str, ...]:
    """What a plan rests on whose nodes are not given yet."""
    source = config.launch.failure_domain_source
    if source == "listed":
        return ()
    return (
        f"launch.failure_domain_source={source}: which nodes share a failure domain is read when the job starts, of "
        "the nodes it has got; this plan takes each node as a domain of its own, so survival and peers may be worse "
        "than shown, and a start with too few domains is refused",
    )


def _unchecked_gpu_memory(config: JobConfig, device: str, needed: int) -> tuple[str, ...]:
    if device != "cuda" or config.launch.gpu_memory_bytes is not None:
        return ()
    return (
        f"GPU memory is not checked: launch.gpu_memory_bytes=null; the largest rank needs {needed / 2**30:.1f} GiB "
        "(activations estimated)",
    )


def _trace(config: JobConfig, inputs: JobInputs) -> RoutingTrace | None:
    if config.model.router != "trace":
        return None
    assert inputs.trace is not None, "forced routing has a recording"
    return RoutingTrace.of(config.model, inputs.trace)


def _stages(
    config: JobConfig, operators: tuple[Operator, ...], data: DataSummary, topology: Topology, device: str
) -> tuple[StagePlan, ...]:
    plans = []
    for stage in range(topology.pipeline_model_parallel_size):
        num_slots = config.placement.num_slots_per_rank if config.placement.algorithm else None
        parameters = parameters_of_stage(config.model, operators, topology, stage, num_slots)
        memory = memory_of_stage(config, parameters, topology, stage, data.vocab_size)
        layers = topology.stage_layers(config.model.num_layers, stage)
        saving = saving_of_stage(config, parameters, topology, device)
        plans.append(
            StagePlan(pipeline_stage=stage, layers=layers, parameters=parameters, memory=memory, saving=saving)
        )
    return tuple(plans)


def _host_bytes_per_node(config: JobConfig, stages: tuple[StagePlan, ...], topology: Topology, device: str) -> int:
    """Largest over nodes: processes, on CPU the ranks' state and activations, and what a save needs.

    A save happens between iterations; what it copied is kept while it is written in the background.
    """

    def host_bytes(rank: int) -> int:
        stage = stages[rank // topology.stage_size]
        kept = stage.saving.snapshot_bytes if config.checkpoint.async_save else 0
        if device == "cuda":
            return PROCESS_BYTES + max(kept, stage.saving.peak_bytes)
        memory = stage.memory
        return PROCESS_BYTES + memory.state_bytes + max(kept + memory.activations_bytes, stage.saving.peak_bytes)

    size = config.launch.ranks_per_node
    return max(
        sum(host_bytes(rank) for rank in range(node * size, (node + 1) * size))
        for node in range(config.launch.num_nodes)
    )
