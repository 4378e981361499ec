"""``JobPlan``: the complete plan of a job, which is made before the job runs."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_ft.config.findings import Findings
from megatron_ft.config.job import JobConfig, LimitsConfig
from megatron_ft.config.membership import JobInputs, derive_placement
from megatron_ft.config.model import PrecisionConfig
from megatron_ft.config.validate import on_device
from megatron_ft.corpus.samples import DataSummary
from megatron_ft.operators import Operator, num_active_parameters, num_parameters, operators_of
from megatron_ft.planning.cost.memory import PROCESS_BYTES, RankMemory, RankParameters, saving_bytes
from megatron_ft.planning.devices import DeviceChoice, other_device
from megatron_ft.planning.iteration import BatchPlan
from megatron_ft.planning.placement.report import PlacementReport
from megatron_ft.planning.recovery.costs import costs_of_nodes, idle_copies, windows_serve
from megatron_ft.planning.recovery.facts import RecoveryFacts
from megatron_ft.planning.recovery.gaps import Gap, find_gaps
from megatron_ft.planning.recovery.layout import config_on
from megatron_ft.planning.recovery.living_state import why_no_replicas
from megatron_ft.planning.recovery.prebuild import (
    PrebuildPlan,
    PrebuildReport,
    bytes_of_parts,
    can_prebuild,
    extra_bytes,
    most_parts,
)
from megatron_ft.planning.recovery.strategy import Cost
from megatron_ft.planning.snapshot.memory import within_limit
from megatron_ft.planning.snapshot.report import SnapshotReport
from megatron_ft.planning.state.declined import Declined
from megatron_ft.planning.trace import RoutingTrace
from megatron_ft.planning.upstream_log import UpstreamLogReport
from megatron_ft.topology import Topology

SLOTS_RATIO = 1.5
"""Largest derived number of replica slots per rank, as a multiple of the number that ``placement.min_replicas``
requires. With this multiple, the busiest rank has hardly more tokens than the mean (``balance`` in docs/claims.md), so
more slots would not make training faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Plan of one pipeline stage; parameters and bytes are those of one rank."""

    pipeline_stage: int
    layers: tuple[int, ...]
    parameters: RankParameters
    memory: RankMemory
    saving_bytes: int
    """Host memory for the copy of the state that a rank writes when it saves a dense checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobMemory:
    """Memory that a job needs on devices and hosts, and the plans from which this memory is computed."""

    stages: tuple[StagePlan, ...]
    snapshot: SnapshotReport | None
    upstream_log: UpstreamLogReport | None
    host_bytes_per_node: int

    @classmethod
    def of(cls, config: JobConfig, data: DataSummary, device: str) -> "_JobMemory":
        topology = Topology.of(config.parallel, config.world_size)
        stages = _stages(config, operators_of(config.model, data.tokenizer_vocab_size), data, topology)
        snapshot = SnapshotReport.of(config, data.tokenizer_vocab_size)
        upstream_log = UpstreamLogReport.of(config, snapshot)
        # Even if ranks train on GPUs, windows and logs are in host memory, in addition to the memory of the processes.
        captured = sum(0 if report is None else report.host_bytes for report in (snapshot, upstream_log))
        unused = 0
        if can_prebuild(config):
            prebuilt = PrebuildPlan.of(config)
            unused = extra_bytes(bytes_of_parts(prebuilt, config, _state_bytes(stages)), prebuilt.num_built)
        return cls(
            stages=stages,
            snapshot=snapshot,
            upstream_log=upstream_log,
            host_bytes_per_node=_host_bytes_per_node(config, stages, topology, device) + captured + unused,
        )

    @property
    def device_bytes(self) -> int:
        """Largest device memory that any rank needs."""
        return max(stage.memory.total_bytes for stage in self.stages)

    def fits(self, limits: LimitsConfig, device: str) -> bool:
        """Return whether the memory is within ``limits``. Device memory is checked only on GPUs."""
        pairs = [(self.host_bytes_per_node, limits.host_memory_bytes)]
        if device == "cuda":
            pairs.append((self.device_bytes, limits.gpu_memory_bytes))
        return all(limit is None or needed <= limit for needed, limit in pairs)


def with_slots(config: JobConfig, device: str, data: Callable[[], DataSummary]) -> tuple[JobConfig, str]:
    """Return ``config`` with all derived values of the placement, and the reason for the number of replica slots per
    rank.

    If ``placement.num_slots_per_rank`` is null, the number of slots is the smallest that ``placement.min_replicas``
    allows. If the memory of the device is limited (``cuda``: ``limits.gpu_memory_bytes``, ``cpu``:
    ``limits.host_memory_bytes``), the number is the largest that fits, up to ``SLOTS_RATIO`` times the smallest. If the
    job may continue without a node, the number must also fit the remaining nodes.

    Args:
        device: ``cpu`` or ``cuda``, already resolved.
        data: function that reads the data of the job; only called if the number depends on the memory.
    """
    derived, placement = derive_placement(config), config.placement
    if placement.algorithm is None or placement.num_slots_per_rank is not None:
        return derived, "" if placement.algorithm is None else "placement.num_slots_per_rank"
    fewest, num_experts = derived.placement.num_slots_per_rank or 0, config.model.num_moe_experts or 0
    key = "gpu_memory_bytes" if device == "cuda" else "host_memory_bytes"
    limit, most = getattr(config.limits, key), min(num_experts, math.ceil(SLOTS_RATIO * fewest))
    replicas = f"placement.min_replicas={placement.min_replicas}"
    reason = f"just enough for {replicas}"
    if limit is None:
        return derived, f"{reason}; if limits.{key} is set, the number can be larger" if most > fewest else reason
    summary = data()
    for num_slots in range(most, fewest, -1):
        larger = derive_placement(replace(config, placement=replace(placement, num_slots_per_rank=num_slots)))
        sizes = [larger]
        if config.fewest_nodes < config.launch.num_nodes:
            smaller = config_on(larger, range(config.launch.num_nodes - 1))
            sizes += [] if isinstance(smaller, Declined) else [smaller]
        if all(_JobMemory.of(size, summary, device).fits(config.limits, device) for size in sizes):
            return larger, f"{fewest} for {replicas}, and {num_slots - fewest} more, which limits.{key} allows"
    return derived, f"{reason}; limits.{key}={limit} allows no more"


def with_prebuilt_parts(config: JobConfig, device: str, data: Callable[[], DataSummary]) -> tuple[JobConfig, str]:
    """Return ``config`` with the number of parts that a spare builds in advance, and the reason for this number. A part
    is the model, gradient buffers and optimizer of all ranks of a node. The arguments are those of ``with_slots``."""
    nodes, limit = config.nodes, config.limits.host_memory_bytes
    if nodes.num_prebuilt_parts is not None:
        return config, "nodes.num_prebuilt_parts"
    if device == "cuda" or not can_prebuild(config):
        return config, ""
    number, reason = 1, "if limits.host_memory_bytes is set, the number can be larger"
    if limit is not None:
        memory = _JobMemory.of(config, data(), device)
        part_bytes = bytes_of_parts(PrebuildPlan.of(config), config, _state_bytes(memory.stages))
        number = most_parts(part_bytes, limit - memory.host_bytes_per_node)
        reason = "as many as fit limits.host_memory_bytes"
    return replace(config, nodes=replace(nodes, num_prebuilt_parts=number)), reason


def _state_bytes(stages: Sequence[StagePlan]) -> tuple[int, ...]:
    return tuple(stage.memory.state_bytes for stage in stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """Plan of a job: layout, parameters, memory, batches, data, and the cost of losses."""

    model: str
    device: str
    formats: str
    """Number formats of weights, of linear layers if these use FP8, and of optimizer state if it is not FP32."""
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
    """Largest estimated host memory that any node needs."""
    gpu_memory_bytes: int | None
    """Largest memory that a rank may use on its GPU (``limits.gpu_memory_bytes``); None for no check."""
    host_memory_bytes: int | None
    """Largest host memory that a node may use (``limits.host_memory_bytes``); None for no check."""
    train_iterations: int
    num_microbatches: int
    """Number of microbatches per iteration over all ranks, without padding."""
    num_microbatches_per_rank: int
    num_padding_microbatches: int
    """Number of padding microbatches per iteration, over all ranks."""
    tokens_per_iteration: int
    data: DataSummary
    placement: PlacementReport | None = None
    """Placement of experts at the start of the job; None without replica slots."""
    num_slots_per_rank: int | None = None
    """Number of replica slots of a rank in each layer; None without replica slots."""
    slots_reason: str = ""
    """Reason for ``num_slots_per_rank``; empty without replica slots."""
    snapshot: SnapshotReport | None = None
    """Estimated size and memory of the snapshot windows; None without snapshots."""
    upstream_log: UpstreamLogReport | None = None
    """Estimated size of the upstream log (sent tensors); None without ``recovery.keep_layout`` or with one stage."""
    prebuilt: PrebuildReport | None = None
    """Parts of the model that spares build in advance; None if spares build nothing."""
    num_prebuilt_parts: int | None = None
    """Value of ``nodes.num_prebuilt_parts``; derived if the key is null."""
    routing: str | None = None
    """Description of the recorded loads that determine routing; None if routing is learned."""
    losses: tuple[Cost, ...] = ()
    """Strategy and cost of the recovery from the loss of each single node, and from the death of all ranks or of all
    processes; empty if not requested."""
    gaps: tuple[Gap, ...] = ()
    """Changes of keys that would improve the recovery from lost nodes; empty if they were not requested."""
    notes: tuple[str, ...] = ()
    """Notes for the user about properties of the job that the configuration does not show directly."""
    device_reason: str = ""
    """Reason for the choice of ``device``."""
    other_device: str = ""
    """Text that states whether the job could run on the device not chosen; empty if the choice is certain."""
    is_refused_there: bool = False
    """Whether the job would be refused on the device that was not chosen."""
    why_no_replicas: str = ""
    """Reason why the job cannot continue from expert replicas after the loss of a node; empty if it can."""
    windows_serve: str = ""
    """Failures after which the job can recover from its snapshot windows; empty without snapshots."""
    gpu_memory_advice: str = ""
    """Suggested changes of the configuration that would lower the GPU memory of a rank."""

    @property
    def device_bytes(self) -> int:
        """Largest device memory that any rank needs."""
        return max(stage.memory.total_bytes for stage in self.stages)

    def validate(self) -> None:
        """Check the plan against the memory limits of the configuration.

        Raises:
            ConfigError: a rank or a node needs more memory than its limit.
        """
        found = Findings()
        with found.collecting(at_fault=()):
            within_limit(
                # On CPU the state of ranks is host memory, which ``host_bytes_per_node`` contains.
                self.gpu_memory_bytes if self.device == "cuda" else None,
                "limits.gpu_memory_bytes",
                self.device_bytes,
                f"the memory of the largest rank (activations estimated); {self.gpu_memory_advice}",
            )
        with found.collecting(at_fault=()):
            within_limit(
                self.host_memory_bytes,
                "limits.host_memory_bytes",
                self.host_bytes_per_node,
                "the memory of a node (estimated); use more nodes, a smaller launch.ranks_per_node or a smaller model",
            )
        found.raise_errors()

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values, with the parallel coordinates of every rank."""
        places = [{"rank": rank, **dataclasses.asdict(place)} for rank, place in self.topology.ranks()]
        named = {"placement": self.placement, "snapshot": self.snapshot, "upstream_log": self.upstream_log}
        reports = {name: None if report is None else report.to_json() for name, report in named.items()}
        return {**dataclasses.asdict(self), **reports, "ranks": places}

    @classmethod
    def of(
        cls,
        config: JobConfig,
        data: DataSummary,
        inputs: JobInputs | None = None,
        *,
        device: str,
        with_losses: bool = False,
        given: JobConfig | None = None,
        choice: DeviceChoice | None = None,
        refused: Mapping[str, str] | None = None,
        slots_reason: str = "",
        prebuilt_reason: str = "",
        memory_is_of_this_machine: bool = False,
    ) -> "JobPlan":
        """Plan the job of a validated configuration.

        Args:
            inputs: contents of the placement and routing files that the configuration names.
            device: ``cpu`` or ``cuda``, already resolved.
            with_losses: whether to compute the cost of losing each node, and warnings about it.
            given: configuration before values were derived, to find keys that improve the recovery from losses; with
                None, ``gaps`` stays empty.
            choice: choice of ``device`` with its reason; None leaves the plan without a reason.
            refused: for each possible device, the reason why it cannot run the configuration; empty if it can.
            slots_reason: reason for ``placement.num_slots_per_rank``, from ``with_slots``.
            prebuilt_reason: reason for ``nodes.num_prebuilt_parts``, from ``with_prebuilt_parts``.
            memory_is_of_this_machine: whether ``limits.gpu_memory_bytes`` was read from this machine instead of given.

        Raises:
            ConfigError: memory limits are exceeded, or inputs do not fit the job.
        """
        assert device in ("cpu", "cuda"), f"device {device!r} is not resolved"
        launch, limits, model, training = config.launch, config.limits, config.model, config.training
        topology = Topology.of(config.parallel, config.world_size)
        operators = operators_of(model, data.tokenizer_vocab_size)
        batch = BatchPlan.of(config, topology)
        memory = _JobMemory.of(config, data, device)
        placement = _placement(config, inputs or JobInputs(), memory.stages)
        trace = _trace(config, inputs or JobInputs())
        snapshot = memory.snapshot
        wrap = None if trace is None else trace.wrap(training.train_iterations)
        losses, warnings = _losses(config, inputs or JobInputs(), placement, snapshot) if with_losses else ((), ())
        gaps: tuple[Gap, ...] = ()
        if given is not None:
            gaps = find_gaps(on_device(given, device), losses, inputs or JobInputs(), data.tokenizer_vocab_size)
        other = "" if choice is None else other_device(choice, refused or {}, config.recovery)
        is_refused_there = choice is not None and not choice.is_certain and any((refused or {}).values())
        plan = cls(
            model=model.name,
            device=device,
            formats=_formats(config.precision),
            num_nodes=launch.num_nodes,
            ranks_per_node=launch.ranks_per_node,
            topology=topology,
            num_parameters=num_parameters(operators),
            num_active_parameters=num_active_parameters(model, operators),
            published_parameters=model.published_parameters,
            published_active_parameters=model.published_active_parameters,
            published_parameters_source=model.published_parameters_source,
            stages=memory.stages,
            host_bytes_per_node=memory.host_bytes_per_node,
            gpu_memory_bytes=limits.gpu_memory_bytes,
            host_memory_bytes=limits.host_memory_bytes,
            train_iterations=training.train_iterations,
            num_microbatches=batch.num_real_microbatches,
            num_microbatches_per_rank=batch.num_microbatches,
            num_padding_microbatches=batch.num_padding_microbatches,
            tokens_per_iteration=training.global_batch_size * model.seq_length,
            data=data,
            placement=placement,
            num_slots_per_rank=None if placement is None else config.placement.num_slots_per_rank,
            slots_reason=slots_reason,
            snapshot=snapshot,
            upstream_log=memory.upstream_log,
            prebuilt=PrebuildReport.of(config, _state_bytes(memory.stages), prebuilt_reason),
            num_prebuilt_parts=config.nodes.num_prebuilt_parts,
            routing=None if trace is None else trace.summary(),
            losses=losses,
            gaps=gaps,
            notes=(
                *(() if placement is None else placement.notes),
                *(() if wrap is None else (wrap,)),
                *_copies_after_a_loss(config),
                *_fewer_lanes(config),
                *_unknown_domains(config),
                *((other,) if is_refused_there else ()),
                *_unchecked_gpu_memory(config, device, memory.device_bytes),
                *idle_copies(config),
                *warnings,
            ),
            device_reason="" if choice is None else choice.reason,
            other_device=other,
            is_refused_there=is_refused_there,
            why_no_replicas=why_no_replicas(config),
            windows_serve="" if snapshot is None else windows_serve(config),
            gpu_memory_advice=_gpu_memory_advice(config, is_of_this_machine=memory_is_of_this_machine),
        )
        plan.validate()
        return plan


def _gpu_memory_advice(config: JobConfig, *, is_of_this_machine: bool) -> str:
    training, parallel = config.training, config.parallel
    sizes = ["parallel.pipeline_model_parallel_size", "parallel.tensor_model_parallel_size"]
    if config.placement.algorithm is None and config.model.num_moe_experts is not None:
        sizes.append("parallel.expert_model_parallel_size")
    changes = [
        f"more ranks with a larger {' or '.join(sizes)}",
        *([] if parallel.use_distributed_optimizer else ["parallel.use_distributed_optimizer=true"]),
        *([] if training.recompute_granularity == "full" else ["training.recompute_granularity=full"]),
        *(["a smaller training.micro_batch_size"] if training.micro_batch_size > 1 else []),
        *(["precision.params_dtype=bf16"] if config.precision.params_dtype == "fp32" else []),
    ]
    whose = " (the limit is the memory of this machine's smallest GPU, by nvidia-smi)" if is_of_this_machine else ""
    return f"use {', or '.join(changes)}{whose}"


def _placement(config: JobConfig, inputs: JobInputs, stages: tuple[StagePlan, ...]) -> PlacementReport | None:
    if config.placement.algorithm is None:
        return None
    return PlacementReport.of(config, inputs, [stage.parameters.num_dense for stage in stages])


def _losses(
    config: JobConfig, inputs: JobInputs, placement: PlacementReport | None, snapshot: SnapshotReport | None
) -> tuple[tuple[Cost, ...], tuple[str, ...]]:
    facts = RecoveryFacts.of(config, () if placement is None else placement.stages, snapshot)
    return costs_of_nodes(facts, inputs), facts.warnings


def _formats(precision: PrecisionConfig) -> str:
    """Return the number formats of a job as text, such as ``bf16; linear layers in fp8 (hybrid, tensorwise)``."""
    parts = [precision.params_dtype]
    if precision.fp8 is not None:
        parts.append(f"linear layers in fp8 ({precision.fp8}, {precision.fp8_recipe})")
    if precision.optimizer_formats is not None:
        master, first, second = precision.optimizer_formats
        parts.append(f"master weights in {master}, moments in {first} and {second}")
    return "; ".join(parts)


def _fewer_lanes(config: JobConfig) -> tuple[str, ...]:
    """Return notes on how a job with ``recovery.keep_layout`` continues if no node can replace a lost node; empty if
    the job must then end."""
    if not (config.recovery.keep_layout and config.may_change_layout):
        return ()
    note = (
        f"recovery.min_nodes={config.recovery.min_nodes}: if no node can replace a lost node, the job continues with "
        "fewer lanes (model replicas). After that, joining nodes add lanes, but even with all "
        f"launch.num_nodes={config.launch.num_nodes} nodes the job does not return to its first layout. Until all "
        "ranks start again on that many nodes, spares do not replace lost nodes, and localized_replay is not possible"
    )
    model = config.model
    if config.snapshot.policy is None or not (model.hidden_dropout or model.attention_dropout):
        return (note,)
    return (
        note,
        "dropout: before a stage replays, its ranks copy their weights and optimizer state, so that they can "
        "continue with fewer lanes if a rank is lost then. Until the replay ends, this state needs twice its memory",
    )


def _copies_after_a_loss(config: JobConfig) -> tuple[str, ...]:
    launch, placement, num_experts = config.launch, config.placement, config.model.num_moe_experts or 0
    num_left = launch.num_nodes - 1
    # A lost node reduces the number of slots only if the job continues on fewer nodes from replicas.
    if placement.algorithm is None or not config.may_change_layout or not config.fewest_nodes <= num_left:
        return ()
    remaining = config_on(config, range(num_left))
    if isinstance(remaining, Declined):
        return ()
    num_ranks = Topology.of(remaining.parallel, remaining.world_size).stage_size
    num_copies = min(placement.min_replicas, num_left)
    num_slots = (placement.num_slots_per_rank or 0) * num_ranks
    if num_slots >= num_copies * num_experts:
        return ()
    enough = min(num_experts, -(-num_copies * num_experts // num_ranks))
    if enough <= (placement.num_slots_per_rank or 0):
        return ()  # each rank has all experts
    of_stage = "" if config.parallel.pipeline_model_parallel_size == 1 else " in each pipeline stage"
    kind = "a node that no other node replaces" if config.recovery.keep_layout else "a node"
    return (
        f"placement.num_slots_per_rank={placement.num_slots_per_rank}: after the loss of {kind} the job has "
        f"{num_slots} slots{of_stage}, too few for {num_copies} replicas of {num_experts} experts "
        f"(placement.min_replicas={placement.min_replicas}). Until a node joins, the next loss can end the job; "
        f"placement.num_slots_per_rank={enough} avoids this",
    )


def _unknown_domains(config: JobConfig) -> tuple[str, ...]:
    source = config.topology.failure_domain_source
    if source == "listed":
        return ()
    return (
        f"topology.failure_domain_source={source}: failure domains are not known before the job has its nodes. This "
        "plan counts every node as a domain; actual joint survival may be lower, and peers may be other nodes. The job "
        "does not start if it has too few domains",
    )


def _unchecked_gpu_memory(config: JobConfig, device: str, needed: int) -> tuple[str, ...]:
    if device != "cuda" or config.limits.gpu_memory_bytes is not None:
        return ()
    return (
        "GPU memory is not checked, because limits.gpu_memory_bytes=null; the largest rank needs "
        f"{needed / 2**30:.1f} GiB (activations estimated)",
    )


def _trace(config: JobConfig, inputs: JobInputs) -> RoutingTrace | None:
    if config.model.router != "trace":
        return None
    assert inputs.trace is not None, "model.router=trace needs recorded loads"
    return RoutingTrace.of(config.model, inputs.trace)


def _stages(
    config: JobConfig, operators: tuple[Operator, ...], data: DataSummary, topology: Topology
) -> tuple[StagePlan, ...]:
    plans = []
    for stage in range(topology.pipeline_model_parallel_size):
        num_slots = config.placement.num_slots_per_rank if config.placement.algorithm else None
        parameters = RankParameters.of_stage(config.model, operators, topology, stage, num_slots)
        memory = RankMemory.of_stage(config, parameters, topology, stage, data.vocab_size)
        layers = topology.stage_layers(config.model.num_layers, stage)
        plans.append(
            StagePlan(
                pipeline_stage=stage,
                layers=layers,
                parameters=parameters,
                memory=memory,
                saving_bytes=saving_bytes(config, parameters, topology),
            )
        )
    return tuple(plans)


def _host_bytes_per_node(config: JobConfig, stages: tuple[StagePlan, ...], topology: Topology, device: str) -> int:
    def host_bytes(rank: int) -> int:
        stage = stages[rank // topology.stage_size]
        # The first save allocates ``saving_bytes``. They are not freed, because later saves use the same memory.
        state = 0 if device == "cuda" else stage.memory.total_bytes
        return PROCESS_BYTES + state + stage.saving_bytes

    totals: dict[int, int] = {}
    for rank, node in enumerate(config.rank_places):
        totals[node] = totals.get(node, 0) + host_bytes(rank)
    return max(totals.values())
