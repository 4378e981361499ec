"""Linear layers with FP8 matrix products in the forward pass and in both gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from transformer_engine_ext.providers import Provider
from transformer_engine_ext.quantized import QuantizedTensor
from transformer_engine_ext.recipes import ROLES, AmaxHistory, Recipe, Scaler


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScalers:
    """Provider of FP8 products of a linear layer, and scalers that quantize its weight, inputs and output gradients."""

    provider: Provider
    weight: Scaler
    input: Scaler
    output_gradient: Scaler

    @classmethod
    def of(
        cls, provider: Provider, recipe: Recipe, history: AmaxHistory | None = None, number: int = 0
    ) -> "LinearScalers":
        """Make the scalers of one linear layer for ``recipe``. Delayed scaling needs ``history``, the largest
        magnitudes of several layers, and ``number``, the index of this layer in ``history``."""
        roles = {role: recipe.scaler(role) if history is None else history.scaler(role, number) for role in ROLES}
        return cls(provider=provider, **roles)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, codes: Any, scalers: LinearScalers) -> torch.Tensor:
        quantized_weight = scalers.weight.quantize(weight) if codes is None else codes
        quantized_rows = scalers.input.quantize(rows)
        ctx.scalers, ctx.blocks, ctx.dtypes = scalers, [], (rows.dtype, weight.dtype)
        # A frozen operator needs no weight gradient, so its inputs are not kept.
        kept = [quantized_weight, *([quantized_rows] if ctx.needs_input_grad[1] else [])]
        ctx.blocks = [found.block_elements for found in kept]
        # Tensors must be saved with this method: then autograd frees them, and recomputation can replace them.
        ctx.save_for_backward(*(part for found in kept for part in (found.codes, found.scales)))
        return scalers.provider.product(quantized_rows, quantized_weight, rows.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        weight, *rows = [
            QuantizedTensor(codes=saved[2 * place], scales=saved[2 * place + 1], block_elements=block)
            for place, block in enumerate(ctx.blocks)
        ]
        product = ctx.scalers.provider.product
        gradient = ctx.scalers.output_gradient.quantize(gradients[0])
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            of_input = product(gradient, weight, ctx.dtypes[0], is_right_transposed=True)
        if ctx.needs_input_grad[1]:
            of_weight = product(gradient, rows[0], ctx.dtypes[1], is_left_transposed=True, is_right_transposed=True)
        return of_input, of_weight, None, None


def linear(
    inputs: torch.Tensor, weight: torch.Tensor, scalers: LinearScalers, codes: QuantizedTensor | None = None
) -> torch.Tensor:
    """Return ``inputs @ weight.T`` with FP8 operands. The backward pass quantizes gradients of the output, too.

    If ``weight`` does not require a gradient, only the gradient of ``inputs`` is computed.

    Args:
        inputs: ``[..., k]``; the number of rows may be zero.
        weight: ``[n, k]``.
        codes: the quantized ``weight`` if it exists already (primary FP8 weights); None quantizes ``weight`` here.

    Returns:
        ``[..., n]`` in the dtype of ``inputs``.
    """
    # Inputs without rows must stay in the graph of autograd. Otherwise a rank whose expert has no tokens would skip the
    # all-to-all of the backward pass, and block the other ranks. (A size of -1 is ambiguous without elements.)
    rows = inputs.reshape(inputs.shape[:-1].numel(), inputs.shape[-1])
    found: torch.Tensor = _Linear.apply(rows, weight, codes, scalers)  # type: ignore[no-untyped-call]
    return found.view(*inputs.shape[:-1], weight.shape[0])


def grouped_linear(
    rows: torch.Tensor,
    rows_per_expert: Sequence[int],
    weights: Sequence[torch.Tensor],
    scalers: Sequence[LinearScalers],
) -> torch.Tensor:
    """Apply the linear layer of each expert to the expert's rows of ``rows [m, k]``. Return ``[m, n]``.

    Rows are sorted by expert. Each expert has scales of its own, so the result equals that of separate calls of
    :func:`linear`. Experts without rows get weight gradients of zero.
    """
    assert sum(rows_per_expert) == len(rows), f"{rows_per_expert} rows per expert of {len(rows)} rows"
    parts = torch.split(rows, list(rows_per_expert))
    return torch.cat([linear(*given) for given in zip(parts, weights, scalers, strict=True)])
