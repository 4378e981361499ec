"""Draws two kinds of maps of a layer: the load of its experts over iterations, and which ranks have each expert."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_ft.events import ExpertLoad, PlacementInForce, Record
from megatron_ft.formatting import seconds, size
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.telemetry.expert_load import bin_loads, herfindahl, max_over_even_share, relative_load
from megatron_ft.telemetry.report.drawing import Element, short, text

WIDTH = 1000
NUM_BESIDE = 2
LEFT, GUTTER = 40, 16
TOP, BOTTOM = 26, 26
MAX_HEIGHT, MAX_CELL = 176, 15
"""Largest height of a map, and largest height of one row of a map, in pixels."""
_LEAST_WITH_GAP = 4.0
NUM_OPEN = 8
"""Number of maps that are visible at once; further maps are in a section that the reader must open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    title: str
    num_rows: int
    num_columns: int
    runs: tuple[tuple[str, int, int, int], ...]
    """Cells of the map. Adjacent cells of one CSS class are merged: (class, row, first column, number of columns)."""
    rows: tuple[str, str]
    """Labels of the first and the last row of the map."""
    columns: tuple[str, str]
    """Labels of the first and the last column of the map."""
    has_gaps: bool = False
    """Whether to leave a gap between neighbouring cells if the cells are large enough."""


def _runs_of(rows: Iterable[Sequence[str | None]]) -> Iterator[tuple[str, int, int, int]]:
    """Yield (CSS class, row, first column, number of columns) for each group of adjacent cells of a row that have the
    same class. Leave out cells without a class."""
    for row, classes in enumerate(rows):
        begin = 0
        for column in range(1, len(classes) + 1):
            if column == len(classes) or classes[column] != classes[begin]:
                if (class_ := classes[begin]) is not None:
                    yield class_, row, begin, column - begin
                begin = column


def _panels(name: str, maps: Sequence[_Panel], *, title: str, description: str, more: str) -> Iterator[Element]:
    """Draw all maps. The first ``NUM_OPEN`` maps are visible; further maps are folded under the title ``more``.

    Args:
        name: Name of the drawings, unique on the page.
    """
    yield _sheet(name, maps[:NUM_OPEN], title, description)
    rest = [maps[begin : begin + NUM_OPEN] for begin in range(NUM_OPEN, len(maps), NUM_OPEN)]
    if rest:
        sheets = [_sheet(f"{name}-{number}", some, title, description) for number, some in enumerate(rest, 2)]
        yield Element.of("details", Element.of("summary", more), *sheets)


def _sheet(name: str, maps: Sequence[_Panel], title: str, description: str) -> Element:
    shapes: list[Element] = []
    y = 0.0
    for begin in range(0, len(maps), NUM_BESIDE):
        beside = maps[begin : begin + NUM_BESIDE]
        for place, panel in enumerate(beside):
            shapes += _panel(panel, place * WIDTH / NUM_BESIDE + LEFT, y + TOP)
        y += TOP + max(_height(panel) for panel in beside) + BOTTOM
    named = f"{title}: {maps[0].title} to {maps[-1].title}" if len(maps) > 1 else f"{title}: {maps[0].title}"
    return Element.drawing(name, *shapes, width=WIDTH, height=int(y), title=named, description=description)


def _height(panel: _Panel) -> float:
    return min(MAX_HEIGHT, MAX_CELL * panel.num_rows)


def _panel(panel: _Panel, left: float, top: float) -> Iterator[Element]:
    width, height = WIDTH / NUM_BESIDE - LEFT - GUTTER, _height(panel)
    across, down = width / panel.num_columns, height / panel.num_rows
    gap = 1.0 if panel.has_gaps and min(across, down) >= _LEAST_WITH_GAP else 0.0
    yield text(panel.title, left, top - 8, "strong")
    yield Element.of("rect", x=left, y=top, width=width, height=height, class_="lane")
    paths: dict[str, list[str]] = {}
    for class_, row, column, count in panel.runs:
        box = short(count * across - gap)
        start = f"M{short(left + column * across)} {short(top + row * down)}"
        # All cells of a class form one path, because tens of thousands of elements would make the page slow.
        paths.setdefault(class_, []).append(f"{start}h{box}v{short(down - gap)}h-{box}z")
    for class_, parts in sorted(paths.items()):
        yield Element.of("path", d="".join(parts), class_=class_)
    first, last = panel.rows
    yield text(first, left - 6, top + min(11.0, down / 2 + 4), "tick", "end")
    if panel.num_rows > 1:
        yield text(last, left - 6, top + height - max(0.0, down / 2 - 4), "tick", "end")
    first, last = panel.columns
    yield text(first, left, top + height + 15, "tick")
    if panel.num_columns > 1:
        yield text(last, left + width, top + height + 15, "tick", "end")


MAX_COLUMNS = 60
"""Largest number of columns of a map. If there are more iterations, a column shows the sum of several iterations."""
MAX_ROWS = 64
"""Largest number of rows of a map. If there are more experts, a row shows the busiest of several adjacent experts."""
MAX_CELLS = 60_000
"""Limit for the number of cells in the maps of all layers together. Above it, the maps get fewer columns."""
_MIN_COLUMNS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerLoads:
    """Load of the experts of one MoE layer."""

    number: int
    """Layer number in Megatron, counted from 1."""
    columns: tuple[tuple[float, ...], ...]
    """Load by column (iterations) and row (experts): tokens divided by the mean per expert. Even load is 1."""
    busiest: int
    """Expert with the most tokens in the newest iterations (last column)."""
    max_over_even: float
    """Tokens of the busiest expert divided by the mean per expert, in the newest iterations (last column)."""
    min_over_even: float
    """Tokens of the least busy expert divided by the mean per expert, in the newest iterations (last column)."""
    herfindahl: float
    """Herfindahl-Hirschman index (sum of the experts' squared token shares) in the newest iterations (last column)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoads:
    """Loads of the experts of all MoE layers. Records that differ from the newest in layers or experts are left out."""

    num_experts: int
    experts_per_row: int
    stretches: tuple[tuple[int, int], ...]
    """First and last iteration that each column of the maps covers."""
    layers: tuple[_LayerLoads, ...]

    @classmethod
    def of(cls, records: Iterable[Record]) -> "ExpertLoads | None":
        """Compute the expert loads of a run. Return None if no record contains loads. Only the newest record of an
        iteration counts."""
        loads = [record for record in records if isinstance(record, ExpertLoad) and record.layers and record.layers[0]]
        if not loads:
            return None
        newest = loads[-1]
        # Records are stored by iteration, so that the newest record of a repeated iteration counts.
        of_its_shape = {record.iteration: record for record in loads if _shape(record) == _shape(newest)}
        if len({len(row) for row in newest.layers}) != 1:
            return None
        num_layers, num_experts = len(newest.layers), len(newest.layers[0])
        per_row = -(-num_experts // MAX_ROWS)
        most = MAX_CELLS // (num_layers * -(-num_experts // per_row))
        stretches = list(_stretches(sorted(of_its_shape), min(MAX_COLUMNS, max(_MIN_COLUMNS, most))))
        totals = [_total([of_its_shape[iteration] for iteration in stretch]) for stretch in stretches]
        numbers = _shape(newest)[1] or tuple(range(1, num_layers + 1))
        return cls(
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
    parts = min(most, len(iterations))
    for part in range(parts):
        yield iterations[part * len(iterations) // parts : (part + 1) * len(iterations) // parts]


def _total(records: Sequence[ExpertLoad]) -> list[list[int]]:
    return [
        [max(0, sum(counts)) for counts in zip(*rows, strict=True)]
        for rows in zip(*(record.layers for record in records), strict=True)
    ]


def _layer(number: int, totals: Sequence[Sequence[int]]) -> _LayerLoads:
    newest = totals[-1]
    shares = relative_load(newest)
    return _LayerLoads(
        number=number,
        columns=tuple(tuple(bin_loads(relative_load(tokens), MAX_ROWS)) for tokens in totals),
        busiest=max(range(len(newest)), key=newest.__getitem__),
        max_over_even=max_over_even_share(newest),
        min_over_even=min(shares),
        herfindahl=herfindahl(newest),
    )


_LEVELS = (
    (0.25, "load-0", "below 1/4 of the even share"),
    (0.5, "load-1", "1/4 to 1/2"),
    (0.8, "load-2", "1/2 to 0.8"),
    (1.25, "load-3", "0.8 to 1.25: about even"),
    (2.0, "load-4", "1.25 to 2"),
    (4.0, "load-5", "2 to 4 times"),
    (float("inf"), "load-6", "4 times and more"),
)
"""Colours of the load maps: upper limit of the load, CSS class, and description in the legend."""


def load_maps(loads: ExpertLoads | None) -> Iterator[Element]:
    """Draw a map for each layer: how its tokens spread over the experts, from the first iteration to the newest."""
    if loads is None:
        return
    yield Element.of("h2", "Expert load", id="expert-load")
    maps = [_load_panel(loads, layer) for layer in loads.layers]
    first, last = loads.stretches[0][0], loads.stretches[-1][1]
    per_row = (
        "" if loads.experts_per_row == 1 else (f" (each row shows the busiest of {loads.experts_per_row} neighbours)")
    )
    down = f"experts 0 to {loads.num_experts - 1} from top to bottom{per_row}"
    words = f"A map for each layer: {down}, iterations {first:,} to {last:,} from left to right."
    yield Element.of("p", f"{words} Colours show an expert's tokens divided by the mean over experts.")
    yield Element.of(
        "ul", *(Element.of("li", Element.swatch(class_), words) for _, class_, words in _LEVELS), class_="legend"
    )
    yield from _panels(
        "expert-load",
        maps,
        title="Load of experts",
        description=f"{words} The table below shows how uneven the newest loads are.",
        more="Layers not shown above",
    )
    rows = [
        (
            str(layer.number),
            str(layer.busiest),
            f"{layer.max_over_even:.2f}",
            f"{layer.min_over_even:.2f}",
            f"{layer.herfindahl:.3f}",
        )
        for layer in loads.layers
    ]
    header = ("layer", "busiest expert", "its load", "lowest load", "HHI")
    first, last = loads.stretches[-1]
    span = f"iterations {first:,} to {last:,}" if last > first else f"iteration {first:,}"
    found = Element.table(f"Tokens of an expert divided by the mean, {span}", header, rows, numbers={0, 1, 2, 3, 4})
    yield Element.of("details", Element.of("summary", "Present unevenness"), found)
    even = f"{1 / loads.num_experts:.3f}"
    words = f"HHI: sum of squared shares; {even} is even, 1 means that one expert has all tokens."
    yield Element.of("p", words, class_="soft")


def _level(load: float) -> str:
    """Return the CSS class of the colour for a load (an expert's tokens divided by the mean per expert)."""
    return next(class_ for end, class_, _ in _LEVELS if load < end or end == float("inf"))


def _load_panel(loads: ExpertLoads, layer: _LayerLoads) -> _Panel:
    num_rows = len(layer.columns[0])
    rows = ([_level(column[row]) for column in layer.columns] for row in range(num_rows))
    return _Panel(
        title=f"layer {layer.number}",
        num_rows=num_rows,
        num_columns=len(layer.columns),
        runs=tuple(_runs_of(rows)),
        rows=("0", str(loads.num_experts - 1)),
        columns=(f"iteration {loads.stretches[0][0]:,}", f"{loads.stretches[-1][1]:,}"),
    )


MAX_PLACEMENT_CELLS = 200_000
"""Largest number of cells (experts times ranks, over all layers) for which a placement is drawn."""
MAX_CHANGES = 40
_PLACEMENT_WORDS = "A map for each layer: experts from top to bottom, ranks from left to right."
_PLACEMENT_LEGEND = (
    ("held-1", "a replica"),
    ("held-2", "replicas in two or more slots, which share one set of weights"),
)


def placement_maps(placements: Sequence[PlacementInForce], plans: Sequence[PlacementPlan]) -> Iterator[Element]:
    """Draw which ranks now have replicas of which expert, and list the changes of the placement during the run."""
    if not placements:
        return
    newest = placements[-1]
    yield Element.of("h2", "Placement", id="placement")
    yield Element.of("p", f"Used since iteration {newest.iteration:,} ({newest.reason}).")
    yield Element.of("ul", *(Element.of("li", line, class_="words") for line in newest.stages[:64]))
    maps = [_placement_panel(plan, layer) for plan in plans for layer in range(len(plan.layer_numbers))]
    num_cells = sum(plan.num_experts * len(plan.ranks) * len(plan.slots) for plan in plans)
    if not maps:
        yield Element.of(
            "p",
            "The slots are not drawn, because the run's folder does not contain this placement's plan.",
            class_="soft",
        )
    elif num_cells > MAX_PLACEMENT_CELLS:
        yield Element.of("p", "The slots are not drawn, because there are too many.", class_="soft")
    else:
        yield Element.of("p", _PLACEMENT_WORDS)
        yield Element.of(
            "ul",
            *(Element.of("li", Element.swatch(class_), words) for class_, words in _PLACEMENT_LEGEND),
            class_="legend",
        )
        yield from _panels(
            "placement-map",
            maps,
            title="Placement",
            description=f"{_PLACEMENT_WORDS} A filled cell means that the rank has the expert. The list "
            "above sums up the maps.",
            more="Layers not shown above",
        )
        yield Element.of("details", Element.of("summary", "Ranks and failure domains"), _ranks(plans))
    yield Element.of("details", Element.of("summary", "History of the placement"), _changes(placements))


def _placement_panel(plan: PlacementPlan, layer: int) -> _Panel:
    held = [Counter(experts) for experts in plan.slots[layer]]
    cells = (
        ("held-1" if of_rank[expert] == 1 else "held-2", expert, column, 1)
        for column, of_rank in enumerate(held)
        for expert in sorted(of_rank)
    )
    return _Panel(
        title=f"layer {plan.layer_numbers[layer]}",
        num_rows=plan.num_experts,
        num_columns=max(1, len(plan.ranks)),
        runs=tuple(cells),
        rows=("0", str(plan.num_experts - 1)),
        columns=(f"rank {plan.ranks[0]}", f"{plan.ranks[-1]}") if plan.ranks else ("no ranks", ""),
        has_gaps=True,
    )


def _ranks(plans: Sequence[PlacementPlan]) -> Element:
    rows = []
    for stage, plan in enumerate(plans):
        for position, (rank, domain) in enumerate(zip(plan.ranks, plan.domains, strict=True)):
            held = [len(by_rank[position]) for by_rank in plan.slots]
            few, most = min(held, default=0), max(held, default=0)
            rows.append((str(rank), str(stage), domain, str(most) if few == most else f"{few} to {most}"))
    header = ("rank", "stage", "failure domain", "slots with a replica, per layer")
    return Element.table("Ranks, which are the columns of the map", header, rows, numbers={0, 1, 3}, words=2)


def _changes(placements: Sequence[PlacementInForce]) -> Element:
    shown = placements[-MAX_CHANGES:]
    more = len(placements) - len(shown)
    caption = "Placements that the run has used" + (f"; {more:,} earlier ones are left out" if more else "")
    header = ("from iteration", "why", "moved", "took", "busiest rank over mean, before", "after", "predicted gain")
    return Element.table(caption, header, [_change(record) for record in shown], numbers={0, 2, 3, 4, 5, 6}, words=1)


def _change(record: PlacementInForce) -> tuple[str, ...]:
    return (
        f"{record.iteration:,}",
        record.reason,
        "-" if record.moved_bytes is None else size(record.moved_bytes),
        "-" if record.seconds is None else seconds(record.seconds),
        "-" if record.imbalance_before is None else f"{record.imbalance_before:.2f}",
        "-" if record.imbalance_after is None else f"{record.imbalance_after:.2f}",
        "-" if record.gain is None else f"{100 * record.gain:.1f} %",
    )
