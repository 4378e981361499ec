"""Megatron's ``optimizer.step()`` in the parts that the commit protocol needs.

``prepare`` computes the master gradients and their norm, and changes nothing that cannot be rolled back. ``update``
clips the gradients, and updates master weights and moments of this rank. ``gather`` all-gathers the parameters.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer, MixedPrecisionOptimizer

from megatron_ft.mcore.state.digest import masters_of


def _parts(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """Yield Megatron's optimizers: one for dense and one for expert parameters. Skip those without parameters."""
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return (part for part in chained if not getattr(part, "is_stub_optimizer", False))


@torch.no_grad()
def prepare(optimizer: MegatronOptimizer) -> tuple[bool, float]:
    """Copy the reduced gradients to the master gradients, unscale them and compute their norm.

    Returns:
        (found_inf, grad_norm): whether a gradient is not finite after unscaling, and the global gradient norm.
    """
    scalers = grad_scalers(optimizer)
    before = [scaler.state_dict() for scaler in scalers]
    found_inf = bool(optimizer.prepare_grads())
    # Megatron updates each scaler for the overflow of its own part. But there is one loss scale for all parts, so each
    # scaler is reset and updated again for an overflow in any part.
    for scaler, state in zip(scalers, before, strict=True):
        scaler.load_state_dict(state)
        scaler.update(found_inf)
    return found_inf, float(optimizer.get_grad_norm())


@torch.no_grad()
def prepare_known(
    optimizer: MegatronOptimizer, *, found_inf: bool, without: Collection[torch.nn.Parameter] = frozenset()
) -> None:
    """Do the work of ``prepare`` without communication, in a replay: the logged vote has its results. Parameters in
    ``without`` get no master gradients, so that the update does not change their state."""
    for part in _parts(optimizer):
        scaler: Any = getattr(part, "grad_scaler", None)
        if scaler is None:
            part.prepare_grads()
        else:
            # Megatron's own method would all-reduce the overflow flag with stages that do not replay.
            _unscale(part, scaler)
            scaler.update(found_inf)
        for parameter, master in masters_of(part):
            # The gradient is removed, because with a zero gradient the update would still decay weights and moments.
            if parameter in without:
                master.grad = None


def _unscale(part: Any, scaler: Any) -> None:
    part._copy_model_grads_to_main_grads()
    gradients = part._collect_main_grad_data_for_unscaling()
    overflow = torch.zeros(1, device=scaler.inv_scale.device)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, scaler.inv_scale)


def grad_scalers(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the loss scalers of all parts. Only a run in FP16 has loss scalers."""
    scalers = (getattr(part, "grad_scaler", None) for part in _parts(optimizer))
    return [scaler for scaler in scalers if scaler is not None]


@torch.no_grad()
def update(optimizer: MegatronOptimizer, clip_grad: float, grad_norm: float) -> None:
    """Clip the gradients with ``grad_norm`` from the vote; update this rank's master weights, moments and weights."""
    for part in _parts(optimizer):
        parameters = part.get_parameters()
        # In a replay all parameters of a part may be frozen. Then no gradient is left to clip.
        if clip_grad > 0.0 and any(parameter.grad is not None for parameter in parameters):
            clip_grad_by_total_norm_fp32(parameters, max_norm=clip_grad, total_norm=grad_norm)
        if isinstance(part, DistributedOptimizer):
            # The method of ``DistributedOptimizer`` would also gather parameters, once for each part.
            MixedPrecisionOptimizer.step_with_ready_grads(part)
        else:
            part.step_with_ready_grads()


def gather(optimizer: MegatronOptimizer, model_chunks: list[torch.nn.Module]) -> None:
    """All-gather the updated parameters if the optimizer is sharded."""
    if any(isinstance(part, DistributedOptimizer) for part in _parts(optimizer)):
        for chunk in model_chunks:
            chunk.start_param_sync()  # type: ignore[operator]
