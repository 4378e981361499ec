"""Carries out a ``MigrationPlan``: expert weights and optimizer state move, nothing else changes, not by a bit."""

import torch

from megatron_ft.mcore.loop.engine import TrainingEngine
from megatron_ft.mcore.moe.replicas import Replicas
from megatron_ft.mcore.optimizer.state_view import NamedState, expert_of, put_state, take_state
from megatron_ft.planning.placement.migration import MigrationPlan
from megatron_ft.runtime.transport.exchange import exchange_tensors

_ExpertId = tuple[int, int]


def migrate(engine: TrainingEngine, replicas: Replicas, migration: MigrationPlan) -> int:
    """Rebuild ``engine`` for ``replicas`` after moving what ``migration`` says; collective over the stage.

    Returns:
        Bytes this rank sent.
    """
    state = take_state(engine.model_chunks, engine.optimizer)
    sent_bytes = _exchange(engine, state, migration)
    engine.rebuild(replicas)
    put_state(engine.model_chunks, engine.optimizer, state)
    return sent_bytes


def _exchange(engine: TrainingEngine, state: NamedState, migration: MigrationPlan) -> int:
    group = engine.pg.ep
    position = {rank: place for place, rank in enumerate(migration.placement.ranks)}
    me = migration.placement.ranks[group.rank()]
    by_expert = _by_expert(state)
    outgoing: list[list[torch.Tensor]] = [[] for _ in position]
    incoming: list[list[torch.Tensor]] = [[] for _ in position]
    for transfer in migration.transfers:
        expert = (transfer.layer_number, transfer.expert)
        if transfer.source_rank == me:
            outgoing[position[transfer.target_rank]] += [state[name] for name in by_expert[expert]]
        if transfer.target_rank == me:
            for name, tensor in _space_for(expert, by_expert, state).items():
                state[name] = tensor
                incoming[position[transfer.source_rank]].append(tensor)
    return exchange_tensors(outgoing, incoming, group)


def _by_expert(state: NamedState) -> dict[_ExpertId, list[str]]:
    """Names of each expert's tensors here, sorted: the same order on every rank."""
    names: dict[_ExpertId, list[str]] = {}
    for name in sorted(state):
        expert = expert_of(name)
        if expert is not None:
            names.setdefault(expert, []).append(name)
    return names


def _space_for(expert: _ExpertId, by_expert: dict[_ExpertId, list[str]], state: NamedState) -> NamedState:
    """Empty tensors for an expert's state: experts are alike, so any one held here shows shapes and dtypes."""
    template = next(iter(by_expert))
    old, new = _prefix(template), _prefix(expert)
    return {name.replace(old, new, 1): torch.empty_like(state[name]) for name in by_expert[template]}


def _prefix(expert: _ExpertId) -> str:
    return f"decoder.layers.{expert[0] - 1}.mlp.experts.local_experts.{expert[1]}."
