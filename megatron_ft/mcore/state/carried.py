"""State that a rank carries from one membership to the next, and its transfer to joining ranks, which have none."""

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
"""Distance of the seeds of joining ranks of one iteration and the next: more than ranks and pipeline stages add."""


@dataclass(kw_only=True)
class Carried:
    """A rank's state, free of the groups that it was made with."""

    holdings: tuple[Holding, ...]
    """Oldest first; ``state`` has what each of them gives this rank."""
    iteration: int
    state: NamedState
    host: TrainState
    """State besides tensors."""
    finished: IterationResult | None
    """The iteration that was settled on the way out, until it is accounted for."""
    batch: BatchPlan
    """Batch plan of the finished iteration."""
    unsaved: int | None
    """Iteration of an abandoned save, until it is reported."""
    kept: WindowKey | None = None
    """The newest committed window that this rank knows of; None before the first."""
    plan: WindowPlan | None = None
    """Plan that windows are captured by; None before the first."""
    has_whole_weights: bool = True
    """Whether weights are those of the iteration throughout: of one that was finished on the way out, a sharded
    optimizer has brought this rank's own shard up to date only."""

    @classmethod
    def of(cls, trainer: "Trainer") -> "Carried":
        """Capture a rank at an iteration boundary that every other rank has reached."""
        engine = trainer.engine
        return cls(
            holdings=(_holding(trainer, None),),
            iteration=engine.iteration,
            state=take_state(engine.model_chunks, engine.optimizer),
            host=replace(engine.train_state(), newest_vote=engine.newest_vote, rounded_off=trainer.rounded_off),
            finished=None,
            batch=engine.batch,
            unsaved=None,
            **_windows(trainer),
        )

    def after(self, before: "Carried | None") -> "Carried":
        """Add what the rank carried into the membership that this was captured in: both are of the same iteration.

        Reports and saves that were due then may still be due.
        """
        if before is None:
            return self
        return replace(
            self,
            holdings=(*before.holdings, *self.holdings),
            state={**before.state, **self.state},
            host=replace(self.host, stopped=before.host.stopped),
            finished=before.finished,
            batch=before.batch,
            unsaved=before.unsaved if self.unsaved is None else self.unsaved,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipStart:
    """State that a membership began with, kept until it commits an iteration: it may break before."""

    iteration: int
    carried: Carried | None
    """None on a joining rank."""
    changes: tuple[str, ...] = ()
    """Changes as in ``Holding``, with the one to this membership."""
    is_formed: bool = False
    """Whether this rank has the state that the membership's placement gives it."""

    @property
    def has_state(self) -> bool:
        """Whether the rank has state, by whatever placement."""
        return self.is_formed or self.carried is not None


def carry(trainer: "Trainer", target: Target) -> Carried | None:
    """Take out this rank's state after ``target``, before its groups are dissolved; None on a rank that has none.

    Where the membership has committed nothing, the state is still the one that it began with. A rank that had formed
    it has its part by the placement of this membership, too; any other has what it carried into it, no more.
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
    """State of a rank that has formed its membership; ``changes`` of ``Holding``."""
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
        iteration=target.iteration,
        state=state,
        host=replace(
            host,
            newest_vote=engine.newest_vote,
            rounded_off=trainer.rounded_off,
            stopped=finished.decision.reason if finished is not None and stops else None,
        ),
        finished=finished,
        batch=engine.batch,
        unsaved=trainer.checkpoints.pending_iteration,
        has_whole_weights=finished is None or not trainer.config.parallel.use_distributed_optimizer,
        **_windows(trainer),
    )


def _windows(trainer: "Trainer") -> dict[str, Any]:
    """Fields of ``Carried`` about this rank's windows."""
    snapshots = trainer.snapshots
    return {} if snapshots is None else {"kept": snapshots.kept, "plan": snapshots.plan}


def hand_over(state: NamedState, shapes: Sequence[Shape], previous: Sequence[int | None], groups: Groups) -> NamedState:
    """Send all state but experts to joining ranks, shared out over the ranks that have it; collective.

    Args:
        state: this rank's; a joining rank's is filled.
        shapes: name, dtype, kind of device and shape of the tensors of one rank that has state.
        previous: None for each rank that has none.

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
    """Start the generators of a rank that joins after ``iteration``: a function of that, its rank and the run's seed.

    Not of the generation: memberships that do not form leave no trace.
    """
    own = seed + (iteration + 1) * _ITERATION_STRIDE
    random.seed(own + groups.vote.rank())
    np.random.seed((own + groups.vote.rank()) % 2**32)
    seed_rng(own, groups.pg_collection)
