"""Checks of the arguments of a dispatch, its row counts, and differentiable operations on rows. ``backend.py`` explains
the notation.

The operations are built from three kernels. ``gather`` copies rows into a given order, and ``combine`` sums the rows of
each token. Without weights, ``gather`` and ``combine`` are each other's gradients. ``weigh`` is the gradient of the
weighted sum. Every sum has one fixed order, because no kernel uses atomic additions. Sums use float32, or float64 for
float64 rows. Each product is rounded before it is added; the sum is rounded to the type of the rows at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch

NO_ROW = -1
"""Padding in ``DispatchHandle.rows_of_token`` [T, K] for a token with fewer than K rows."""


def check_matrices(counts: torch.Tensor, replicas: torch.Tensor, rank: int) -> None:
    """Check that ``counts`` and ``replicas`` are int64 [E, N], and that ``rank`` is one of the N ranks; otherwise raise
    ``ValueError``. The values in the matrices are not read."""
    matrices = counts.dtype == replicas.dtype == torch.int64 and counts.dim() == 2
    if not matrices or counts.shape != replicas.shape:
        both = " and ".join(f"{each.dtype} {list(each.shape)}" for each in (counts, replicas))
        raise ValueError(f"counts and replicas are {both}: both must be int64 [E, N]")
    _check_rank(rank, counts.shape[1])


def check_plan(routing_map: torch.Tensor, schedule: torch.Tensor, rank: int, local_experts: Sequence[int]) -> None:
    """Raise ``ValueError`` if an argument of ``DispatchBackend.plan`` has a wrong shape, type or range of values."""
    if routing_map.dtype != torch.bool or routing_map.dim() != 2:
        raise ValueError(f"routing_map is {routing_map.dtype} {list(routing_map.shape)}: must be bool [T, E]")
    num_experts = routing_map.shape[1]
    fits = schedule.dim() == 3 and schedule.shape[:2] == (2, num_experts)
    if schedule.dtype != torch.int64 or not fits:
        raise ValueError(
            f"schedule is {schedule.dtype} {list(schedule.shape)}: must be int64 [2, E, N] with E={num_experts}"
        )
    _check_rank(rank, schedule.shape[2])
    experts = list(local_experts)
    if experts != sorted(set(experts)) or any(not 0 <= expert < num_experts for expert in experts):
        raise ValueError(f"local_experts={experts}: must be distinct, ascending and from 0 to {num_experts - 1}")


def _check_rank(rank: int, num_ranks: int) -> None:
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank={rank}: must be from 0 to {num_ranks - 1}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Totals:
    """Row counts of one dispatch. They are on the host, because a backend needs them to allocate its tensors."""

    send_splits: list[int]
    recv_splits: list[int]
    tokens_per_local_expert: list[int]
    max_rows_per_token: int

    @classmethod
    def of(
        cls,
        routed: torch.Tensor,
        max_rows_per_token: torch.Tensor,
        schedule: torch.Tensor,
        rank: int,
        local_experts: Sequence[int],
    ) -> "Totals":
        """Compute the row counts of a dispatch from ``schedule`` [2, E, N], with a single copy to the host.

        ``routed`` [E]: tokens that this rank routes to each expert. ``max_rows_per_token`` has shape [1]. All tensors
        must be on one device.

        Raises ``ValueError`` when the schedule and ``routed`` have different token counts, or when the schedule sends
        rows to this rank for an expert that is not in ``local_experts``.
        """
        _, num_experts, num_ranks = schedule.shape
        outgoing, incoming = schedule
        parts = [max_rows_per_token, routed, outgoing.sum(1), outgoing.sum(0), incoming.sum(0), incoming.sum(1)]
        sizes = [1, num_experts, num_experts, num_ranks, num_ranks, num_experts]
        flat = torch.cat(parts).tolist()
        ends = list(accumulate(sizes))
        widest, here, sent, send_splits, recv_splits, arriving = (
            flat[end - size : end] for size, end in zip(sizes, ends, strict=True)
        )
        _check_sums(here, sent, arriving, rank, local_experts)
        return cls(
            send_splits=send_splits,
            recv_splits=recv_splits,
            tokens_per_local_expert=[arriving[expert] for expert in local_experts],
            max_rows_per_token=widest[0],
        )


def _check_sums(
    routed: list[int], sent: list[int], arriving: list[int], rank: int, local_experts: Sequence[int]
) -> None:
    for expert, (have, planned) in enumerate(zip(routed, sent, strict=True)):
        if have != planned:
            raise ValueError(
                f"the schedule sends {planned} tokens of expert {expert} from rank {rank}, but the routing map of "
                f"this rank has {have}: make the schedule from the counts of this routing map"
            )
    for expert, num_tokens in enumerate(arriving):
        if num_tokens and expert not in local_experts:
            raise ValueError(
                f"the schedule sends {num_tokens} tokens of expert {expert} to rank {rank}, which has only "
                f"experts {list(local_experts)}: make the schedule from the current placement"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DispatchHandle:
    """Source and destination of every row of one dispatch. Index tensors are int64 on the device of the tokens.

    ``send_splits`` N ints: number of rows that this rank sends to each rank; the sum is S. ``recv_splits`` N ints:
    number of rows that this rank receives from each rank; the sum is R. ``permutation`` [S]: the token of each sent
    row. Rows are sent in the order (destination rank, expert, token). ``expert_of_row`` [S]: the expert of each sent
    row. ``rows_of_token`` [T, K]: the sent rows of each token, experts ascending, padded with ``NO_ROW``; K is the
    largest number of rows of a token. A token's rows are summed in this order, which does not depend on the placement.
    ``receive_order`` [R]: arrival index of each row when rows are sorted by (local expert, source rank, arrival).
    ``local_experts`` L ints, ascending. ``tokens_per_local_expert`` int64 [L], on the host: number of received rows of
    each local expert.
    """

    num_tokens: int
    rank: int
    send_splits: list[int]
    recv_splits: list[int]
    permutation: torch.Tensor
    expert_of_row: torch.Tensor
    rows_of_token: torch.Tensor
    receive_order: torch.Tensor
    local_experts: tuple[int, ...]
    tokens_per_local_expert: torch.Tensor

    @classmethod
    def of(
        cls,
        totals: Totals,
        num_tokens: int,
        rank: int,
        local_experts: Sequence[int],
        *,
        sent: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        receive_order: torch.Tensor,
    ) -> "DispatchHandle":
        """Build a handle. ``sent`` contains the fields ``permutation``, ``expert_of_row`` and ``rows_of_token``."""
        permutation, expert_of_row, rows_of_token = sent
        return cls(
            num_tokens=num_tokens,
            rank=rank,
            send_splits=totals.send_splits,
            recv_splits=totals.recv_splits,
            permutation=permutation,
            expert_of_row=expert_of_row,
            rows_of_token=rows_of_token,
            receive_order=receive_order,
            local_experts=tuple(local_experts),
            tokens_per_local_expert=torch.tensor(totals.tokens_per_local_expert, dtype=torch.int64),
        )

    @property
    def num_sent_rows(self) -> int:
        """S, the number of rows that this rank sends, including those to itself."""
        return sum(self.send_splits)

    @property
    def num_received_rows(self) -> int:
        """R, the number of rows that the local experts process."""
        return sum(self.recv_splits)

    @property
    def piece_sizes(self) -> list[int]:
        """Number of rows of each local expert. On a rank without experts, this is ``[0]``, so that the rank has one
        empty tensor. It connects the rank's exchanges in autograd's graph, so the backward pass runs them, too."""
        return self.tokens_per_local_expert.tolist() or [0]


ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Supported element types of rows. Kernels receive a type as its index in this tuple."""


class _RowKernels(Protocol):
    """Interface of the kernels of a dispatch backend. Rows are contiguous and have a type in ``ROW_DTYPES``. Indices
    are contiguous int64."""

    def gather(self, source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return [B, H], a copy of rows of ``source`` [A, H]. Row b is a copy of row ``index[b]`` of ``source``."""
        ...

    def scatter(self, pieces: Sequence[torch.Tensor], index: torch.Tensor) -> torch.Tensor:
        """Join ``pieces``, one or more tensors with B rows in total, and permute the rows. Row b of the joined pieces
        becomes row ``index[b]`` of the result [B, H]. ``index`` is a permutation."""
        ...

    def combine(self, rows: torch.Tensor, rows_of_token: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Sum the ``rows`` [S, H] of each token to [T, H]. ``rows_of_token`` [T, K] lists a token's rows in summing
        order. ``weights`` [S], of type ``sum_dtype(rows)``, are factors of the rows; None means no factors."""
        ...

    def weigh(
        self, grad: torch.Tensor, rows: torch.Tensor, permutation: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the gradients of ``combine`` for ``rows`` [S, H] and ``weights`` [S] from ``grad`` [T, H].

        ``permutation`` [S] is the token of each row. The first result [S, H] is ``grad * weight`` for each row. The
        second result [S] is ``grad * row``, summed over H in a fixed order. For this sum, the terms are padded with
        zeros to a power of two. Then the second half is added to the first half until one number is left.
        """
        ...


def split_like(index: torch.Tensor, pieces: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Split ``index`` [B] into one part for each of ``pieces``. A part has as many elements as its piece has rows."""
    return index.split([len(piece) for piece in pieces])


def sum_dtype(rows: torch.Tensor) -> torch.dtype:
    """Return the type in which ``rows`` are summed: float64 for float64 rows, otherwise float32."""
    return torch.float64 if rows.dtype == torch.float64 else torch.float32


class _Permute(torch.autograd.Function):
    """Copies tokens [T, H] to rows [S, H]. The gradient of a token is the sum of the gradients of its rows."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, handle: DispatchHandle, kernels: _RowKernels) -> torch.Tensor:
        ctx.handle, ctx.kernels = handle, kernels
        return kernels.gather(tokens.contiguous(), handle.permutation)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.kernels.combine(grad_rows.contiguous(), ctx.handle.rows_of_token, None), None, None


# ``_Sort`` also splits the rows by expert, and ``_Unsort`` also joins them. With separate operations, ``torch.cat`` and
# the gradient of ``torch.split`` would copy all rows once more.


class _Sort(torch.autograd.Function):
    """Sorts rows [R, H] by local expert. Returns the rows of each expert."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, handle: DispatchHandle, kernels: _RowKernels) -> tuple[torch.Tensor, ...]:
        ctx.handle, ctx.kernels = handle, kernels
        return kernels.gather(rows.contiguous(), handle.receive_order).split(handle.piece_sizes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.kernels.scatter(grads, ctx.handle.receive_order), None, None


class _Unsort(torch.autograd.Function):
    """Joins the rows of all local experts to [R, H], in their order of arrival."""

    @staticmethod
    def forward(ctx: Any, handle: DispatchHandle, kernels: _RowKernels, *pieces: torch.Tensor) -> torch.Tensor:
        ctx.handle, ctx.kernels = handle, kernels
        return kernels.scatter(pieces, handle.receive_order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = ctx.kernels.gather(grad_rows.contiguous(), ctx.handle.receive_order)
        return None, None, *grads.split(ctx.handle.piece_sizes)


class _Sum(torch.autograd.Function):
    """Sums the rows [S, H] of each token to [T, H]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, handle: DispatchHandle, kernels: _RowKernels) -> torch.Tensor:
        ctx.handle, ctx.kernels = handle, kernels
        return kernels.combine(rows.contiguous(), handle.rows_of_token, None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_tokens: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.kernels.gather(grad_tokens.contiguous(), ctx.handle.permutation), None, None


class _WeightedSum(torch.autograd.Function):
    """Sums the rows [S, H] of each token, weighted with the probabilities [S] of the rows, to [T, H]."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, row_probs: torch.Tensor, handle: DispatchHandle, kernels: _RowKernels
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
    """Gathers the probabilities [S] of rows from the probabilities [T, E] of tokens. Each of the T * E entries is used
    at most once, so its gradient is not a sum."""

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
    """Base class of dispatch backends. It builds the differentiable operations of ``DispatchBackend`` from kernels."""

    def permute(self: _RowKernels, tokens: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """Copy ``tokens`` [T, H] to the rows to send, [S, H], in sending order."""
        _check_rows("tokens", tokens, handle.num_tokens)
        return _Permute.apply(tokens, handle, self)

    def sort_received(self: _RowKernels, rows: torch.Tensor, handle: DispatchHandle) -> tuple[torch.Tensor, ...]:
        """Sort the received ``rows`` [R, H] from order of arrival by local expert, then by source rank. Return one
        tensor for each entry of ``piece_sizes``; the entry is the tensor's number of rows."""
        _check_rows("rows", rows, handle.num_received_rows)
        return _Sort.apply(rows, handle, self)

    def unsort(self: _RowKernels, pieces: Sequence[torch.Tensor], handle: DispatchHandle) -> torch.Tensor:
        """Join the rows of all local experts to [R, H], in the order in which the rows arrived. This is the inverse of
        ``sort_received``."""
        for piece, num_rows in zip(pieces, handle.piece_sizes, strict=True):
            _check_rows("rows", piece, num_rows)
        return _Unsort.apply(handle, self, *pieces)

    def unpermute(
        self: _RowKernels, rows: torch.Tensor, probs: torch.Tensor | None, handle: DispatchHandle
    ) -> torch.Tensor:
        """Sum the ``rows`` [S, H] of each token to [T, H]. If ``probs`` [T, E] is given, weight the rows with it."""
        _check_rows("rows", rows, handle.num_sent_rows)
        if probs is None:
            return _Sum.apply(rows, handle, self)
        return _WeightedSum.apply(rows, _RowProbs.apply(probs, handle), handle, self)

    def row_probs(self, probs: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """Return the router probability of each sent row, [S], from ``probs`` [T, E]. The probability can then be sent
        together with the row."""
        return _RowProbs.apply(probs, handle)


def _check_rows(name: str, rows: torch.Tensor, num_rows: int) -> None:
    if rows.dim() != 2 or rows.shape[0] != num_rows or rows.dtype not in ROW_DTYPES:
        raise ValueError(
            f"{name} is {rows.dtype} {list(rows.shape)}: must have shape [{num_rows}, H] and one of the types "
            + ", ".join(str(dtype).removeprefix("torch.") for dtype in ROW_DTYPES)
        )
