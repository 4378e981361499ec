"""Recovery strategy ``living_state``: the surviving ranks have all state, and no iteration runs again.

The strategy needs every part of the state on several ranks. All ranks of a model part have its non-expert state, or
other nodes have copies of its optimizer shards; experts have replicas or expert-data-parallel peers. In a job that
keeps its layout, new ranks receive the state of the ranks that they replace (``LocalizedPlan``). In other jobs, experts
and shards move whenever ranks are lost, leave or join, and ranks receive the model part that the new layout gives them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import config_of
from megatron_ft.config.requirements import LIVING_PLACES, REQUIREMENTS, Requirement
from megatron_ft.operators import OperatorId
from megatron_ft.planning.cost.memory import expert_state_bytes
from megatron_ft.planning.placement.layout import Holdings, OtherHoldings
from megatron_ft.planning.placement.migration import MigrationPlan, holdings, remap
from megatron_ft.planning.placement.plan import PlacementPlan, Slots
from megatron_ft.planning.recovery.facts import RecoveryFacts
from megatron_ft.planning.recovery.layout import MembershipLayout
from megatron_ft.planning.recovery.strategy import NOT_RUNNING, Cost, Loss, Place, SavedKind, why_no_replacement
from megatron_ft.planning.state.declined import Declined
from megatron_ft.topology import Topology

NO_HOLDER = "no surviving rank holds these operators"


@dataclass(frozen=True, slots=True)
class LivingState:
    """The remaining ranks continue with the state that they have: on fewer nodes (``recovery.min_nodes``), or together
    with nodes that take the places of lost nodes (``recovery.keep_layout``)."""

    name: ClassVar[str] = "living_state"
    requirements: ClassVar[tuple[Requirement, ...]] = REQUIREMENTS[name]
    reads: ClassVar[tuple[SavedKind, ...]] = ()

    def cost(self, loss: Loss, facts: RecoveryFacts) -> Cost | Declined:
        """Compute the cost of the recovery; no iteration runs again."""
        # A job that keeps its layout continues with fewer lanes only if no node can replace a lost node.
        if facts.has_places and (not why_no_replacement(loss, facts) or not facts.config.may_change_layout):
            return self._cost_in_place(loss, facts)
        if reason := _why_not(loss, facts):
            return Declined(strategy=self.name, reason=reason)
        # All operators are necessary: after the loss of one expert of one layer, this strategy cannot be used.
        if loss.missing:
            return Declined(strategy=self.name, reason=NO_HOLDER, missing=loss.missing)
        num_bytes, sent_bytes = None, None
        if loss.place is not None:
            found = _moved_bytes(loss, facts, loss.place)
            if isinstance(found, Declined):
                return found
            num_bytes, sent_bytes = found
        # Not bitwise: fewer ranks add the same numbers in another order.
        return Cost.in_processes(
            self.name, loss, facts, 0, sent_bytes=sent_bytes, lost_operators=(), moved_bytes=num_bytes, is_bitwise=False
        )

    def _cost_in_place(self, loss: Loss, facts: RecoveryFacts) -> Cost | Declined:
        if reason := why_no_living_places(loss, facts):
            return Declined(strategy=self.name, reason=reason, missing=loss.missing if reason == NO_HOLDER else ())
        received = [facts.received_bytes[stage] for stage in facts.stages_of_ranks(loss.nodes)]
        return Cost.in_processes(
            self.name,
            loss,
            facts,
            0,
            sent_bytes=max(received),
            lost_operators=(),
            moved_bytes=sum(received),
            is_bitwise=True,
        )


def why_no_living_places(loss: Loss, facts: RecoveryFacts) -> str:
    """Return the reason why, in a job that keeps its layout, the ranks in the places of lost ranks cannot receive all
    of their state from living ranks; empty if they can."""
    config = facts.config
    if reason := why_no_replicas(config):
        return reason
    if not facts.is_running:
        return NOT_RUNNING
    if not loss.remaining:
        return "no rank survives"
    if reason := why_no_replacement(loss, facts):
        return reason
    for key in ("hidden_dropout", "attention_dropout"):
        if value := getattr(config.model, key):
            return f"model.{key}={value:g}: the random number generators of lost ranks are not known"
    return NO_HOLDER if loss.missing else ""


def _moved_bytes(loss: Loss, facts: RecoveryFacts, place: Place) -> tuple[int, int] | Declined:
    """Return two numbers of bytes of expert state: the bytes that the remaining ranks send in all stages together, and
    the most bytes that one rank sends or receives for one stage."""
    after = facts.layouts.on(loss.remaining, facts.layout)
    assert facts.placements and isinstance(after, MembershipLayout), "this was checked before"
    topology = Topology.of(config_of(facts.config, after.rank_nodes).parallel, len(after.processes))
    previous = [facts.layout.rank_of(process) for process in after.processes]
    num_bytes = most_bytes = 0
    for stage, held in enumerate(stage_holders(facts.placements, previous, topology)):
        migration = plan_replicas(
            facts.placements[stage],
            held.previous_ranks,
            partial(place, after.rank_nodes, stage),
            num_slots_per_rank=facts.config.placement.num_slots_per_rank or 0,
            expert_bytes=expert_state_bytes(facts.config),
            others=held.others,
        )
        if isinstance(migration, Declined):
            return migration
        num_bytes += migration.num_bytes
        most_bytes = max(most_bytes, migration.most_bytes_of_a_rank)
    return num_bytes, most_bytes


def why_no_replicas(config: JobConfig) -> str:
    """Return the reason why the job can never continue from the state of the remaining ranks (including expert
    replicas) after the loss of a node. Return an empty text if it may be able to continue.

    Args:
        config: configuration of the job, in which ``training.device`` is not ``auto``.
    """
    keeps_layout = config.recovery.keep_layout
    reasons = Requirement.unmet_values(config, LIVING_PLACES if keeps_layout else LivingState.requirements)
    if not config.recovery.may_use(LivingState.name):
        reasons.insert(0, f"recovery.strategies does not contain {LivingState.name}")
    if not keeps_layout and (config.recovery.min_nodes is None or not config.may_change_nodes):
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
    after = facts.layouts.on(loss.remaining, facts.layout)
    return after.reason if isinstance(after, Declined) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageHolders:
    """Ranks of a membership that hold experts of a stage because they were in this stage in the previous membership."""

    previous_ranks: tuple[int | None, ...]
    """Previous rank of each rank of the stage, in order; None if the rank has no state of this stage."""
    owned: Holdings | None = None
    """Experts that each rank of ``previous_ranks`` has; None if they are the experts of the previous placement."""
    others: OtherHoldings
    """Experts of this stage that are on ranks which have changed to another stage."""


def stage_holders(
    plans: Sequence[PlacementPlan],
    previous: Sequence[int | None],
    topology: Topology,
    changed: Mapping[int, Collection[tuple[int, int]]] | None = None,
) -> list[StageHolders]:
    """Return the ranks that hold experts of each stage.

    Args:
        plans: previous placement of each stage.
        previous: for each rank of the membership, its rank in ``plans``; None if it has no state.
        topology: topology of the membership, from which the ranks of each stage follow.
        changed: experts (layer number, expert) of each rank that has other experts than in ``plans``, because a
            migration was interrupted.
    """
    stage_of = {rank: stage for stage, plan in enumerate(plans) for rank in plan.ranks}
    before = [None if rank is None else stage_of[rank] for rank in previous]
    found = []
    for stage, plan in enumerate(plans):
        ranks = topology.stage_ranks(stage)
        staying = [rank for rank in ranks if before[rank] == stage]
        others = [rank for rank, old in enumerate(before) if old == stage and rank not in ranks]

        def experts(rank: int, plan: PlacementPlan = plan) -> tuple[frozenset[int], ...]:
            of_rank = (changed or {}).get(rank)
            if of_rank is None:
                return tuple(of_layer[0] for of_layer in holdings(plan, (previous[rank],)))
            return tuple(frozenset(expert for layer, expert in of_rank if layer == n) for n in plan.layer_numbers)

        nothing = tuple(frozenset[int]() for _ in plan.layer_numbers)
        is_changed = any(rank in (changed or {}) for rank in staying)
        held = [experts(rank) if rank in staying else nothing for rank in ranks]
        found.append(
            StageHolders(
                previous_ranks=tuple(previous[rank] if rank in staying else None for rank in ranks),
                owned=tuple(zip(*held, strict=True)) if is_changed else None,
                others={rank: experts(rank) for rank in others},
            )
        )
    return found


def lost_experts(
    plan: PlacementPlan,
    previous_ranks: Sequence[int | None],
    owned: Holdings | None = None,
    others: OtherHoldings | None = None,
) -> tuple[OperatorId, ...]:
    """Return the experts of ``plan`` that neither the surviving ranks ``previous_ranks`` nor the ranks ``others`` have.
    ``owned``, ``[layer][rank]``, has the experts of surviving ranks; None means the experts in ``plan``."""
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
        previous_ranks: for each rank of the stage in the next membership, in order, its rank in ``plan``; None for
            ranks without state of the stage.
        place: function that plans the next placement from the experts of each rank; called only if no expert is lost.
        num_slots_per_rank: number of expert slots of a rank in the next membership.
        expert_bytes: bytes of the state of one expert, equal in all layers or one value for each layer.
        owned: experts whose state each rank of the next membership has, ``[layer][rank]``; None if these are the
            experts of ``plan``. ``owned`` and ``plan`` differ after an interrupted migration.
        others: ranks that leave the stage and hold experts of it.
    """
    if missing := lost_experts(plan, previous_ranks, owned, others):
        return Declined(strategy=LivingState.name, reason=NO_HOLDER, missing=missing)
    # Checked before ``place`` is called: an error of ``place`` would prevent the next strategy from being tried.
    num_slots = num_slots_per_rank * len(previous_ranks)
    if num_slots < plan.num_experts:
        return Declined(
            strategy=LivingState.name,
            reason=f"placement.num_slots_per_rank={num_slots_per_rank}: the slots of all ranks, {num_slots}, are fewer "
            f"than the experts, {plan.num_experts}",
        )
    held = holdings(plan, previous_ranks)
    # ``place`` gets the experts of ``plan`` even after an interrupted migration, so that the next placement does not
    # depend on the progress of this migration.
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
        place: function that plans the placement on the staying ranks from the experts that they hold; it is called only
            if a migration is necessary.
        expert_bytes: bytes of the state of one expert, equal in all layers or one value for each layer.
    """
    if not lost_experts(plan, staying):
        return None
    # Leaving ranks keep their slots, because they compute with their experts until they have left.
    held = holdings(plan, staying)
    wanted = remap(place(held), held, expert_bytes)
    position = {rank: index for index, rank in enumerate(staying)}
    slots: Slots = tuple(
        tuple(new[position[rank]] if rank in position else kept for rank, kept in zip(plan.ranks, old, strict=True))
        for old, new in zip(plan.slots, wanted.slots, strict=True)
    )
    return MigrationPlan.between(plan.replacing(slots), holdings(plan), expert_bytes)


def share_out(sizes: Mapping[str, int], ranks: Sequence[int]) -> dict[int, tuple[str, ...]]:
    """Divide the tensors for joining ranks among the sending ``ranks``, so that all send about equally many bytes.

    Args:
        sizes: bytes of each tensor, by its name.

    Returns:
        Sorted names of the tensors that each rank sends.
    """
    shares: dict[int, list[str]] = {rank: [] for rank in ranks}
    num_bytes = dict.fromkeys(ranks, 0)
    # Largest tensors first, for even shares. Names and ranks resolve ties, so that every rank finds the same shares.
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = min(ranks, key=lambda rank: (num_bytes[rank], rank))
        shares[rank].append(name)
        num_bytes[rank] += sizes[name]
    return {rank: tuple(sorted(names)) for rank, names in shares.items()}
