"""What a job's first placement amounts to: slots, survival of its state, bytes of its copies."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_ft.config.inputs import JobInputs
from megatron_ft.config.job import JobConfig
from megatron_ft.errors import ConfigError
from megatron_ft.operators import operators_of
from megatron_ft.planning.cost.memory import BYTES_PER_VALUE, FP32_BYTES
from megatron_ft.planning.placement.copies import NON_EXPERT, StateCopyPlan, plan_copies
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.stage import first_plans, scripted_plans, stage_requests
from megatron_ft.planning.placement.survival import Survival, survival

Domains = frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementReport:
    """The first placement of a job with replica slots.

    Survival is that of all state of a kind together (every expert of every layer, and what is not an expert) when so
    many failure domains are lost at once: 1 up to the replicas that were asked for.
    """

    min_replicas: int
    """Replicas of each expert that were asked for."""
    kept_min_replicas: int
    """Replicas the rarest expert has; fewer than asked for where slots are short."""
    stages: tuple[PlacementPlan, ...]
    weights_survival: tuple[Survival, ...]
    """Of compute weights: where they compute."""
    state_survival: tuple[Survival, ...]
    """Of optimizer state: with computing copies, or in ``num_state_copies``."""
    num_state_copies: int | None
    expert_weights_bytes: int
    """Compute weights of experts on all holders."""
    expert_state_bytes: int
    """Optimizer state of experts with every holder."""
    expert_copies_bytes: int | None
    """Optimizer state of experts in ``num_state_copies`` copies."""
    non_expert_state_bytes: int
    """Optimizer state of all else as data parallelism keeps it: one sharded copy, or one on every rank."""
    non_expert_copies_bytes: int | None
    """The same in ``num_state_copies`` copies."""

    def validate(self) -> None:
        """Every plan holds together.

        Raises:
            ConfigError: one does not.
        """
        for plan in self.stages:
            plan.validate()
        if self.kept_min_replicas < 1:
            raise ConfigError.of("placement.min_replicas", self.kept_min_replicas, "must leave every expert a replica")

    @property
    def num_slots_per_rank(self) -> int:
        """Replica slots of each rank and layer."""
        return self.stages[0].num_slots_per_rank

    @property
    def notes(self) -> tuple[str, ...]:
        """What differs from what was asked for."""
        if self.kept_min_replicas >= self.min_replicas:
            return ()
        asked = f"placement.min_replicas={self.min_replicas}"
        return (f"{asked}: slots are short, the rarest expert has {self.kept_min_replicas}",)


    def to_json(self) -> dict[str, Any]:
        """Plain values; with its ``stages`` it is a file that ``placement.schedule`` can name."""
        stages = [plan.to_json() for plan in self.stages]
        return {"num_slots_per_rank": self.num_slots_per_rank, **asdict(self), "stages": stages}


def optimizer_bytes(config: JobConfig, num_dense: int) -> tuple[int, int]:
    """Optimizer state of one expert, and of a stage's non-expert weights, once; ``num_dense`` of them on each rank."""
    full_precision = BYTES_PER_VALUE[config.precision.params_dtype] == FP32_BYTES
    state_bytes = (2 if full_precision else 3) * FP32_BYTES
    num_parts = config.parallel.tensor_model_parallel_size
    return expert_parameters(config) * state_bytes, num_dense * num_parts * state_bytes


def expert_parameters(config: JobConfig) -> int:
    """Parameters of one routed expert of one layer."""
    operators = operators_of(config.model, 1)
    return next(operator.num_parameters for operator in operators if operator.id.kind == "expert")


def plan_state_copies(config: JobConfig, plan: PlacementPlan, num_dense: int) -> StateCopyPlan | None:
    """Who keeps copies of a stage's optimizer state; None where only the ranks that compute with it keep it.

    Without the distributed optimizer every rank has all of the non-expert state already.
    """
    if config.placement.state_copies is None:
        return None
    expert_bytes, dense_bytes = optimizer_bytes(config, num_dense)
    dense = [(0, dense_bytes)] if config.parallel.use_distributed_optimizer else []
    return plan_copies(plan, config.placement.state_copies, expert_bytes=expert_bytes, non_expert_bytes=dense)


def report_placement(config: JobConfig, inputs: JobInputs, num_dense: Sequence[int]) -> PlacementReport:
    """Plan the first placement of a job with replica slots (derived already), and check every scripted one.

    Args:
        num_dense: parameters that are no experts' on each rank, by pipeline stage.

    Raises:
        ConfigError, DataError: loads or placements that do not fit the job.
    """
    requests = stage_requests(config, config.launch.num_nodes * config.launch.ranks_per_node)
    for scheduled in inputs.schedule.values():
        scripted_plans(requests, scheduled)
    plans = tuple(first_plans(config, requests, inputs))
    stages = [_Stage.of(config, plan, num_dense[stage]) for stage, plan in enumerate(plans)]
    names = tuple(dict.fromkeys(requests[0].cluster.failure_domains))
    lost = range(1, min(config.placement.min_replicas, len(names)) + 1)
    num_copies = config.placement.state_copies
    report = PlacementReport(
        min_replicas=config.placement.min_replicas,
        kept_min_replicas=min(min(plan.replica_counts(layer)) for plan in plans for layer in range(len(plan.slots))),
        stages=plans,
        weights_survival=survival([held for stage in stages for held in stage.weight_holders()], names, lost),
        state_survival=survival([held for stage in stages for held in stage.state_holders()], names, lost),
        num_state_copies=num_copies,
        expert_weights_bytes=sum(stage.num_held * stage.expert_weights_bytes for stage in stages),
        expert_state_bytes=sum(stage.num_held * stage.expert_state_bytes for stage in stages),
        expert_copies_bytes=None if num_copies is None else sum(s.copies_bytes(experts=True) for s in stages),
        non_expert_state_bytes=sum(stage.non_expert_bytes for stage in stages),
        non_expert_copies_bytes=None if num_copies is None else sum(s.copies_bytes(experts=False) for s in stages),
    )
    report.validate()
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """State of one pipeline stage: who holds it, how large it is."""

    plan: PlacementPlan
    num_tensor_parts: int
    """Ranks that split the non-expert weights."""
    sharded: bool
    """Whether each rank keeps a part of the non-expert optimizer state (the distributed optimizer), or all of it."""
    expert_weights_bytes: int
    expert_state_bytes: int
    """Of one expert: moments, and master weights where compute weights are not their own."""
    dense_state_bytes: int
    """Optimizer state of all non-expert weights of the stage, once."""
    copies: StateCopyPlan | None

    @classmethod
    def of(cls, config: JobConfig, plan: PlacementPlan, num_dense: int) -> "_Stage":
        expert_bytes, dense_bytes = optimizer_bytes(config, num_dense)
        copies = plan_state_copies(config, plan, num_dense)
        return cls(
            plan=plan,
            num_tensor_parts=config.parallel.tensor_model_parallel_size,
            sharded=config.parallel.use_distributed_optimizer,
            expert_weights_bytes=expert_parameters(config) * BYTES_PER_VALUE[config.precision.params_dtype],
            expert_state_bytes=expert_bytes,
            dense_state_bytes=dense_bytes,
            copies=copies,
        )

    @property
    def num_held(self) -> int:
        """Sets of expert weights: several slots of a rank with one expert are one."""
        return sum(len(set(experts)) for by_rank in self.plan.slots for experts in by_rank)

    @property
    def non_expert_bytes(self) -> int:
        """Non-expert optimizer state as data parallelism keeps it."""
        num_whole = 1 if self.sharded else len(self.plan.ranks) // self.num_tensor_parts
        return self.dense_state_bytes * num_whole

    def weight_holders(self) -> Iterator[Domains]:
        """Failure domains of every expert, and of every tensor-parallel part of the rest."""
        yield from self.plan.all_expert_domains()
        yield from self._dense_holders()

    def state_holders(self) -> Iterator[Domains]:
        """Failure domains of every shard of optimizer state. Holders of an expert keep all of its state."""
        domain_of = dict(zip(self.plan.ranks, self.plan.domains, strict=True))
        if not self.sharded:
            yield from self._dense_holders()
        if self.copies is None:
            yield from self.plan.all_expert_domains()
            if self.sharded:
                yield from (frozenset((name,)) for name in self.plan.domains)
            return
        holders = iter(self.plan.all_expert_domains())
        for operator in self.copies.operators:
            held = frozenset[str]() if operator.expert == NON_EXPERT else next(holders)
            yield from (held | {domain_of[rank] for rank in owners} for owners in operator.owners)

    def copies_bytes(self, *, experts: bool) -> int:
        """Optimizer state in the copies that were asked for: of experts or of all else."""
        assert self.copies is not None, "there are copies to count"
        return sum(
            operator.shard_bytes(shard) * len(owners)
            for operator in self.copies.operators
            if (operator.expert != NON_EXPERT) == experts
            for shard, owners in enumerate(operator.owners)
        )

    def _dense_holders(self) -> Iterator[Domains]:
        """Tensor-parallel ranks are neighbours: every so many hold the same part."""
        for part in range(self.num_tensor_parts):
            yield frozenset(self.plan.domains[part :: self.num_tensor_parts])
