"""All-to-all exchange of unevenly many rows, without padding, and its gradient. ``backend.py`` has the notation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.runtime.dispatch.rows import DispatchHandle


@dataclass(slots=True)
class ExchangeCounter:
    """Counts the bytes that this rank passes to all-to-all exchanges, for rows and for the gradients of rows. The
    caller reads and resets the counts."""

    sent_bytes: int = 0
    """Bytes of the rows that go to other ranks."""
    kept_bytes: int = 0
    """Bytes of the rows that stay on this rank."""
    num_exchanges: int = 0

    def add(self, splits: Sequence[int], rank: int, row_bytes: int) -> None:
        """Count one exchange in which this rank sends ``splits[n]`` rows of ``row_bytes`` bytes to each rank n."""
        self.num_exchanges += 1
        self.kept_bytes += splits[rank] * row_bytes
        self.sent_bytes += (sum(splits) - splits[rank]) * row_bytes


class _AllToAll(torch.autograd.Function):
    """All-to-all exchange of rows, which must be ordered by destination rank. The received rows are ordered by source
    rank. The backward pass sends the gradients of the rows back."""

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
    """Send ``rows`` [S, H] or [S] to their destination ranks. Return the rows that this rank receives, [R, H] or [R],
    in order of arrival. Every rank of ``group`` must call this."""
    return _AllToAll.apply(rows, handle.send_splits, handle.recv_splits, group, counter)


def return_rows(
    rows: torch.Tensor, handle: DispatchHandle, group: dist.ProcessGroup, counter: ExchangeCounter | None = None
) -> torch.Tensor:
    """Send the received ``rows`` [R, H] or [R], in order of arrival, back to the ranks that sent them. Return the rows
    that this rank had sent, [S, H] or [S], in sending order. Every rank of ``group`` must call this."""
    return _AllToAll.apply(rows, handle.recv_splits, handle.send_splits, group, counter)


def gather_counts(routing_map: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return how many tokens each rank routes to each expert, int64 [E, N]. Every rank of ``group`` must call this."""
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
        raise ValueError(
            f"{len(rows)} rows cannot be sent with splits {list(send_splits)} in a group of size {group.size()}: there "
            "must be one split for each rank, and the splits must sum to the number of rows"
        )
    if counter is not None:
        row_bytes = rows.shape[1:].numel() * rows.element_size()
        counter.add(send_splits, group.rank(), row_bytes)
    if group.size() == 1:
        return rows.clone()
    received = rows.new_empty((sum(recv_splits), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), list(recv_splits), list(send_splits), group=group)
    return received
