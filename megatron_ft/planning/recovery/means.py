"""Determines from the configuration and the present placement how a job can recover from the loss of ranks or nodes."""

from collections.abc import Iterable, Iterator, Sequence

from megatron_ft.config.checks.primitives import show
from megatron_ft.config.inputs import JobInputs
from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import config_of
from megatron_ft.config.requirements import KEPT_LAYOUT, REPLICAS, Requirement, value_of
from megatron_ft.operators import OperatorId, operators_of
from megatron_ft.planning.cost.memory import expert_state_bytes
from megatron_ft.planning.placement.copies import NON_EXPERT
from megatron_ft.planning.placement.layout import Holdings
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.report import plan_state_copies
from megatron_ft.planning.placement.stage import StageRequest, algorithm_of
from megatron_ft.planning.recovery.loss_cost import LossCost
from megatron_ft.planning.recovery.losses import HeldOperator, Place, RecoveryMeans
from megatron_ft.planning.snapshot.report import SnapshotReport
from megatron_ft.topology import Topology

MAX_PLANNED_NODES = 16
"""Largest number of nodes for which ``costs_of_nodes`` plans the placement after the loss of that node. For the loss of
any other node, the bytes that move are not computed."""


def means_of(
    config: JobConfig,
    plans: Sequence[PlacementPlan],
    snapshot: SnapshotReport | None,
    nodes: Sequence[int] | None = None,
) -> RecoveryMeans:
    """Determine how a job with ``config`` can recover.

    Args:
        config: configuration of the whole job with derived values; ``training.device=auto`` counts as ``cpu``.
        plans: present placement of each pipeline stage; empty without expert replicas.
        snapshot: estimate of the job's snapshots; None without snapshots.
        nodes: present nodes, ascending; all nodes if None.
    """
    launch, recovery = config.launch, config.recovery
    present = tuple(range(launch.num_nodes) if nodes is None else nodes)
    size = launch.ranks_per_node
    # A job that has lost nodes already holds its state on fewer ranks than it was configured for.
    of_present = config if len(present) == launch.num_nodes else config_of(config, present)
    topology = Topology.of(of_present.parallel, len(present) * size)
    return RecoveryMeans(
        nodes=present,
        ranks_per_node=size,
        failure_domains=_domains(config, range(max(launch.num_nodes, *(node + 1 for node in present)))),
        stages=tuple(_stages(topology, range(place * size, (place + 1) * size)) for place in range(len(present))),
        operators=tuple(_held(of_present, topology, plans)),
        min_nodes=recovery.min_nodes if config.may_change_nodes else None,
        uncovered=_uncovered(config),
        # Recovery from replicas is only possible with one pipeline stage.
        placement=plans[0] if len(plans) == 1 else None,
        num_slots_per_rank=config.placement.num_slots_per_rank or 0,
        expert_bytes=expert_state_bytes(config) if config.model.num_moe_experts else 0,
        max_restarts=recovery.max_restarts,
        takes_snapshots=snapshot is not None,
        peers=() if snapshot is None else snapshot.peers,
        window_iterations=None if snapshot is None else snapshot.window_iterations,
        interval_iterations=None if snapshot is None else snapshot.interval_iterations,
        persist_interval_windows=config.snapshot.persist_interval_windows,
        save_interval_iterations=config.checkpoint.save_interval_iterations,
        train_iterations=config.training.train_iterations,
        keeps_layout=recovery.keep_layout and not Requirement.unmet(config, KEPT_LAYOUT),
        commit_lag_iterations=config.upstream_log.commit_lag_iterations,
        num_spare_nodes=config.nodes.num_spare_nodes,
        restarts_lost_nodes=config.nodes.restart_lost_nodes,
        runs_in_slurm=launch.node_launcher != "local",
    )


def why_no_replicas(config: JobConfig) -> str:
    """Return the reason why the job cannot continue from expert replicas after the loss of a node; empty if it can.

    Args:
        config: configuration of the job, in which ``training.device`` is not ``auto``.
    """
    if config.placement.algorithm is None:
        return "placement.algorithm=null"
    if config.recovery.min_nodes is None or not config.may_change_nodes:
        return "recovery.min_nodes=null: the loss of a node ends the job"
    return "; ".join(_uncovered(config))


def idle_copies(config: JobConfig) -> tuple[str, ...]:
    """Return notes on copies that the job stores on other nodes although no recovery from a lost node uses them."""
    notes = []
    if config.placement.state_copies is not None and why_no_replicas(config):
        copies = f"placement.state_copies={config.placement.state_copies}"
        notes.append(f"{copies}: no recovery uses these copies; they only cost memory and time")
    if config.snapshot.policy is not None and config.snapshot.num_peer_copies and not config.recovery.keep_layout:
        after = "the loss of a node ends the job, and windows in memory are lost with the job"
        if not why_no_replicas(config):
            after = "after the loss of a node the job continues from replicas, or from a dense checkpoint"
        copies = f"snapshot.num_peer_copies={config.snapshot.num_peer_copies}"
        notes.append(f"{copies}: peer copies are only used if a node's own window is damaged; {after}")
    return tuple(notes)


def windows_serve(config: JobConfig) -> str:
    """Describe the failures after which the job can recover from its snapshot windows."""
    recovery, snapshot = config.recovery, config.snapshot
    served = []
    if recovery.keep_layout:
        served.append("the loss of a rank or a node (recovery.keep_layout=true)")
    if recovery.max_restarts:
        served.append(f"the death of ranks on running nodes (recovery.max_restarts={recovery.max_restarts})")
    if snapshot.persist_interval_windows:
        served.append("the end of the job: run.resume with the same number of ranks loads persisted windows")
    return "; ".join(served) or "no failure: recovery.max_restarts=0 and snapshot.persist_interval_windows=0"


def costs_of_nodes(config: JobConfig, means: RecoveryMeans, inputs: JobInputs) -> tuple[LossCost, ...]:
    """Compute the cost of losing each present node alone and, if the job restarts ranks, of the death of all ranks."""
    wanted = placer(config, inputs)
    gone = tuple(
        means.cost_of_loss([node], place=wanted if position < MAX_PLANNED_NODES else None)
        for position, node in enumerate(means.nodes)
    )
    return (*gone, means.cost_of_loss(means.nodes, is_gone=False)) if means.max_restarts else gone


def placer(config: JobConfig, inputs: JobInputs, loads: Sequence[Sequence[float]] | None = None) -> Place:
    """Return a function that plans survivors' placements from ``loads`` [layers][experts], or from the first loads."""

    def place(nodes: tuple[int, ...], held: Holdings) -> PlacementPlan:
        remaining = config_of(config, nodes)
        (request,) = StageRequest.of_job(remaining, len(nodes) * config.launch.ranks_per_node)
        wanted = request.first_loads(remaining, inputs) if loads is None else loads
        return request.place(algorithm_of(remaining), wanted, held)[0]

    return place


def _domains(job: JobConfig, nodes: Iterable[int]) -> tuple[str, ...]:
    names = job.topology.failure_domains
    return tuple(names[node] if node < len(names) else f"node{node}" for node in nodes)


def _uncovered(config: JobConfig) -> tuple[str, ...]:
    # The missing placement algorithm is reported on its own, by ``why_no_replicas`` and ``RecoveryMeans.cost_of_loss``.
    keys = [requirement.key for requirement in Requirement.unmet(config, REPLICAS)]
    return tuple(f"{key}={show(value_of(config, key))}" for key in keys if key != "placement.algorithm")


def _stages(topology: Topology, ranks: range) -> tuple[int, ...]:
    return tuple(sorted({topology.coordinates(rank).pp for rank in ranks}))


def _held(config: JobConfig, topology: Topology, plans: Sequence[PlacementPlan]) -> Iterator[HeldOperator]:
    sharded = config.parallel.use_distributed_optimizer
    stage_of = _stage_of_layers(config, topology)
    is_copied = sharded and config.placement.state_copies is not None
    copied = [_holders_of_copies(config, plan) for plan in plans] if is_copied else []
    # The size of the vocabulary changes how much state there is, not which ranks hold it.
    for operator in operators_of(config.model, 1):
        stage = stage_of[operator.id.layer]
        if operator.id.kind == "expert":
            groups = _expert_groups(config, topology, stage, operator.id, plans)
            sharded_here = sharded and not plans
        else:
            groups, sharded_here = _dense_groups(topology, stage), sharded
        if copied and operator.id.kind != "expert":
            groups, sharded_here = copied[stage], False
        # Each shard of the distributed optimizer is on one rank; otherwise every rank of a group has all of it.
        parts = [frozenset((rank,)) for group in groups for rank in sorted(group)] if sharded_here else groups
        yield HeldOperator(operator=operator.id, holders=tuple(parts))


def _holders_of_copies(config: JobConfig, plan: PlacementPlan) -> list[frozenset[int]]:
    # Returns the ranks that have each shard of the non-expert optimizer state, as the ranks of the job plan them.
    copies = plan_state_copies(config, plan, 0)
    assert copies is not None, "the job makes no copies of optimizer state"
    (non_expert,) = (operator for operator in copies.operators if operator.expert == NON_EXPERT)
    return [frozenset(owners) for owners in non_expert.owners]


def _stage_of_layers(config: JobConfig, topology: Topology) -> dict[int, int]:
    # Stage of each layer number; the embedding is in the first stage, the head in the last.
    num_layers, num_stages = config.model.num_layers, topology.pipeline_model_parallel_size
    found = {layer: stage for stage in range(num_stages) for layer in topology.stage_layers(num_layers, stage)}
    return {**found, 0: 0, num_layers + 1: num_stages - 1}


def _dense_groups(topology: Topology, stage: int) -> list[frozenset[int]]:
    ranks = topology.stage_ranks(stage)
    return [
        frozenset(rank for rank in ranks if topology.coordinates(rank).tp == part)
        for part in range(topology.tensor_model_parallel_size)
    ]


def _expert_groups(
    config: JobConfig, topology: Topology, stage: int, operator: OperatorId, plans: Sequence[PlacementPlan]
) -> list[frozenset[int]]:
    assert operator.expert is not None, f"{operator} is not an expert"
    if plans:
        plan = plans[stage]
        by_rank = plan.slots[plan.layer_numbers.index(operator.layer)]
        return [frozenset(rank for rank, held in zip(plan.ranks, by_rank, strict=True) if operator.expert in held)]
    # Megatron gives each expert-parallel rank a contiguous range of experts.
    each = (config.model.num_moe_experts or 1) // topology.expert_model_parallel_size
    first = topology.stage_ranks(stage)[0]
    size = topology.expert_tensor_parallel_size
    owners = [r for r in topology.stage_ranks(stage) if topology.coordinates(r).ep == operator.expert // each]
    return [frozenset(rank for rank in owners if (rank - first) % size == part) for part in range(size)]
