"""The state that a rank keeps from one membership to the next, and the part that it sends to joining ranks."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megatron_ft.mcore.groups import Groups, exchange_tensors
from megatron_ft.mcore.state.optimizer_shards import Shards
from megatron_ft.mcore.state.rank_status import Holding
from megatron_ft.mcore.state.tensors import NamedState, by_expert, expert_of
from megatron_ft.mcore.state.train_state import IterationResult, TrainState, seed_rng
from megatron_ft.planning.iteration import BatchPlan
from megatron_ft.planning.recovery.living_state import share_out
from megatron_ft.planning.snapshot.plan import WindowKey, WindowPlan

Shape = tuple[str, str, str, list[int]]
"""Name, dtype, device type and shape of a tensor."""

_ITERATION_STRIDE = 1_000_003
"""Difference between the seeds of ranks that join after consecutive iterations. It is larger than the numbers that are
added to a seed for ranks and pipeline stages, so that no two seeds are equal."""


@dataclass(kw_only=True)
class Carried:
    """A rank's state between two memberships. It does not reference process groups."""

    holdings: tuple[Holding, ...]
    """Records of the placements whose tensors are in ``state``, oldest first."""
    state: NamedState
    host: TrainState
    """State of the rank besides the tensors in ``state`` and ``shards``."""
    finished: IterationResult | None
    """Result of the iteration that was finished after the membership had ended, and that is not reported yet. None if
    there is no such iteration."""
    batch: BatchPlan
    """Batch plan with which the iteration in ``finished`` ran."""
    shards: Shards | None = None
    """Non-expert optimizer state if the optimizer is sharded and ranks can change; ``state`` then contains no
    non-expert parameters. It does not depend on the placement, so it belongs to all of ``holdings``."""
    kept: WindowKey | None = None
    """The newest window that was committed, as far as this rank knows; None before the first commit."""
    plan: WindowPlan | None = None
    """Plan of snapshot windows, or None before the first plan."""
    has_moved: bool = False
    """Whether a migration has replaced experts since the placements in ``holdings``, so that only ``state`` shows which
    experts this rank has."""
    has_whole_weights: bool = True
    """Whether all weights on this rank are up to date. If not, the optimizer is sharded and the newest iteration was
    finished after the membership had ended, so that only this rank's shard of the weights was updated."""

    def after(self, before: "Carried | None") -> "Carried":
        """Add ``before``, the state with which the rank began the membership, at the same iteration. None adds nothing.
        ``finished`` is that of ``before``, because it must still be reported."""
        if before is None:
            return self
        return replace(
            self,
            holdings=(*before.holdings, *self.holdings),
            state={**before.state, **self.state},
            shards=None if self.shards is None else self.shards.and_also(before.shards),
            host=replace(self.host, stopped=before.host.stopped),
            finished=before.finished,
            batch=before.batch,
        )


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


def hand_over(state: NamedState, shapes: Sequence[Shape], previous: Sequence[int | None], groups: Groups) -> NamedState:
    """Send all non-expert state to joining ranks. Each rank with state sends a part. All ranks must call this.

    Args:
        state: this rank's tensors. On a joining rank, the received tensors are added.
        shapes: name, dtype, device type and shape of all tensors of one rank with state.
        previous: for each rank, its rank in the chosen holding; None if it has no state.

    Returns:
        Uninitialized tensors with the names and shapes of one expert's tensors.
    """
    # With replicas, the expert group contains all ranks of the stage, and only jobs with one stage call this function.
    group = groups.pg_collection.ep
    rows = {name: row for name, *row in shapes}
    dense = {name: _num_bytes(row) for name, row in rows.items() if expert_of(name) is None}
    with_state = [rank for rank, former in enumerate(previous) if former is not None]
    # Senders and receivers compute the same shares from the same rows, so names need not be sent.
    shares = share_out(dense, with_state)
    outgoing: list[list[torch.Tensor]] = [[] for _ in previous]
    incoming: list[list[torch.Tensor]] = [[] for _ in previous]
    me = group.rank()
    if previous[me] is None:
        state.update({name: _empty(rows[name]) for name in dense})
        incoming = [[state[name] for name in shares.get(rank, ())] for rank in range(len(previous))]
    else:
        mine = [state[name] for name in shares[me]]
        outgoing = [mine if former is None else [] for former in previous]
    exchange_tensors(outgoing, incoming, group)
    first = next(iter(by_expert(rows).values()))
    return {name: _empty(rows[name]) for name in first}


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
    the iteration and the rank, but not on the generation, so that memberships that could not be formed have no effect
    on the results."""
    own = seed + (iteration + 1) * _ITERATION_STRIDE
    random.seed(own + groups.vote.rank())
    np.random.seed((own + groups.vote.rank()) % 2**32)
    seed_rng(own, groups.pg_collection)
