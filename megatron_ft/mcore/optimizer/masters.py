"""The tensors that an optimizer updates on this rank, by global name, with all inputs of their update."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_ft.mcore.checkpoint.optimizer_state import allocate_state, sub_optimizers
from megatron_ft.mcore.model.names import named_parameters
from megatron_ft.mcore.state.digest import masters_of

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Master:
    """One updated tensor: a whole master weight, or this rank's flat range of one.

    ``state`` is that of the inner optimizer: moments and step count.
    """

    name: str
    tensor: torch.Tensor
    state: dict[str, Any]
    weight_decay: float


def masters(model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> Iterator[Master]:
    """List all masters of this rank, in the optimizer's order; moments are allocated."""
    allocate_state(optimizer)
    names = {parameter: name for chunk in model_chunks for name, parameter in named_parameters(chunk)}
    for member in sub_optimizers(optimizer):
        decay = {id(p): group["weight_decay"] for group in member.optimizer.param_groups for p in group["params"]}
        for parameter, tensor in masters_of(member):
            yield Master(
                name=names[parameter],
                tensor=tensor,
                state=member.optimizer.state[tensor],
                weight_decay=decay[id(tensor)],
            )
