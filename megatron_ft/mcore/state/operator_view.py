"""Finds a rank's elements of each operator (unit of a snapshot), chooses which rank captures them, and restores them.

Megatron's optimizers have lists of parameters, and of the tensors that they update for these parameters. This module
finds master weights and moments in these lists, so it works for all precisions, and for sharded optimizers, too.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.groups import Collectives, Groups, exchange_tensors
from megatron_ft.mcore.model.transformer_config import named_parameters, tensor_part
from megatron_ft.mcore.optimizer.adamw import (
    MASTER,
    STEP,
    allocate_state,
    masters_of,
    range_of,
    state_format_of,
    state_tensors,
    sub_optimizers,
    weight_of,
)
from megatron_ft.mcore.optimizer.scaled import has_fp8_values, quantized
from megatron_ft.operators import (
    SCALE_BLOCK_ELEMENTS,
    Component,
    StateShard,
    block_elements,
    check_shards,
    operator_of,
)
from megatron_ft.planning.snapshot.plan import Piece, WindowPlan, batch_bytes, slice_bytes
from megatron_ft.snapshot.window import Gradient, Update
from transformer_engine_ext.formats import E4M3
from transformer_engine_ext.quantized import QuantizedTensor, quantize_blocks

_Value = TypeVar("_Value")
Part = tuple[str, int]
"""Global name of a parameter, and the index of one of its tensor-parallel parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartHolding:
    """State that a rank has of a tensor-parallel part of a parameter: the weight, and optimizer state of ``ranges``."""

    part: Part
    num_elements: int
    ranges: tuple[tuple[int, int], ...]
    """Ranges (start, stop) of elements of the flattened part whose master weights and moments are on this rank."""
    full: tuple[Component, ...]
    """Components of the full state: master weight, moments and step count."""
    frozen: tuple[Component, ...]
    """Components that a slice stores of an operator whose full state is in a later slice: only the compute weight."""

    def covers(self, start: int, stop: int) -> bool:
        """Return whether this rank has the optimizer state of elements [start, stop)."""
        return any(first <= start and stop <= last for first, last in self.ranges)


def _to_record(holdings: Iterable[_PartHolding]) -> dict[str, Any]:
    """Return ``holdings`` as a JSON object that ``_from_record`` reads. Each combination of components is stored once,
    because most parameters have the same combination."""
    kinds: dict[tuple[tuple[Component, ...], tuple[Component, ...]], int] = {}
    rows = [[*h.part, h.num_elements, h.ranges, kinds.setdefault((h.full, h.frozen), len(kinds))] for h in holdings]
    return {"kinds": [[[asdict(c) for c in group] for group in kind] for kind in kinds], "rows": rows}


def _from_record(record: Mapping[str, Any]) -> tuple[_PartHolding, ...]:
    kinds = [[tuple(Component(**values) for values in group) for group in kind] for kind in record["kinds"]]
    return tuple(
        _PartHolding(
            part=(parameter, tensor_part),
            num_elements=num_elements,
            ranges=tuple((start, stop) for start, stop in ranges),
            full=kinds[kind][0],
            frozen=kinds[kind][1],
        )
        for parameter, tensor_part, num_elements, ranges, kind in record["rows"]
    )


def _cut_shards(
    holdings_by_rank: Sequence[Sequence[_PartHolding]], num_layers: int
) -> tuple[tuple[StateShard, ...], ...]:
    """Return the shards that each rank captures. Ranks that have the same element range capture equal shares."""
    held: dict[Part, dict[int, _PartHolding]] = {}
    for rank, holdings in enumerate(holdings_by_rank):
        for holding in holdings:
            held.setdefault(holding.part, {})[rank] = holding
    shards: list[list[StateShard]] = [[] for _ in holdings_by_rank]
    for part, by_rank in held.items():
        for rank, start, stop in _cut(by_rank):
            shards[rank].append(_shard(part, by_rank[rank], start, stop, num_layers))
    return tuple(tuple(of_rank) for of_rank in shards)


def _sizes(holdings_by_rank: Iterable[Iterable[_PartHolding]]) -> dict[Part, int]:
    """Return the number of elements of each tensor-parallel part of each parameter."""
    return {holding.part: holding.num_elements for holdings in holdings_by_rank for holding in holdings}


def _cut(by_rank: Mapping[int, _PartHolding]) -> Iterable[tuple[int, int, int]]:
    # Yields (rank, start, stop). Ranges of ranks may overlap in part, for example if two stages share the embedding.
    # Use the largest block: the block of a rank without optimizer state may be too small for the other ranks.
    block = max(block_elements((*holding.full, *holding.frozen)) for holding in by_rank.values())
    edges = sorted({edge for holding in by_rank.values() for bounds in holding.ranges for edge in bounds})
    for start, stop in pairwise(edges):
        # Divide the range evenly, to share the work, and in rank order, so that all ranks compute the same shards.
        holders = [rank for rank, holding in by_rank.items() if holding.covers(start, stop)]
        cuts = [start + (stop - start) * place // len(holders) for place in range(len(holders))]
        # Move each cut down to the beginning of a block of elements that share a scale.
        if not holders:
            continue  # ``check_shards`` reports elements that no rank captures
        cuts = [start, *(max(start, cut - cut % block) for cut in cuts[1:]), stop]
        for rank, (first, last) in zip(holders, pairwise(cuts), strict=True):
            if last > first:
                yield rank, first, last


def _shard(part: Part, holding: _PartHolding, start: int, stop: int, num_layers: int) -> StateShard:
    return StateShard(
        operator=operator_of(part[0], num_layers),
        parameter=part[0],
        tensor_part=part[1],
        start=start,
        stop=stop,
        full=holding.full,
        frozen=holding.frozen,
    )


Payload = bytes | bytearray | memoryview
"""Bytes of a slice that one rank has captured. Functions that take a ``Payload`` do not change it."""

WEIGHT = "weight"
_WEIGHT_SCALES = f"{WEIGHT}_scales"


def _restore_slice(view: "OperatorView", plan: WindowPlan, index: int, payload: Payload) -> int:
    """Send the bytes of slice ``index`` from the ranks that captured them to all ranks that need them, and write them
    to the tensors of ``view``. See ``OperatorView.restore``."""
    holders = _holders(view.holdings_by_rank)
    pieces_by_rank = [Piece.of_slice(plan, index, shards) for shards in view.shards_by_rank]
    sizes = [slice_bytes(pieces) for pieces in pieces_by_rank]
    captured = _Captured(pieces_by_rank[view.rank], _content(payload, sizes[view.rank], index))
    # Exchange in batches to limit memory, because the bytes of a batch are copied before and after they are sent. Every
    # rank computes the batches of all ranks.
    at_a_time = batch_bytes(max(sizes))
    batches: dict[int, list[list[Piece]]] = {}
    for rank, pieces in enumerate(pieces_by_rank):
        for piece in pieces:
            for batch, part in piece.in_batches(at_a_time):
                batches.setdefault(batch, [[] for _ in sizes])[rank].append(part)
    most = 0
    for _, by_rank in sorted(batches.items()):
        outgoing = _outgoing(view, by_rank[view.rank], captured, holders)
        incoming = _incoming(view, by_rank, holders)
        exchange_tensors(outgoing, incoming, view.group)
        most = max(most, sum(tensor.nbytes for of_rank in (*outgoing, *incoming) for tensor in of_rank))
    return most


class _Captured:
    """The bytes of a slice that this rank has captured: ``content`` (uint8, flat), in which ``pieces`` are stored."""

    def __init__(self, pieces: Iterable[Piece], content: torch.Tensor) -> None:
        self.content = content
        self._pieces: dict[tuple[str, int, str], list[Piece]] = {}
        for piece in pieces:
            self._pieces.setdefault((piece.parameter, piece.tensor_part, piece.component), []).append(piece)

    def parts(self, piece: Piece, block: int) -> tuple[int, dict[str, torch.Tensor]]:
        """Return (first element, tensors by component): the values of ``piece`` and, if there are any, their scales. If
        ``piece`` begins or ends inside a block of ``block`` elements, the result contains the whole block."""
        found, first = {}, piece.start - piece.start % block
        for component in (piece.component, f"{piece.component}_scales"):
            for whole in self._pieces.get((piece.parameter, piece.tensor_part, component), ()):
                if whole.start <= piece.start and piece.stop <= whole.stop:
                    stop = min(whole.stop, piece.stop + -piece.stop % block)
                    dtype, per_value = getattr(torch, whole.dtype), whole.elements_per_value
                    begin = whole.offset + (first - whole.start) // per_value * dtype.itemsize
                    end = whole.offset - (whole.start - stop) // per_value * dtype.itemsize
                    # Clone the bytes, because ``view`` needs an address that is aligned for the dtype.
                    found[component] = self.content[begin:end].clone().view(dtype)
        return first, found


def _outgoing(
    view: "OperatorView", pieces: Iterable[Piece], captured: _Captured, holders: dict[Part, dict[int, _PartHolding]]
) -> list[list[torch.Tensor]]:
    outgoing: list[list[torch.Tensor]] = [[] for _ in view.shards_by_rank]
    for piece in pieces:
        for component, targets in _deliveries(piece, holders[piece.parameter, piece.tensor_part]):
            tensor = captured.content[piece.offset : piece.end]
            # The sender computes the weight, so that all receivers get the same bits, and fewer bytes are sent.
            if component == WEIGHT:
                tensor = view.weight_of(piece, captured)
            for target in targets:
                outgoing[target].append(tensor)
    return outgoing


def _incoming(
    view: "OperatorView", pieces_by_rank: Iterable[Iterable[Piece]], holders: dict[Part, dict[int, _PartHolding]]
) -> list[list[torch.Tensor]]:
    return [
        [
            view.live((piece.parameter, piece.tensor_part), component, piece.start, piece.stop)
            for piece in pieces
            if view.rank in holders[piece.parameter, piece.tensor_part]
            for component, targets in _deliveries(piece, holders[piece.parameter, piece.tensor_part])
            if view.rank in targets
        ]
        for pieces in pieces_by_rank
    ]


def _holders(holdings_by_rank: Sequence[Sequence[_PartHolding]]) -> dict[Part, dict[int, _PartHolding]]:
    found: dict[Part, dict[int, _PartHolding]] = {}
    for rank, holdings in enumerate(holdings_by_rank):
        for holding in holdings:
            found.setdefault(holding.part, {})[rank] = holding
    return found


def _deliveries(piece: Piece, holders: dict[int, _PartHolding]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (component, ranks that receive it) for each component that ``piece`` provides. A piece of a master weight
    also gives the compute weight, rounded from it, which every rank with the parameter receives."""
    weight = next(iter(holders.values())).frozen[0]
    if piece.component in (WEIGHT, MASTER):
        yield WEIGHT, tuple(holders)
    # An FP32 weight is its own master, so it was sent above. Scales are not sent for a weight: the sender decodes it.
    is_own_master = piece.component == MASTER and weight.dtype == "float32"
    if piece.component not in (WEIGHT, _WEIGHT_SCALES) and not is_own_master:
        yield piece.component, tuple(r for r, holding in holders.items() if holding.covers(piece.start, piece.stop))


def _content(payload: Payload, num_bytes: int, index: int) -> torch.Tensor:
    given = memoryview(payload).nbytes
    if given < num_bytes:
        raise RecoveryError(
            f"slice {index} has {given} captured bytes, but this rank needs {num_bytes}: the window may have been "
            "captured with another layout"
        )
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns about read-only memory, but nothing writes to it
        return torch.frombuffer(payload, dtype=torch.uint8)


@dataclass(kw_only=True)
class _Held:
    """Tensors of one tensor-parallel part of a parameter on this rank: the flattened weight, and the optimizer state by
    element range (start, stop) and component."""

    parameter: torch.nn.Parameter
    weight: torch.Tensor
    is_encoded: bool
    """Whether the weight is captured as FP8 codes and scales."""
    states: dict[tuple[int, int], dict[str, torch.Tensor]] = field(default_factory=dict)
    masters: dict[tuple[int, int], tuple[torch.Tensor, dict[str, Any]]] = field(default_factory=dict)
    """The tensor that torch's optimizer updates, and its parameter group, for each element range."""


class OperatorView:
    """The tensors of this rank by parameter and element range, and the shards that each rank of the job captures.

    All ranks must create a view together, and must create a new one after model or optimizer were rebuilt. The
    constructor allocates moments as zeros before the first update.
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
        self._optimizer = optimizer
        self._held = _held(model_chunks, optimizer, groups.pg_collection)
        # Gather once, so that every rank can later compute the slices of all ranks without communication.
        self._holdings = {part: _holding(part, held) for part, held in self._held.items()}
        self.holdings_by_rank = tuple(
            _from_record(record) for record in Collectives(self.group).gather(_to_record(self._holdings.values()))
        )
        self.shards_by_rank = _cut_shards(self.holdings_by_rank, num_layers)
        # Check now: otherwise only a replay would show that no rank has captured an element.
        check_shards(self.shards_by_rank, _sizes(self.holdings_by_rank))
        self.shards = self.shards_by_rank[self.rank]
        self._codes = _code_buffers(self.shards, self._held)

    def pieces(self, plan: WindowPlan, index: int) -> tuple[Piece, ...]:
        """Return the pieces (element ranges) that this rank captures in slice ``index`` of a window of ``plan``."""
        return Piece.of_slice(plan, index, self.shards)

    def source(self, piece: Piece) -> torch.Tensor:
        """Return the elements of ``piece`` as a 1-D view of the tensor that training uses. The view has one element if
        the component, such as a step count, has one value for all elements. For weights of FP8 layers, return a view
        of codes or scales, which ``encode`` writes."""
        part = (piece.parameter, piece.tensor_part)
        if piece.component not in (WEIGHT, _WEIGHT_SCALES) or part not in self._codes:
            return self.live(part, piece.component, piece.start, piece.stop)
        start, buffer = self._codes[part]
        found = _range_of(buffer, piece.start - start, piece.stop - start)
        return found.codes if piece.component == WEIGHT else found.scales

    def encode(self, pieces: Iterable[Piece]) -> None:
        """Compute codes and scales from the present weights, for those of ``pieces`` that are weights of FP8 layers.
        This loses no bits. Call it before the tensors of ``source`` are read, and before weights change again."""
        for piece in pieces:
            part = (piece.parameter, piece.tensor_part)
            if piece.component == WEIGHT and part in self._codes:
                start, buffer = self._codes[part]
                values = self._held[part].weight[piece.start : piece.stop].float()
                found = quantize_blocks(values, E4M3, start=piece.start)
                _range_of(buffer, piece.start - start, piece.stop - start).copy_(found)

    def live(self, part: Part, component: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of ``component`` of ``part`` as a 1-D view of the tensor that training uses."""
        held = self._held[part]
        if component == WEIGHT:
            return held.weight[start:stop]
        found = _range_with(held.states, start, stop)
        if found is None:
            raise KeyError(f"{part}/{component}: rank {self.rank} does not have elements {start} to {stop}")
        first, tensor = found[0], found[1][component]
        if component == STEP:
            return tensor
        per_value = SCALE_BLOCK_ELEMENTS if component.endswith("_scales") else 1
        return tensor[(start - first) // per_value : -((first - stop) // per_value)]

    def update_of(self, pieces: Sequence[Piece], wanted: Iterable[int]) -> tuple[Update | None, list[torch.Tensor]]:
        """Return the newest AdamW update of some of ``pieces``, and their gradients. ``wanted`` contains the indices of
        these pieces, which must be of master weights. Each gradient is a flat FP32 view, valid until the next iteration
        begins. Pieces without a gradient, for instance of frozen parameters, are left out. The update is None if no
        piece is left."""
        rows, gradients, options = [], [], {}
        for index in wanted:
            piece = pieces[index]
            found = _range_with(self._held[piece.parameter, piece.tensor_part].masters, piece.start, piece.stop)
            if found is None or (gradient := found[1][0].grad) is None:
                continue
            first, (_, options) = found
            rows.append(Gradient(index, float(options["lr"]), float(options["weight_decay"])))
            gradients.append(gradient.view(-1)[piece.start - first : piece.stop - first])
        if not rows:
            return None, []
        # All parameter groups of a job have the same ``betas`` and ``eps``.
        betas, eps = options["betas"], float(options["eps"])
        return Update(betas=(float(betas[0]), float(betas[1])), eps=eps, gradients=tuple(rows)), gradients

    def weight_of(self, piece: Piece, captured: _Captured) -> torch.Tensor:
        """Return the compute weights of ``piece`` in the dtype of the model. ``piece`` must be a piece of compute
        weights or of master weights."""
        held, block = self._held[piece.parameter, piece.tensor_part], block_elements(self._components(piece))
        first, parts = captured.parts(piece, block)
        if piece.component == MASTER:
            weights = weight_of(self._optimizer, held.parameter, first, parts)
        else:
            weights = quantized(WEIGHT, parts).decode(held.weight.dtype) if held.is_encoded else parts[WEIGHT]
        return weights[piece.start - first : piece.stop - first]

    def _components(self, piece: Piece) -> tuple[Component, ...]:
        found = self._holdings[piece.parameter, piece.tensor_part]
        return (*found.full, *found.frozen)

    def restore(self, plan: WindowPlan, index: int, payload: Payload) -> int:
        """Restore slice ``index`` on every rank that has any of its elements. All ranks must call this.

        ``payload`` contains the bytes that this rank captured, in the order of ``pieces``. Compute weights are rounded
        from captured master weights, as the optimizer rounds them.

        Returns:
            Size of the largest batch in bytes: the bytes that this rank sent and received at one time.

        Raises:
            RecoveryError: ``payload`` is too small.
        """
        return _restore_slice(self, plan, index, payload)


def _held(
    model_chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, pg_collection: ProcessGroupCollection
) -> dict[Part, _Held]:
    parts: dict[torch.nn.Parameter, Part] = {}
    found: dict[Part, _Held] = {}
    has_scales = state_format_of(optimizer) is not None
    for chunk in model_chunks:
        for name, parameter in named_parameters(chunk):
            part = (name, tensor_part(name, parameter, pg_collection))
            assert part not in found, f"{part} occurs twice on this rank"
            parts[parameter] = part
            weight, is_encoded = parameter.detach().view(-1), has_scales and has_fp8_values(parameter)
            found[part] = _Held(parameter=parameter, weight=weight, is_encoded=is_encoded)
    for member in sub_optimizers(optimizer):
        group_of = {id(master): group for group in member.optimizer.param_groups for master in group["params"]}
        for parameter, master in masters_of(member):
            held, bounds = found[parts[parameter]], range_of(member, parameter)
            held.states[bounds] = state_tensors(member, master)
            held.masters[bounds] = master, group_of[id(master)]
    return found


def _code_buffers(shards: Iterable[StateShard], held: Mapping[Part, _Held]) -> dict[Part, tuple[int, QuantizedTensor]]:
    """Allocate codes and scales for the weights that this rank captures in FP8. Return, for each weight, the index of
    the first captured element, and the tensor of codes and scales."""
    ranges: dict[Part, tuple[int, int]] = {}
    for shard in shards:
        part = (shard.parameter, shard.tensor_part)
        if held[part].is_encoded:
            start, stop = ranges.get(part, (shard.start, shard.stop))
            ranges[part] = min(start, shard.start), max(stop, shard.stop)
    return {
        part: (start, quantize_blocks(held[part].weight[start:stop].float(), E4M3, start=start))
        for part, (start, stop) in ranges.items()
    }


def _range_with(ranges: Mapping[tuple[int, int], _Value], start: int, stop: int) -> tuple[int, _Value] | None:
    """Return (first element, value) of the range in ``ranges`` that contains [start, stop); None if none does."""
    return next(((first, value) for (first, last), value in ranges.items() if first <= start and stop <= last), None)


def _range_of(buffer: QuantizedTensor, start: int, stop: int) -> QuantizedTensor:
    """Return codes and scales of elements [start, stop) as views. ``start`` must be a multiple of the block size."""
    scales = buffer.scales[start // SCALE_BLOCK_ELEMENTS : -(-stop // SCALE_BLOCK_ELEMENTS)]
    return replace(buffer, codes=buffer.codes[start:stop], scales=scales)


_ENCODED_WEIGHT = (
    Component(name=WEIGHT, dtype=E4M3.name, item_bytes=E4M3.item_bytes),
    Component(name=_WEIGHT_SCALES, dtype="uint8", item_bytes=1, per_block=True),
)


def _holding(part: Part, held: _Held) -> _PartHolding:
    state = next(iter(held.states.values()), {})
    return _PartHolding(
        part=part,
        num_elements=held.weight.numel(),
        ranges=tuple(held.states),
        full=tuple(_component(name, tensor) for name, tensor in state.items()),
        frozen=_ENCODED_WEIGHT if held.is_encoded else (_component(WEIGHT, held.weight),),
    )


def _component(name: str, tensor: torch.Tensor) -> Component:
    return Component(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        item_bytes=tensor.element_size(),
        per_element=name != STEP,
        per_block=name.endswith("_scales"),
    )
