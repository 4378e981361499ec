"""Restores captured bytes: each rank sends what it captured to all ranks that need the same elements."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.state.shards import Holding, Part
from megatron_ft.operator_state import StateShard
from megatron_ft.planning.snapshot.pieces import Piece, slice_bytes, slice_pieces
from megatron_ft.planning.snapshot.plan import WindowPlan
from megatron_ft.runtime.transport.exchange import exchange_tensors

Payload = bytes | bytearray | memoryview
"""Read-only bytes."""

WEIGHT, MASTER = "weight", "master"


class Holder(Protocol):
    """The part of ``OperatorView`` that a restore needs."""

    rank: int
    group: dist.ProcessGroup
    shards: tuple[StateShard, ...]
    shards_by_rank: tuple[tuple[StateShard, ...], ...]
    holdings_by_rank: tuple[tuple[Holding, ...], ...]

    def live(self, part: Part, component: str, start: int, stop: int) -> torch.Tensor:
        """Return elements of a component on this rank."""
        ...


def restore_slice(view: Holder, plan: WindowPlan, index: int, payload: Payload) -> int:
    """Exchange slice ``index`` and fill the live tensors; see ``OperatorView.restore``."""
    holders = _holders(view.holdings_by_rank)
    outgoing: list[list[torch.Tensor]] = [[] for _ in view.shards_by_rank]
    pieces = slice_pieces(plan, index, view.shards)
    content = _content(payload, slice_bytes(pieces), index)
    for piece in pieces:
        part = (piece.parameter, piece.tensor_part)
        captured = content[piece.offset : piece.offset + piece.num_bytes]
        for component, targets in _deliveries(piece, holders[part]):
            tensor = captured
            # Rounded by the sender: all ranks that compute with the weight get the same bits, and fewer of them travel.
            if component != piece.component:
                tensor = _rounded(captured, piece.dtype, holders[part][view.rank])
            for target in targets:
                outgoing[target].append(tensor)
    return exchange_tensors(outgoing, _incoming(view, plan, index, holders), view.group)


def _incoming(
    view: Holder, plan: WindowPlan, index: int, holders: dict[Part, dict[int, Holding]]
) -> list[Sequence[torch.Tensor]]:
    incoming: list[Sequence[torch.Tensor]] = []
    for shards in view.shards_by_rank:
        shared = [s for s in shards if view.rank in holders[s.parameter, s.tensor_part]]
        incoming.append(
            [
                view.live((piece.parameter, piece.tensor_part), component, piece.start, piece.stop)
                for piece in slice_pieces(plan, index, shared)
                for component, targets in _deliveries(piece, holders[piece.parameter, piece.tensor_part])
                if view.rank in targets
            ]
        )
    return incoming


def _holders(holdings_by_rank: Sequence[Sequence[Holding]]) -> dict[Part, dict[int, Holding]]:
    found: dict[Part, dict[int, Holding]] = {}
    for rank, holdings in enumerate(holdings_by_rank):
        for holding in holdings:
            found.setdefault(holding.part, {})[rank] = holding
    return found


def _deliveries(piece: Piece, holders: dict[int, Holding]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (component, ranks that receive it). A master also gives the weight, on every rank that computes with it."""
    weight = next(iter(holders.values())).frozen[0]
    if piece.component in (WEIGHT, MASTER):
        yield WEIGHT, tuple(holders)
    # An FP32 weight is its own master.
    if piece.component != WEIGHT and (piece.component != MASTER or weight.dtype != piece.dtype):
        yield piece.component, tuple(r for r, holding in holders.items() if holding.covers(piece.start, piece.stop))


def _rounded(captured: torch.Tensor, dtype: str, holding: Holding) -> torch.Tensor:
    # A copy: ``view`` needs an offset that is a multiple of the dtype's size, and a piece may begin anywhere.
    master = captured.clone().view(getattr(torch, dtype))
    return master.to(getattr(torch, holding.frozen[0].dtype))


def _content(payload: Payload, num_bytes: int, index: int) -> torch.Tensor:
    given = memoryview(payload).nbytes
    if given < num_bytes:
        raise RecoveryError(
            f"slice {index}: has {given} captured bytes, but {num_bytes} are needed; was it captured with another "
            "layout?"
        )
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the memory is read-only, and only read
        return torch.frombuffer(payload, dtype=torch.uint8)
