"""From a configuration and the placement in force to what a job can continue with when nodes are lost."""

from collections.abc import Iterable, Iterator, Sequence

from megatron_ft.config.checks.primitives import show
from megatron_ft.config.inputs import JobInputs
from megatron_ft.config.job import JobConfig
from megatron_ft.config.present_nodes import config_of
from megatron_ft.operators import OperatorId, operators_of
from megatron_ft.planning.cost.memory import expert_state_bytes
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.stage import algorithm_of, first_loads, place_stage, stage_requests
from megatron_ft.planning.recovery.loss_cost import LossCost
from megatron_ft.planning.recovery.losses import HeldOperator, Place, RecoveryMeans, cost_of_loss
from megatron_ft.planning.snapshot.report import SnapshotReport
from megatron_ft.topology import Topology

MAX_PLANNED_NODES = 16
"""Placements of survivors are planned for losses of so many nodes; of others the bytes that move are not told."""


def means_of(
    config: JobConfig,
    plans: Sequence[PlacementPlan],
    snapshot: SnapshotReport | None,
    nodes: Sequence[int] | None = None,
) -> RecoveryMeans:
    """What ``config`` can continue with.

    Args:
        config: of the whole job, derived already, with ``training.device`` decided; ``auto`` counts as ``cpu``.
        plans: the placement in force, of each pipeline stage; empty without replicas.
        snapshot: the estimate of its windows; None without snapshots.
        nodes: those present, ascending; all without it.
    """
    launch = config.launch
    present = tuple(range(launch.num_nodes) if nodes is None else nodes)
    size = launch.ranks_per_node
    of_present = config if len(present) == launch.num_nodes else config_of(config, present)
    topology = Topology.of(of_present.parallel, len(present) * size)
    return RecoveryMeans(
        nodes=present,
        ranks_per_node=size,
        failure_domains=_domains(config, range(max(launch.num_nodes, *(node + 1 for node in present)))),
        stages=tuple(_stages(topology, range(place * size, (place + 1) * size)) for place in range(len(present))),
        operators=tuple(_held(of_present, topology, plans)),
        min_nodes=launch.min_nodes if launch.may_lose_nodes else None,
        uncovered=_uncovered(config),
        placement=plans[0] if len(plans) == 1 else None,
        num_slots_per_rank=config.placement.num_slots_per_rank or 0,
        expert_bytes=expert_state_bytes(config) if config.model.num_moe_experts else 0,
        max_restarts=launch.max_restarts,
        takes_snapshots=snapshot is not None,
        peers=() if snapshot is None else snapshot.peers,
        window_iterations=None if snapshot is None else snapshot.window_iterations,
        interval_iterations=None if snapshot is None else snapshot.interval_iterations,
        persist_interval_windows=config.snapshot.persist_interval_windows,
        save_interval_iterations=config.checkpoint.save_interval_iterations,
        train_iterations=config.training.train_iterations,
        keeps_layout=launch.keep_layout and config.training.device != "cuda",
        commit_lag_iterations=config.upstream_log.commit_lag_iterations,
        num_spare_nodes=launch.num_spare_nodes,
        restarts_lost_nodes=launch.restart_lost_nodes,
        runs_in_slurm=launch.node_launcher != "local",
    )


def why_no_replicas(config: JobConfig) -> str:
    """Why a lost node is never survived by expert replicas, whatever lives on; empty where it can be.

    Args:
        config: with ``training.device`` decided.
    """
    if config.placement.algorithm is None:
        return "placement.algorithm=null"
    if config.launch.min_nodes is None or not config.launch.may_lose_nodes:
        return "launch.min_nodes=null: a lost node ends the job"
    return "; ".join(_uncovered(config))


def idle_copies(config: JobConfig) -> tuple[str, ...]:
    """Copies that a job keeps on other nodes although no recovery from a lost node reads them, each as a sentence."""
    launch, notes = config.launch, []
    if config.placement.state_copies is not None:
        copies = f"placement.state_copies={config.placement.state_copies}"
        notes.append(f"{copies}: no recovery reads these copies; they take memory and time")
    if config.snapshot.policy is not None and config.snapshot.num_peer_copies and not launch.keep_layout:
        after = "a lost node ends the job, and windows in memory with it"
        if not why_no_replicas(config):
            after = "after a lost node the job goes on by replicas, or from a dense checkpoint"
        copies = f"snapshot.num_peer_copies={config.snapshot.num_peer_copies}"
        notes.append(f"{copies}: copies in peers' memory serve where a node's own window is damaged; {after}")
    return tuple(notes)


def windows_serve(config: JobConfig) -> str:
    """Which failures the windows of a job's snapshots serve, in words."""
    launch, snapshot = config.launch, config.snapshot
    served = []
    if launch.keep_layout:
        served.append("stages that lose a rank or a node (launch.keep_layout=true)")
    if launch.max_restarts:
        served.append(f"ranks that die while all nodes live (launch.max_restarts={launch.max_restarts})")
    if snapshot.persist_interval_windows:
        served.append("run.resume, from those on storage, on as many ranks")
    return "; ".join(served) or "no failure: launch.max_restarts=0, and none is written to storage"


def costs_of_nodes(config: JobConfig, means: RecoveryMeans, inputs: JobInputs) -> tuple[LossCost, ...]:
    """What the loss of each present node alone costs; last, where ranks are started again, the death of all ranks."""
    wanted = placer(config, inputs)
    gone = tuple(
        cost_of_loss(means, [node], place=wanted if position < MAX_PLANNED_NODES else None)
        for position, node in enumerate(means.nodes)
    )
    return (*gone, cost_of_loss(means, means.nodes, is_gone=False)) if means.max_restarts else gone


def placer(config: JobConfig, inputs: JobInputs, loads: Sequence[Sequence[float]] | None = None) -> Place:
    """Plans placements of survivors from ``loads`` [layers][experts], or from those that a job starts with."""

    def place(nodes: tuple[int, ...]) -> PlacementPlan:
        remaining = config_of(config, nodes)
        (request,) = stage_requests(remaining, len(nodes) * config.launch.ranks_per_node)
        wanted = first_loads(remaining, request, inputs) if loads is None else loads
        return place_stage(request, algorithm_of(remaining), wanted)[0]

    return place


def _domains(job: JobConfig, nodes: Iterable[int]) -> tuple[str, ...]:
    """Failure domains of nodes by their numbers; those without a name are their own."""
    names = job.launch.failure_domains
    return tuple(names[node] if node < len(names) else f"node{node}" for node in nodes)


def _uncovered(config: JobConfig) -> tuple[str, ...]:
    """Keys with which the ranks of other nodes cannot go on. ``config/checks/survival.py`` refuses them beside
    ``launch.min_nodes``."""
    parallel, launch = config.parallel, config.launch
    wanted: tuple[tuple[str, object, object], ...] = (
        *((("training.device", "cuda", "cpu"),) if config.training.device == "cuda" else ()),
        ("launch.mode", launch.mode, "local"),
        ("parallel.pipeline_model_parallel_size", parallel.pipeline_model_parallel_size, 1),
        ("parallel.tensor_model_parallel_size", parallel.tensor_model_parallel_size, 1),
        ("parallel.context_parallel_size", parallel.context_parallel_size, 1),
        ("parallel.use_distributed_optimizer", parallel.use_distributed_optimizer, False),
        ("placement.state_copies", config.placement.state_copies, None),
    )
    return tuple(f"{key}={show(value)}" for key, value, covered in wanted if value != covered)


def _stages(topology: Topology, ranks: range) -> tuple[int, ...]:
    return tuple(sorted({topology.coordinates(rank).pp for rank in ranks}))


def _held(config: JobConfig, topology: Topology, plans: Sequence[PlacementPlan]) -> Iterator[HeldOperator]:
    """Every operator with the ranks that hold its state: weights, moments and master weights together."""
    sharded = config.parallel.use_distributed_optimizer
    stage_of = _stage_of_layers(config, topology)
    for operator in operators_of(config.model, 1):
        stage = stage_of[operator.id.layer]
        if operator.id.kind == "expert":
            groups = _expert_groups(config, topology, stage, operator.id, plans)
            sharded_here = sharded and not plans
        else:
            groups, sharded_here = _dense_groups(topology, stage), sharded
        parts = [frozenset((rank,)) for group in groups for rank in sorted(group)] if sharded_here else groups
        yield HeldOperator(operator=operator.id, holders=tuple(parts))


def _stage_of_layers(config: JobConfig, topology: Topology) -> dict[int, int]:
    """Stage by layer number; the embedding is in the first, the head in the last."""
    num_layers, num_stages = config.model.num_layers, topology.pipeline_model_parallel_size
    found = {layer: stage for stage in range(num_stages) for layer in topology.stage_layers(num_layers, stage)}
    return {**found, 0: 0, num_layers + 1: num_stages - 1}


def _dense_groups(topology: Topology, stage: int) -> list[frozenset[int]]:
    """Ranks that hold the same tensor-parallel part."""
    ranks = topology.stage_ranks(stage)
    return [
        frozenset(rank for rank in ranks if topology.coordinates(rank).tp == part)
        for part in range(topology.tensor_model_parallel_size)
    ]


def _expert_groups(
    config: JobConfig, topology: Topology, stage: int, operator: OperatorId, plans: Sequence[PlacementPlan]
) -> list[frozenset[int]]:
    """Ranks that hold the same part of an expert: by placement, or as Megatron deals experts out."""
    assert operator.expert is not None, f"{operator} is no expert"
    if plans:
        plan = plans[stage]
        by_rank = plan.slots[plan.layer_numbers.index(operator.layer)]
        return [frozenset(rank for rank, held in zip(plan.ranks, by_rank, strict=True) if operator.expert in held)]
    each = (config.model.num_moe_experts or 1) // topology.expert_model_parallel_size
    first = topology.stage_ranks(stage)[0]
    size = topology.expert_tensor_parallel_size
    owners = [r for r in topology.stage_ranks(stage) if topology.coordinates(r).ep == operator.expert // each]
    return [frozenset(rank for rank in owners if (rank - first) % size == part) for part in range(size)]
