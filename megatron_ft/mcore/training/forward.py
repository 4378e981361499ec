"""The forward step of one microbatch, which Megatron's schedules call."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from megatron_ft import failpoints
from megatron_ft.mcore.data.batches import Microbatch

LossResult = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _sum_of_losses(is_padding: bool, losses: torch.Tensor) -> LossResult:
    """Sum the per-token ``losses`` [micro_batch_size, seq_length] of a microbatch.

    Returns:
        (loss_sum, num_tokens, report): sum of losses, int32 number of tokens, and both as float64 [2]. All are zero for
        a padding microbatch.
    """
    num_tokens = 0 if is_padding else losses.numel()
    # Not multiplied by zero, because zero times a loss that is not finite is NaN.
    counted = torch.where(torch.zeros_like(losses, dtype=torch.bool), losses, 0.0) if is_padding else losses
    loss_sum = counted.float().sum()
    # Filled on the device, because a copy from the host would wait for all queued work.
    tokens = losses.new_full((), num_tokens, dtype=torch.int32)
    return loss_sum, tokens, torch.stack([loss_sum.detach().double(), tokens.double()])


def forward_step(
    microbatches: Iterator[Microbatch], model: torch.nn.Module, *, iteration: int
) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossResult]]:
    """Run the next microbatch through one model chunk. Return its output and the loss function for this output."""
    failpoints.hit("forward", iteration)
    batch = next(microbatches)
    output = model(batch.tokens, batch.position_ids, None, labels=batch.labels, padding_mask=_padding_mask(batch))
    if output.requires_grad:
        output.register_hook(lambda gradient: failpoints.hit("backward", iteration))
    return output, partial(_sum_of_losses, batch.is_padding)


def _padding_mask(batch: Microbatch) -> torch.Tensor | None:
    # Returns a mask only for padding microbatches, because the router treats any mask as padding. The embedding checks
    # the shape of the mask.
    if not batch.is_padding:
        return None
    if batch.tokens is None:
        return torch.ones((1, 1), dtype=torch.bool)
    return torch.ones_like(batch.tokens, dtype=torch.bool)
