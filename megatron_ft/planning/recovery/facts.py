"""``RecoveryFacts``: facts about a job that determine how it can recover from the loss of ranks or nodes."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import config_of
from megatron_ft.config.requirements import KEPT_LAYOUT, Requirement, value_of
from megatron_ft.operators import OperatorId, operators_of
from megatron_ft.planning.cost.memory import RankMemory, RankParameters
from megatron_ft.planning.placement.copies import NON_EXPERT
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.report import plan_shard_copies, plan_state_copies
from megatron_ft.planning.recovery.layout import JobLayouts, MembershipLayout
from megatron_ft.planning.snapshot.report import SnapshotReport
from megatron_ft.planning.state.declined import Declined
from megatron_ft.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOperator:
    """One operator and the ranks of the present membership that hold its state."""

    operator: OperatorId
    holders: tuple[frozenset[int], ...]
    """Ranks that hold each part of the operator's state."""

    def lives_on(self, ranks: frozenset[int]) -> bool:
        """Whether ``ranks`` together hold every part of the operator's state."""
        return not any(held.isdisjoint(ranks) for held in self.holders)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryFacts:
    """Facts about a job that determine how it can recover."""

    config: JobConfig
    """Configuration of the whole job with derived values; ``training.device=auto`` counts as ``cpu``."""
    nodes: tuple[int, ...]
    """Present nodes, ascending; node numbers never change."""
    failure_domains: tuple[str, ...]
    """Failure domain of each node, by node number."""
    stages: tuple[tuple[int, ...], ...]
    """Pipeline stages in which the ranks of each present node train."""
    operators: tuple[HeldOperator, ...]
    layouts: JobLayouts
    """Layouts that the job can have."""
    layout: MembershipLayout
    """Layout of the present nodes."""
    placements: tuple[PlacementPlan, ...]
    """Present placement of the experts of each stage; empty without expert replicas."""
    snapshot: SnapshotReport | None
    """Estimate of the job's snapshots; None without snapshots."""
    state_bytes: int
    """Bytes of the largest state of any rank, without activations; a vocabulary of unknown size counts as one entry."""
    received_bytes: tuple[int, ...] = ()
    """Bytes of weights, master weights, moments and state copies of a rank, by pipeline stage. A rank that replaces
    a lost rank receives them. A vocabulary of unknown size counts as one entry."""
    is_running: bool = True
    """Whether the job has running ranks, which could continue after a loss."""
    iteration_seconds: float | None = None
    """Duration of an iteration: measured, or ``snapshot.iteration_seconds``; None if it is not known."""
    has_changed_layout: bool = False
    """Whether a job that keeps its layout has at some time had fewer nodes than at its start, after its ranks were
    started. From then on, no node takes the place of a lost node, even if the job has all its nodes again."""
    num_waiting: int | None = None
    """Number of nodes that wait to replace lost nodes, according to the running job. If it is None, every spare that is
    not a member counts as waiting."""
    worn_nodes: tuple[int, ...] = ()
    """Members that are not started again after their next loss, because they were lost too often
    (``nodes.max_node_restarts``), ascending."""

    @classmethod
    def of(
        cls,
        config: JobConfig,
        plans: Sequence[PlacementPlan],
        snapshot: SnapshotReport | None,
        layout: MembershipLayout | None = None,
    ) -> "RecoveryFacts":
        """Determine the facts of a job with ``config``.

        Args:
            config: configuration of the whole job with derived values; ``training.device=auto`` counts as ``cpu``.
            plans: present placement of each pipeline stage; empty without expert replicas.
            snapshot: estimate of the job's snapshots; None without snapshots.
            layout: present layout; None for the layout at the start of the job.
        """
        launch, layouts = config.launch, JobLayouts.of(config)
        if layout is None:
            initial = layouts.on(range(launch.num_nodes))
            assert isinstance(initial, MembershipLayout), "the configured nodes are too few"
            layout = initial
        present = tuple(sorted(layout.nodes))
        # If the job has lost nodes before, fewer ranks than configured hold its state, or ranks are on other nodes.
        is_first = layout.nodes == tuple(range(launch.num_nodes))
        of_present = config if is_first else config_of(config, layout.rank_nodes)
        topology = Topology.of(of_present.parallel, len(layout.processes))
        memories = tuple(_memory(of_present, topology))
        return cls(
            config=config,
            nodes=present,
            failure_domains=_domains(config, range(max(launch.num_nodes, *(node + 1 for node in present)))),
            stages=tuple(_stages(topology, _ranks_on(layout, (node,))) for node in present),
            operators=tuple(_held(of_present, topology, plans)),
            layouts=layouts,
            layout=layout,
            placements=tuple(plans),
            snapshot=snapshot,
            state_bytes=max(memory.state_bytes for memory in memories),
            received_bytes=tuple(map(_received_bytes, memories)),
            iteration_seconds=config.snapshot.iteration_seconds,
        )

    def missing_on(self, ranks: frozenset[int]) -> tuple[OperatorId, ...]:
        """Return the operators whose state is not completely on ``ranks``."""
        # Many operators share one tuple of holders, so each tuple is checked only once. Tuples are identified by their
        # ids, because hashing a tuple would take as long as checking it.
        lives = {id(held.holders): held for held in self.operators}
        lost = {key for key, held in lives.items() if not held.lives_on(ranks)}
        return tuple(held.operator for held in self.operators if id(held.holders) in lost) if lost else ()

    @property
    def min_nodes(self) -> int | None:
        """Return the smallest number of nodes with which the job continues; None if it needs all nodes."""
        return self.config.recovery.min_nodes if self.config.may_change_layout else None

    @property
    def keeps_layout(self) -> bool:
        """Return whether the configuration lets other nodes replace lost nodes, so that the job keeps its layout."""
        return self.config.recovery.keep_layout and not Requirement.unmet(self.config, KEPT_LAYOUT)

    @property
    def has_places(self) -> bool:
        """Return whether other nodes can take the places of lost nodes in the present layout: the job keeps its layout,
        and has always had as many nodes as at its start."""
        is_full = len(self.layout.nodes) == self.config.launch.num_nodes
        return self.config.recovery.keep_layout and is_full and not self.has_changed_layout

    @property
    def num_spare_nodes(self) -> int:
        """Return the number of nodes that wait to take the place of a lost node."""
        if self.num_waiting is not None:
            return self.num_waiting
        first = self.config.launch.num_nodes
        return max(0, self.config.nodes.num_spare_nodes - sum(node >= first for node in self.layout.nodes))

    @property
    def shares_machine(self) -> bool:
        """Return whether all ranks compute on the cores of one machine, so that some are faster while others wait."""
        return self.config.launch.node_launcher == "local" and self.config.training.device != "cuda"

    def can_replace(self, lost: Collection[int]) -> bool:
        """Return whether spares or restarted nodes can take the places of the nodes ``lost``."""
        num_returning = len(set(lost).difference(self.worn_nodes)) if self.config.nodes.restart_lost_nodes else 0
        return self.has_places and len(lost) <= num_returning + self.num_spare_nodes

    @property
    def num_written_windows(self) -> int:
        """Return n if every n-th captured window is written to storage; at least 1."""
        return self.config.snapshot.windows_per_file

    def window_bound(self, num_windows: int) -> int | None:
        """Return the largest number of iterations that a recovery from the newest usable window runs again, if only
        every ``num_windows``-th window is usable. Return None if the size of a window is not measured yet."""
        if self.snapshot is None or self.snapshot.window_iterations is None:
            return None
        interval = self.snapshot.interval_iterations
        assert interval is not None, "interval_iterations must be given with window_iterations"
        # In the worst case the failure comes just before the commit of the next window.
        return num_windows * interval + self.snapshot.window_iterations

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """Return the keys that are null but are necessary to compute the size of a window."""
        keys = ("snapshot.bandwidth_bytes_per_second", "snapshot.iteration_seconds")
        return tuple(f"{key}=null" for key in keys if value_of(self.config, key) is None)

    def peers_of(self, node: int) -> tuple[int, ...]:
        """Return the nodes that store copies of the windows of ``node``."""
        if self.snapshot is None or not self.snapshot.peers:
            return ()
        # A node that has taken the place of a lost node has the peers of this place.
        members = self.layout.nodes
        return tuple(members[place] for place in self.snapshot.peers[members.index(node)])

    def without_copies(self, lost: Iterable[int], remaining: Iterable[int]) -> list[int]:
        """Return the nodes in ``lost`` whose windows have no copy on a node in ``remaining``."""
        left = set(remaining)
        return [node for node in lost if not left & set(self.peers_of(node))]

    def ranks_without(self, lost: Collection[int]) -> frozenset[int]:
        """Return the ranks that continue without the nodes ``lost``. If no layout exists without these nodes, return
        all ranks on the remaining nodes."""
        remaining = [node for node in self.nodes if node not in lost]
        living = _ranks_on(self.layout, remaining)
        if self.min_nodes is None or self.can_replace(lost):
            return living
        after = self.layouts.on(remaining, self.layout)
        if isinstance(after, Declined):
            return living
        # Processes without a rank in the next membership are hot spares, whose state is not used.
        return frozenset(rank for rank in living if after.rank_of(self.layout.processes[rank]) is not None)

    def stages_of(self, nodes: Iterable[int]) -> tuple[int, ...]:
        """Return the pipeline stages in which the ranks on ``nodes`` train, ascending."""
        return tuple(sorted({stage for node in nodes for stage in self.stages[self.nodes.index(node)]}))

    def stages_of_ranks(self, nodes: Collection[int]) -> tuple[int, ...]:
        """Return the pipeline stage of each rank on ``nodes``."""
        stage_size = len(self.layout.rank_nodes) // self.config.parallel.pipeline_model_parallel_size
        return tuple(rank // stage_size for rank in sorted(_ranks_on(self.layout, nodes)))

    def stages_with(self, operators: Iterable[OperatorId]) -> frozenset[int]:
        """Return the pipeline stages that contain ``operators``."""
        topology = Topology.of(self.config.parallel, len(self.layout.rank_nodes))
        stage_of = _stage_of_layers(self.config, topology)
        return frozenset(stage_of[operator.layer] for operator in operators)

    def domain_of(self, node: int) -> str:
        """Return the failure domain of ``node``."""
        return self.failure_domains[node]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return notes about nodes that span several stages, and nodes with a peer in their own failure domain."""
        spans = [
            f"node {node} spans pipeline stages {', '.join(map(str, stages))}: its loss affects all of them"
            for node, stages in zip(self.nodes, self.stages, strict=True)
            if len(stages) > 1
        ]
        shared = [
            f"node {node} and its peer, node {peer}, are in the same failure domain {self.domain_of(node)}"
            for node in self.nodes
            for peer in self.peers_of(node)
            if self.domain_of(peer) == self.domain_of(node)
        ]
        return (*spans, *shared)


def _domains(job: JobConfig, nodes: Iterable[int]) -> tuple[str, ...]:
    names = job.topology.failure_domains
    return tuple(names[node] if node < len(names) else f"node{node}" for node in nodes)


def _ranks_on(layout: MembershipLayout, nodes: Collection[int]) -> frozenset[int]:
    return frozenset(rank for rank, node in enumerate(layout.rank_nodes) if node in nodes)


def _memory(config: JobConfig, topology: Topology) -> Iterator[RankMemory]:
    # Yields the memory of a rank of each stage.
    vocab_size = config.model.vocab_size or 1
    operators = operators_of(config.model, vocab_size)
    num_slots = config.placement.num_slots_per_rank if config.placement.algorithm else None
    for stage in range(topology.pipeline_model_parallel_size):
        parameters = RankParameters.of_stage(config.model, operators, topology, stage, num_slots)
        yield RankMemory.of_stage(config, parameters, topology, stage, vocab_size)


def _received_bytes(memory: RankMemory) -> int:
    # A quarter of the bytes of copies are gradients, which are not sent.
    return memory.weights_bytes + memory.master_bytes + memory.moments_bytes + memory.copies_bytes * 3 // 4


def _stages(topology: Topology, ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({topology.coordinates(rank).pp for rank in ranks}))


def _held(config: JobConfig, topology: Topology, plans: Sequence[PlacementPlan]) -> Iterator[HeldOperator]:
    sharded = config.parallel.use_distributed_optimizer
    stage_of = _stage_of_layers(config, topology)
    is_copied = sharded and config.placement.state_copies is not None
    all_stages = range(topology.pipeline_model_parallel_size)
    copied_stages = all_stages if is_copied else ()
    copied = [_holders_of_copies(config, stage, plans[stage] if plans else None) for stage in copied_stages]
    # The size of the vocabulary changes how much state there is, not which ranks hold it. Operators with the same
    # holders share one tuple, so that ``missing_on`` checks it only once for all of them.
    known: dict[tuple[int, int | None], tuple[frozenset[int], ...]] = {}
    # Megatron gives each expert-parallel rank a contiguous range of experts.
    each = max(1, (config.model.num_moe_experts or 1) // topology.expert_model_parallel_size)
    owners_of = [topology.expert_parallel_ranks(topology.stage_ranks(stage)) for stage in all_stages]
    for operator in operators_of(config.model, 1):
        stage = stage_of[operator.id.layer]
        key = (stage, None if operator.id.expert is None else operator.id.expert // each)
        if key in known:
            yield HeldOperator(operator=operator.id, holders=known[key])
            continue
        if operator.id.expert is not None and plans:
            # The placement states which ranks hold an expert. Each rank may hold any number of experts.
            groups, sharded_here = _slot_groups(plans[stage], operator.id), False
        elif operator.id.expert is not None:
            owners = owners_of[stage][operator.id.expert // each]
            groups, sharded_here = _expert_groups(topology, stage, owners), sharded
        else:
            groups, sharded_here = _dense_groups(topology, stage), sharded
        if copied and operator.id.kind != "expert":
            # Copies contain no weights. The weights of a tensor part are only on the ranks of this part.
            groups, sharded_here = [*copied[stage], *groups], False
        elif copied and not plans:
            # Weights of experts need no holder: they are computed by rounding the master weights in the shards.
            first = topology.stage_ranks(stage)[0]
            owners = sorted(rank for group in groups for rank in group)
            groups, sharded_here = [copied[stage][rank - first] for rank in owners], False
        # Each shard of the distributed optimizer is on one rank; other state is on every rank of its group.
        parts = [frozenset((rank,)) for group in groups for rank in sorted(group)] if sharded_here else groups
        holders = tuple(parts)
        # In replica slots, the holders of an expert also depend on its layer.
        if operator.id.expert is None or not plans:
            known[key] = holders
        yield HeldOperator(operator=operator.id, holders=holders)


def _holders_of_copies(config: JobConfig, stage: int, plan: PlacementPlan | None) -> list[frozenset[int]]:
    # Returns the ranks that have a copy of the optimizer shard of each rank of a stage, planned as in the running job.
    # With a placement, shards do not contain the state of experts.
    copies = plan_shard_copies(config, stage) if plan is None else plan_state_copies(config, plan, 0)
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


def _slot_groups(plan: PlacementPlan, operator: OperatorId) -> list[frozenset[int]]:
    by_rank = plan.slots[plan.layer_numbers.index(operator.layer)]
    return [frozenset(rank for rank, held in zip(plan.ranks, by_rank, strict=True) if operator.expert in held)]


def _expert_groups(topology: Topology, stage: int, owners: Sequence[int]) -> list[frozenset[int]]:
    first = topology.stage_ranks(stage)[0]
    size = topology.expert_tensor_parallel_size
    return [frozenset(rank for rank in owners if (rank - first) % size == part) for part in range(size)]
