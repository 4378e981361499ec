"""Carries out a ``MigrationPlan``: moves expert weights and optimizer state between ranks, bit for bit."""

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
    """State with which a rank can return to the placement before a migration."""

    before_iteration: int
    """First iteration with the new placement."""
    plans: list[PlacementPlan]
    """Placement of each stage before the migration."""
    state: NamedState
    """During the migration, all tensors of this rank; after it, only the tensors of experts that this rank no longer
    has."""
    host: TrainState | None = None
    """During the migration, the state besides tensors, because a migration that fails leaves the engine without usable
    state; after it, None."""
    is_evacuation: bool = False
    """Whether the migration moved all experts to the ranks that stay, before other ranks leave."""


def migrate(
    engine: TrainingEngine,
    replicas: Replicas,
    migration: MigrationPlan,
    *,
    keep: Callable[[NamedState], None] | None = None,
) -> NamedState:
    """Carry out ``migration``, and rebuild ``engine`` for ``replicas``. All ranks of the stage must call this.

    Args:
        keep: called with all tensors of this rank before the migration, so that the caller can restore them.

    Returns:
        The tensors of the experts that this rank no longer has.
    """
    state = take_state(engine.model_chunks, engine.optimizer)
    # A copy of the dict, because ``move_experts`` adds tensors to ``state``.
    if keep is not None:
        keep(dict(state))
    move_experts(state, migration, engine.pg.ep)
    # Until ``put_state`` returns, the engine has no usable state. After a failure, the caller needs what ``keep`` got.
    engine.rebuild(replicas)
    put_state(engine.model_chunks, engine.optimizer, state)
    held = migration.placement.of_rank(engine.pg.ep.rank())
    return {name: t for name, t in state.items() if (expert := expert_of(name)) is not None and expert not in held}


def move_experts(
    state: NamedState, migration: MigrationPlan, group: dist.ProcessGroup, *, like: NamedState | None = None
) -> int:
    """Send and receive the experts of ``migration``, and add the received ones to ``state``.

    All ranks of ``group``, which are the ranks of the plan, must call this.

    Args:
        like: tensors of any expert, for shapes, dtypes and devices; None uses an expert in ``state``.

    Returns:
        Number of bytes that this rank sent.
    """
    position = {rank: place for place, rank in enumerate(migration.placement.ranks)}
    me = migration.placement.ranks[group.rank()]
    names = by_expert(state)
    like = {name: state[name] for name in next(iter(names.values()))} if like is None else like
    outgoing: list[list[torch.Tensor]] = [[] for _ in position]
    incoming: list[list[torch.Tensor]] = [[] for _ in position]
    # Sender and receiver use the order of the plan and sort the names, so names need not be sent.
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
    """Return, for each expert (layer number, expert id), the sorted names of its tensors in ``state``."""
    names: dict[_ExpertId, list[str]] = {}
    for name in sorted(state):
        expert = expert_of(name)
        if expert is not None:
            names.setdefault(expert, []).append(name)
    return names


def _space_for(expert: _ExpertId, like: NamedState) -> NamedState:
    template = expert_of(next(iter(like)))
    assert template is not None, "``like`` must contain tensors of an expert"
    old, new = _prefix(template), _prefix(expert)
    return {
        name.replace(old, new, 1): torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for name, tensor in like.items()
    }


def _prefix(expert: _ExpertId) -> str:
    return f"decoder.layers.{expert[0] - 1}.mlp.experts.local_experts.{expert[1]}."
