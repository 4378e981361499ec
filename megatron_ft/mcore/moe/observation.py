"""Reads the counters of a rank's MoE layers: auxiliary losses and tokens per expert."""

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_moe_layer_wise_logging_tracker

from megatron_ft.mcore.model.names import unwrap
from megatron_ft.mcore.moe.router import PaddingAwareRouter

_Z_LOSS = "z_loss"


def routers(model_chunks: list[torch.nn.Module]) -> list[PaddingAwareRouter]:
    """Return the routers of all MoE layers of ``model_chunks``, in the order of the layers within each chunk."""
    return [m for chunk in model_chunks for m in unwrap(chunk).modules() if isinstance(m, PaddingAwareRouter)]


def take_auxiliary_losses() -> tuple[float, float]:
    """Return this rank's auxiliary losses since the last call, and reset them.

    Returns:
        (sum of balancing losses, sum of z-losses) over layers and microbatches, without their coefficients.
    """
    balancing = z = 0.0
    # Not reduced over ranks: the vote sums these values in rank order.
    for name, entry in get_moe_layer_wise_logging_tracker().items():
        total = float(entry["values"].sum())
        entry["values"].zero_()
        if name == _Z_LOSS:
            z += total
        else:
            balancing += total
    return balancing, z


def forget_auxiliary_losses() -> None:
    """Clear Megatron's global tracker of auxiliary losses, which references process groups of the current engine. The
    global scale of auxiliary losses is also reset. The schedule of the next engine sets it again."""
    get_moe_layer_wise_logging_tracker().clear()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


def expert_load(model_chunks: list[torch.nn.Module], num_layers: int, num_experts: int) -> torch.Tensor:
    """Return the number of tokens that this rank has routed to each expert in this iteration. The result is int64
    [num_layers, num_experts], on the CPU."""
    load = torch.zeros((num_layers, num_experts), dtype=torch.int64)
    for router in routers(model_chunks):
        load[router.layer_number - 1] = router.load.cpu()
    return load
