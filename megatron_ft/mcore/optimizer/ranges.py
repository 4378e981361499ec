"""Which elements of a parameter an optimizer updates on this rank."""

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def range_of(member: Any, parameter: torch.nn.Parameter) -> tuple[int, int]:
    """(start, stop) in the flattened parameter; all of it where ``member`` is not sharded."""
    if not isinstance(member, DistributedOptimizer):
        return 0, parameter.numel()
    found = member._get_model_param_range_map(parameter)["param"]
    return found.start, found.end
