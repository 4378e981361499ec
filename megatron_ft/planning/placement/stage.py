"""Makes the placements of a job's pipeline stages from the loads of experts.

The dry run and every rank call the same functions, so that ranks use the placement that the dry run prints.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import JobInputs, ScheduledPlacement
from megatron_ft.config.serialize import build_policy
from megatron_ft.errors import ConfigError, DataError
from megatron_ft.operators import is_moe_layer
from megatron_ft.planning.placement.algorithm import PlacementAlgorithm
from megatron_ft.planning.placement.allocation import Allocation, allocate
from megatron_ft.planning.placement.layout import Holdings
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.topology import Cluster, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """Ranks, MoE layers, experts and slots of one pipeline stage, from which its placements are planned."""

    cluster: Cluster
    ranks: tuple[int, ...]
    """Ranks of the stage, ascending."""
    layer_numbers: tuple[int, ...]
    """MoE layers of the stage, in Megatron's numbering, ascending."""
    num_experts: int
    num_slots_per_rank: int
    min_replicas: int

    @property
    def domains(self) -> tuple[str, ...]:
        """Failure domain of each rank of the stage."""
        return tuple(self.cluster.failure_domains[self.cluster.node_of(rank)] for rank in self.ranks)

    @property
    def num_domains(self) -> int:
        """Number of failure domains that contain ranks of the stage."""
        return len(set(self.domains))

    def place(
        self, algorithm: PlacementAlgorithm, loads: Sequence[Sequence[float]], previous: Holdings | None = None
    ) -> tuple[PlacementPlan, tuple[Allocation, ...]]:
        """Compute replica counts from ``loads`` [layers][experts] and place the replicas in slots.

        Args:
            previous: experts that the stage's ranks already hold; None if they hold none.

        Raises:
            ConfigError: loads, slots and failure domains do not fit together.
        """
        num_slots = self.num_slots_per_rank * len(self.ranks)
        # A rank has separate slots for each layer.
        allocations = tuple(
            allocate(load, num_slots, self.min_replicas, num_domains=self.num_domains) for load in loads
        )
        plan = algorithm.place(
            [allocation.replica_counts for allocation in allocations],
            self.cluster,
            num_slots_per_rank=self.num_slots_per_rank,
            ranks=self.ranks,
            loads=loads,
            layer_numbers=self.layer_numbers,
            min_replicas=self.min_replicas,
            previous=previous,
        )
        return plan, allocations

    @classmethod
    def of_job(cls, config: JobConfig) -> "list[StageRequest]":
        """Return a placement request for each stage: ranks, MoE layers and slots."""
        topology, model = Topology.of(config.parallel, config.world_size), config.model
        domains = tuple(config.member_domains)
        cluster = Cluster(nodes=config.rank_places, failure_domains=domains, alive=frozenset(range(len(domains))))
        return [
            cls(
                cluster=cluster,
                ranks=tuple(topology.stage_ranks(stage)),
                layer_numbers=tuple(
                    number for number in topology.stage_layers(model.num_layers, stage) if is_moe_layer(model, number)
                ),
                num_experts=model.num_moe_experts or 0,
                num_slots_per_rank=config.placement.num_slots_per_rank or 0,
                min_replicas=config.placement.min_replicas,
            )
            for stage in range(topology.pipeline_model_parallel_size)
        ]

    def with_domains(self, plan: PlacementPlan) -> PlacementPlan:
        """Return ``plan`` with the failure domains of this request; unchanged if the plan is for other ranks."""
        return replace(plan, domains=self.domains) if plan.ranks == self.ranks else plan

    def fits(self, plan: PlacementPlan) -> bool:
        """Whether ``plan`` has the ranks, domains, layers, experts and slots of this request; see ``_check_fit``."""
        try:
            _check_fit(plan, self)
        except ConfigError:
            return False
        return True

    def first_loads(self, config: JobConfig, inputs: JobInputs) -> Sequence[Sequence[float]]:
        """Return a stage's first loads [layers][experts]: the recorded loads, or equal loads if none are recorded.

        Raises:
            ConfigError: the recorded loads do not fit the model.
        """
        if inputs.loads is None:
            return [[1.0] * self.num_experts for _ in self.layer_numbers]
        model = config.model
        numbers = [number for number in range(1, model.num_layers + 1) if is_moe_layer(model, number)]
        by_layer = dict(zip(numbers, inputs.loads.per_layer().tolist(), strict=False))
        for number in self.layer_numbers:
            if len(by_layer.get(number, ())) != self.num_experts:
                raise ConfigError.of(
                    "placement.loads_file",
                    config.placement.loads_file,
                    f"must contain {len(numbers)} MoE layers with {self.num_experts} experts each",
                )
        return [by_layer[number] for number in self.layer_numbers]


def algorithm_of(config: JobConfig) -> PlacementAlgorithm:
    """Build the algorithm from ``placement.algorithm``.

    Raises:
        ConfigError: the class cannot be built, or is not a placement algorithm.
    """
    spec = config.placement.algorithm or {}
    algorithm: PlacementAlgorithm = build_policy("placement.algorithm", spec)
    if not callable(getattr(algorithm, "place", None)):
        raise ConfigError.of("placement.algorithm._target_", spec["_target_"], "must be a class with a method 'place'")
    return algorithm


def first_plans(config: JobConfig, requests: Sequence[StageRequest], inputs: JobInputs) -> list[PlacementPlan]:
    """Return the plans of all stages at the start of a job: the plans in ``placement.schedule`` for iteration 1. If
    there are none, plans are made from recorded loads, or from equal loads if no loads are recorded.

    Raises:
        ConfigError, DataError: recorded loads or a scheduled placement do not fit the job.
    """
    if 1 in inputs.schedule:
        return scripted_plans(requests, inputs.schedule[1])
    algorithm = algorithm_of(config)
    return [request.place(algorithm, request.first_loads(config, inputs))[0] for request in requests]


def scripted_plans(requests: Sequence[StageRequest], scheduled: ScheduledPlacement) -> list[PlacementPlan]:
    """Return the plans of all stages from a file of ``placement.schedule``.

    Raises:
        DataError: a plan is inconsistent or does not fit the job.
    """
    key = f"placement.schedule={scheduled.path}"
    if len(scheduled.stages) != len(requests):
        constraint = f"must be {len(requests)}, the number of pipeline stages"
        raise DataError(f"{key}: number of stages={len(scheduled.stages)}: {constraint}")
    plans = []
    for stage, (content, request) in enumerate(zip(scheduled.stages, requests, strict=True)):
        try:
            # The user has written the file: any error in it is an error of the data, not of this program.
            plan = PlacementPlan.from_json(dict(content))
            _check_fit(plan, request)
        except ConfigError as error:
            raise DataError(f"{key}: stage {stage}: {error}") from None
        except (TypeError, KeyError, ValueError) as error:
            detail = f"{type(error).__name__}: {error}"
            raise DataError(f"{key}: stage {stage}: must have the format of a placement plan ({detail})") from None
        plans.append(plan)
    return plans


def _check_fit(plan: PlacementPlan, request: StageRequest) -> None:
    """Check that a plan has the ranks, domains, layers, experts and slots of ``request``, and that every rank has an
    expert. Raises ConfigError if not."""
    for name in ("ranks", "layer_numbers", "num_experts"):
        found, wanted = getattr(plan, name), getattr(request, name)
        if found != wanted:
            shown = list(found) if isinstance(found, tuple) else found
            raise ConfigError.of(name, shown, f"must be {list(wanted) if isinstance(wanted, tuple) else wanted}")
    if plan.num_slots_per_rank > request.num_slots_per_rank:
        what = f"must be at most placement.num_slots_per_rank={request.num_slots_per_rank}"
        raise ConfigError.of("num_slots_per_rank", plan.num_slots_per_rank, what)
    if plan.domains != request.domains:
        raise ConfigError.of("domains", list(plan.domains), f"must be {list(request.domains)}")
    for layer, by_rank in zip(plan.layer_numbers, plan.slots, strict=True):
        for rank, experts in zip(plan.ranks, by_rank, strict=True):
            if not experts:
                raise ConfigError.of(f"slots of layer {layer}, rank {rank}", [], "must contain at least one expert")
