"""A rank's tensors by global name, saved and restored around a rebuild of model and optimizer."""

from collections.abc import Iterator, Mapping

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_ft.mcore.checkpoint.optimizer_state import allocate_state
from megatron_ft.mcore.state.digest import named_state

NamedState = dict[str, torch.Tensor]
"""Global name, with ``/master``, ``/exp_avg``... for optimizer state, to tensor."""


def take_state(model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> NamedState:
    """Copy every parameter, buffer, master and moment of this rank."""
    return {name: tensor.detach().clone() for name, tensor in _distinct_state(model_chunks, optimizer)}


def put_state(
    model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer, state: Mapping[str, torch.Tensor]
) -> None:
    """Fill a newly built model and optimizer, bit for bit.

    Raises:
        KeyError: ``state`` lacks a tensor that this rank has now.
    """
    with torch.no_grad():
        for name, tensor in _distinct_state(model_chunks, optimizer):
            # In place: gradient buffers, hooks and the optimizer refer to these very tensors.
            tensor.copy_(state[name])


def _distinct_state(
    model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    # Yield all named state, each tensor once: FP32 weights are their own masters.
    allocate_state(optimizer)
    own_masters: set[str] = set()
    for name, tensor in named_state(model_chunks, optimizer):
        # ``named_state`` lists weights before their masters.
        if tensor.dtype is torch.float32 and "/" not in name:
            own_masters.add(f"{name}/master")
        if name not in own_masters:
            yield name, tensor


def expert_of(name: str) -> tuple[int, int] | None:
    """Return (layer number from 1, expert) of a global name; None for anything but a routed expert."""
    head, found, rest = name.partition(".mlp.experts.local_experts.")
    if not found:
        return None
    layer = int(head.rsplit(".", 1)[1]) + 1
    return layer, int(rest.split(".", 1)[0])
