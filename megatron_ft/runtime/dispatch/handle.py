"""What one dispatch decided, kept until the rows are back; notation in ``backend.py``."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

NO_ROW = -1
"""Padding of ``rows_of_token`` [T, K]: this token has fewer than K rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DispatchHandle:
    """Where every row of one dispatch goes and comes from. Index tensors are int64 on the tokens' device.

    ``send_splits`` N ints: rows this rank sends to each rank; they sum to S.
    ``recv_splits`` N ints: rows it gets from each rank; they sum to R.
    ``permutation`` [S]: token of each sent row, in the order (destination rank, expert, token).
    ``expert_of_row`` [S]: expert of each sent row.
    ``rows_of_token`` [T, K]: sent rows of each token, experts ascending, padded with ``NO_ROW``; K is the most
    rows any token has. A token's sum runs in this order, which does not depend on where the copies are.
    ``receive_order`` [R]: arrived row that stands at each place of the order (local expert, source rank, arrival).
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

    @property
    def num_sent_rows(self) -> int:
        """S: (token, expert) pairs of this rank."""
        return sum(self.send_splits)

    @property
    def num_received_rows(self) -> int:
        """R: rows the local experts work on."""
        return sum(self.recv_splits)

    @property
    def num_rows_leaving(self) -> int:
        """Rows whose copy is on another rank: what routing needs to send."""
        return self.num_sent_rows - self.send_splits[self.rank]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Totals:
    """The sums of a schedule that a plan needs on the host, checked against routing map and local experts."""

    send_splits: list[int]
    recv_splits: list[int]
    tokens_per_local_expert: list[int]
    max_rows_per_token: int

    @classmethod
    def of(cls, routing_map: torch.Tensor, schedule: torch.Tensor, rank: int, local_experts: Sequence[int]) -> "Totals":
        """Sums over ``routing_map`` [T, E] and ``schedule`` [E, N, N], in one copy to the host.

        Raises ``ValueError`` when shapes differ, when the schedule does not send just what this rank routes, or
        when it sends rows to this rank for an expert that is not among ``local_experts``.
        """
        _check_shapes(routing_map, schedule, rank, local_experts)
        num_experts, num_ranks = schedule.shape[0], schedule.shape[1]
        routed = routing_map.sum(0)
        widest = routing_map.sum(1).max().view(1) if len(routing_map) else routed.new_zeros(1)
        outgoing, incoming = schedule[:, rank, :], schedule[:, :, rank]
        parts = [widest, routed, outgoing.sum(1), outgoing.sum(0), incoming.sum(0), incoming.sum(1)]
        flat = torch.cat([part.to(schedule.device) for part in parts]).tolist()
        routed_here, sent_here = flat[1 : 1 + num_experts], flat[1 + num_experts : 1 + 2 * num_experts]
        splits, arriving = flat[1 + 2 * num_experts : -num_experts], flat[-num_experts:]
        _check_sums(routed_here, sent_here, arriving, rank, local_experts)
        return cls(
            send_splits=splits[:num_ranks],
            recv_splits=splits[num_ranks:],
            tokens_per_local_expert=[arriving[expert] for expert in local_experts],
            max_rows_per_token=flat[0],
        )


def _check_shapes(routing_map: torch.Tensor, schedule: torch.Tensor, rank: int, local_experts: Sequence[int]) -> None:
    if routing_map.dtype != torch.bool or routing_map.dim() != 2:
        raise ValueError(f"routing_map is {routing_map.dtype} {list(routing_map.shape)}: must be bool [T, E]")
    num_experts = routing_map.shape[1]
    square = schedule.dim() == 3 and schedule.shape[1] == schedule.shape[2]
    if schedule.dtype != torch.int64 or not square or schedule.shape[0] != num_experts:
        raise ValueError(
            f"schedule is {schedule.dtype} {list(schedule.shape)}: must be int64 [E, N, N] with E={num_experts}"
        )
    if not 0 <= rank < schedule.shape[1]:
        raise ValueError(f"rank={rank}: must be from 0 to {schedule.shape[1] - 1}")
    experts = list(local_experts)
    if experts != sorted(set(experts)) or any(not 0 <= expert < num_experts for expert in experts):
        raise ValueError(f"local_experts={experts}: must be distinct, ascending and from 0 to {num_experts - 1}")


def _check_sums(
    routed: list[int], sent: list[int], arriving: list[int], rank: int, local_experts: Sequence[int]
) -> None:
    for expert, (have, planned) in enumerate(zip(routed, sent, strict=True)):
        if have != planned:
            raise ValueError(
                f"the schedule sends {planned} tokens of expert {expert} from rank {rank}, which routes {have}: "
                "the schedule must come from the counts of this very routing map"
            )
    for expert, num_tokens in enumerate(arriving):
        if num_tokens and expert not in local_experts:
            raise ValueError(
                f"the schedule sends {num_tokens} tokens of expert {expert} to rank {rank}, "
                f"whose experts are {list(local_experts)}"
            )
