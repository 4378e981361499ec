"""Operators of one rank as element ranges of live tensors: the sources of captures, and the targets of restores.

Weights, masters and moments are found through Megatron's own pairing of parameters with the tensors that its optimizers
update. So the view works for every precision, and for sharded and whole optimizer state.
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
from megatron_ft.planning.snapshot.pieces import Piece, slice_pieces
from megatron_ft.planning.snapshot.plan import WindowPlan


def range_of(member: Any, parameter: torch.nn.Parameter) -> tuple[int, int]:
    """Return (start, stop) in the flattened parameter; all of it if ``member`` is not sharded."""
    if not isinstance(member, DistributedOptimizer):
        return 0, parameter.numel()
    found = member._get_model_param_range_map(parameter)["param"]
    return found.start, found.end


STEP = "step"


@dataclass(kw_only=True)
class _Held:
    """One part of a parameter on this rank: its flat weight, and optimizer state by element range."""

    weight: torch.Tensor
    states: dict[tuple[int, int], dict[str, torch.Tensor]] = field(default_factory=dict)


class OperatorView:
    """The state of this rank, and the part that it captures; built collectively over the whole job.

    Build it again after model or optimizer were rebuilt. Moments that no update has made yet are allocated as zeros.
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
        # Gathered once: from then on every rank lays out the slices of all ranks without messages.
        mine = [_holding(part, held) for part, held in self._held.items()]
        self.holdings_by_rank = tuple(from_record(record) for record in Collectives(self.group).gather(to_record(mine)))
        self.shards_by_rank = cut_shards(self.holdings_by_rank, num_layers)
        # An element that no rank captures would be missed by a replay only, long after the window was committed.
        check_shards(self.shards_by_rank, sizes(self.holdings_by_rank))
        self.shards = self.shards_by_rank[self.rank]

    def pieces(self, plan: WindowPlan, index: int) -> tuple[Piece, ...]:
        """List the pieces that this rank captures in slice ``index``."""
        return slice_pieces(plan, index, self.shards)

    def source(self, piece: Piece) -> torch.Tensor:
        """Return the live elements of ``piece``: 1-D, no copy; one element if the component has one value for all."""
        return self.live((piece.parameter, piece.tensor_part), piece.component, piece.start, piece.stop)

    def live(self, part: Part, component: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of a component of ``part`` on this rank: 1-D, no copy."""
        held = self._held[part]
        if component == WEIGHT:
            return held.weight[start:stop]
        for (first, last), state in held.states.items():
            if first <= start and stop <= last:
                tensor = state[component]
                return tensor if component == STEP else tensor[start - first : stop - first]
        raise KeyError(f"{part}/{component}: rank {self.rank} does not have elements {start} to {stop}")

    def restore(self, plan: WindowPlan, index: int, payload: Payload) -> int:
        """Restore slice ``index`` on every rank that holds any of it; collective over the whole job.

        ``payload`` is what this rank captured, in the layout of ``pieces``. Weights of units captured in full are
        rounded from their masters, as the optimizer does.

        Returns:
            Bytes that this rank sent.

        Raises:
            RecoveryError: the payload is too small.
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
            # Always this order, whatever the optimizer's is: a window outlives the process that captured it.
            # A fused optimizer counts steps for each group: ``TrainState.group_steps`` has those.
            state = {kind: known[kind].view(-1) for kind in (*MOMENTS, STEP) if torch.is_tensor(known.get(kind))}
            bounds = range_of(member, parameter)
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
