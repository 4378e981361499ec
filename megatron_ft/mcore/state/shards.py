"""Assigns every captured element to exactly one of the ranks that have it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from megatron_ft.operator_state import Component, StateShard, operator_of

Part = tuple[str, int]
"""A parameter's global name, and its tensor-parallel part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One rank's share of one part of a parameter: the whole compute weight, and the optimizer state of ``ranges``."""

    part: Part
    num_elements: int
    ranges: tuple[tuple[int, int], ...]
    """Elements (start, stop) of the flattened part whose master and moments are on this rank."""
    full: tuple[Component, ...]
    frozen: tuple[Component, ...]

    def covers(self, start: int, stop: int) -> bool:
        """Whether the optimizer state of elements [start, stop) is on this rank."""
        return any(first <= start and stop <= last for first, last in self.ranges)


def to_record(holdings: Iterable[Holding]) -> dict[str, Any]:
    """Make a JSON object for ``from_record``; components are stored once, because most parameters have the same."""
    kinds: dict[tuple[tuple[Component, ...], tuple[Component, ...]], int] = {}
    rows = [[*h.part, h.num_elements, h.ranges, kinds.setdefault((h.full, h.frozen), len(kinds))] for h in holdings]
    return {"kinds": [[[asdict(c) for c in group] for group in kind] for kind in kinds], "rows": rows}


def from_record(record: Mapping[str, Any]) -> tuple[Holding, ...]:
    kinds = [[tuple(Component(**values) for values in group) for group in kind] for kind in record["kinds"]]
    return tuple(
        Holding(
            part=(parameter, tensor_part),
            num_elements=num_elements,
            ranges=tuple((start, stop) for start, stop in ranges),
            full=kinds[kind][0],
            frozen=kinds[kind][1],
        )
        for parameter, tensor_part, num_elements, ranges, kind in record["rows"]
    )


def cut_shards(holdings_by_rank: Sequence[Sequence[Holding]], num_layers: int) -> tuple[tuple[StateShard, ...], ...]:
    """Compute the shards each rank captures; element ranges that several ranks hold are divided evenly."""
    held: dict[Part, dict[int, Holding]] = {}
    for rank, holdings in enumerate(holdings_by_rank):
        for holding in holdings:
            held.setdefault(holding.part, {})[rank] = holding
    shards: list[list[StateShard]] = [[] for _ in holdings_by_rank]
    for part, by_rank in held.items():
        for rank, start, stop in _cut(by_rank):
            shards[rank].append(_shard(part, by_rank[rank], start, stop, num_layers))
    return tuple(tuple(of_rank) for of_rank in shards)


def sizes(holdings_by_rank: Iterable[Iterable[Holding]]) -> dict[Part, int]:
    """Count the elements of each part of each parameter."""
    return {holding.part: holding.num_elements for holdings in holdings_by_rank for holding in holdings}


def _cut(by_rank: Mapping[int, Holding]) -> Iterable[tuple[int, int, int]]:
    # Yield (rank, start, stop); ranges of ranks may overlap in part, as for stages that share the embedding.
    edges = sorted({edge for holding in by_rank.values() for bounds in holding.ranges for edge in bounds})
    for start, stop in pairwise(edges):
        # In rank order on every rank, so that all compute the same cut; even parts let holders capture in parallel.
        holders = [rank for rank, holding in by_rank.items() if holding.covers(start, stop)]
        for place, rank in enumerate(holders):
            first = start + (stop - start) * place // len(holders)
            last = start + (stop - start) * (place + 1) // len(holders)
            if last > first:
                yield rank, first, last


def _shard(part: Part, holding: Holding, start: int, stop: int, num_layers: int) -> StateShard:
    return StateShard(
        operator=operator_of(part[0], num_layers),
        parameter=part[0],
        tensor_part=part[1],
        start=start,
        stop=stop,
        full=holding.full,
        frozen=holding.frozen,
    )
