"""Layout of a slice in bytes, the same on the rank that captures it and on the one that restores it."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_ft.operator_state import Component, StateShard
from megatron_ft.operators import OperatorId
from megatron_ft.planning.snapshot.plan import Unit, WindowPlan

# A restore views each piece as a tensor of its dtype where it lies, which needs its address to be aligned.
PIECE_ALIGNMENT_BYTES = 64
SLICE_ALIGNMENT_BYTES = 4096
"""Slices, and the payload of a window in its file, begin at multiples of it."""


class Piece(NamedTuple):
    """One component of an element range of one parameter, captured from one state; a row of a slice's manifest."""

    parameter: str
    """Global name."""
    tensor_part: int
    """Tensor-parallel part of the parameter."""
    component: str
    """``weight``, ``master``, ``exp_avg``..."""
    dtype: str
    """torch's name of it."""
    start: int
    stop: int
    """Elements [start, stop) of the flattened tensor part; a component without elements has one value for all."""
    offset: int
    """First byte in the slice."""
    num_bytes: int

    @property
    def end(self) -> int:
        """Byte after the last, from the start of the slice."""
        return self.offset + self.num_bytes


def slice_pieces(plan: WindowPlan, index: int, shards: Sequence[StateShard]) -> tuple[Piece, ...]:
    """Pieces that the rank with ``shards`` captures in slice ``index``, by offset."""
    # The order is a function of plan and shards alone: a window is loaded only into a model that gives the same pieces.
    by_operator: dict[OperatorId, list[StateShard]] = {}
    for shard in shards:
        by_operator.setdefault(shard.operator, []).append(shard)
    wanted = [(unit, True) for unit in plan.slices[index]] + [(unit, False) for unit in plan.frozen(index)]
    pieces: list[Piece] = []
    offset = 0
    for unit, is_full in wanted:
        for shard in by_operator.get(unit.operator, ()):
            for piece in _pieces_of(unit, shard, shard.full if is_full else shard.frozen, offset):
                pieces.append(piece)
                offset = align(piece.end, PIECE_ALIGNMENT_BYTES)
    return tuple(pieces)


def slice_bytes(pieces: Sequence[Piece]) -> int:
    """Bytes of a slice in a window's buffer."""
    return align(pieces[-1].end) if pieces else 0


def _pieces_of(unit: Unit, shard: StateShard, components: Sequence[Component], offset: int) -> Iterator[Piece]:
    start, stop = unit.range_of(shard)
    for component in components:
        num_items = stop - start if component.per_element else int(stop > start)
        if num_items == 0:
            continue
        yield Piece(
            parameter=shard.parameter,
            tensor_part=shard.tensor_part,
            component=component.name,
            dtype=component.dtype,
            start=start,
            stop=stop,
            offset=offset,
            num_bytes=num_items * component.item_bytes,
        )
        offset = align(offset + num_items * component.item_bytes, PIECE_ALIGNMENT_BYTES)


def align(num_bytes: int, alignment: int = SLICE_ALIGNMENT_BYTES) -> int:
    """The next multiple of ``alignment``."""
    return -(-num_bytes // alignment) * alignment


def window_bytes(plan: WindowPlan, shards: Sequence[StateShard]) -> int:
    """Bytes of a window on the rank with ``shards``: the sum of ``slice_bytes``, in one pass."""
    by_operator: dict[OperatorId, list[StateShard]] = {}
    for shard in shards:
        by_operator.setdefault(shard.operator, []).append(shard)
    total = later_frozen = 0
    # From the last slice on: every slice has the compute weights of all that come after it.
    for units in reversed(plan.slices):
        found = [(unit, shard) for unit in units for shard in by_operator.get(unit.operator, ())]
        full = sum(_aligned_bytes(unit, shard, shard.full) for unit, shard in found)
        total += align(full + later_frozen)
        later_frozen += sum(_aligned_bytes(unit, shard, shard.frozen) for unit, shard in found)
    return total


def _aligned_bytes(unit: Unit, shard: StateShard, components: Sequence[Component]) -> int:
    pieces = _pieces_of(unit, shard, components, 0)
    return sum(align(piece.num_bytes, PIECE_ALIGNMENT_BYTES) for piece in pieces)
