"""A rank's tensors by global name: copied, restored, compared by checksums, and moved with experts to other ranks."""

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
import xxhash
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_ft.mcore.groups import exchange_tensors
from megatron_ft.mcore.model.parameters import named_parameters, unwrap
from megatron_ft.mcore.optimizer.adamw import allocate_state, masters_of, sub_optimizers
from megatron_ft.planning.placement.migration import MigrationPlan


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the xxh3_128 of the tensor's bytes, dtype and shape, as a hexadecimal number."""
    # dtype and shape are included, because zeros of different dtypes have the same bytes.
    digest = xxhash.xxh3_128(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest.update(content.numpy().data)
    return digest.hexdigest()


def named_state(
    model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of every parameter, persistent buffer, master weight and moment on this rank. Names are
    ``<parameter>``, ``<parameter>/master``, ``<parameter>/exp_avg`` and so on, where ``<parameter>`` is a global name.
    With the distributed optimizer, masters and moments are this rank's flat ranges."""
    names: dict[torch.nn.Parameter, str] = {}
    for number, chunk in enumerate(model_chunks):
        for name, parameter in named_parameters(chunk):
            names[parameter] = name
            yield name, parameter
        parameters = {name for name, _ in unwrap(chunk).named_parameters()}
        for name, tensor in unwrap(chunk).state_dict().items():
            if name not in parameters and torch.is_tensor(tensor):
                yield f"buffer.{number}.{name}", tensor
    for member in sub_optimizers(optimizer):
        for parameter, master in masters_of(member):
            if master is not parameter:
                yield f"{names[parameter]}/master", master
            for kind, value in sorted(member.optimizer.state.get(master, {}).items()):
                if torch.is_tensor(value):
                    yield f"{names[parameter]}/{kind}", value


def state_digest(model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> str:
    """Return one digest over all of :func:`tensor_digests`. It does not depend on the order of the tensors."""
    total = xxhash.xxh3_128()
    for name, digest in sorted(tensor_digests(model_chunks, optimizer).items()):
        total.update(f"{name}={digest}\n".encode())
    return total.hexdigest()


def tensor_digests(model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> dict[str, str]:
    """Return the digest of every tensor of :func:`named_state` by name, to locate the differences of two states. Before
    the first update, moments are allocated as zeros, so that they are part of the result."""
    allocate_state(optimizer)
    return {name: tensor_digest(tensor) for name, tensor in named_state(model_chunks, optimizer)}


NamedState = dict[str, torch.Tensor]
"""Tensors by the names that ``named_state`` gives them."""


def take_state(model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> NamedState:
    """Return copies of every parameter, buffer, master weight and moment of this rank, by name."""
    return {name: tensor.detach().clone() for name, tensor in _distinct_state(model_chunks, optimizer)}


def put_state(
    model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer, state: Mapping[str, torch.Tensor]
) -> None:
    """Fill a newly built model and optimizer with ``state``, the result of ``take_state``.

    Raises:
        KeyError: ``state`` lacks a tensor that this rank needs.
    """
    with torch.no_grad():
        for name, tensor in _distinct_state(model_chunks, optimizer):
            # In place, because gradient buffers, hooks and the optimizer reference these tensors.
            tensor.copy_(state[name])


def _distinct_state(
    model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    # Yields each tensor once: an FP32 weight is also its own master weight.
    allocate_state(optimizer)
    own_masters: set[str] = set()
    for name, tensor in named_state(model_chunks, optimizer):
        # ``named_state`` lists weights before their masters.
        if tensor.dtype is torch.float32 and "/" not in name:
            own_masters.add(f"{name}/master")
        if name not in own_masters:
            yield name, tensor


def expert_of(name: str) -> tuple[int, int] | None:
    """Return (layer number, expert) if ``name`` is of a routed expert, else None. Layers are numbered from 1."""
    head, found, rest = name.partition(".mlp.experts.local_experts.")
    if not found:
        return None
    layer = int(head.rsplit(".", 1)[1]) + 1
    return layer, int(rest.split(".", 1)[0])


_ExpertId = tuple[int, int]


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
