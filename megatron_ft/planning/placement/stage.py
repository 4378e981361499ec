"""The placement of one pipeline stage: from loads to slots, over all its layers."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.planning.placement.algorithm import PlacementAlgorithm
from megatron_ft.planning.placement.allocation import Allocation, allocate
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.topology import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """What does not change from one plan of a stage to the next."""

    cluster: Cluster
    ranks: tuple[int, ...]
    """Ranks of the stage, ascending."""
    layer_numbers: tuple[int, ...]
    """Mixture layers of the stage, Megatron's numbers, ascending."""
    num_experts: int
    num_slots_per_rank: int
    min_replicas: int

    @property
    def num_domains(self) -> int:
        """Failure domains the stage's ranks live in."""
        return len({self.cluster.failure_domains[self.cluster.node_of(rank)] for rank in self.ranks})


def place_stage(
    request: StageRequest, algorithm: PlacementAlgorithm, loads: Sequence[Sequence[float]]
) -> tuple[PlacementPlan, tuple[Allocation, ...]]:
    """Replica counts from ``loads`` [layers][experts], then slots.

    Raises:
        ConfigError: loads, slots and failure domains that do not fit each other.
    """
    num_slots = request.num_slots_per_rank * len(request.ranks)
    allocations = tuple(
        allocate(load, num_slots, request.min_replicas, num_domains=request.num_domains) for load in loads
    )
    plan = algorithm.place(
        [allocation.replica_counts for allocation in allocations],
        request.cluster,
        num_slots_per_rank=request.num_slots_per_rank,
        ranks=request.ranks,
        loads=loads,
        layer_numbers=request.layer_numbers,
    )
    return plan, allocations
