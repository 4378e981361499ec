"""The dispatch backend in torch operators, on any device. Other backends must give bitwise equal results."""

from collections.abc import Sequence

import numpy as np
import torch

from megatron_ft.config.placement import BALANCED
from megatron_ft.errors import ConfigError
from megatron_ft.planning import dispatch as rule
from megatron_ft.runtime.dispatch.rows import (
    NO_ROW,
    DispatchHandle,
    RowOperations,
    Totals,
    check_matrices,
    check_plan,
    sum_dtype,
)


class ReferenceDispatch(RowOperations):
    """Dispatch backend that is easy to read, but slow. ``backend.py`` explains the notation of shapes."""

    def __init__(self, shares: str = BALANCED) -> None:
        self.shares = shares

    def schedule(self, counts: torch.Tensor, replicas: torch.Tensor, rank: int) -> torch.Tensor:
        """Compute the schedule on the host with ``planning.dispatch``. Return it on the device of ``counts``."""
        check_matrices(counts, replicas, rank)
        tokens = counts.cpu().numpy()
        try:
            quotas = rule.quotas(tokens, replicas.cpu().numpy(), self.shares)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        planned = np.stack([rule.sends(tokens, quotas, rank), rule.receives(tokens, quotas, rank)])
        return torch.from_numpy(planned).to(counts.device)

    def plan(
        self, routing_map: torch.Tensor, schedule: torch.Tensor, rank: int, local_experts: Sequence[int]
    ) -> DispatchHandle:
        """Plan a dispatch with two stable sorts: one of the sent rows, and one of the received rows."""
        schedule = schedule.to(routing_map.device)
        check_plan(routing_map, schedule, rank, local_experts)
        per_token = routing_map.sum(1)
        widest = per_token.max().view(1) if len(per_token) else per_token.new_zeros(1)
        totals = Totals.of(routing_map.sum(0), widest, schedule, rank, local_experts)
        permutation, expert_of_row = _send_order(routing_map, schedule[0], rank)
        receive_order = _receive_order(schedule[1, list(local_experts)])
        rows_of_token = _rows_of_token(routing_map, permutation, expert_of_row, totals.max_rows_per_token)
        sent = (permutation, expert_of_row, rows_of_token)
        return DispatchHandle.of(totals, len(routing_map), rank, local_experts, sent=sent, receive_order=receive_order)

    def gather(self, source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return source.index_select(0, index)

    def scatter(self, pieces: Sequence[torch.Tensor], index: torch.Tensor) -> torch.Tensor:
        out = pieces[0].new_empty((len(index), pieces[0].shape[1]))
        return out.index_copy_(0, index, torch.cat(list(pieces)))

    def combine(self, rows: torch.Tensor, rows_of_token: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        total = rows.new_zeros((len(rows_of_token), rows.shape[1]), dtype=sum_dtype(rows))
        for column in rows_of_token.unbind(1):
            there = (column != NO_ROW).nonzero().squeeze(1)
            picked = column[there]
            term = rows[picked].to(total.dtype)
            if weights is not None:
                term = term * weights[picked].unsqueeze(1)
            total[there] = total[there] + term
        return total.to(rows.dtype)

    def weigh(
        self, grad: torch.Tensor, rows: torch.Tensor, permutation: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        picked = grad[permutation].to(weights.dtype)
        return (picked * weights.unsqueeze(1)).to(rows.dtype), _halving_sum(picked * rows.to(weights.dtype))


def _halving_sum(terms: torch.Tensor) -> torch.Tensor:
    """Sum ``terms`` [S, H] over H in a fixed order. Pad H with zeros to a power of two. Then add the second half to the
    first half, repeatedly, until one number is left."""
    width = 1 << max(terms.shape[1] - 1, 0).bit_length()
    terms = torch.nn.functional.pad(terms, (0, width - terms.shape[1]))
    while width > 1:
        width //= 2
        terms = terms[:, :width] + terms[:, width:]
    return terms[:, 0]


def _send_order(routing_map: torch.Tensor, outgoing: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token and the expert of each sent row. ``outgoing`` [E, N]: count of tokens of each expert that
    go to each rank. An expert's first tokens go to this rank, its next tokens to the other ranks in rank order."""
    num_experts, num_ranks = outgoing.shape
    experts, tokens = routing_map.t().nonzero(as_tuple=True)
    filling = torch.tensor([rank, *(other for other in range(num_ranks) if other != rank)], device=outgoing.device)
    destinations = filling.repeat(num_experts).repeat_interleave(outgoing[:, filling].flatten())
    order = destinations.argsort(stable=True)
    return tokens[order], experts[order]


def _receive_order(incoming: torch.Tensor) -> torch.Tensor:
    """Return the arrival indices [R] of the received rows, sorted by (local expert, source rank, arrival).
    ``incoming`` [L, N]: number of received rows for each local expert from each source rank."""
    num_local, num_ranks = incoming.shape
    experts = torch.arange(num_local, device=incoming.device).repeat(num_ranks)
    return experts.repeat_interleave(incoming.t().flatten()).argsort(stable=True)


def _rows_of_token(
    routing_map: torch.Tensor, permutation: torch.Tensor, expert_of_row: torch.Tensor, width: int
) -> torch.Tensor:
    """Return the indices of each token's sent rows, [T, ``width``], experts ascending, padded with ``NO_ROW``."""
    num_tokens, num_experts = routing_map.shape
    table = permutation.new_full((num_tokens, width), NO_ROW)
    by_token = (permutation * num_experts + expert_of_row).argsort()
    tokens = permutation[by_token]
    per_token = routing_map.sum(1)
    starts = per_token.cumsum(0) - per_token
    table[tokens, torch.arange(len(tokens), device=tokens.device) - starts[tokens]] = by_token
    return table
