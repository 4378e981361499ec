"""Source and destination of each row of one dispatch, stored until the rows return. ``backend.py`` explains the
notation."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_ft.runtime.dispatch.checks import Totals

NO_ROW = -1
"""Padding in ``rows_of_token`` [T, K] for a token that has fewer than K rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DispatchHandle:
    """Source and destination of every row of one dispatch. Index tensors are int64 on the device of the tokens.

    ``send_splits`` N ints: number of rows that this rank sends to each rank; the sum is S.
    ``recv_splits`` N ints: number of rows that this rank receives from each rank; the sum is R.
    ``permutation`` [S]: the token of each sent row. Rows are sent in the order (destination rank, expert, token).
    ``expert_of_row`` [S]: the expert of each sent row.
    ``rows_of_token`` [T, K]: the sent rows of each token, experts ascending, padded with ``NO_ROW``; K is the largest
    number of rows of a token. A token's rows are summed in this order, which does not depend on the placement.
    ``receive_order`` [R]: arrival index of each row when rows are sorted by (local expert, source rank, arrival).
    ``receive_place`` [R]: position of each arrived row in this sorted order: the inverse of ``receive_order``.
    ``local_experts`` L ints, ascending.
    ``tokens_per_local_expert`` int64 [L], on the host: number of received rows of each local expert.
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
        """Build a handle. ``sent`` is (``permutation``, ``expert_of_row``, ``rows_of_token``); ``received`` is
        (``receive_order``, ``receive_place``)."""
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
        """S, the number of rows that this rank sends, including those to itself."""
        return sum(self.send_splits)

    @property
    def num_received_rows(self) -> int:
        """R, the number of rows that the local experts process."""
        return sum(self.recv_splits)

    @property
    def num_rows_leaving(self) -> int:
        """Number of rows that this rank sends to other ranks."""
        return self.num_sent_rows - self.send_splits[self.rank]
