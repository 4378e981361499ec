"""Report about a job's first placement: slots, probability that all state survives losses of failure domains, and bytes
of state copies."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import JobInputs
from megatron_ft.errors import ConfigError
from megatron_ft.operators import operators_of
from megatron_ft.planning.cost.memory import BYTES_PER_VALUE, expert_state_bytes, optimizer_bytes
from megatron_ft.planning.placement.algorithm import PlacementAlgorithm
from megatron_ft.planning.placement.copies import NON_EXPERT, StateCopyPlan
from megatron_ft.planning.placement.overlap_search import OverlapSearch
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.stage import StageRequest, algorithm_of, first_plans, scripted_plans
from megatron_ft.planning.placement.survival import Survival, survival
from megatron_ft.topology import Topology

Domains = frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementReport:
    """First placement of a job with replica slots.

    Survival is the probability that all state survives: every expert of every layer, and all other state. It is
    computed for the loss of 1, 2, ... failure domains, up to the number of requested replicas.
    """

    min_replicas: int
    """Requested minimum number of replicas of each expert."""
    kept_min_replicas: int
    """Number of replicas of the rarest expert, which is less than requested if there are too few slots."""
    stages: tuple[PlacementPlan, ...]
    weights_survival: tuple[Survival, ...]
    """Probability that all compute weights survive the loss of 1, 2, ... failure domains."""
    state_survival: tuple[Survival, ...]
    """Probability that all optimizer state survives the loss of 1, 2, ... failure domains. If ``num_state_copies`` is
    not None, a shard also survives if only a state copy of it is left."""
    num_state_copies: int | None
    expert_weights_bytes: int
    """Bytes of the compute weights of all expert replicas."""
    expert_state_bytes: int
    """Bytes of the optimizer state of all expert replicas."""
    expert_copies_bytes: int | None
    """Bytes of ``num_state_copies`` copies of the optimizer state of experts."""
    non_expert_state_bytes: int
    """Bytes of the optimizer state of non-expert parameters on all ranks, without ``non_expert_copies_bytes``."""
    non_expert_copies_bytes: int | None
    """Bytes of ``num_state_copies`` copies of the optimizer state of non-expert parameters."""
    rebalance_interval_iterations: int
    """Number of iterations between two plans of the placement; 0 if the placement is planned only once."""
    staged_bytes: int
    """Bytes of the state of one expert. A rank needs this much additional memory during a rebalance."""
    most_moved_bytes: int
    """Most bytes that a rebalance can move. ``overlap_search`` does not move base copies (copies for survival)."""
    most_received_bytes: int
    """Largest number of bytes that one rank receives if a rebalance moves the most possible (``most_moved_bytes``)."""
    rebalance_seconds: float | None
    """Predicted time for which training waits if a rebalance moves the most bytes possible (``most_moved_bytes``); None
    without ``topology.link_bytes_per_second``."""

    def validate(self) -> None:
        """Check the placement of every stage, and that every expert has a replica.

        Raises:
            ConfigError: a plan is inconsistent.
        """
        for plan in self.stages:
            plan.validate()
        if self.kept_min_replicas < 1:
            raise ConfigError.of(
                "placement.min_replicas", self.kept_min_replicas, "must be at least 1: every expert needs a replica"
            )

    @property
    def num_slots_per_rank(self) -> int:
        """Number of replica slots of each rank in each layer."""
        return self.stages[0].num_slots_per_rank

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about differences between the placement and the configuration."""
        if self.kept_min_replicas >= self.min_replicas:
            return ()
        requested = f"placement.min_replicas={self.min_replicas}"
        return (f"{requested}: too few slots; the smallest number of replicas is {self.kept_min_replicas}",)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. A file with these values can be used in ``placement.schedule``."""
        stages = [plan.to_json() for plan in self.stages]
        return {"num_slots_per_rank": self.num_slots_per_rank, **asdict(self), "stages": stages}

    @classmethod
    def of(cls, config: JobConfig, inputs: JobInputs, num_dense: Sequence[int]) -> "PlacementReport":
        """Plan the first placement of a job with replica slots, and check every scheduled placement.

        Args:
            config: configuration with derived values.
            num_dense: number of non-expert parameters on a rank of each pipeline stage.

        Raises:
            ConfigError, DataError: loads or placements do not fit the job.
        """
        requests = StageRequest.of_job(config)
        # All scheduled placements are checked now: a file that does not fit must not end a run after days.
        for scheduled in inputs.schedule.values():
            scripted_plans(requests, scheduled)
        plans = tuple(first_plans(config, requests, inputs))
        stages = [_Stage.of(config, plan, num_dense[stage]) for stage, plan in enumerate(plans)]
        names = tuple(dict.fromkeys(requests[0].cluster.failure_domains))
        lost = range(1, min(config.placement.min_replicas, len(names)) + 1)
        num_copies, speed = config.placement.state_copies, config.topology.link_bytes_per_second
        movable = [_movable_copies(plan, algorithm_of(config), config.placement.min_replicas) for plan in plans]
        # If all movable copies move, every rank receives about the same number.
        received = max(
            sum(-(-num_copies // len(plan.ranks)) for num_copies in copies)
            for plan, copies in zip(plans, movable, strict=True)
        ) * expert_state_bytes(config)
        report = cls(
            min_replicas=config.placement.min_replicas,
            kept_min_replicas=min(
                min(plan.replica_counts(layer)) for plan in plans for layer in range(len(plan.slots))
            ),
            stages=plans,
            weights_survival=survival([held for stage in stages for held in stage.weight_holders()], names, lost),
            state_survival=survival([held for stage in stages for held in stage.state_holders()], names, lost),
            num_state_copies=num_copies,
            expert_weights_bytes=sum(stage.num_held * stage.expert_weights_bytes for stage in stages),
            expert_state_bytes=sum(stage.num_held * stage.expert_state_bytes for stage in stages),
            expert_copies_bytes=None if num_copies is None else sum(s.copies_bytes(experts=True) for s in stages),
            non_expert_state_bytes=sum(stage.non_expert_bytes for stage in stages),
            non_expert_copies_bytes=None if num_copies is None else sum(s.copies_bytes(experts=False) for s in stages),
            rebalance_interval_iterations=config.placement.rebalance_interval,
            staged_bytes=expert_state_bytes(config),
            most_moved_bytes=sum(map(sum, movable)) * expert_state_bytes(config),
            most_received_bytes=received,
            # A rank sends and receives one expert at a time, and the transfers of different ranks overlap.
            rebalance_seconds=None if speed is None else received / speed,
        )
        report.validate()
        return report


def _movable_copies(plan: PlacementPlan, algorithm: PlacementAlgorithm, min_replicas: int) -> list[int]:
    """Return for each layer the largest number of expert replicas that a rebalance may move: all replicas except the
    base copies of ``overlap_search``. If all replicas are base copies, or their number depends on loads
    (``survival_share``), base copies may move, too."""
    counts = [plan.replica_counts(layer) for layer in range(len(plan.slots))]
    base = None
    if isinstance(algorithm, OverlapSearch):
        base = algorithm.base_copies(counts, sum(map(len, plan.slots[0])), min_replicas)
    if base is None or any(len(set(copies)) > 1 for copies in base):
        return [sum(of_layer) for of_layer in counts]
    return [sum(of_layer) - sum(copies) for of_layer, copies in zip(counts, base, strict=True)]


def _optimizer_bytes(config: JobConfig, num_dense: int) -> tuple[int, int]:
    """Return the bytes of optimizer state of one expert, and of all non-expert weights of a stage. A rank of the stage
    has ``num_dense`` non-expert parameters."""
    num_parts = config.parallel.tensor_model_parallel_size
    expert, dense = (optimizer_bytes(config, number) for number in (_expert_parameters(config), num_dense * num_parts))
    return sum(expert), sum(dense)


def _expert_parameters(config: JobConfig) -> int:
    """Return the number of parameters of one routed expert in one layer."""
    operators = operators_of(config.model, 1)
    return next(operator.num_parameters for operator in operators if operator.id.kind == "expert")


def plan_state_copies(config: JobConfig, plan: PlacementPlan, num_dense: int) -> StateCopyPlan | None:
    """Plan the copies of a stage's optimizer state; return None without ``placement.state_copies``."""
    if config.placement.state_copies is None:
        return None
    # Without the distributed optimizer every rank has all non-expert state already.
    expert_bytes, dense_bytes = _optimizer_bytes(config, num_dense)
    dense = [(0, dense_bytes)] if config.parallel.use_distributed_optimizer else []
    return StateCopyPlan.of(plan, config.placement.state_copies, expert_bytes=expert_bytes, non_expert_bytes=dense)


def plan_shard_copies(config: JobConfig, stage: int, num_bytes: int = 0) -> StateCopyPlan | None:
    """Plan the copies of a stage's optimizer shards in a job without replica slots; return None without
    ``placement.state_copies``. ``num_bytes`` are the bytes of the optimizer state of the stage; the owners of shards do
    not depend on them."""
    copies = config.placement.state_copies
    if copies is None:
        return None
    ranks = Topology.of(config.parallel, config.world_size).stage_ranks(stage)
    domains = [config.rank_domains[rank] for rank in ranks]
    return StateCopyPlan.of_shards(ranks, domains, copies, num_bytes=num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """State of one pipeline stage: its number of bytes, and the failure domains that hold each part of the state."""

    plan: PlacementPlan
    num_tensor_parts: int
    """Number of ranks over which tensor parallelism splits the non-expert weights."""
    sharded: bool
    """Whether the non-expert optimizer state is sharded (distributed optimizer)."""
    expert_weights_bytes: int
    expert_state_bytes: int
    """Bytes of the moments of one expert, and of its master weights if they differ from the compute weights."""
    dense_state_bytes: int
    """Bytes of the optimizer state of all non-expert weights of the stage, counted once."""
    copies: StateCopyPlan | None

    @classmethod
    def of(cls, config: JobConfig, plan: PlacementPlan, num_dense: int) -> "_Stage":
        expert_bytes, dense_bytes = _optimizer_bytes(config, num_dense)
        copies = plan_state_copies(config, plan, num_dense)
        return cls(
            plan=plan,
            num_tensor_parts=config.parallel.tensor_model_parallel_size,
            sharded=config.parallel.use_distributed_optimizer,
            expert_weights_bytes=_expert_parameters(config) * BYTES_PER_VALUE[config.precision.params_dtype],
            expert_state_bytes=expert_bytes,
            dense_state_bytes=dense_bytes,
            copies=copies,
        )

    @property
    def num_held(self) -> int:
        """Number of sets of expert weights on all ranks. Several slots of a rank with the same expert share one set."""
        return sum(len(set(experts)) for by_rank in self.plan.slots for experts in by_rank)

    @property
    def non_expert_bytes(self) -> int:
        """Bytes of non-expert optimizer state over all ranks, without additional copies."""
        num_whole = 1 if self.sharded else len(self.plan.ranks) // self.num_tensor_parts
        return self.dense_state_bytes * num_whole

    def weight_holders(self) -> Iterator[Domains]:
        """Yield the failure domains that hold each expert, and each tensor-parallel part of the non-expert weights."""
        yield from self.plan.all_expert_domains()
        yield from self._dense_holders()

    def state_holders(self) -> Iterator[Domains]:
        """Yield the failure domains that hold each shard of optimizer state. Each rank with a replica of an expert has
        the whole optimizer state of this expert."""
        domain_of = dict(zip(self.plan.ranks, self.plan.domains, strict=True))
        if not self.sharded:
            yield from self._dense_holders()
        if self.copies is None:
            yield from self.plan.all_expert_domains()
            if self.sharded:
                yield from (frozenset((name,)) for name in self.plan.domains)
            return
        # ``StateCopyPlan.of`` lists experts in the same order: layer by layer, then by id.
        holders = iter(self.plan.all_expert_domains())
        for operator in self.copies.operators:
            held = frozenset[str]() if operator.expert == NON_EXPERT else next(holders)
            yield from (held | {domain_of[rank] for rank in owners} for owners in operator.owners)

    def copies_bytes(self, *, experts: bool) -> int:
        """Return the bytes of all copies of optimizer state, either of experts or of non-expert parameters."""
        assert self.copies is not None, "no state copies are requested"
        return sum(
            operator.shard_bytes(shard) * len(owners)
            for operator in self.copies.operators
            if (operator.expert != NON_EXPERT) == experts
            for shard, owners in enumerate(operator.owners)
        )

    def _dense_holders(self) -> Iterator[Domains]:
        # Ranks of one tensor-parallel group have adjacent numbers.
        for part in range(self.num_tensor_parts):
            yield frozenset(self.plan.domains[part :: self.num_tensor_parts])
