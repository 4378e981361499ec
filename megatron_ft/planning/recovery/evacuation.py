"""What moves before nodes leave, so that those that stay hold every expert."""

from collections.abc import Callable, Sequence

from megatron_ft.planning.placement.migration import MigrationPlan, holdings, plan_migration, remap
from megatron_ft.planning.placement.plan import PlacementPlan, Slots
from megatron_ft.planning.recovery.replicas import lost_experts


def plan_evacuation(
    plan: PlacementPlan,
    staying: Sequence[int],
    place: Callable[[], PlacementPlan],
    *,
    expert_bytes: int | Sequence[int],
) -> MigrationPlan | None:
    """Moves to a placement of all ranks that are there, of which ``staying`` hold what they train with next.

    None where the ranks that stay hold every expert already: what is left to move can move when the others have gone.

    Args:
        plan: the placement in force.
        staying: ranks of ``plan`` that stay, rising.
        place: the placement wanted for these alone; asked where it is needed only.
        expert_bytes: state of one expert, or of one expert of each layer.
    """
    if not lost_experts(plan, staying):
        return None
    wanted = remap(place(), holdings(plan, staying), expert_bytes)
    position = {rank: index for index, rank in enumerate(staying)}
    slots: Slots = tuple(
        tuple(new[position[rank]] if rank in position else kept for rank, kept in zip(plan.ranks, old, strict=True))
        for old, new in zip(plan.slots, wanted.slots, strict=True)
    )
    return plan_migration(plan.replacing(slots), holdings(plan), expert_bytes)
