"""The load of experts over the iterations of a run: how far each expert is above or below the even share."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_ft.events import ExpertLoad, Record
from megatron_ft.telemetry.expert_load import bin_loads, herfindahl, max_over_even_share, relative_load

MAX_COLUMNS = 60
"""Stretches of iterations that a map shows; neighbours are added up."""
MAX_ROWS = 64
"""Experts, or groups of neighbours, that a map shows; the busiest stands for its group."""
MAX_CELLS = 60_000
"""Of all layers together; a map has fewer columns where there would be more."""
_MIN_COLUMNS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoads:
    """One mixture layer."""

    number: int
    """Megatron's, from 1."""
    columns: tuple[tuple[float, ...], ...]
    """For each stretch of iterations and each row, tokens over the even share: 1 is even."""
    busiest: int
    """The expert with the most tokens over the newest stretch."""
    max_over_even: float
    """Its tokens over the even share."""
    min_over_even: float
    """The same of the expert with the fewest."""
    herfindahl: float
    """Sum of squared shares over the newest stretch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoads:
    """All mixture layers, by the shape of the newest record; records of another shape are left out."""

    num_experts: int
    experts_per_row: int
    stretches: tuple[tuple[int, int], ...]
    """First and last iteration of each column."""
    layers: tuple[LayerLoads, ...]


def expert_loads(records: Iterable[Record]) -> ExpertLoads | None:
    """What the records say; None where there are none. Of an iteration that was run again the newest counts."""
    loads = [record for record in records if isinstance(record, ExpertLoad) and record.layers and record.layers[0]]
    if not loads:
        return None
    newest = loads[-1]
    of_its_shape = {record.iteration: record for record in loads if _shape(record) == _shape(newest)}
    if len({len(row) for row in newest.layers}) != 1:
        return None
    num_layers, num_experts = len(newest.layers), len(newest.layers[0])
    per_row = -(-num_experts // MAX_ROWS)
    most = MAX_CELLS // (num_layers * -(-num_experts // per_row))
    stretches = list(_stretches(sorted(of_its_shape), min(MAX_COLUMNS, max(_MIN_COLUMNS, most))))
    totals = [_total([of_its_shape[iteration] for iteration in stretch]) for stretch in stretches]
    numbers = _shape(newest)[1] or tuple(range(1, num_layers + 1))
    return ExpertLoads(
        num_experts=num_experts,
        experts_per_row=per_row,
        stretches=tuple((stretch[0], stretch[-1]) for stretch in stretches),
        layers=tuple(_layer(number, [total[place] for total in totals]) for place, number in enumerate(numbers)),
    )


def _shape(record: ExpertLoad) -> tuple[tuple[int, ...], tuple[int, ...]]:
    lengths = tuple(len(row) for row in record.layers)
    numbers = record.layer_numbers or tuple(range(1, len(lengths) + 1))
    return lengths, numbers if len(numbers) == len(lengths) else ()


def _stretches(iterations: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    """Iterations in order, cut into ``most`` parts of about the same number of them."""
    parts = min(most, len(iterations))
    for part in range(parts):
        yield iterations[part * len(iterations) // parts : (part + 1) * len(iterations) // parts]


def _total(records: Sequence[ExpertLoad]) -> list[list[int]]:
    """Tokens per layer and expert over all of the records."""
    return [
        [max(0, sum(counts)) for counts in zip(*rows, strict=True)]
        for rows in zip(*(record.layers for record in records), strict=True)
    ]


def _layer(number: int, totals: Sequence[Sequence[int]]) -> LayerLoads:
    newest = totals[-1]
    shares = relative_load(newest)
    return LayerLoads(
        number=number,
        columns=tuple(tuple(bin_loads(relative_load(tokens), MAX_ROWS)) for tokens in totals),
        busiest=max(range(len(newest)), key=newest.__getitem__),
        max_over_even=max_over_even_share(newest),
        min_over_even=min(shares),
        herfindahl=herfindahl(newest),
    )
