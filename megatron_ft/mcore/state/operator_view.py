"""Finds the tensor elements of each operator on one rank, to capture and restore them.

Master weights and moments are found with Megatron's lists of parameters and of the tensors that its optimizers update.
So the view works for every precision, and with or without a sharded optimizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ft.mcore.checkpoint.optimizer_state import allocate_state, sub_optimizers
from megatron_ft.mcore.collectives import Collectives
from megatron_ft.mcore.groups import Groups
from megatron_ft.mcore.model.names import named_parameters
from megatron_ft.mcore.model.weights import tensor_part
from megatron_ft.mcore.optimizer.masters import MOMENTS
from megatron_ft.mcore.state.digest import masters_of
from megatron_ft.mcore.state.restoring import MASTER, WEIGHT, Payload, restore_slice
from megatron_ft.mcore.state.shards import Holding, Part, cut_shards, from_record, sizes, to_record
from megatron_ft.operator_state import Component, check_shards
from megatron_ft.planning.snapshot.pieces import Piece
from megatron_ft.planning.snapshot.plan import WindowPlan


def _range_of(member: Any, parameter: torch.nn.Parameter) -> tuple[int, int]:
    """Return the range (start, stop) of the flattened ``parameter`` that the optimizer ``member`` updates on this rank.
    This is the whole parameter if the optimizer is not sharded."""
    if not isinstance(member, DistributedOptimizer):
        return 0, parameter.numel()
    found = member._get_model_param_range_map(parameter)["param"]
    return found.start, found.end


STEP = "step"


@dataclass(kw_only=True)
class _Held:
    """One tensor-parallel part of a parameter on this rank: its flattened weight, and its optimizer state by element
    range."""

    weight: torch.Tensor
    states: dict[tuple[int, int], dict[str, torch.Tensor]] = field(default_factory=dict)


class OperatorView:
    """The tensors of this rank by parameter and element range, and the shards that each rank of the job captures.

    All ranks must create it together, and again after model or optimizer were rebuilt. Before the first update, moments
    are allocated as zeros.
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module],
        optimizer: MegatronOptimizer,
        *,
        groups: Groups,
        num_layers: int,
    ) -> None:
        allocate_state(optimizer)
        self.group = groups.vote
        self.rank: int = groups.vote.rank()
        self._held = _held(model_chunks, optimizer, groups.pg_collection)
        # Gathered once, so that every rank can compute the slices of all ranks without communication.
        mine = [_holding(part, held) for part, held in self._held.items()]
        self.holdings_by_rank = tuple(from_record(record) for record in Collectives(self.group).gather(to_record(mine)))
        self.shards_by_rank = cut_shards(self.holdings_by_rank, num_layers)
        # Checked now, because an element that no rank captures would otherwise be noticed only in a replay.
        check_shards(self.shards_by_rank, sizes(self.holdings_by_rank))
        self.shards = self.shards_by_rank[self.rank]

    def pieces(self, plan: WindowPlan, index: int) -> tuple[Piece, ...]:
        """Return the pieces that this rank captures in slice ``index`` of a window of ``plan``."""
        return Piece.of_slice(plan, index, self.shards)

    def source(self, piece: Piece) -> torch.Tensor:
        """Return the elements of ``piece`` as a 1-D view of the tensor that training uses. The view has one element if
        the component, such as a step count, has one value for all elements."""
        return self.live((piece.parameter, piece.tensor_part), piece.component, piece.start, piece.stop)

    def live(self, part: Part, component: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of ``component`` of ``part`` as a 1-D view of the tensor that training uses."""
        held = self._held[part]
        if component == WEIGHT:
            return held.weight[start:stop]
        for (first, last), state in held.states.items():
            if first <= start and stop <= last:
                tensor = state[component]
                return tensor if component == STEP else tensor[start - first : stop - first]
        raise KeyError(f"{part}/{component}: rank {self.rank} does not have elements {start} to {stop}")

    def restore(self, plan: WindowPlan, index: int, payload: Payload) -> int:
        """Restore slice ``index`` on every rank that has any of its elements. All ranks must call this.

        ``payload`` contains the bytes that this rank captured, in the order of ``pieces``. If master weights were
        captured, the weights are rounded from them, as the optimizer does.

        Returns:
            Number of bytes that this rank sent.

        Raises:
            RecoveryError: ``payload`` is too small.
        """
        return restore_slice(self, plan, index, payload)


def _held(
    model_chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, pg_collection: ProcessGroupCollection
) -> dict[Part, _Held]:
    parts: dict[torch.nn.Parameter, Part] = {}
    found: dict[Part, _Held] = {}
    for chunk in model_chunks:
        for name, parameter in named_parameters(chunk):
            part = (name, tensor_part(name, parameter, pg_collection))
            assert part not in found, f"{part} occurs twice on this rank"
            parts[parameter], found[part] = part, _Held(weight=parameter.detach().view(-1))
    for member in sub_optimizers(optimizer):
        for parameter, master in masters_of(member):
            known = member.optimizer.state[master]
            # The order is fixed, because another process, with another optimizer, may restore the window. A fused
            # optimizer has one step count per parameter group, which is in ``TrainState.group_steps``.
            state = {kind: known[kind].view(-1) for kind in (*MOMENTS, STEP) if torch.is_tensor(known.get(kind))}
            bounds = _range_of(member, parameter)
            found[parts[parameter]].states[bounds] = {MASTER: master.detach().view(-1), **state}
    return found


def _holding(part: Part, held: _Held) -> Holding:
    state = next(iter(held.states.values()), {})
    return Holding(
        part=part,
        num_elements=held.weight.numel(),
        ranges=tuple(held.states),
        full=tuple(_component(name, tensor) for name, tensor in state.items()),
        frozen=(_component(WEIGHT, held.weight),),
    )


def _component(name: str, tensor: torch.Tensor) -> Component:
    return Component(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        item_bytes=tensor.element_size(),
        per_element=name != STEP,
    )
