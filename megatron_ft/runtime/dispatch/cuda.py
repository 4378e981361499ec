"""The dispatch backend in CUDA. Its results equal the reference backend's bitwise. Only ``plan`` copies to the host."""

import ctypes
from collections.abc import Sequence

import torch

from megatron_ft.config.placement import BALANCED
from megatron_ft.errors import SoftwareError
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

MAX_RANKS = 3072
"""Largest number of ranks of a group. A CUDA block has 48 KiB of shared memory and needs two int64 for each rank."""

Argument = torch.Tensor | int | None


class CudaDispatch(RowOperations):
    """Dispatch backend with CUDA kernels on the current stream. The constructor raises ``SoftwareError`` if there is no
    CUDA device. ``backend.py`` explains the notation of shapes."""

    def __init__(self, shares: str = BALANCED) -> None:
        if not torch.cuda.is_available():
            raise SoftwareError(
                "placement.dispatch_backend=cuda needs a CUDA device, but torch.cuda.is_available() is False on this "
                "machine: set the key to cpp"
            )
        self.shares = shares
        self.library = extension.load("cuda")
        self.library.dispatch_error.restype = ctypes.c_char_p
        self.library.dispatch_schedule_cells.restype = ctypes.c_int64

    def schedule(self, counts: torch.Tensor, replicas: torch.Tensor, rank: int) -> torch.Tensor:
        """Compute the schedule [2, E, N] from ``counts`` and ``replicas``, int64 [E, N]. Copy nothing to the host."""
        check_matrices(counts, replicas, rank)
        num_experts, num_ranks = counts.shape
        _check_ranks(num_ranks)
        planned = counts.new_empty((2, num_experts, num_ranks))
        counts, replicas = counts.contiguous(), replicas.to(counts.device).contiguous()
        cells = self.library.dispatch_schedule_cells(ctypes.c_int64(num_experts), ctypes.c_int64(num_ranks))
        memory, is_balanced = counts.new_empty(cells), int(self.shares == BALANCED)
        self._run("dispatch_schedule", counts, replicas, num_experts, num_ranks, rank, is_balanced, memory, planned)
        return planned

    def plan(
        self, routing_map: torch.Tensor, schedule: torch.Tensor, rank: int, local_experts: Sequence[int]
    ) -> DispatchHandle:
        """Plan a dispatch. One block per expert assigns rows to tokens; then one warp per token lists its rows."""
        check_plan(routing_map, schedule, rank, local_experts)
        schedule = schedule.to(routing_map.device)
        _check_ranks(schedule.shape[2])
        per_token = routing_map.sum(1)
        widest = per_token.max().view(1) if len(per_token) else per_token.new_zeros(1)
        totals = Totals.of(routing_map.sum(0), widest, schedule, rank, local_experts)
        sent = self._order_sent(routing_map, schedule[0].contiguous(), rank, totals)
        order = self._order_received(schedule[1, list(local_experts)], sum(totals.recv_splits))
        return DispatchHandle.of(totals, len(routing_map), rank, local_experts, sent=sent, receive_order=order)

    def gather(self, source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        out = source.new_empty((len(index), source.shape[1]))
        self._run("dispatch_gather", source, index, len(index), source.shape[1] * source.element_size(), out)
        return out

    def scatter(self, pieces: Sequence[torch.Tensor], index: torch.Tensor) -> torch.Tensor:
        out = pieces[0].new_empty((len(index), pieces[0].shape[1]))
        row_bytes = out.shape[1] * out.element_size()
        for piece, places in zip(pieces, split_like(index, pieces), strict=True):
            self._run("dispatch_scatter", piece.contiguous(), places, len(piece), row_bytes, out)
        return out

    def combine(self, rows: torch.Tensor, rows_of_token: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        (num_tokens, width), hidden = rows_of_token.shape, rows.shape[1]
        out = rows.new_empty((num_tokens, hidden))
        row_type = ROW_DTYPES.index(rows.dtype)
        self._run("dispatch_combine", row_type, rows, rows_of_token, weights, num_tokens, width, hidden, out)
        return out

    def weigh(
        self, grad: torch.Tensor, rows: torch.Tensor, permutation: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (num_rows, hidden), row_type = rows.shape, ROW_DTYPES.index(rows.dtype)
        grad_rows, dots = torch.empty_like(rows), torch.empty_like(weights)
        self._run(*("dispatch_weigh", row_type, grad, rows, permutation, weights, num_rows, hidden, grad_rows, dots))
        return grad_rows, dots

    def _order_sent(
        self, routing_map: torch.Tensor, outgoing: torch.Tensor, rank: int, totals: Totals
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        (num_tokens, num_experts), num_ranks = routing_map.shape, outgoing.shape[1]
        num_sent, width = sum(totals.send_splits), totals.max_rows_per_token
        permutation, expert_of_row = outgoing.new_empty(num_sent), outgoing.new_empty(num_sent)
        rows_of_token = outgoing.new_empty((num_tokens, width))
        row_of = outgoing.new_empty((num_tokens, num_experts))
        starts = _starts(outgoing.t()).t().contiguous()
        self._run(
            *("dispatch_order_sent", routing_map.contiguous(), outgoing, starts, num_tokens, num_experts, num_ranks),
            *(rank, width, row_of, permutation, expert_of_row, rows_of_token),
        )
        return permutation, expert_of_row, rows_of_token

    def _order_received(self, incoming: torch.Tensor, num_received: int) -> torch.Tensor:
        order = incoming.new_empty(num_received)
        sizes, places = incoming.contiguous(), _starts(incoming)
        arrivals = _starts(incoming.t()).t().contiguous()
        self._run("dispatch_order_received", sizes, arrivals, places, sizes.numel(), order)
        return order

    def _run(self, name: str, *arguments: Argument) -> None:
        device = next(each.device for each in arguments if isinstance(each, torch.Tensor))
        if device.type != "cuda":
            raise ValueError(
                f"{name}: tensors are on {device}, but placement.dispatch_backend=cuda needs CUDA tensors; set the key "
                "to cpp"
            )
        stream = torch.cuda.current_stream(device).cuda_stream
        index = torch.cuda.current_device() if device.index is None else device.index
        code = getattr(self.library, name)(
            ctypes.c_int64(index), ctypes.c_void_p(stream), *(_argument(each, device) for each in arguments)
        )
        if code:
            raise SoftwareError(f"{name} failed on {device}: {self.library.dispatch_error(code).decode()}")


def _argument(value: Argument, device: torch.device) -> ctypes.c_void_p | ctypes.c_int64:
    if isinstance(value, int):
        return ctypes.c_int64(value)
    assert value is None or value.device == device, (
        f"tensors are on {device} and {value.device}: all must be on one device"
    )
    return ctypes.c_void_p(None if value is None else value.data_ptr())


def _starts(sizes: torch.Tensor) -> torch.Tensor:
    # Returns the offset of each block, in the shape of ``sizes``. The blocks are adjacent, in the order of ``sizes``.
    flat = sizes.flatten()
    return (flat.cumsum(0) - flat).view(sizes.shape)


def _check_ranks(num_ranks: int) -> None:
    if num_ranks > MAX_RANKS:
        raise ValueError(
            f"the dispatch group has {num_ranks} ranks: placement.dispatch_backend=cuda supports at most {MAX_RANKS}"
        )
