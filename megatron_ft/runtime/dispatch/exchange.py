"""Uneven all-to-all over a process group, without padding, and its gradient; notation in ``backend.py``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.runtime.dispatch.handle import DispatchHandle


@dataclass(slots=True)
class ExchangeCounter:
    """Bytes that this rank passed to exchanges, gradients included; the caller reads and resets it."""

    sent_bytes: int = 0
    """Rows for other ranks."""
    kept_bytes: int = 0
    """Rows whose copy is on this rank."""
    num_exchanges: int = 0

    def add(self, splits: Sequence[int], rank: int, row_bytes: int) -> None:
        """Count one exchange that sends ``splits`` [N] rows of ``row_bytes``."""
        self.num_exchanges += 1
        self.kept_bytes += splits[rank] * row_bytes
        self.sent_bytes += (sum(splits) - splits[rank]) * row_bytes


class AllToAll(torch.autograd.Function):
    """Rows by destination -> rows by source; the gradient takes the reverse way."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        send_splits: Sequence[int],
        recv_splits: Sequence[int],
        group: dist.ProcessGroup,
        counter: ExchangeCounter | None,
    ) -> torch.Tensor:
        ctx.way_back = (recv_splits, send_splits, group, counter)
        return _exchange(rows, send_splits, recv_splits, group, counter)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchange(grad, *ctx.way_back), None, None, None, None


def send_rows(
    rows: torch.Tensor, handle: DispatchHandle, group: dist.ProcessGroup, counter: ExchangeCounter | None = None
) -> torch.Tensor:
    """Send ``rows`` [S, H] or [S] in sending order -> [R, H] or [R] in order of arrival. Called by every rank of
    ``group``."""
    return AllToAll.apply(rows, handle.send_splits, handle.recv_splits, group, counter)


def return_rows(
    rows: torch.Tensor, handle: DispatchHandle, group: dist.ProcessGroup, counter: ExchangeCounter | None = None
) -> torch.Tensor:
    """Return ``rows`` [R, H] or [R] in order of arrival -> [S, H] or [S] in sending order: the inverse of
    ``send_rows``."""
    return AllToAll.apply(rows, handle.recv_splits, handle.send_splits, group, counter)


def gather_counts(routing_map: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather ``routing_map`` [T, E] of each rank -> int64 [E, N]: the tokens that each rank routes to each expert."""
    mine = routing_map.sum(0)
    rows = torch.empty((group.size(), len(mine)), dtype=torch.int64, device=mine.device)
    dist.all_gather_into_tensor(rows.view(-1), mine, group=group)
    return rows.t().contiguous()


def _exchange(
    rows: torch.Tensor,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    group: dist.ProcessGroup,
    counter: ExchangeCounter | None,
) -> torch.Tensor:
    if len(rows) != sum(send_splits) or len(send_splits) != group.size():
        raise ValueError(f"{len(rows)} rows for splits {list(send_splits)} over {group.size()} ranks: must match")
    if counter is not None:
        row_bytes = rows.shape[1:].numel() * rows.element_size()
        counter.add(send_splits, group.rank(), row_bytes)
    if group.size() == 1:
        return rows.clone()
    received = rows.new_empty((sum(recv_splits), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), list(recv_splits), list(send_splits), group=group)
    return received
