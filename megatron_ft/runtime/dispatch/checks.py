"""Checks that the arguments of a dispatch agree, and computes the row counts of a plan. ``backend.py`` explains the
notation."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


def check_matrices(counts: torch.Tensor, replicas: torch.Tensor, rank: int) -> None:
    """Check that ``counts`` and ``replicas`` are int64 [E, N], and that ``rank`` is one of the N ranks. The values are
    not read. Raises ``ValueError``."""
    matrices = counts.dtype == replicas.dtype == torch.int64 and counts.dim() == 2
    if not matrices or counts.shape != replicas.shape:
        both = " and ".join(f"{each.dtype} {list(each.shape)}" for each in (counts, replicas))
        raise ValueError(f"counts and replicas are {both}: both must be int64 [E, N]")
    _check_rank(rank, counts.shape[1])


def check_plan(routing_map: torch.Tensor, schedule: torch.Tensor, rank: int, local_experts: Sequence[int]) -> None:
    """Check shapes, types and ranges of the arguments of ``DispatchBackend.plan``. Raises ``ValueError``."""
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
    """Row counts of one dispatch, on the host, from which a backend allocates its ``DispatchHandle``."""

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
        """Compute the row counts from ``schedule`` [2, E, N]. Data are copied to the host only once.

        ``routed`` [E]: tokens that this rank routes to each expert. ``max_rows_per_token`` has shape [1]. All tensors
        are on one device.

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
