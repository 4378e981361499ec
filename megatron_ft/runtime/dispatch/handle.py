"""Decisions of one dispatch, kept until the rows return; notation in ``backend.py``."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_ft.runtime.dispatch.checks import Totals

NO_ROW = -1
"""Padding of ``rows_of_token`` [T, K]: this token has fewer than K rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DispatchHandle:
    """Source and destination of every row of one dispatch. Index tensors are int64 on the tokens' device.

    ``send_splits`` N ints: rows that this rank sends to each rank; they sum to S.
    ``recv_splits`` N ints: rows that it receives from each rank; they sum to R.
    ``permutation`` [S]: token of each sent row, in the order (destination rank, expert, token).
    ``expert_of_row`` [S]: expert of each sent row.
    ``rows_of_token`` [T, K]: sent rows of each token, experts ascending, padded with ``NO_ROW``; K is the largest
    number of rows of a token. A token's sum runs in this order, which does not depend on the placement of copies.
    ``receive_order`` [R]: arrived row at each place of the order (local expert, source rank, arrival).
    ``receive_place`` [R]: the inverse: place of each arrived row.
    ``local_experts`` L ints, ascending; ``tokens_per_local_expert`` int64 [L], on the host.
    """

    num_tokens: int
    rank: int
    send_splits: list[int]
    recv_splits: list[int]
    permutation: torch.Tensor
    expert_of_row: torch.Tensor
    rows_of_token: torch.Tensor
    receive_order: torch.Tensor
    receive_place: torch.Tensor
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
        received: tuple[torch.Tensor, torch.Tensor],
    ) -> "DispatchHandle":
        """Build a handle from the splits and the orders: ``sent`` is (``permutation``, ``expert_of_row``,
        ``rows_of_token``), ``received`` (``receive_order``, ``receive_place``)."""
        permutation, expert_of_row, rows_of_token = sent
        receive_order, receive_place = received
        return cls(
            num_tokens=num_tokens,
            rank=rank,
            send_splits=totals.send_splits,
            recv_splits=totals.recv_splits,
            permutation=permutation,
            expert_of_row=expert_of_row,
            rows_of_token=rows_of_token,
            receive_order=receive_order,
            receive_place=receive_place,
            local_experts=tuple(local_experts),
            tokens_per_local_expert=torch.tensor(totals.tokens_per_local_expert, dtype=torch.int64),
        )

    @property
    def num_sent_rows(self) -> int:
        """S: (token, expert) pairs of this rank."""
        return sum(self.send_splits)

    @property
    def num_received_rows(self) -> int:
        """R: rows that the local experts process."""
        return sum(self.recv_splits)

    @property
    def num_rows_leaving(self) -> int:
        """Number of rows whose copy is on another rank, so that they must be sent."""
        return self.num_sent_rows - self.send_splits[self.rank]
