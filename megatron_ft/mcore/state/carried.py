"""The state that a rank takes from one membership to the next, and the part that it sends to joining ranks."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_ft.mcore.checkpoint.rng import seed_rng
from megatron_ft.mcore.groups import Groups
from megatron_ft.mcore.moe.migration import by_expert
from megatron_ft.mcore.moe.placement_manager import PlacementState
from megatron_ft.mcore.state.rank_status import Holding
from megatron_ft.mcore.state.resolving import resolve_iteration
from megatron_ft.mcore.state.tensors import NamedState, expert_of, take_state
from megatron_ft.mcore.state.train_state import TrainState
from megatron_ft.mcore.training.iteration import IterationResult
from megatron_ft.planning.batch import BatchPlan
from megatron_ft.planning.recovery.replicas import share_out
from megatron_ft.planning.recovery.target import Target
from megatron_ft.planning.snapshot.plan import WindowKey, WindowPlan
from megatron_ft.runtime.transport.exchange import exchange_tensors

if TYPE_CHECKING:
    from megatron_ft.mcore.training.trainer import Trainer

Shape = tuple[str, str, str, list[int]]
"""Name, dtype, kind of device and shape of a tensor."""

_ITERATION_STRIDE = 1_000_003
"""Distance between the seeds of joining ranks of consecutive iterations; larger than what ranks and pipeline stages
add."""


@dataclass(kw_only=True)
class Carried:
    """A rank's state, without references to the groups with which it was made."""

    holdings: tuple[Holding, ...]
    """Holdings, oldest first; ``state`` contains the tensors that each of them gives this rank."""
    state: NamedState
    host: TrainState
    """State besides tensors."""
    finished: IterationResult | None
    """The iteration that was finished when the membership ended, until it is reported."""
    batch: BatchPlan
    """Batch plan of the finished iteration."""
    kept: WindowKey | None = None
    """The newest committed window that this rank knows of; None before the first."""
    plan: WindowPlan | None = None
    """Plan of windows; None before the first."""
    has_whole_weights: bool = True
    """Whether all weights are those of the iteration. If a sharded optimizer finished it when the membership ended,
    only this rank's own shard of the weights is up to date."""

    @classmethod
    def of(cls, trainer: "Trainer") -> "Carried":
        """Capture the state of a rank at an iteration boundary that every other rank has reached."""
        engine = trainer.engine
        return cls(
            holdings=(_holding(trainer, None),),
            state=take_state(engine.model_chunks, engine.optimizer),
            host=replace(engine.train_state(), newest_vote=engine.newest_vote, rounded_off=trainer.rounded_off),
            finished=None,
            batch=engine.batch,
            **_windows(trainer),
        )

    def after(self, before: "Carried | None") -> "Carried":
        """Add what the rank carried into the membership of this capture, at the same iteration: reports that were due
        then may still be due."""
        if before is None:
            return self
        return replace(
            self,
            holdings=(*before.holdings, *self.holdings),
            state={**before.state, **self.state},
            host=replace(self.host, stopped=before.host.stopped),
            finished=before.finished,
            batch=before.batch,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipStart:
    """State with which a membership began, kept until it commits an iteration, because it may break before."""

    iteration: int
    carried: Carried | None
    """None on a joining rank."""
    changes: tuple[str, ...] = ()
    """Changes as in ``Holding``, including the one to this membership."""
    is_formed: bool = False
    """Whether this rank has the state that the membership's placement gives it."""

    @property
    def has_state(self) -> bool:
        """Whether the rank has state, by any placement."""
        return self.is_formed or self.carried is not None


def carry(trainer: "Trainer", target: Target) -> Carried | None:
    """Extract this rank's state after ``target``, before its groups are destroyed; None on a rank without state.

    If the membership has committed nothing, the state is still the one with which it began. A rank that had formed the
    membership then also has its part by the membership's placement; any other rank has only what it carried into it.
    """
    beginning, engine = trainer.membership_start, trainer.engine
    if beginning is None or beginning.iteration != target.iteration:
        is_moving = trainer.previous_placement is not None and trainer.previous_placement.host is not None
        return _take(trainer, target, ()) if engine.is_built or is_moving else None
    if beginning.is_formed:
        return _take(trainer, target, beginning.changes).after(beginning.carried)
    trainer.previous_placement = None
    return beginning.carried


def _holding(trainer: "Trainer", placement: PlacementState | None, **more: Any) -> Holding:
    context = trainer.context
    # In a layout that is kept a rank has the same part in every membership.
    generation = 0 if placement is None else context.generation
    return Holding(generation=generation, rank=context.rank, nodes=tuple(trainer.nodes), placement=placement, **more)


def _take(trainer: "Trainer", target: Target, changes: tuple[str, ...]) -> Carried:
    # Return the state of a rank that has formed its membership; ``changes`` of ``Holding``.
    placement, engine = trainer.placement, trainer.engine
    finished = resolve_iteration(engine, target)
    # Ranks that completed the iteration have observed its loads: all plan the next placement from the same ones.
    if finished is not None:
        trainer.observe(finished)
    former, trainer.previous_placement = trainer.previous_placement, None
    if former is None or former.host is None:
        state, host = take_state(engine.model_chunks, engine.optimizer), engine.train_state()
    else:  # there may be no model, nor all of its optimizer
        state, host = {}, former.host
    in_force = None
    if placement is not None:
        in_force = PlacementState(plans=placement.plans, loads=placement.loads)
    holdings = (_holding(trainer, in_force, changes=changes),)
    if placement is not None and former is not None and engine.iteration < former.before_iteration:
        # A placement that no iteration has been committed with: the one before holds.
        state = {**state, **former.state}
        before = PlacementState(plans=former.plans, loads=placement.loads)
        evacuated = (_holding(trainer, in_force, changes=changes, is_evacuation=True),)
        has_moved = former.is_evacuation and former.host is None
        holdings = (_holding(trainer, before, changes=changes), *(evacuated if has_moved else ()))
    stops = finished is not None and finished.decision.action == "stop"
    return Carried(
        holdings=holdings,
        state=state,
        host=replace(
            host,
            newest_vote=engine.newest_vote,
            rounded_off=trainer.rounded_off,
            stopped=finished.decision.reason if finished is not None and stops else None,
        ),
        finished=finished,
        batch=engine.batch,
        has_whole_weights=finished is None or not trainer.config.parallel.use_distributed_optimizer,
        **_windows(trainer),
    )


def _windows(trainer: "Trainer") -> dict[str, Any]:
    snapshots = trainer.snapshots
    return {} if snapshots is None else {"kept": snapshots.kept, "plan": snapshots.plan}


def hand_over(state: NamedState, shapes: Sequence[Shape], previous: Sequence[int | None], groups: Groups) -> NamedState:
    """Send all state except experts to joining ranks, shared among the ranks that have it; collective.

    Args:
        state: this rank's state; that of a joining rank is filled.
        shapes: name, dtype, kind of device and shape of the tensors of one rank with state.
        previous: None for each rank without state.

    Returns:
        Tensors like those of one expert.
    """
    # With replicas the expert group is the whole stage, and only jobs of one stage hand state over.
    group = groups.pg_collection.ep
    rows = {name: row for name, *row in shapes}
    dense = {name: _num_bytes(row) for name, row in rows.items() if expert_of(name) is None}
    with_state = [rank for rank, former in enumerate(previous) if former is not None]
    # Senders and receivers compute the same shares from the same rows: tensors travel without names.
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
    """List name, dtype, device and shape of every tensor, for ``hand_over``."""
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
    """Seed the generators of a rank that joins after ``iteration``, from the iteration, its rank and the run's seed.
    The generation has no effect, because memberships that are not formed leave no trace."""
    own = seed + (iteration + 1) * _ITERATION_STRIDE
    random.seed(own + groups.vote.rank())
    np.random.seed((own + groups.vote.rank()) % 2**32)
    seed_rng(own, groups.pg_collection)
