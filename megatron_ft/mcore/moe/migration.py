"""Carries out a ``MigrationPlan``: moves expert weights and optimizer state, without changing a bit of any state."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ft.mcore.moe.replicas import Replicas
from megatron_ft.mcore.state.tensors import NamedState, expert_of, put_state, take_state
from megatron_ft.mcore.state.train_state import TrainState
from megatron_ft.mcore.training.engine import TrainingEngine
from megatron_ft.planning.placement.migration import MigrationPlan
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.runtime.transport.exchange import exchange_tensors

_ExpertId = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class PreviousPlacement:
    """State with which a rank can return to the previous placement until an iteration with the new one is committed."""

    before_iteration: int
    """First iteration of the new placement."""
    plans: list[PlacementPlan]
    """Previous plan of each stage."""
    state: NamedState
    """Tensors of experts that this rank no longer has; while experts move, all its previous tensors."""
    host: TrainState | None = None
    """Previous state besides tensors, while experts move: if a rank is lost then, the engine's state belongs to no
    placement, and no engine can be built from it. None after the move."""
    is_evacuation: bool = False
    """Whether the new placement was made for the ranks that stay in the next membership."""


def migrate(
    engine: TrainingEngine,
    replicas: Replicas,
    migration: MigrationPlan,
    *,
    keep: Callable[[NamedState], None] | None = None,
) -> NamedState:
    """Rebuild ``engine`` for ``replicas`` after carrying out ``migration``; collective over the stage.

    Args:
        keep: called with this rank's whole state before any of it moves, so that it can be restored at any time.

    Returns:
        State of the experts that this rank no longer has; with it, the previous placement can be restored afterwards.
    """
    state = take_state(engine.model_chunks, engine.optimizer)
    # A copy of the dict: the move adds experts to ``state``.
    if keep is not None:
        keep(dict(state))
    move_experts(state, migration, engine.pg.ep)
    # From here until ``put_state`` returns there may be no model: only what ``keep`` has received is sound.
    engine.rebuild(replicas)
    put_state(engine.model_chunks, engine.optimizer, state)
    held = migration.placement.of_rank(engine.pg.ep.rank())
    return {name: t for name, t in state.items() if (expert := expert_of(name)) is not None and expert not in held}


def move_experts(
    state: NamedState, migration: MigrationPlan, group: dist.ProcessGroup, *, like: NamedState | None = None
) -> int:
    """Send the experts of ``migration`` from ``state``, and add received ones; collective over the plan's ranks,
    ``group``.

    Args:
        like: state of any expert, for shapes, dtypes and devices; None takes one of this rank.

    Returns:
        Bytes that this rank sent.
    """
    position = {rank: place for place, rank in enumerate(migration.placement.ranks)}
    me = migration.placement.ranks[group.rank()]
    names = by_expert(state)
    like = {name: state[name] for name in next(iter(names.values()))} if like is None else like
    outgoing: list[list[torch.Tensor]] = [[] for _ in position]
    incoming: list[list[torch.Tensor]] = [[] for _ in position]
    # Senders and receivers follow the plan's order, and names in sorted order: tensors travel without names.
    for transfer in migration.transfers:
        expert = (transfer.layer_number, transfer.expert)
        if transfer.source_rank == me:
            outgoing[position[transfer.target_rank]] += [state[name] for name in names[expert]]
        if transfer.target_rank == me:
            for name, tensor in _space_for(expert, like).items():
                state[name] = tensor
                incoming[position[transfer.source_rank]].append(tensor)
    return exchange_tensors(outgoing, incoming, group)


def by_expert(state: Iterable[str]) -> dict[_ExpertId, list[str]]:
    """Return the names of each expert's tensors in ``state``, sorted, so that all ranks have the same order."""
    names: dict[_ExpertId, list[str]] = {}
    for name in sorted(state):
        expert = expert_of(name)
        if expert is not None:
            names.setdefault(expert, []).append(name)
    return names


def _space_for(expert: _ExpertId, like: NamedState) -> NamedState:
    template = expert_of(next(iter(like)))
    assert template is not None, "the state names no expert"
    old, new = _prefix(template), _prefix(expert)
    return {
        name.replace(old, new, 1): torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for name, tensor in like.items()
    }


def _prefix(expert: _ExpertId) -> str:
    return f"decoder.layers.{expert[0] - 1}.mlp.experts.local_experts.{expert[1]}."
