"""Reads the counters of a rank's MoE layers: auxiliary losses and tokens per expert."""

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_moe_layer_wise_logging_tracker

from megatron_ft.mcore.model.names import unwrap
from megatron_ft.mcore.moe.router import PaddingAwareRouter

_Z_LOSS = "z_loss"


def routers(model_chunks: list[torch.nn.Module]) -> list[PaddingAwareRouter]:
    """List the routers of a rank, bottom layer first within each chunk."""
    return [m for chunk in model_chunks for m in unwrap(chunk).modules() if isinstance(m, PaddingAwareRouter)]


def take_auxiliary_losses() -> tuple[float, float]:
    """Return (sum of balancing losses, sum of z-losses) since the last call, unweighted, over layers and
    microbatches."""
    balancing = z = 0.0
    # Values of this rank: Megatron reduces them in its own report only, and the vote adds them up in rank order.
    for name, entry in get_moe_layer_wise_logging_tracker().items():
        total = float(entry["values"].sum())
        entry["values"].zero_()
        if name == _Z_LOSS:
            z += total
        else:
            balancing += total
    return balancing, z


def forget_auxiliary_losses() -> None:
    """Reset Megatron's tracker: it is global, keeps the number of layers and references process groups.

    The scale of auxiliary losses is global too, but the next engine's schedule sets it.
    """
    get_moe_layer_wise_logging_tracker().clear()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


def expert_load(model_chunks: list[torch.nn.Module], num_layers: int, num_experts: int) -> torch.Tensor:
    """Count the tokens that this rank gave to each expert in this iteration: int64 [num_layers, num_experts], on the
    CPU."""
    load = torch.zeros((num_layers, num_experts), dtype=torch.int64)
    for router in routers(model_chunks):
        load[router.layer_number - 1] = router.load.cpu()
    return load
