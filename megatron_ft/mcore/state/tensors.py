"""Copies a rank's tensors by global name, and restores them after model and optimizer were rebuilt."""

from collections.abc import Iterator, Mapping

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_ft.mcore.checkpoint.optimizer_state import allocate_state
from megatron_ft.mcore.state.digest import named_state

NamedState = dict[str, torch.Tensor]
"""Tensors by the names that ``digest.named_state`` gives them."""


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
