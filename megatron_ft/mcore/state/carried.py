"""Passes state from one membership to the next. A rank keeps state of its own, sends parts of it to joining ranks, and
receives other state if it changes to another model part."""

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
"""Model part of a rank, and its experts of this part, as pairs (layer number, expert)."""

_ITERATION_STRIDE = 1_000_003
"""Difference between the seeds of ranks that join after consecutive iterations. A seed also contains an offset for the
rank and the pipeline stage. The difference is larger than any such offset, so that no two seeds are equal."""


@dataclass(kw_only=True)
class Carried:
    """A rank's state between two memberships. It does not reference process groups."""

    holdings: tuple[Holding, ...]
    """Records of the placements whose tensors are in ``state`` and ``former``, oldest first."""
    part: int = 0
    """Model part of ``state`` and ``host``, see ``Topology.model_parts``."""
    state: NamedState
    """Copies of this rank's tensors; empty in a job that keeps its layout, because its tensors stay in the engine."""
    host: TrainState
    """State of the rank besides the tensors in ``state`` and ``shards``."""
    former: Mapping[int, tuple[NamedState, TrainState]] = field(default_factory=dict)
    """Tensors and other state of model parts that this rank had in earlier memberships. All of it belongs to the same
    iteration."""
    finished: IterationResult | None
    """Result of an iteration that was finished after the membership had ended and is not reported yet. None if there is
    no such iteration."""
    batch: BatchPlan
    """Batch plan with which the iteration in ``finished`` ran."""
    shards: Shards | None = None
    """Non-expert optimizer state of all model parts if the optimizer is sharded and ranks can change; ``state`` then
    contains no non-expert parameters. It does not depend on the placement, so it belongs to all of ``holdings``."""
    kept: WindowKey | None = None
    """The newest window that was committed, as far as this rank knows; None before the first commit."""
    plan: WindowPlan | None = None
    """Plan of snapshot windows, or None before the first plan."""
    has_moved: bool = False
    """Whether a migration has replaced experts since the placements in ``holdings``. If so, only ``state`` shows the
    experts of this rank."""
    has_whole_weights: bool = True
    """Whether all weights on this rank are up to date. If not, the optimizer is sharded and the newest iteration was
    finished after the membership had ended, so that only this rank's shard of the weights was updated."""
    digests: dict[str, str] | None = None
    """Digest of each tensor, if a replay may have overwritten the tensors in the engine; None if they are intact."""
    before_replay: tuple[NamedState, Shards | None] | None = None
    """Copies of the tensors and shards from before a replay, until the replay has restored them on all ranks; None if
    no copies were made. With them, the job continues with fewer lanes if another rank is lost meanwhile."""

    def after(self, before: "Carried | None") -> "Carried":
        """Return this state together with ``before``, the state with which the rank began the membership. Both are
        after the same iteration. Return ``self`` if ``before`` is None. ``finished`` is taken from ``before``, because
        that result must still be reported."""
        if before is None:
            return self
        earlier = {**before.former, before.part: (before.state, before.host)}
        state, _ = earlier.pop(self.part, ({}, None))
        return replace(
            self,
            holdings=(*before.holdings, *self.holdings),
            state={**state, **self.state},
            former=earlier,
            shards=None if self.shards is None else self.shards.and_also(before.shards),
            host=replace(self.host, stopped=before.host.stopped),
            finished=before.finished,
            batch=before.batch,
        )

    def of_part(self, part: int) -> tuple[NamedState, TrainState]:
        """Return the tensors and the other state of a model part."""
        return (self.state, self.host) if part == self.part else self.former[part]


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipStart:
    """State with which a rank began a membership. It is kept until the membership commits an iteration, in case of a
    failure before that."""

    iteration: int
    carried: Carried | None
    """State from the previous membership; None on a joining rank."""
    changes: tuple[str, ...] = ()
    """``Holding.changes``, including the change to this membership."""
    is_formed: bool = False
    """Whether this rank has received all state that the placement of this membership assigns to it."""

    @property
    def has_state(self) -> bool:
        """Whether the rank has state, for this membership or for the previous one."""
        return self.is_formed or self.carried is not None


def hand_over(
    state: NamedState,
    shapes: Mapping[int, Sequence[Shape]],
    former: Sequence[int | None],
    parts: Sequence[int],
    group: dist.ProcessGroup,
) -> NamedState:
    """Send the non-expert state of each model part to the ranks that lack it. Each rank that has had the part sends a
    share. All ranks of ``group`` must call this.

    Args:
        state: this rank's tensors of its former part; not used on a rank without state.
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
    """Return uninitialized tensors with the names and shapes of one expert's tensors. ``shapes`` are those of all
    tensors of a rank."""
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
    the iteration and the rank. They do not depend on the generation, because memberships that could not be formed must
    have no effect on the results."""
    own = seed + (iteration + 1) * _ITERATION_STRIDE
    random.seed(own + groups.vote.rank())
    np.random.seed((own + groups.vote.rank()) % 2**32)
    seed_rng(own, groups.pg_collection)


@dataclass(frozen=True, kw_only=True)  # no slots, for ``cached_property``
class MembershipMove:
    """The ranks of a new membership, and the state that they have from the holding with ``key``."""

    key: Key
    previous: Previous
    former: tuple[int | None, ...]
    """Model part that each rank has in the holding; None for a rank without state."""
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
        """The rank that had the lowest number in the previous membership. If it was the reporting rank, it knows which
        results it has reported."""
        known = [(former, rank) for rank, former in enumerate(self.previous) if former is not None]
        return min(known)[1]

    def keeps_generators(self, rank: int) -> bool:
        """Return whether a rank keeps its random number generators. It keeps them only if all ranks of its TP·CP group
        stay together, because some of their generators must be equal."""
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
        # ``moved`` describes the newest model part of a rank. If the holding is of another part, it does not apply.
        changed = {rank: moved[1] for rank, (moved, part) in found if moved is not None and moved[0] == part}
        return stage_holders(plans, self.previous, self.topology, changed)

    def is_whole(self, carried: Carried | None, groups: Groups) -> bool:
        """Return whether the ranks with the holding have every expert and every model part. All ranks must call
        this. ``carried`` is the state of this rank."""
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
        """Return three values: the state of this rank's model part besides tensors; the holding; and the shapes of the
        tensors of each part, empty if no rank lacks state. All ranks must call this; ``carried`` is this rank's
        state."""
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
