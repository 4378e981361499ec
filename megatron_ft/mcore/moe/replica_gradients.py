"""Sums the gradients of an expert's copies in rank order, so that every copy gets the same bits.

Each expert's gradient is cut into as many pieces as it has holders. There are two exchanges over the stage: every
holder sends each piece to the holder that sums it, and then receives the sums of the other pieces.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ft.mcore.model.names import unwrap
from megatron_ft.mcore.moe.replica_layer import ReplicaMixtureLayer, holders
from megatron_ft.mcore.moe.replicas import Replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedExpert:
    """An expert that this rank shares with other ranks."""

    parameters: tuple[torch.nn.Parameter, ...]
    holders: tuple[int, ...]

    def pieces(self) -> list[int]:
        """Return the number of elements that each holder sums."""
        total, count = sum(parameter.numel() for parameter in self.parameters), len(self.holders)
        return [total * (number + 1) // count - total * number // count for number in range(count)]


class ReplicaGradients:
    """Sums replica gradients over the ranks of one stage.

    Args:
        model_chunks: DDP-wrapped chunks of this rank.
        replicas: the placement in force.
        group: the ranks of the stage.
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module],
        replicas: Replicas,
        group: dist.ProcessGroup,
    ) -> None:
        self._group = group
        self._rank = group.rank()
        self._experts = list(_shared_experts(model_chunks, replicas))
        # A rank whose experts have no copies takes part with empty tensors, of the others' type and device.
        self._nothing = next(p.main_grad for chunk in model_chunks for p in chunk.parameters()).new_empty(0)

    def sum(self) -> None:
        """Replace each gradient by the sum over all copies; collective over the stage."""
        # One exchange for all experts, instead of a group for each set of holders, which changes with the placement.
        flats = [torch.cat([p.main_grad.reshape(-1) for p in expert.parameters]) for expert in self._experts]
        parts = [flat.split(expert.pieces()) for flat, expert in zip(flats, self._experts, strict=True)]
        contributions = self._exchange(
            [(part, expert) for part, expert in zip(parts, self._experts, strict=True)], to_owners=True
        )
        sums = [self._add_up(number, parts[number], contributions) for number in range(len(parts))]
        returned = self._exchange(
            [([s], expert) for s, expert in zip(sums, self._experts, strict=True)], to_owners=False
        )
        for number, expert in enumerate(self._experts):
            whole = [sums[number] if holder == self._rank else returned[holder][number] for holder in expert.holders]
            _write(expert.parameters, torch.cat(whole))

    def _add_up(
        self, number: int, own: Sequence[torch.Tensor], contributions: dict[int, dict[int, torch.Tensor]]
    ) -> torch.Tensor:
        expert = self._experts[number]
        mine = own[expert.holders.index(self._rank)]
        terms = [mine if holder == self._rank else contributions[holder][number] for holder in expert.holders]
        # Not an all-reduce: its order of additions depends on the backend, the sizes and the number of ranks.
        total = terms[0].clone()
        for term in terms[1:]:
            total += term
        return total

    def _exchange(
        self, parts: list[tuple[Sequence[torch.Tensor], _SharedExpert]], *, to_owners: bool
    ) -> dict[int, dict[int, torch.Tensor]]:
        """Exchange pieces by one uneven all-to-all; return the pieces of each rank, by number of expert.

        To owners, piece k is sent to holder k; on the way back, this rank's piece is sent to every other holder.
        """
        ranks = range(self._group.size())
        outgoing: list[list[torch.Tensor]] = [[] for _ in ranks]
        incoming: list[list[tuple[int, int]]] = [[] for _ in ranks]
        # Two ranks list the experts they share in the same order, by layer and number: no counts have to be exchanged.
        for number, (pieces, expert) in enumerate(parts):
            sizes, me = expert.pieces(), expert.holders.index(self._rank)
            for place, holder in enumerate(expert.holders):
                if holder != self._rank:
                    outgoing[holder].append(pieces[place] if to_owners else pieces[0])
                    incoming[holder].append((number, sizes[me] if to_owners else sizes[place]))
        send_sizes = [sum(piece.numel() for piece in of_rank) for of_rank in outgoing]
        receive_sizes = [sum(size for _, size in of_rank) for of_rank in incoming]
        flat = [piece for of_rank in outgoing for piece in of_rank]
        sent = torch.cat([self._nothing, *flat])
        received = sent.new_empty(sum(receive_sizes))
        dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=self._group)
        chunks = iter(received.split([size for of_rank in incoming for _, size in of_rank]))
        return {rank: {number: next(chunks) for number, _ in of_rank} for rank, of_rank in enumerate(incoming)}


def _shared_experts(model_chunks: Sequence[torch.nn.Module], replicas: Replicas) -> Iterator[_SharedExpert]:
    for chunk in model_chunks:
        for layer in unwrap(chunk).decoder.layers:  # type: ignore[union-attr]
            if not isinstance(layer.mlp, ReplicaMixtureLayer):
                continue
            of_layer = replicas.slots_of(layer.layer_number)
            for expert_id, expert in zip(layer.mlp.experts.expert_ids, layer.mlp.experts.local_experts, strict=True):
                ranks = holders(of_layer, expert_id)
                if len(ranks) > 1:
                    yield _SharedExpert(parameters=tuple(expert.parameters()), holders=tuple(ranks))


def _write(parameters: Sequence[torch.nn.Parameter], flat: torch.Tensor) -> None:
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.main_grad.copy_(part.view_as(parameter.main_grad))
