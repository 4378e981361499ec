"""Passes state from one membership to the next. A rank keeps its own state, and sends parts of this state to joining
ranks. A rank that changes to another model part receives the state of that part."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_ft.config.job import JobConfig
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.mcore.groups import Collectives, Groups, exchange_tensors
from megatron_ft.mcore.state.optimizer_shards import Shards
from megatron_ft.mcore.state.rank_status import Holding, Key, Previous
from megatron_ft.mcore.state.tensors import NamedState, by_expert, expert_of
from megatron_ft.mcore.state.train_state import IterationResult, TrainState, seed_rng
from megatron_ft.planning.iteration import BatchPlan
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.recovery.living_state import StageHolders, lost_experts, share_out, stage_holders
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.planning.snapshot.plan import WindowKey, WindowPlan
from megatron_ft.topology import Topology

Shape = tuple[str, str, str, list[int]]
"""Name, dtype, device type and shape of a tensor."""
Moved = tuple[int, frozenset[tuple[int, int]]]
"""Model part of a rank, and the experts of this part that the rank has, as pairs (layer number, expert)."""

_ITERATION_STRIDE = 1_000_003
"""Step by which the seed of a joining rank grows per iteration. An offset for the rank and the pipeline stage is added
to the seed. All offsets are smaller than the step, so no two seeds are equal."""


@dataclass(kw_only=True)
class Carried:
    """A rank's state between two memberships. It does not reference process groups."""

    holdings: tuple[Holding, ...]
    """Records of placements of experts, oldest first. This rank has all state that each of them assigns to it."""
    part: int = 0
    """Model part to which ``state`` and ``host`` belong, see ``Topology.model_parts``."""
    state: NamedState
    """This rank's tensors. With ``shards``, weights of experts that can be rounded from master weights are left out.
    Empty in a job that keeps its layout: there, the tensors stay in the engine."""
    host: TrainState
    """State of the rank besides the tensors in ``state`` and ``shards``."""
    former: Mapping[int, tuple[NamedState, TrainState]] = field(default_factory=dict)
    """``state`` and ``host`` of other model parts, by model part. This rank had these parts in earlier memberships. The
    states are from after the same iteration as ``state``."""
    finished: IterationResult | None
    """Result of an iteration that was finished after the membership had ended and is not reported yet. None if there is
    no such iteration."""
    batch: BatchPlan
    """Batch plan with which the iteration in ``finished`` ran."""
    shards: Shards | None = None
    """Sharded optimizer state of non-expert parameters that this rank has, from all memberships in ``holdings``. If it
    is set, ``state`` lacks these parameters. None if the optimizer is not sharded or the job keeps its layout."""
    kept: WindowKey | None = None
    """Newest committed window that this rank knows; None before the first commit."""
    plan: WindowPlan | None = None
    """Plan of snapshot windows, or None before the first plan."""
    has_moved: bool = False
    """Whether a migration has replaced experts after the placements in ``holdings`` were recorded. If so, only the
    names in ``state`` show which experts this rank has."""
    has_whole_weights: bool = True
    """Whether all compute weights on this rank are up to date. False only if the optimizer is sharded and the newest
    iteration was finished after the membership had ended: then only this rank's shard of the weights was updated."""
    digests: dict[str, str] | None = None
    """Digests of the engine's tensors, by name, from before a replay that may have overwritten these tensors. None if
    no replay has begun, or if the newest replay has succeeded."""
    before_replay: tuple[NamedState, Shards | None] | None = None
    """Copies of tensors and shards, made before a replay and kept until all ranks have finished it. If a rank is lost
    in the replay, the job continues from the copies with fewer model replicas. None without copies."""

    def after(self, before: "Carried | None") -> "Carried":
        """Combine this state with ``before``, the state with which the rank began the membership. Both states must be
        from after the same iteration. ``finished`` is taken from ``before``, because its result must still be reported.
        Return ``self`` if ``before`` is None."""
        if before is None:
            return self
        earlier = {**before.former, before.part: (before.state, before.host)}
        state, _ = earlier.pop(self.part, ({}, None))
        return replace(
            self,
            holdings=(*before.holdings, *self.holdings),
            state={**state, **self.state},
            has_moved=self.has_moved or before.has_moved,
            former=earlier,
            shards=before.shards if self.shards is None else self.shards.and_also(before.shards),
            host=replace(self.host, stopped=before.host.stopped),
            finished=before.finished,
            batch=before.batch,
        )

    def of_part(self, part: int) -> tuple[NamedState, TrainState]:
        """Return the tensors and the ``TrainState`` that this rank has of a model part."""
        return (self.state, self.host) if part == self.part else self.former[part]


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipStart:
    """State with which a rank began a membership, kept until the membership commits an iteration. The tensors are kept
    only until the membership has formed on all ranks, because only a failure before that needs them."""

    iteration: int
    carried: Carried | None
    """State from the previous membership; None on a joining rank."""
    changes: tuple[str, ...] = ()
    """Changes of membership since the newest committed iteration, for ``Holding.changes``. The last change began this
    membership."""
    is_formed: bool = False
    """Whether this rank has received all state that the placement of this membership assigns to it."""

    @property
    def has_state(self) -> bool:
        """Whether the rank has state: all state for this membership, or state from the previous membership."""
        return self.is_formed or self.carried is not None


def hand_over(
    state: NamedState,
    shapes: Mapping[int, Sequence[Shape]],
    former: Sequence[int | None],
    parts: Sequence[int],
    group: dist.ProcessGroup,
) -> NamedState:
    """Send the non-expert state of each model part to the ranks that need it and lack it. All ranks that have the state
    of a model part divide the sending among themselves. All ranks of ``group`` must call this.

    Args:
        state: this rank's tensors, which belong to its former model part; not used on a rank without state.
        shapes: name, dtype, device type and shape of all tensors of one rank, by model part.
        former: for each rank, the model part whose state it has; None if it has no state.
        parts: model part of each rank in the new membership.

    Returns:
        The tensors that this rank has received.
    """
    outgoing: list[list[torch.Tensor]] = [[] for _ in parts]
    incoming: list[list[torch.Tensor]] = [[] for _ in parts]
    received: NamedState = {}
    me = group.rank()
    for part, of_part in sorted(shapes.items()):
        lacking = [rank for rank, wanted in enumerate(parts) if wanted == part != former[rank]]
        rows = {name: row for name, *row in of_part if expert_of(name) is None}
        # Senders and receivers compute the same shares from the same rows, so names need not be sent.
        having = [rank for rank, found in enumerate(former) if found == part]
        shares = share_out({name: _num_bytes(row) for name, row in rows.items()}, having)
        if me in lacking:
            received = {name: _empty(row) for name, row in rows.items()}
            for rank, names in shares.items():
                incoming[rank] = [received[name] for name in names]
        if me in shares:
            for rank in lacking:
                outgoing[rank] = [state[name] for name in shares[me]]
    exchange_tensors(outgoing, incoming, group)
    return received


def expert_like(shapes: Sequence[Shape]) -> NamedState:
    """Return uninitialized tensors, by name, that are like the tensors of the first expert in ``shapes``. ``shapes``
    describes all tensors of a rank."""
    rows = {name: row for name, *row in shapes}
    return {name: _empty(rows[name]) for name in next(iter(by_expert(rows).values()))}


def shapes_of(state: NamedState) -> list[Shape]:
    """Return name, dtype, device type and shape of every tensor, for ``hand_over``."""
    return [
        (name, str(t.dtype).removeprefix("torch."), t.device.type, list(t.shape)) for name, t in sorted(state.items())
    ]


def _empty(row: Sequence[Any]) -> torch.Tensor:
    dtype, device, shape = row
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)


def _num_bytes(row: Sequence[Any]) -> int:
    dtype, _, shape = row
    return math.prod(shape) * int(getattr(torch, dtype).itemsize)


def seed_newcomer(seed: int, iteration: int, groups: Groups) -> None:
    """Seed the random number generators of a rank that joins after ``iteration``. The seeds depend on the run's seed,
    the iteration and the rank. They do not depend on the generation, because memberships that failed to form increase
    the generation and must not change the results."""
    own = seed + (iteration + 1) * _ITERATION_STRIDE
    random.seed(own + groups.vote.rank())
    np.random.seed((own + groups.vote.rank()) % 2**32)
    seed_rng(own, groups.pg_collection)


@dataclass(frozen=True, kw_only=True)  # no slots, for ``cached_property``
class MembershipMove:
    """Describes the change to a new membership, which continues from the state of an earlier one. ``key`` identifies
    this state in the ranks' holdings (records of the state that each rank has)."""

    key: Key
    previous: Previous
    former: tuple[int | None, ...]
    """Model part of each rank's holding with ``key``; None for a rank that lacks this holding."""
    topology: Topology
    moved: tuple[Moved | None, ...]
    """Present model part and experts of each rank, if a migration replaced experts after its holdings were recorded;
    otherwise None."""
    joining: tuple[int, ...]
    """Nodes with a rank that lacks the holding with ``key``, unless it was a hot spare in this holding's membership."""

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Model part of each rank in the new membership."""
        return self.topology.model_parts

    @cached_property
    def staying(self) -> frozenset[int]:
        """Ranks of the new membership that keep the model part of their state."""
        return frozenset(
            rank for rank, (old, new) in enumerate(zip(self.former, self.parts, strict=True)) if old == new
        )

    @property
    def lost_parts(self) -> list[int]:
        """Model parts whose state no rank has."""
        return sorted(set(self.parts) - set(self.former))

    @property
    def reporting_rank(self) -> int:
        """The rank that reports events: among the ranks with state, the one with the lowest former rank number. So the
        former rank 0 still reports if it survives, because it knows which results it has reported."""
        known = [(former, rank) for rank, former in enumerate(self.previous) if former is not None]
        return min(known)[1]

    def keeps_generators(self, rank: int) -> bool:
        """Return whether a rank keeps its random number generators. It keeps them only if all ranks of its TP·CP group
        keep their model part and were in one TP·CP group before, because some generators must be equal in a group."""
        size = self.topology.tensor_model_parallel_size * self.topology.context_parallel_size
        group = range(rank // size * size, (rank // size + 1) * size)
        before = {None if (former := self.previous[member]) is None else former // size for member in group}
        return self.staying.issuperset(group) and len(before) == 1

    def keeps_stage(self, rank: int) -> bool:
        """Return whether a rank's state is of the same pipeline stage as the rank's new model part."""
        return self._stage(self.former[rank]) == self._stage(self.parts[rank])

    def _stage(self, part: int | None) -> int | None:
        return None if part is None else part // self.topology.tensor_model_parallel_size

    def holders(self, plans: Sequence[PlacementPlan]) -> list[StageHolders]:
        """Return, for each pipeline stage, the ranks with state of the stage and the experts that each rank has.
        ``plans`` are the placements of the stages in the holding with ``key``."""
        found = enumerate(zip(self.moved, self.former, strict=True))
        # ``moved`` describes the newest model part of a rank. It does not apply if the holding is of an earlier part.
        changed = {rank: moved[1] for rank, (moved, part) in found if moved is not None and moved[0] == part}
        return stage_holders(plans, self.previous, self.topology, changed)

    def is_whole(self, carried: Carried | None, groups: Groups) -> bool:
        """Return whether the ranks that have the holding with ``key`` together have every expert and every model part.
        All ranks must call this. ``carried`` is the state of this rank."""
        # The first rank with the holding has the placement, so it decides for all ranks.
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
        """Return (train state of this rank's model part, holding with ``key``, shapes). The shapes describe all tensors
        of each model part; they are empty if every rank has state. ``carried`` is this rank's state. All ranks must
        call this."""
        me = groups.vote.rank()
        # All ranks have equal ``staying`` and ``parts``, so all of them skip the exchange, or none does.
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
    """Return the lowest rank of the new membership that has a former rank in ``previous``, and so has state."""
    return next(rank for rank, former in enumerate(previous) if former is not None)


def _held(carried: Carried | None, key: Key) -> Holding:
    assert carried is not None, "this rank has no state, and so no holding"
    return next(held for held in carried.holdings if held.key == key)


def context_in(context: RankContext, following: NextMembership, config: JobConfig) -> RankContext:
    """Return ``context`` with the rank, nodes and addresses of this process in the membership ``following``, which must
    have a rank for this process. ``config`` is the configuration for the nodes of ``following``."""
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
