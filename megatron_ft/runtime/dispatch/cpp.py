"""The dispatch backend in C++, for tokens in host memory. Its results equal the reference backend's bitwise."""

import ctypes
from collections.abc import Sequence

import torch

from megatron_ft.config.placement import BALANCED
from megatron_ft.planning.balanced_shares import MAX_TOKENS
from megatron_ft.runtime.dispatch import extension
from megatron_ft.runtime.dispatch.rows import (
    ROW_DTYPES,
    DispatchHandle,
    RowOperations,
    Totals,
    check_matrices,
    check_plan,
    split_like,
)

POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int64
SIGNATURES = {
    "dispatch_schedule": [POINTER, POINTER, INTEGER, INTEGER, INTEGER, INTEGER, POINTER, POINTER],
    "dispatch_count_rows": [POINTER, INTEGER, INTEGER, POINTER],
    "dispatch_order_sent": [POINTER, POINTER, INTEGER, INTEGER, INTEGER, INTEGER, INTEGER, POINTER, POINTER, POINTER],
    "dispatch_order_received": [POINTER, INTEGER, INTEGER, POINTER],
    "dispatch_gather": [POINTER, POINTER, INTEGER, INTEGER, POINTER],
    "dispatch_scatter": [POINTER, POINTER, INTEGER, INTEGER, POINTER],
    "dispatch_combine": [INTEGER, POINTER, POINTER, POINTER, INTEGER, INTEGER, INTEGER, POINTER],
    "dispatch_weigh": [INTEGER, POINTER, POINTER, POINTER, POINTER, INTEGER, INTEGER, POINTER, POINTER],
}
"""Argument types of every C function in ``csrc/bindings.cpp``, by the function's name."""
_NEGATIVE, _TOO_MANY_TOKENS, _FINE = -1, -2, 0
"""Return codes of the C function ``dispatch_schedule``. A code n > 0 means: expert n - 1 has tokens but no replica."""


class CppDispatch(RowOperations):
    """Dispatch backend with single-threaded C++ kernels. The constructor raises ``SoftwareError`` if the kernels cannot
    be built. ``backend.py`` explains the notation of shapes."""

    def __init__(self, shares: str = BALANCED) -> None:
        self.shares = shares
        self.library = extension.load("cpp")
        for name, arguments in SIGNATURES.items():
            getattr(self.library, name).argtypes = arguments
            getattr(self.library, name).restype = None
        for name in ("dispatch_count_rows", "dispatch_schedule"):
            getattr(self.library, name).restype = INTEGER

    def schedule(self, counts: torch.Tensor, replicas: torch.Tensor, rank: int) -> torch.Tensor:
        check_matrices(counts, replicas, rank)
        counts, replicas = _on_host("counts", counts), _on_host("replicas", replicas)
        num_experts, num_ranks = counts.shape
        planned, quotas = counts.new_empty((2, num_experts, num_ranks)), torch.empty_like(counts)
        is_balanced = int(self.shares == BALANCED)
        result = self.library.dispatch_schedule(
            *(_at(counts), _at(replicas), num_experts, num_ranks, rank, is_balanced, _at(quotas), _at(planned))
        )
        _check_result(result)
        return planned

    def plan(
        self, routing_map: torch.Tensor, schedule: torch.Tensor, rank: int, local_experts: Sequence[int]
    ) -> DispatchHandle:
        """Make a plan in two passes over ``routing_map`` [T, E]: the first counts the rows, the second lists them."""
        check_plan(routing_map, schedule, rank, local_experts)
        routing_map, schedule = _on_host("routing_map", routing_map), _on_host("schedule", schedule)
        (num_tokens, num_experts), num_ranks = routing_map.shape, schedule.shape[2]
        routed = torch.empty(num_experts, dtype=torch.int64)
        width = self.library.dispatch_count_rows(_at(routing_map), num_tokens, num_experts, _at(routed))
        totals = Totals.of(routed, torch.tensor([width]), schedule, rank, local_experts)
        num_sent, num_received = sum(totals.send_splits), sum(totals.recv_splits)
        permutation, expert_of_row = (torch.empty(num_sent, dtype=torch.int64) for _ in range(2))
        receive_order = torch.empty(num_received, dtype=torch.int64)
        rows_of_token = torch.empty((num_tokens, width), dtype=torch.int64)
        outgoing, incoming = schedule[0], schedule[1, list(local_experts)]
        self.library.dispatch_order_sent(
            *(_at(routing_map), _at(outgoing), num_tokens, num_experts, num_ranks, rank, width),
            *(_at(permutation), _at(expert_of_row), _at(rows_of_token)),
        )
        self.library.dispatch_order_received(_at(incoming), len(local_experts), num_ranks, _at(receive_order))
        sent = (permutation, expert_of_row, rows_of_token)
        return DispatchHandle.of(totals, num_tokens, rank, local_experts, sent=sent, receive_order=receive_order)

    def gather(self, source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        source = _on_host("rows", source)
        out = source.new_empty((len(index), source.shape[1]))
        row_bytes = source.shape[1] * source.element_size()
        self.library.dispatch_gather(_at(source), _at(index), len(index), row_bytes, _at(out))
        return out

    def scatter(self, pieces: Sequence[torch.Tensor], index: torch.Tensor) -> torch.Tensor:
        pieces = [_on_host("rows", piece) for piece in pieces]
        out = pieces[0].new_empty((len(index), pieces[0].shape[1]))
        row_bytes = out.shape[1] * out.element_size()
        for piece, places in zip(pieces, split_like(index, pieces), strict=True):
            self.library.dispatch_scatter(_at(piece), _at(places), len(piece), row_bytes, _at(out))
        return out

    def combine(self, rows: torch.Tensor, rows_of_token: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        rows = _on_host("rows", rows)
        (num_tokens, width), hidden = rows_of_token.shape, rows.shape[1]
        out = rows.new_empty((num_tokens, hidden))
        scales = None if weights is None else _at(weights)
        self.library.dispatch_combine(
            *(ROW_DTYPES.index(rows.dtype), _at(rows), _at(rows_of_token), scales, num_tokens, width, hidden, _at(out))
        )
        return out

    def weigh(
        self, grad: torch.Tensor, rows: torch.Tensor, permutation: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (num_rows, hidden), row_type = rows.shape, ROW_DTYPES.index(rows.dtype)
        grad_rows, dots = torch.empty_like(rows), torch.empty_like(weights)
        self.library.dispatch_weigh(
            *(row_type, _at(grad), _at(rows), _at(permutation), _at(weights), num_rows, hidden),
            *(_at(grad_rows), _at(dots)),
        )
        return grad_rows, dots


def _check_result(result: int) -> None:
    if result == _NEGATIVE:
        raise ValueError("counts or replicas has a negative value: all values must be at least 0")
    if result == _TOO_MANY_TOKENS:
        raise ValueError(
            f"counts: the sum must be below {MAX_TOKENS} with placement.shares=balanced; set placement.shares=even"
        )
    if result != _FINE:
        raise ValueError(f"expert {result - 1} has tokens but no replica: each such expert needs a replica")


def _on_host(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{name} is on {tensor.device}, but placement.dispatch_backend=cpp needs tensors in host memory: set the "
            "key to cuda"
        )
    return tensor.contiguous()


def _at(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()
