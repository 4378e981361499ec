"""Describes which state the ranks of a new membership have, and which of them need the state of another model part."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_ft.config.job import JobConfig
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.mcore.groups import Collectives, Groups
from megatron_ft.mcore.state.carried import Carried, Shape, shapes_of
from megatron_ft.mcore.state.rank_status import Holding, Key, Previous
from megatron_ft.mcore.state.train_state import TrainState
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.recovery.living_state import StageHolders, lost_experts, stage_holders
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.topology import Topology

Moved = tuple[int, frozenset[tuple[int, int]]]
"""Model part of a rank, and its experts of this part, as pairs (layer number, expert)."""


@dataclass(frozen=True, kw_only=True)  # no slots, for ``cached_property``
class MembershipMove:
    """The ranks of a new membership, and the state that they have from the holding with ``key``."""

    key: Key
    previous: Previous
    former: tuple[int | None, ...]
    """Model part of each rank in the holding; None without state."""
    topology: Topology
    moved: tuple[Moved | None, ...]
    """Experts of each rank in its newest model part; None for the experts of the holding."""
    joining: tuple[int, ...]
    """Nodes whose ranks have no state, except hot spares of the former membership."""

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Model part of each rank in the new membership."""
        return self.topology.model_parts

    @cached_property
    def staying(self) -> frozenset[int]:
        """Ranks that keep their model part."""
        return frozenset(
            rank for rank, (old, new) in enumerate(zip(self.former, self.parts, strict=True)) if old == new
        )

    @property
    def lost_parts(self) -> list[int]:
        """Model parts whose state no rank has."""
        return sorted(set(self.parts) - set(self.former))

    @property
    def reporting_rank(self) -> int:
        """The rank with state that had the lowest number: if it reported before, it knows what is reported already."""
        known = [(former, rank) for rank, former in enumerate(self.previous) if former is not None]
        return min(known)[1]

    def keeps_generators(self, rank: int) -> bool:
        """Return whether a rank keeps its random number generators. The ranks of its TP·CP group must continue together
        for this, because some of their generators must be equal."""
        size = self.topology.tensor_model_parallel_size * self.topology.context_parallel_size
        group = range(rank // size * size, (rank // size + 1) * size)
        before = {None if (former := self.previous[member]) is None else former // size for member in group}
        return self.staying.issuperset(group) and len(before) == 1

    def keeps_stage(self, rank: int) -> bool:
        """Return whether a rank has had state of its pipeline stage."""
        return self._stage(self.former[rank]) == self._stage(self.parts[rank])

    def _stage(self, part: int | None) -> int | None:
        return None if part is None else part // self.topology.tensor_model_parallel_size

    def holders(self, plans: Sequence[PlacementPlan]) -> list[StageHolders]:
        """Return the ranks that hold experts of each stage; ``plans`` are the placements of the holding."""
        found = enumerate(zip(self.moved, self.former, strict=True))
        # ``moved`` is about the newest model part of a rank, which the holding may not be about.
        changed = {rank: moved[1] for rank, (moved, part) in found if moved is not None and moved[0] == part}
        return stage_holders(plans, self.previous, self.topology, changed)

    def is_whole(self, carried: Carried | None, groups: Groups) -> bool:
        """Return whether the ranks with the holding have every expert and every model part. All ranks must call
        this. ``carried`` is the state of this rank."""
        # The first of these ranks has the placement, and decides.
        first, missing = first_of(self.previous), None
        if groups.vote.rank() == first:
            placement = _held(carried, self.key).placement
            if placement is not None:
                holders = self.holders(placement.plans)
                missing = bool(self.lost_parts) or any(
                    lost_experts(plan, held.previous_ranks, held.owned, held.others)
                    for plan, held in zip(placement.plans, holders, strict=True)
                )
        return not Collectives(groups.vote).from_rank(first, missing)

    def share(self, carried: Carried | None, groups: Groups) -> tuple[TrainState, Holding, dict[int, list[Shape]]]:
        """Return the state of this rank's model part besides tensors, the holding and, if ranks lack state, the shapes
        of the tensors of each part. All ranks must call this; ``carried`` is the state of this rank."""
        me = groups.vote.rank()
        # This object is the same on every rank, so all ranks skip the exchange, or none does.
        if len(self.staying) == len(self.parts):
            assert carried is not None, "all ranks must have state, but this rank has none"
            return carried.of_part(self.parts[me])[1], _held(carried, self.key), {}
        senders = {self.former.index(part): part for part in set(self.parts)}
        record = None
        if carried is not None and me in senders:
            state, host = carried.of_part(senders[me])
            about = {"host": host.to_json(own=False), "held": _held(carried, self.key).to_json()}
            record = {**about, "shapes": shapes_of(state)}
        shared = Collectives(groups.vote).gather(record)
        by_part = {part: shared[rank] for rank, part in senders.items()}
        shapes = {part: found["shapes"] for part, found in by_part.items()}
        if carried is not None and me in self.staying:
            return carried.of_part(self.parts[me])[1], _held(carried, self.key), shapes
        own = by_part[self.parts[me]]
        return TrainState.from_json(own["host"]), Holding.from_json(own["held"]), shapes


def first_of(previous: Previous) -> int:
    """Return the first rank with state."""
    return next(rank for rank, former in enumerate(previous) if former is not None)


def _held(carried: Carried | None, key: Key) -> Holding:
    assert carried is not None, "this rank has no state, and so no holding"
    return next(held for held in carried.holdings if held.key == key)


def context_in(context: RankContext, following: NextMembership, config: JobConfig) -> RankContext:
    """Return the context of this process in the membership ``following``, in which it must have a rank. ``config`` is
    the configuration for the nodes of ``following``."""
    rank = following.rank_on(context.node, context.local_rank)
    assert rank is not None, (
        f"local rank {context.local_rank} of node {context.node} is not in the membership {following.summary()}"
    )
    return replace(
        context,
        rank=rank,
        world_size=following.world_size,
        num_nodes=config.launch.num_nodes,
        local_ranks=following.local_ranks,
        members=following.members,
        generation=following.generation,
        master_addr=following.master_addr,
        master_port=following.master_port,
        nodes=following.nodes,
        is_joining=False,
    )
