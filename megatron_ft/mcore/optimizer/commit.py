"""Megatron's ``optimizer.step()`` in the pieces the commit protocol needs.

prepare (copy, unscale, norm) changes nothing that cannot be undone; clip and update change master weights
and moments on this rank; gather brings every rank's parameters up to date.
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer, MixedPrecisionOptimizer


def parts(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """The optimizers of the dense and of the expert parameters, those without parameters left out."""
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return (part for part in chained if not getattr(part, "is_stub_optimizer", False))


@torch.no_grad()
def prepare(optimizer: MegatronOptimizer) -> tuple[bool, float]:
    """Copy reduced gradients to the master gradients and unscale them.

    Returns:
        (found_inf, grad_norm): whether an unscaled gradient overflowed, and the global norm.
    """
    scalers = grad_scalers(optimizer)
    before = [scaler.state_dict() for scaler in scalers]
    found_inf = bool(optimizer.prepare_grads())
    # Each part judges its own gradients. There is one loss scale, so every part answers an overflow in any.
    for scaler, state in zip(scalers, before, strict=True):
        scaler.load_state_dict(state)
        scaler.update(found_inf)
    return found_inf, float(optimizer.get_grad_norm())


def grad_scalers(optimizer: MegatronOptimizer) -> list[Any]:
    """The loss scalers of the parts; none unless the run is in FP16."""
    scalers = (getattr(part, "grad_scaler", None) for part in parts(optimizer))
    return [scaler for scaler in scalers if scaler is not None]


@torch.no_grad()
def update(optimizer: MegatronOptimizer, clip_grad: float, grad_norm: float) -> None:
    """Clip with the voted norm and update master weights, moments and this rank's compute weights."""
    for part in parts(optimizer):
        parameters = part.get_parameters()
        if clip_grad > 0.0 and parameters:
            clip_grad_by_total_norm_fp32(parameters, max_norm=clip_grad, total_norm=grad_norm)
        if isinstance(part, DistributedOptimizer):
            # DistributedOptimizer's own method would also gather, once per part.
            MixedPrecisionOptimizer.step_with_ready_grads(part)
        else:
            part.step_with_ready_grads()


def gather(optimizer: MegatronOptimizer, model_chunks: list[torch.nn.Module]) -> None:
    """All-gather updated parameters where the optimizer is sharded."""
    if any(isinstance(part, DistributedOptimizer) for part in parts(optimizer)):
        for chunk in model_chunks:
            chunk.start_param_sync()  # type: ignore[operator]
