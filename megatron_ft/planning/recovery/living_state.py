"""Recovery strategy ``living_state``: the surviving ranks have all state, and continue without going back.

Every rank has the non-expert state, or other nodes have copies of its shards, and experts have replicas. Only experts
move if ranks are lost, leave or join.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from megatron_ft.config.job import JobConfig
from megatron_ft.config.requirements import REPLICAS, Requirement
from megatron_ft.operators import OperatorId
from megatron_ft.planning.cost.memory import expert_state_bytes
from megatron_ft.planning.placement.layout import Holdings
from megatron_ft.planning.placement.migration import MigrationPlan, holdings, remap
from megatron_ft.planning.placement.plan import PlacementPlan, Slots
from megatron_ft.planning.recovery.facts import RecoveryFacts
from megatron_ft.planning.recovery.strategy import NOT_RUNNING, Cost, Loss
from megatron_ft.planning.state.declined import Declined

NO_HOLDER = "no surviving rank holds these operators"


@dataclass(frozen=True, slots=True)
class LivingState:
    """The remaining ranks continue on fewer nodes with the state that they have (``recovery.min_nodes``)."""

    name: ClassVar[str] = "living_state"
    requirements: ClassVar[tuple[Requirement, ...]] = REPLICAS

    def cost(self, loss: Loss, facts: RecoveryFacts) -> Cost | Declined:
        """Compute the cost of the recovery; no iteration runs again."""
        if reason := _why_not(loss, facts):
            return Declined(strategy=self.name, reason=reason)
        # Joint over all operators: the loss of one expert of one layer is enough to end this strategy.
        if loss.missing:
            return Declined(strategy=self.name, reason=NO_HOLDER, missing=loss.missing)
        num_bytes, place = None, loss.place
        if place is not None:
            assert facts.placement is not None, "experts have no replicas, although the requirements are met"
            found = plan_replicas(
                facts.placement,
                sorted(facts.ranks_on(loss.remaining)),
                lambda held: place(loss.remaining, held),
                num_slots_per_rank=facts.config.placement.num_slots_per_rank or 0,
                expert_bytes=expert_state_bytes(facts.config),
            )
            if isinstance(found, Declined):
                return found
            num_bytes = found.num_bytes
        # Fewer ranks add the same numbers in another order.
        return Cost.in_processes(self.name, loss, 0, lost_operators=(), moved_bytes=num_bytes, is_bitwise=False)


def why_no_replicas(config: JobConfig) -> str:
    """Return the reason why the job cannot continue from expert replicas after the loss of a node; empty if it can.

    Args:
        config: configuration of the job, in which ``training.device`` is not ``auto``.
    """
    reasons = Requirement.unmet_values(config, LivingState.requirements)
    if config.recovery.min_nodes is None or not config.may_lose_nodes:
        reasons.append("recovery.min_nodes=null: all nodes are needed")
    return "; ".join(reasons)


def _why_not(loss: Loss, facts: RecoveryFacts) -> str:
    if not facts.is_running:
        return NOT_RUNNING
    if reason := why_no_replicas(facts.config):
        return reason
    assert facts.min_nodes is not None, "min_nodes is null, although it was checked"
    if len(loss.remaining) < facts.min_nodes:
        return f"recovery.min_nodes={facts.min_nodes} is more than the number of remaining nodes, {len(loss.remaining)}"
    return ""


def lost_experts(
    plan: PlacementPlan, previous_ranks: Sequence[int | None], owned: Holdings | None = None
) -> tuple[OperatorId, ...]:
    """Return the experts of ``plan`` that none of the surviving ranks ``previous_ranks`` has. Each rank has the experts
    of ``plan``, or those in ``owned``, ``[layer][rank]``."""
    return tuple(
        OperatorId(layer=layer, kind="expert", expert=expert)
        for layer, of_layer in zip(plan.layer_numbers, owned or holdings(plan, previous_ranks), strict=True)
        for expert in sorted(set(range(plan.num_experts)) - frozenset().union(*of_layer))
    )


def plan_replicas(
    plan: PlacementPlan,
    previous_ranks: Sequence[int | None],
    place: Callable[[Holdings], PlacementPlan],
    *,
    num_slots_per_rank: int,
    expert_bytes: int | Sequence[int],
    owned: Holdings | None = None,
) -> MigrationPlan | Declined:
    """Plan the migration of experts to a placement on the next membership; ``Declined`` if this is impossible.

    Only experts move, because every rank holds all other state.

    Args:
        plan: present placement.
        previous_ranks: rank in ``plan`` of each rank of the next membership, in order; None for ranks without state.
        place: function that plans the next placement from what ranks hold; it is called only if the job can continue.
        num_slots_per_rank: number of expert slots of a rank in the next membership.
        expert_bytes: bytes of the state of one expert, equal in all layers or one value for each layer.
        owned: experts whose state each rank of the next membership has, ``[layer][rank]``; None if these are the
            experts of ``plan``. The two differ after an interrupted migration.
    """
    if missing := lost_experts(plan, previous_ranks, owned):
        return Declined(strategy=LivingState.name, reason=NO_HOLDER, missing=missing)
    # Declined here, because ``place`` would raise an error, and the next strategy would not be tried.
    num_slots = num_slots_per_rank * len(previous_ranks)
    if num_slots < plan.num_experts:
        return Declined(
            strategy=LivingState.name,
            reason=f"placement.num_slots_per_rank={num_slots_per_rank}: the slots of all ranks, {num_slots}, are fewer "
            f"than the experts, {plan.num_experts}",
        )
    held = holdings(plan, previous_ranks)
    # Planned from ``plan`` also if a migration was interrupted: then the next placement does not depend on how far the
    # migration had come.
    return MigrationPlan.between(remap(place(held), held, expert_bytes), owned or held, expert_bytes)


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
