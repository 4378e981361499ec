"""``WindowPlan``: the units of state that each iteration of a window captures, and the byte layout of the slices.

``WindowKey`` identifies a window. ``PlanBasis`` contains the measurements with which a plan was made.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from megatron_ft.config.model import ModelConfig
from megatron_ft.formatting import counted, every
from megatron_ft.operators import SCALE_BLOCK_ELEMENTS, Component, OperatorId, StateShard, moe_layers

# A restore uses each piece in place as a tensor of its dtype, so the address of the piece must be aligned.
PIECE_ALIGNMENT_BYTES = 64


SLICE_ALIGNMENT_BYTES = 4096
"""Alignment of slices, and of the payload of a window in its file, in bytes."""
MAX_PARTIAL_FILES = 8
"""Largest number of consecutive files of windows that omit pieces which are in earlier files. So a damaged file makes
at most this number of later files unusable. If files have an older state of some experts than their windows,
``PartialWindows.store`` can choose a larger number."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Unit:
    """State that one slice captures: an operator, or one of ``num_parts`` equal ranges of each of its shards."""

    operator: OperatorId
    part: int = 0
    num_parts: int = 1

    def range_of(self, shard: StateShard) -> tuple[int, int]:
        """Return the elements (start, stop) of ``shard`` that belong to this unit."""
        if self.num_parts == 1:
            return shard.start, shard.stop
        # Whole blocks are divided, and only the last block of a shard may be short.
        block = shard.block_elements
        num_blocks = -(-shard.num_elements // block)
        return (
            # The end of one part is computed as the start of the next: no gap and no overlap, whatever the rounding.
            min(shard.start + num_blocks * self.part // self.num_parts * block, shard.stop),
            min(shard.start + num_blocks * (self.part + 1) // self.num_parts * block, shard.stop),
        )

    def __str__(self) -> str:
        return str(self.operator) + ("" if self.num_parts == 1 else f"[{self.part + 1}/{self.num_parts}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Number of tokens that each expert received in the whole job; the values are the same on every rank."""

    layers: tuple[int, ...]
    """Layers with experts, in Megatron's numbering (from 1)."""
    tokens: tuple[tuple[tuple[int, ...], ...], ...]
    """Numbers of tokens [record][layer][expert], oldest record first; a record covers one or several iterations."""

    @classmethod
    def of(cls, model: ModelConfig, loads: Iterable[Sequence[Sequence[int]]]) -> "Activations | None":
        """Create token counts from records ``loads`` [layer of model][expert], oldest first; None without records."""
        layers = moe_layers(model)
        records = tuple(tuple(tuple(rows[layer - 1]) for layer in layers) for rows in loads)
        return cls(layers=layers, tokens=records) if records else None

    def validate(self) -> None:
        """Assert that every record has a row of counts for each layer, all of equal length."""
        assert self.tokens, "there is no record of activations"
        width = len(self.tokens[0][0]) if self.layers else 0
        for rows in self.tokens:
            assert len(rows) == len(self.layers), f"{len(rows)} rows of activations for {len(self.layers)} layers"
            assert all(len(row) == width for row in rows), "layers have different numbers of experts"
            assert all(value >= 0 for row in rows for value in row), "a count is negative"

    @property
    def totals(self) -> tuple[tuple[int, ...], ...]:
        """Number of tokens of each expert, summed over all records, as [layer][expert]."""
        return tuple(
            tuple(sum(column) for column in zip(*rows, strict=True)) for rows in zip(*self.tokens, strict=True)
        )

    def collapsed(self) -> "Activations":
        """Return the token counts with all records summed to one (``totals``)."""
        return Activations(layers=self.layers, tokens=(self.totals,))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Activations":
        return cls(
            layers=tuple(content["layers"]),
            tokens=tuple(tuple(tuple(row) for row in rows) for rows in content["tokens"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBasis:
    """Measurements from which a plan was made. A new plan is made if present measurements differ too much."""

    budget_bytes: int | None
    """Bytes that a rank can capture within one iteration; None if the plan does not depend on them."""
    peak_bytes: int
    """Bytes of the largest slice on any rank."""
    activations: Activations | None = None
    """Token counts of experts as one record; None if the order of operators does not depend on them."""
    policy: str | None = None
    """``snapshot.policy`` of the job that made the plan, as JSON text; None if it is not known."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "PlanBasis":
        activations = content["activations"]
        given = None if activations is None else Activations.from_json(activations)
        return cls(
            budget_bytes=content["budget_bytes"],
            peak_bytes=content["peak_bytes"],
            activations=given,
            policy=content.get("policy"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialPlan:
    """Extent of a window: it captures a number of experts completely, and all other experts without some components.
    The completely captured experts are chosen when the window begins."""

    num_experts: int
    """Number of experts of each MoE layer that a window captures, on average over layers."""
    components: tuple[str, ...]
    """Components copied from an earlier window for experts that are not chosen. All other components are captured."""
    captured_bytes: int | None = None
    """Largest number of bytes that a window with ``num_experts`` captures on any rank; None in windows of earlier
    versions of the program."""
    num_persisted_experts: int | None = None
    """Number of experts of each MoE layer whose newer state is written to a window's file; None to write all."""
    sends_gradients: bool = False
    """Whether peers repeat updates of experts (``send_gradients`` of the policy). Then the buffer of a window has room
    for the gradients of all experts after its slice."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "PartialPlan":
        return cls(
            num_experts=content["num_experts"],
            components=tuple(content["components"]),
            captured_bytes=content.get("captured_bytes"),
            num_persisted_experts=content.get("num_persisted_experts"),
            sends_gradients=content.get("sends_gradients", False),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """Plan of a window of the whole job. Slice i is captured from the state after iteration ``start + i``.

    Slice i contains its own units in full, the units of later slices as compute weights only, and nothing of the units
    of earlier slices (MoEvement, section 3.2). A window of one slice is a dense snapshot.
    """

    slices: tuple[tuple[Unit, ...], ...]
    interval_iterations: int
    """Iterations from the start of a window to the start of the next; at least the number of slices."""
    reason: str = ""
    """Reason for the number of slices and the order of units."""
    basis: PlanBasis | None = None
    """Inputs from which the plan was made; None for a plan that was not made by a policy."""
    partial: PartialPlan | None = None
    """State that windows leave out; None if every window captures everything."""

    @classmethod
    def dense(cls, shards: Iterable[StateShard], interval_iterations: int = 1, reason: str = "") -> "WindowPlan":
        """Return a plan that captures the whole state of ``shards`` in one slice."""
        operators = sorted({shard.operator for shard in shards}, key=str)
        units = tuple(Unit(operator=operator) for operator in operators)
        return cls(slices=(units,), interval_iterations=interval_iterations, reason=reason)

    @property
    def num_iterations(self) -> int:
        """Number of slices, which is the number of iterations of a window (W)."""
        return len(self.slices)

    def has_other_policy(self, policy: str) -> bool:
        """Return whether the plan was made with another policy than ``policy``; False if its policy is not known."""
        return self.basis is not None and self.basis.policy not in (None, policy)

    def active(self, index: int) -> tuple[Unit, ...]:
        """Return the units that have their full state after slices 0 to ``index`` are loaded."""
        return tuple(unit for units in self.slices[: index + 1] for unit in units)

    def frozen(self, index: int) -> tuple[Unit, ...]:
        """Return the units that have only compute weights after slices 0 to ``index`` are loaded."""
        return tuple(unit for units in self.slices[index + 1 :] for unit in units)

    def validate(self, operators: Iterable[OperatorId]) -> None:
        """Assert that every part of every operator is captured exactly once, and that windows do not overlap."""
        assert self.slices and all(self.slices), "a slice captures nothing, or the window has no slice"
        # With several slices, a replay would run iterations with older experts than those with which ranks voted.
        assert self.partial is None or len(self.slices) == 1, "windows that leave out experts must have one slice"
        # A rank fills one window at a time: the snapshot server drops an incomplete window when the next one begins.
        assert self.interval_iterations >= self.num_iterations, (
            f"windows of {self.num_iterations} slices overlap at an interval of {self.interval_iterations} iterations"
        )
        parts: dict[OperatorId, list[Unit]] = {}
        for unit in self.active(self.num_iterations - 1):
            parts.setdefault(unit.operator, []).append(unit)
        for operator, units in parts.items():
            found = sorted((unit.part, unit.num_parts) for unit in units)
            wanted = [(part, len(units)) for part in range(len(units))]
            assert found == wanted, f"(part, num_parts) captured of {operator}: {found} instead of {wanted}"
        missing = set(operators) ^ set(parts)
        assert not missing, f"operators are not captured, or are unknown: {sorted(map(str, missing))[:5]}"

    def summary(self) -> str:
        sizes = " ".join(str(len(units)) for units in self.slices)
        return (
            f"window of {counted(self.num_iterations, 'iteration')} {every(self.interval_iterations)}: "
            f"operators or parts in each slice: {sizes}; {self.reason}"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "WindowPlan":
        slices = tuple(
            tuple(Unit(**{**unit, "operator": OperatorId(**unit["operator"])}) for unit in units)
            for units in content["slices"]
        )
        basis = content.get("basis")
        return cls(
            slices=slices,
            interval_iterations=content["interval_iterations"],
            reason=content["reason"],
            basis=None if basis is None else PlanBasis.from_json(basis),
            # Windows of earlier versions have no such field.
            partial=None if content.get("partial") is None else PartialPlan.from_json(content["partial"]),
        )


class Piece(NamedTuple):
    """One kind of state for a range of elements of one parameter; a row in the manifest of a slice."""

    parameter: str
    """Name of the parameter in the whole model."""
    tensor_part: int
    """Index of the tensor-parallel part of the parameter."""
    component: str
    """Kind of state: ``weight``, ``master``, ``exp_avg``, ..."""
    dtype: str
    """Name of the data type in torch."""
    start: int
    stop: int
    """End of the elements [start, stop) of the flattened tensor part. A component that is not per element, such as
    ``step``, has one value for the whole range."""
    offset: int
    """Offset of the first byte from the start of the slice."""
    num_bytes: int

    @property
    def end(self) -> int:
        """Offset of the byte after the piece, from the start of the slice."""
        return self.offset + self.num_bytes

    @property
    def elements_per_value(self) -> int:
        """Number of elements that share a value: more than one for the scales of quantized state."""
        return SCALE_BLOCK_ELEMENTS if self.component.endswith("_scales") else 1

    def in_batches(self, at_a_time: int) -> "Iterator[tuple[int, Piece]]":
        """Divide the slice into batches of ``at_a_time`` bytes, and cut the piece where batches end. Yield each part of
        the piece with the index of its batch. ``at_a_time`` must be a multiple of the alignment of pieces."""
        # Pieces begin at aligned offsets, so no cut divides an element or a piece that has a single value.
        num_values = -(-(self.stop - self.start) // self.elements_per_value)
        item_bytes = max(1, self.num_bytes // num_values)
        for batch in range(self.offset // at_a_time, -(-self.end // at_a_time)):
            offset, end = max(self.offset, batch * at_a_time), min(self.end, (batch + 1) * at_a_time)
            start = self.start + (offset - self.offset) // item_bytes * self.elements_per_value
            stop = self.start + (end - self.offset) // item_bytes * self.elements_per_value
            stop = self.stop if end == self.end else stop
            yield batch, self._replace(start=start, stop=stop, offset=offset, num_bytes=end - offset)

    @classmethod
    def of_slice(cls, plan: WindowPlan, index: int, shards: Sequence[StateShard]) -> "tuple[Piece, ...]":
        """Return the pieces that the rank with ``shards`` captures in slice ``index``, in order of their offsets."""
        # The order depends only on plan and shards. A window can only be loaded into a model with the same pieces.
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
    """Return the bytes that a slice with ``pieces`` occupies in the buffer of its window."""
    return align(pieces[-1].end) if pieces else 0


_NUM_BATCHES, _LEAST_BATCH_BYTES = 128, 1 << 18


def batch_bytes(largest_slice_bytes: int) -> int:
    """Return the size in bytes of the batches in which ranks send a slice when they restore a window.
    ``largest_slice_bytes`` is the size of the slice on the rank where it is largest."""
    # The bytes of a batch are copied before the send, so they must be few. But each batch costs one collective.
    return align(max(_LEAST_BATCH_BYTES, largest_slice_bytes // _NUM_BATCHES))


def _pieces_of(unit: Unit, shard: StateShard, components: Sequence[Component], offset: int) -> Iterator[Piece]:
    start, stop = unit.range_of(shard)
    for component in components:
        num_items = component.num_values(stop - start)
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
    """Return ``num_bytes`` rounded up to a multiple of ``alignment``."""
    return -(-num_bytes // alignment) * alignment


UPDATED_COMPONENTS = ("master", "exp_avg", "exp_avg_sq", "step")
"""Components of the state that an AdamW update changes."""
GRADIENT_ITEM_BYTES = 4
"""Bytes of a reduced gradient per parameter. Gradients are FP32, as the master weights that they update."""


def window_bytes(plan: WindowPlan, shards: Sequence[StateShard]) -> int:
    """Return the bytes of a window on the rank with ``shards``: the sum of ``slice_bytes`` over all slices, and the
    room for gradients of experts if ``plan.partial.sends_gradients``."""
    return window_bytes_by_rank(plan, [shards])[0]


def window_bytes_by_rank(plan: WindowPlan, shards_by_rank: Sequence[Sequence[StateShard]]) -> tuple[int, ...]:
    """Return ``window_bytes`` of each rank. The plan is read once for all ranks. So the time for one rank is
    proportional to the number of its shards, and not to the number of operators of the job."""
    units_of: dict[OperatorId, list[tuple[int, Unit]]] = {}
    for index, units in enumerate(plan.slices):
        for unit in units:
            units_of.setdefault(unit.operator, []).append((index, unit))
    sends_gradients = plan.partial is not None and plan.partial.sends_gradients
    return tuple(
        _window_bytes(plan.num_iterations, units_of, shards) + (_gradient_bytes(shards) if sends_gradients else 0)
        for shards in shards_by_rank
    )


def _window_bytes(
    num_slices: int, units_of: Mapping[OperatorId, Sequence[tuple[int, Unit]]], shards: Iterable[StateShard]
) -> int:
    full, frozen = [0] * num_slices, [0] * num_slices
    for shard in shards:
        for index, unit in units_of.get(shard.operator, ()):
            start, stop = unit.range_of(shard)
            full[index] += _aligned_bytes(stop - start, shard.full)
            frozen[index] += _aligned_bytes(stop - start, shard.frozen)
    total = later_frozen = 0
    # Backwards from the last slice: every slice contains the compute weights of the units of all later slices.
    for index in reversed(range(num_slices)):
        total += align(full[index] + later_frozen)
        later_frozen += frozen[index]
    return total


def _gradient_bytes(shards: Iterable[StateShard]) -> int:
    sizes = (GRADIENT_ITEM_BYTES * shard.num_elements for shard in shards if shard.operator.expert is not None)
    return align(sum(align(size, PIECE_ALIGNMENT_BYTES) for size in sizes))


def _aligned_bytes(num_elements: int, components: Sequence[Component]) -> int:
    # Bytes of the pieces of ``_pieces_of``, without making them.
    sizes = (component.num_values(num_elements) * component.item_bytes for component in components)
    return sum(align(size, PIECE_ALIGNMENT_BYTES) for size in sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReorderTrigger:
    """Decides when the popularity of experts has changed so much that a new order of operators is made (MoEvement,
    3.5).

    The frequency of an expert is its share of its layer's tokens. The trigger compares the present frequency with the
    frequency when the present order was made. So a slow drift triggers a new order, and oscillation does not.
    """

    min_change: float = 0.10
    """Relative change of an expert's frequency above which the expert counts as changed."""
    min_share: float = 0.25
    """Smallest share of changed experts that leads to a new order. A value above 1 keeps the run's first order."""

    def fires(self, before: Activations | None, now: Activations | None) -> bool:
        """Return whether an order made from the token counts ``before`` is outdated for the token counts ``now``."""
        if now is None:
            return False
        # This check precedes that of ``before``: the first order is kept even if it was made without activations.
        if self.min_share > 1:
            return False
        if before is None or before.layers != now.layers:
            return True
        pairs = [
            pair
            for rows in zip(_frequencies(before), _frequencies(now), strict=True)
            for pair in zip(*rows, strict=True)
        ]
        num_moved = sum(abs(new - old) > self.min_change * old for old, new in pairs)
        # With ``min_share=0``, unchanged frequencies must not trigger a new order.
        return num_moved > 0 and num_moved >= self.min_share * len(pairs)


def _frequencies(activations: Activations) -> list[list[float]]:
    return [[tokens / (sum(row) or 1) for tokens in row] for row in activations.totals]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class WindowKey:
    """Start iteration and generation, which identify a captured window on every rank of the job."""

    start_iteration: int
    generation: int
    """Generation of the membership that captured the window. Windows of two generations are never mixed."""
