"""Lists the master weights that the optimizer updates on this rank, with their optimizer state."""

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
    """One master weight that this rank updates: the whole tensor, or a flat range of it if the optimizer is sharded.
    ``name`` is the parameter's global name. ``state`` contains the moments and the step count of torch's optimizer."""

    name: str
    tensor: torch.Tensor
    state: dict[str, Any]
    weight_decay: float


def masters(model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> Iterator[Master]:
    """Yield all master weights of this rank, in the order of the optimizer. Allocate their moments first."""
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
