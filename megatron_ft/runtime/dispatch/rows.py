"""Differentiable movement of rows, built from three kernels that every backend has; notation in ``backend.py``.

``gather`` copies rows into an order, ``combine`` sums the rows of each token; without weights each is the other's
gradient. ``weigh`` is the gradient of the weighted sum. No kernel scatters with atomics: every sum has one fixed order.
Sums use float32 (float64 for float64 rows); each product is rounded before it is added, and sums are rounded once to
the rows' type at the end.
"""

from typing import Any, Protocol

import torch

from megatron_ft.runtime.dispatch.handle import DispatchHandle

ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types of the elements of rows."""


class RowKernels(Protocol):
    """The kernels. Rows are contiguous and of a type in ``ROW_DTYPES``; indices are contiguous int64."""

    def gather(self, source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """``source`` [A, H], ``index`` [B] -> [B, H]: row ``index[b]`` at place b."""
        ...

    def combine(self, rows: torch.Tensor, rows_of_token: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Sum ``rows`` [S, H] by ``rows_of_token`` [T, K], with ``weights`` None or [S] of the sum's type -> [T, H]."""
        ...

    def weigh(
        self, grad: torch.Tensor, rows: torch.Tensor, permutation: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the gradient of ``combine`` from that of its tokens, ``grad`` [T, H], and ``permutation`` [S].

        Returns, for ``rows`` [S, H] and ``weights`` [S]: each row's ``grad * weight`` [S, H], and [S] the products
        ``grad * row`` summed over H. This sum is padded with zeros to a power of two; then the second half is added to
        the first until one number is left.
        """
        ...


def sum_dtype(rows: torch.Tensor) -> torch.dtype:
    """Return the type in which ``rows`` are summed."""
    return torch.float64 if rows.dtype == torch.float64 else torch.float32


class _Permute(torch.autograd.Function):
    """Tokens [T, H] to rows [S, H]; the gradient of a token is the sum over its rows."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, handle: DispatchHandle, kernels: RowKernels) -> torch.Tensor:
        ctx.handle, ctx.kernels = handle, kernels
        return kernels.gather(tokens.contiguous(), handle.permutation)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.kernels.combine(grad_rows.contiguous(), ctx.handle.rows_of_token, None), None, None


class _Reorder(torch.autograd.Function):
    """Rows to another order of the same rows; ``inverse`` undoes ``order``."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, kernels: RowKernels
    ) -> torch.Tensor:
        ctx.inverse, ctx.kernels = inverse, kernels
        return kernels.gather(rows.contiguous(), order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.kernels.gather(grad_rows.contiguous(), ctx.inverse), None, None, None


class _Sum(torch.autograd.Function):
    """Rows [S, H] to tokens [T, H], summed over each token's rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, handle: DispatchHandle, kernels: RowKernels) -> torch.Tensor:
        ctx.handle, ctx.kernels = handle, kernels
        return kernels.combine(rows.contiguous(), handle.rows_of_token, None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_tokens: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.kernels.gather(grad_tokens.contiguous(), ctx.handle.permutation), None, None


class _WeightedSum(torch.autograd.Function):
    """Rows [S, H] and probabilities of rows [S] to tokens [T, H]."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, row_probs: torch.Tensor, handle: DispatchHandle, kernels: RowKernels
    ) -> torch.Tensor:
        ctx.handle, ctx.kernels = handle, kernels
        rows, weights = rows.contiguous(), row_probs.to(sum_dtype(rows)).contiguous()
        ctx.save_for_backward(rows, weights)
        ctx.probs_dtype = row_probs.dtype
        return kernels.combine(rows, handle.rows_of_token, weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        rows, weights = ctx.saved_tensors
        grad_rows, dots = ctx.kernels.weigh(grad_tokens.contiguous(), rows, ctx.handle.permutation, weights)
        return grad_rows, dots.to(ctx.probs_dtype), None, None


class _RowProbs(torch.autograd.Function):
    """Gathers the probabilities of rows [S] from those of tokens [T, E]. Each row takes one entry, so gradients need no
    sum."""

    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        ctx.handle, ctx.shape = handle, probs.shape
        return probs[handle.permutation, handle.expert_of_row]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        flat = grad.new_zeros(ctx.shape[0] * ctx.shape[1])
        flat[ctx.handle.permutation * ctx.shape[1] + ctx.handle.expert_of_row] = grad
        return flat.view(ctx.shape), None


class RowOperations:
    """The movements of one dispatch, for a backend that has the kernels."""

    def permute(self: RowKernels, tokens: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """``tokens`` [T, H] -> [S, H], in the order in which rows are sent."""
        _check_rows("tokens", tokens, handle.num_tokens)
        return _Permute.apply(tokens, handle, self)

    def sort_received(self: RowKernels, rows: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """Arrived ``rows`` [R, H] or [R] -> the same rows, grouped by local expert."""
        return _reorder(self, rows, handle.receive_order, handle.receive_place)

    def unsort(self: RowKernels, rows: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """Undo ``sort_received``: [R, H] or [R] back in the order of arrival."""
        return _reorder(self, rows, handle.receive_place, handle.receive_order)

    def unpermute(
        self: RowKernels, rows: torch.Tensor, probs: torch.Tensor | None, handle: DispatchHandle
    ) -> torch.Tensor:
        """``rows`` [S, H] -> [T, H]: sum of each token's rows, weighted with ``probs`` [T, E] unless None."""
        _check_rows("rows", rows, handle.num_sent_rows)
        if probs is None:
            return _Sum.apply(rows, handle, self)
        return _WeightedSum.apply(rows, _RowProbs.apply(probs, handle), handle, self)

    def row_probs(self, probs: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """``probs`` [T, E] -> [S]: the probability of each sent row, which is sent with it."""
        return _RowProbs.apply(probs, handle)


def _reorder(kernels: RowKernels, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    matrix = rows.unsqueeze(1) if rows.dim() == 1 else rows
    _check_rows("rows", matrix, len(order))
    return _Reorder.apply(matrix, order, inverse, kernels).view(rows.shape)


def _check_rows(name: str, rows: torch.Tensor, num_rows: int) -> None:
    if rows.dim() != 2 or rows.shape[0] != num_rows or rows.dtype not in ROW_DTYPES:
        raise ValueError(
            f"{name} is {rows.dtype} {list(rows.shape)}: must be [{num_rows}, H] of "
            + ", ".join(str(dtype).removeprefix("torch.") for dtype in ROW_DTYPES)
        )
