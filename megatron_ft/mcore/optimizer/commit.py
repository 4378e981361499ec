"""Megatron's ``optimizer.step()`` in the parts that the commit protocol needs.

``prepare`` (copy, unscale, norm) changes nothing that cannot be rolled back. ``update`` (clip, update) changes master
weights and moments on this rank. ``gather`` updates every rank's parameters.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer, MixedPrecisionOptimizer

from megatron_ft.mcore.state.digest import masters_of


def parts(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """List the optimizers of the dense and of the expert parameters, without empty ones."""
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
    # Each part checks its own gradients. There is one loss scale, so every part answers an overflow in any.
    for scaler, state in zip(scalers, before, strict=True):
        scaler.load_state_dict(state)
        scaler.update(found_inf)
    return found_inf, float(optimizer.get_grad_norm())


@torch.no_grad()
def prepare_known(
    optimizer: MegatronOptimizer, *, found_inf: bool, without: Collection[torch.nn.Parameter] = frozenset()
) -> None:
    """Do the work of ``prepare`` if its results are known already, without communication.

    Parameters ``without`` get no master gradients, so that no update changes their state.
    """
    for part in parts(optimizer):
        scaler: Any = getattr(part, "grad_scaler", None)
        if scaler is None:
            part.prepare_grads()
        else:
            # Megatron's own method all-reduces the overflow flag, also over stages that do not replay.
            _unscale(part, scaler)
            scaler.update(found_inf)
        for parameter, master in masters_of(part):
            # A zero gradient would still decay weights and moments.
            if parameter in without:
                master.grad = None


def _unscale(part: Any, scaler: Any) -> None:
    part._copy_model_grads_to_main_grads()
    gradients = part._collect_main_grad_data_for_unscaling()
    overflow = torch.zeros(1, device=scaler.inv_scale.device)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, scaler.inv_scale)


def grad_scalers(optimizer: MegatronOptimizer) -> list[Any]:
    """List the loss scalers of the parts; none unless the run is in FP16."""
    scalers = (getattr(part, "grad_scaler", None) for part in parts(optimizer))
    return [scaler for scaler in scalers if scaler is not None]


@torch.no_grad()
def update(optimizer: MegatronOptimizer, clip_grad: float, grad_norm: float) -> None:
    """Clip with the voted norm and update master weights, moments and this rank's compute weights."""
    for part in parts(optimizer):
        parameters = part.get_parameters()
        # In a replay all parameters of a part may be frozen: there is nothing to clip.
        if clip_grad > 0.0 and any(parameter.grad is not None for parameter in parameters):
            clip_grad_by_total_norm_fp32(parameters, max_norm=clip_grad, total_norm=grad_norm)
        if isinstance(part, DistributedOptimizer):
            # DistributedOptimizer's own method would also gather, once per part.
            MixedPrecisionOptimizer.step_with_ready_grads(part)
        else:
            part.step_with_ready_grads()


def gather(optimizer: MegatronOptimizer, model_chunks: list[torch.nn.Module]) -> None:
    """All-gather updated parameters if the optimizer is sharded."""
    if any(isinstance(part, DistributedOptimizer) for part in parts(optimizer)):
        for chunk in model_chunks:
            chunk.start_param_sync()  # type: ignore[operator]
