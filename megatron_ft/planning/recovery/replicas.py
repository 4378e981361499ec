"""Recovery from expert replicas: plans which experts move if ranks are lost, leave or join."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ft.operators import OperatorId
from megatron_ft.planning.placement.layout import Holdings, OtherHoldings
from megatron_ft.planning.placement.migration import MigrationPlan, holdings, remap
from megatron_ft.planning.placement.plan import PlacementPlan, Slots

NO_HOLDER = "no surviving rank holds these operators"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """Reason why a recovery strategy cannot be used."""

    rung: str
    """Name of the strategy."""
    reason: str
    missing: tuple[OperatorId, ...] = ()
    """Operators whose state no surviving rank holds."""

    def summary(self) -> str:
        named = f": {', '.join(map(str, self.missing))}" if self.missing else ""
        return f"{self.rung}: {self.reason}{named}"


def lost_experts(
    plan: PlacementPlan,
    previous_ranks: Sequence[int | None],
    owned: Holdings | None = None,
    others: OtherHoldings | None = None,
) -> tuple[OperatorId, ...]:
    """Return the experts of ``plan`` that none of the surviving ranks ``previous_ranks`` has, nor any of the ranks
    ``others``. Each surviving rank has the experts of ``plan``, or those in ``owned``, ``[layer][rank]``."""
    return tuple(
        OperatorId(layer=number, kind="expert", expert=expert)
        for layer, (number, of_layer) in enumerate(
            zip(plan.layer_numbers, owned or holdings(plan, previous_ranks), strict=True)
        )
        for expert in sorted(
            set(range(plan.num_experts))
            - frozenset().union(*of_layer, *(by_layer[layer] for by_layer in (others or {}).values()))
        )
    )


def plan_replicas(
    plan: PlacementPlan,
    previous_ranks: Sequence[int | None],
    place: Callable[[Holdings], PlacementPlan],
    *,
    num_slots_per_rank: int,
    expert_bytes: int | Sequence[int],
    owned: Holdings | None = None,
    others: OtherHoldings | None = None,
) -> MigrationPlan | Declined:
    """Plan the migration of a stage's experts to a placement on the next membership; ``Declined`` if this is
    impossible.

    Args:
        plan: present placement.
        previous_ranks: rank in ``plan`` of each rank of the stage in the next membership, in order; None for ranks
            without state of the stage.
        place: function that plans the next placement from what ranks hold; it is called only if the job can continue.
        num_slots_per_rank: number of expert slots of a rank in the next membership.
        expert_bytes: bytes of the state of one expert, equal in all layers or one value for each layer.
        owned: experts whose state each rank of the next membership has, ``[layer][rank]``; None if these are the
            experts of ``plan``. The two differ after an interrupted migration.
        others: ranks that leave the stage and hold experts of it.
    """
    if missing := lost_experts(plan, previous_ranks, owned, others):
        return Declined(rung="replicas", reason=NO_HOLDER, missing=missing)
    # Declined here, because ``place`` would raise an error, and the next strategy would not be tried.
    num_slots = num_slots_per_rank * len(previous_ranks)
    if num_slots < plan.num_experts:
        return Declined(
            rung="replicas",
            reason=f"placement.num_slots_per_rank={num_slots_per_rank}: the slots of all ranks, {num_slots}, are fewer "
            f"than the experts, {plan.num_experts}",
        )
    held = holdings(plan, previous_ranks)
    # Planned from ``plan`` also if a migration was interrupted: then the next placement does not depend on how far the
    # migration had come.
    return MigrationPlan.between(remap(place(held), held, expert_bytes), owned or held, expert_bytes, others)


def plan_drain(
    plan: PlacementPlan,
    staying: Sequence[int],
    place: Callable[[Holdings], PlacementPlan],
    *,
    expert_bytes: int | Sequence[int],
) -> MigrationPlan | None:
    """Plan a migration before some ranks leave, so that the staying ranks hold every expert.

    Return None if the staying ranks already hold every expert: other moves can wait until the ranks have left.

    Args:
        plan: present placement.
        staying: ranks of ``plan`` that stay, ascending.
        place: function that plans the placement on the staying ranks from what they hold; it is called only if a
            migration is necessary.
        expert_bytes: bytes of the state of one expert, equal in all layers or one value for each layer.
    """
    if not lost_experts(plan, staying):
        return None
    # Only the staying ranks are rearranged: leaving ones compute with their experts until they have left.
    held = holdings(plan, staying)
    wanted = remap(place(held), held, expert_bytes)
    position = {rank: index for index, rank in enumerate(staying)}
    slots: Slots = tuple(
        tuple(new[position[rank]] if rank in position else kept for rank, kept in zip(plan.ranks, old, strict=True))
        for old, new in zip(plan.slots, wanted.slots, strict=True)
    )
    return MigrationPlan.between(plan.replacing(slots), holdings(plan), expert_bytes)


def share_out(sizes: Mapping[str, int], ranks: Sequence[int]) -> dict[int, tuple[str, ...]]:
    """Distribute tensors for joining ranks over the sending ``ranks``, so that each sends about the same bytes.

    Args:
        sizes: bytes of each tensor, by its name.

    Returns:
        Sorted names of the tensors that each rank sends.
    """
    shares: dict[int, list[str]] = {rank: [] for rank in ranks}
    num_bytes = dict.fromkeys(ranks, 0)
    # The largest first keeps shares even; ties by name and rank, because every rank computes the shares by itself.
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = min(ranks, key=lambda rank: (num_bytes[rank], rank))
        shares[rank].append(name)
        num_bytes[rank] += sizes[name]
    return {rank: tuple(sorted(names)) for rank, names in shares.items()}
