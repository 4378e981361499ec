"""Describes the shards of the distributed optimizer that each rank has, and moves them when ranks change.

A *shard* is the optimizer state of element ranges of the non-expert parameters: master weights and moments. The number
of ranks determines which ranges a rank updates. Ranks also have copies of the shards of other ranks
(``optimizer/state_copies.py``). When a membership forms, each rank states which ranges it has. After the optimizer is
built, each rank states which ranges it needs. From these statements all ranks compute the same plan
(``planning/state/``) and execute it. At the end the compute weights are rounded from the master weights, because a rank
may have been lost before the other ranks had received the weights of its newest update.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_ft.mcore.groups import Collectives, Groups, exchange_tensors
from megatron_ft.mcore.optimizer.adamw import MASTER, STEP, masters, refresh_weights
from megatron_ft.mcore.optimizer.state_copies import StateCopies
from megatron_ft.mcore.state.tensors import NamedState, is_non_expert
from megatron_ft.operators import SCALE_BLOCK_ELEMENTS, operator_of
from megatron_ft.planning.state.declined import Declined
from megatron_ft.planning.state.holdings import Holding, Holdings, Medium, Need, Needs
from megatron_ft.planning.state.tensors import StateTensor, TensorIndex
from megatron_ft.planning.state.transfers import STAGING_BYTES, TransferPlan

_Row = tuple[int, str, int, int]
"""Model part and name of a parameter, and a range [start, stop) of its elements. If the state has scales, an element is
a block of values with one scale; the last block of a parameter may be incomplete."""


def _unit(kinds: Iterable[str]) -> int:
    """Return the number of values that a plan counts as one element: a block if ``kinds`` contains scales, else 1."""
    return SCALE_BLOCK_ELEMENTS if any(kind.endswith("_scales") for kind in kinds) else 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    """Optimizer state of consecutive elements of one flattened parameter."""

    part: int
    """Model part of the parameter, see ``Topology.model_parts``."""
    parameter: str
    start: int
    tensors: Mapping[str, torch.Tensor]
    """Flat tensor of each component except the step count, in the order of ``adamw.state_tensors``."""
    is_copy: bool = False

    @classmethod
    def at(cls, start: int, tensors: Mapping[str, torch.Tensor], **more: Any) -> "_Piece":
        """Make a piece from ``tensors``, which begin at value ``start`` of the parameter. Leave out a step count."""
        kept = {kind: tensor.view(-1) for kind, tensor in tensors.items() if kind != STEP}
        return cls(start=start // _unit(kept), tensors=kept, **more)

    @property
    def stop(self) -> int:
        return self.start - (-self.tensors[MASTER].numel() // _unit(self.tensors))

    def of(self, start: int, stop: int) -> list[torch.Tensor]:
        """Return the state of the elements [start, stop), as views."""
        unit, first, last = _unit(self.tensors), start - self.start, stop - self.start
        return [
            tensor[first:last] if kind.endswith("_scales") else tensor[first * unit : last * unit]
            for kind, tensor in self.tensors.items()
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shards:
    """Non-expert optimizer state of one rank after an iteration: its own shard, and copies of other ranks' shards."""

    sizes: Mapping[int, Mapping[str, int]]
    """Number of values of each non-expert parameter, by model part."""
    step: int | None
    """Number of updates that the state contains; None on a rank without a shard."""
    pieces: tuple[_Piece, ...]
    kinds: Mapping[str, torch.dtype]
    """Dtype of each component of the state besides the step count."""

    @classmethod
    def split_off(cls, state: NamedState, copies: StateCopies, parts: Sequence[int]) -> "Shards":
        """Remove non-expert parameters from ``state`` with ``remove_from``. Return their optimizer state, and that in
        ``copies``, this rank's copies of other ranks' state. ``parts`` lists the model part of each rank."""
        part, taken = parts[copies.rank], cls.remove_from(state)
        steps = {int(tensor) for name, tensor in taken.items() if name.endswith("/step")}
        pieces = []
        for name, (start, stop) in copies.ranges.items():
            if not is_non_expert(name):
                continue
            # An FP32 weight is its own master weight. Copy its range, so that the rest of the weight can be freed.
            master = taken.get(f"{name}/{MASTER}")
            master = taken[name].view(-1)[start:stop].clone() if master is None else master
            others = {kind: taken[f"{name}/{kind}"] for kind in copies.kinds if kind != MASTER}
            pieces.append(_Piece.at(start, {MASTER: master, **others}, part=part, parameter=name))
        for kept in copies.kept:
            tensors = kept.tensors()
            for name, start in zip(kept.names, kept.starts, strict=True):
                if is_non_expert(name):
                    copied = {kind: tensors[f"{name}/{kind}"] for kind in copies.kinds}
                    pieces.append(_Piece.at(start, copied, part=parts[kept.owner], parameter=name, is_copy=True))
                    steps.add(int(tensors[f"{name}/{STEP}"]))
        assert len(steps) <= 1, f"shards have different numbers of updates: {sorted(steps)}"
        sizes = {name: tensor.numel() for name, tensor in taken.items() if "/" not in name}
        kinds = {kind: dtype for kind, dtype in copies.kinds.items() if kind != STEP}
        return cls(sizes={part: sizes}, step=next(iter(steps), None), pieces=tuple(pieces), kinds=kinds)

    @staticmethod
    def remove_from(state: NamedState) -> NamedState:
        """Remove the non-expert parameters from ``state``, which has all tensors of a rank, and return them. Also
        remove the weights of experts that ``restore`` rounds from master weights, unless these are quantized."""
        for name in [name for name in state if f"{name}/{MASTER}" in state and f"{name}/{MASTER}_scales" not in state]:
            if not is_non_expert(name):
                del state[name]
        return {name: state.pop(name) for name in list(state) if is_non_expert(name)}

    def and_also(self, other: "Shards | None") -> "Shards":
        """Return the union of this state and ``other``. Both states must be from after the same iteration."""
        if other is None:
            return self
        return replace(self, sizes={**other.sizes, **self.sizes}, pieces=(*self.pieces, *other.pieces))

    def space_for(self, part: int, parameter: str, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Allocate tensors for the elements [start, stop) of a parameter."""
        unit, device = _unit(self.kinds), torch.cuda.current_device()
        num_values = min(stop * unit, self.sizes[part][parameter]) - start * unit
        return {
            kind: torch.empty(stop - start if kind.endswith("_scales") else num_values, dtype=dtype, device=device)
            for kind, dtype in self.kinds.items()
        }

    def statement(self) -> dict[str, Any]:
        """Return JSON values that describe the element ranges in this object, for ``ShardMove.of``."""
        rows = [[piece.part, piece.parameter, piece.start, piece.stop, piece.is_copy] for piece in self.pieces]
        unit = _unit(self.kinds)
        item_bytes = sum(
            dtype.itemsize * (1 if kind.endswith("_scales") else unit) for kind, dtype in self.kinds.items()
        )
        sizes = [(part, {name: -(-size // unit) for name, size in found.items()}) for part, found in self.sizes.items()]
        return {"sizes": sizes, "step": self.step, "rows": rows, "item_bytes": item_bytes}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardMove:
    """The shards of all ranks of a membership, with methods that move state to the ranks that need it."""

    mine: Shards | None
    """Shards of this rank; None on a joining rank."""
    step: int
    iteration: int
    held: Holdings
    parts: tuple[int, ...]
    """Model part of each rank of the membership."""

    @classmethod
    def of(
        cls,
        mine: Shards | None,
        statements: Sequence[Mapping[str, Any] | None],
        *,
        parts: Sequence[int],
        iteration: int,
        num_layers: int,
    ) -> "ShardMove":
        """Create the object from ``statements``: the ``Shards.statement`` of each rank of the membership, None for a
        joining rank. ``parts`` lists the model part of each rank. All state must be from after ``iteration``."""
        known = {rank: statement for rank, statement in enumerate(statements) if statement is not None}
        assert known, "no rank has state"
        steps = {statement["step"] for statement in known.values()} - {None}
        assert len(steps) == 1, f"ranks have different numbers of updates: {sorted(steps)}"
        index = TensorIndex.of(
            StateTensor(
                operator=operator_of(name, num_layers),
                parameter=name,
                # Keep model parts apart: copies of tied and replicated parameters in several parts belong to different
                # shards.
                tensor_part=part,
                kind="master and moments",
                num_elements=size,
                item_bytes=statement["item_bytes"],
            )
            for statement in known.values()
            for part, sizes in statement["sizes"]
            for name, size in sizes.items()
        )
        tensor_of = {(tensor.tensor_part, tensor.parameter): tensor for tensor in index.tensors}
        held = Holdings.of(
            index,
            (
                Holding(
                    rank=rank,
                    domain="",
                    tensor=tensor_of[part, name],
                    start=start,
                    stop=stop,
                    iteration=iteration,
                    medium=Medium.STATE_COPY if is_copy else Medium.LIVE,
                )
                for rank, statement in known.items()
                for part, name, start, stop, is_copy in statement["rows"]
            ),
        )
        return cls(mine=mine, step=steps.pop(), iteration=iteration, held=held, parts=tuple(parts))

    def missing(self, without: Sequence[int] = ()) -> Declined | None:
        """Return which state is lost if the ranks in ``without`` leave: state that only they have, or that no rank has.
        None if no state is lost."""
        everything = [[(t.tensor_part, t.parameter, 0, t.num_elements) for t in self.held.index.tensors]]
        found = TransferPlan.of(self.held.without(ranks=without), self._needs(everything))
        return found if isinstance(found, Declined) else None

    def restore(
        self,
        model_chunks: list[torch.nn.Module],
        optimizer: MegatronOptimizer,
        groups: Groups,
        *,
        limit_bytes: int = STAGING_BYTES,
    ) -> None:
        """Fill the shard of this rank in a newly built optimizer, and all non-expert weights of the model. All ranks
        must call this, and no state may be missing. A rank sends and receives at most ``limit_bytes`` at a time."""
        mine = [master for master in masters(model_chunks, optimizer) if is_non_expert(master.name)]
        part = self.parts[groups.vote.rank()]
        targets = [_Piece.at(master.start, master.parts, part=part, parameter=master.name) for master in mine]
        # Gather the ranges of all ranks: they cannot be computed, because Megatron divides flat buffers at any element.
        rows = Collectives(groups.vote).gather([(part, piece.parameter, piece.start, piece.stop) for piece in targets])
        self._carry_out(rows, targets, groups, limit_bytes)
        for master in mine:
            master.state[STEP].fill_(self.step)
        refresh_weights(optimizer, model_chunks)

    def evacuate(self, leaving: Sequence[int], groups: Groups) -> Shards | None:
        """Send the state that only the ranks ``leaving`` have to ranks that stay. Return the state that this rank has
        received; None if the ranks that stay have all state already. All ranks must call this."""
        missing = self.missing(without=leaving)
        if missing is None:
            return None
        assert self.mine is not None, "all ranks have state before some leave"
        staying: dict[int, list[int]] = {}
        for rank, part in enumerate(self.parts):
            if rank not in leaving:
                staying.setdefault(part, []).append(rank)
        rows: list[list[_Row]] = [[] for _ in self.parts]
        for number, item in enumerate(missing.elements):
            part = item.tensor.tensor_part
            rank = staying[part][number % len(staying[part])]
            rows[rank].append((part, item.tensor.parameter, item.start, item.stop))
        targets = [
            _Piece(
                part=part,
                parameter=name,
                start=start,
                tensors=self.mine.space_for(part, name, start, stop),
                is_copy=True,
            )
            for part, name, start, stop in rows[groups.vote.rank()]
        ]
        self._carry_out(rows, targets, groups, STAGING_BYTES)
        return replace(self.mine, pieces=tuple(targets))

    # -- parts --------------------------------------------------------------------------------------------

    def _needs(self, rows_by_rank: Sequence[Sequence[_Row]]) -> Needs:
        index = self.held.index
        tensor_of = {(tensor.tensor_part, tensor.parameter): tensor for tensor in index.tensors}
        return Needs.of(
            index,
            (
                Need(rank=rank, tensor=tensor_of[part, name], start=start, stop=stop, iteration=self.iteration)
                for rank, rows in enumerate(rows_by_rank)
                for part, name, start, stop in rows
            ),
        )

    def _carry_out(
        self, rows: Sequence[Sequence[_Row]], targets: Sequence[_Piece], groups: Groups, limit_bytes: int
    ) -> None:
        group = groups.world
        plan = TransferPlan.of(self.held, self._needs(rows), limit_bytes=limit_bytes)
        assert isinstance(plan, TransferPlan), f"state is missing: {plan.summary()}"
        me = group.rank()
        own, wanted = _by_parameter(() if self.mine is None else self.mine.pieces), _by_parameter(targets)
        with torch.no_grad():
            for kept in plan.kept_by(me):
                for start, stop, piece in _parts(
                    own[kept.tensor.tensor_part, kept.tensor.parameter], kept.start, kept.stop
                ):
                    (target,) = wanted[kept.tensor.tensor_part, kept.tensor.parameter]
                    for to, source in zip(target.of(start, stop), piece.of(start, stop), strict=True):
                        to.copy_(source)
        transfers = list(plan.transfers(me))
        for turn in range(plan.num_rounds):
            outgoing: list[list[torch.Tensor]] = [[] for _ in range(group.size())]
            incoming: list[list[torch.Tensor]] = [[] for _ in range(group.size())]
            for transfer in (found for found in transfers if found.round == turn):
                is_sent = transfer.source == me
                pieces = (own if is_sent else wanted)[transfer.tensor.tensor_part, transfer.tensor.parameter]
                found = [piece.of(start, stop) for start, stop, piece in _parts(pieces, transfer.start, transfer.stop)]
                # Sort by kind of state: the receiver has one tensor per kind, and does not know how many pieces of the
                # sender contain the range.
                tensors = [tensor for of_kind in zip(*found, strict=True) for tensor in of_kind]
                (outgoing[transfer.target] if is_sent else incoming[transfer.source]).extend(tensors)
            with torch.no_grad():
                exchange_tensors(outgoing, incoming, group)


def _by_parameter(pieces: Sequence[_Piece]) -> dict[tuple[int, str], list[_Piece]]:
    found: dict[tuple[int, str], list[_Piece]] = {}
    for piece in pieces:
        found.setdefault((piece.part, piece.parameter), []).append(piece)
    return found


def _parts(pieces: Sequence[_Piece], start: int, stop: int) -> Iterator[tuple[int, int, _Piece]]:
    """Divide [start, stop) into ranges, each inside one of ``pieces``. Pieces may overlap each other."""
    while start < stop:
        piece = next(piece for piece in pieces if piece.start <= start < piece.stop)
        end = min(stop, piece.stop)
        yield start, end, piece
        start = end
