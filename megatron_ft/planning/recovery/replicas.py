"""Rung 1: the living copies of what was lost. A pure decision over the placement in force and who goes on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_ft.operators import OperatorId
from megatron_ft.planning.placement.migration import MigrationPlan, holdings, plan_migration, remap
from megatron_ft.planning.placement.plan import PlacementPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """Why a rung cannot serve."""

    rung: str
    reason: str
    missing: tuple[OperatorId, ...] = ()
    """Operators of which no state lives."""

    def summary(self) -> str:
        """One log line."""
        named = f": {', '.join(map(str, self.missing))}" if self.missing else ""
        return f"{self.rung}: {self.reason}{named}"


def lost_experts(plan: PlacementPlan, previous_ranks: Sequence[int | None]) -> tuple[OperatorId, ...]:
    """Experts that none of ``previous_ranks``, ranks of ``plan`` that go on, holds."""
    return tuple(
        OperatorId(layer=layer, kind="expert", expert=expert)
        for layer, of_layer in zip(plan.layer_numbers, holdings(plan, previous_ranks), strict=True)
        for expert in sorted(set(range(plan.num_experts)) - frozenset().union(*of_layer))
    )


def plan_replicas(
    plan: PlacementPlan,
    previous_ranks: Sequence[int | None],
    place: Callable[[], PlacementPlan],
    *,
    num_slots_per_rank: int,
    expert_bytes: int | Sequence[int],
) -> MigrationPlan | Declined:
    """What has to move so that the survivors train with a placement of their own, or why they cannot.

    Everything but experts is whole on every rank: this is about experts alone.

    Args:
        plan: the placement in force.
        previous_ranks: for each rank of the next membership, in order, the rank it was under ``plan``; None: no state.
        place: the placement wanted for them; asked where it is needed only.
        num_slots_per_rank: of the next membership.
        expert_bytes: state of one expert, or of one expert of each layer.
    """
    if missing := lost_experts(plan, previous_ranks):
        return Declined(rung="replicas", reason="no living rank holds", missing=missing)
    num_slots = num_slots_per_rank * len(previous_ranks)
    if num_slots < plan.num_experts:
        return Declined(
            rung="replicas",
            reason=f"{len(previous_ranks)} ranks have {num_slots} slots for {plan.num_experts} experts "
            f"(placement.num_slots_per_rank={num_slots_per_rank})",
        )
    held = holdings(plan, previous_ranks)
    return plan_migration(remap(place(), held, expert_bytes), held, expert_bytes)
