"""Drawings of small maps beside each other, one for each layer: rows and columns of cells by class."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_ft.telemetry.report.markup import Element, element, short
from megatron_ft.telemetry.report.svg import drawing, text

WIDTH = 1000
NUM_BESIDE = 2
LEFT, GUTTER = 40, 16
TOP, BOTTOM = 26, 26
MAX_HEIGHT, MAX_CELL = 176, 15
"""Pixels of a map, and of one of its rows."""
_LEAST_WITH_GAP = 4.0
NUM_OPEN = 8
"""Maps that a page shows at once; the others are folded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One map."""

    title: str
    num_rows: int
    num_columns: int
    runs: tuple[tuple[str, int, int, int], ...]
    """Class, row, first column and number of columns of cells of the same class."""
    rows: tuple[str, str]
    """Words at the first and the last row."""
    columns: tuple[str, str]
    """Words under the first and the last column."""
    has_gaps: bool = False
    """Whether a cell stands apart from its neighbours, as far as cells are large enough."""


def runs_of(rows: Iterable[Sequence[str | None]]) -> Iterator[tuple[str, int, int, int]]:
    """Neighbours of the same class as one; cells without a class stay empty."""
    for row, classes in enumerate(rows):
        begin = 0
        for column in range(1, len(classes) + 1):
            if column == len(classes) or classes[column] != classes[begin]:
                if (class_ := classes[begin]) is not None:
                    yield class_, row, begin, column - begin
                begin = column


def panels(name: str, maps: Sequence[Panel], *, title: str, description: str, more: str) -> Iterator[Element]:
    """Drawings of all maps; those after the first few are folded under the words ``more``.

    Args:
        name: unique on the page.
    """
    yield _sheet(name, maps[:NUM_OPEN], title, description)
    rest = [maps[begin : begin + NUM_OPEN] for begin in range(NUM_OPEN, len(maps), NUM_OPEN)]
    if rest:
        sheets = [_sheet(f"{name}-{number}", some, title, description) for number, some in enumerate(rest, 2)]
        yield element("details", element("summary", more), *sheets)


def _sheet(name: str, maps: Sequence[Panel], title: str, description: str) -> Element:
    shapes: list[Element] = []
    y = 0.0
    for begin in range(0, len(maps), NUM_BESIDE):
        beside = maps[begin : begin + NUM_BESIDE]
        for place, panel in enumerate(beside):
            shapes += _panel(panel, place * WIDTH / NUM_BESIDE + LEFT, y + TOP)
        y += TOP + max(_height(panel) for panel in beside) + BOTTOM
    named = f"{title}: {maps[0].title} to {maps[-1].title}" if len(maps) > 1 else f"{title}: {maps[0].title}"
    return drawing(name, *shapes, width=WIDTH, height=int(y), title=named, description=description)


def _height(panel: Panel) -> float:
    return min(MAX_HEIGHT, MAX_CELL * panel.num_rows)


def _panel(panel: Panel, left: float, top: float) -> Iterator[Element]:
    width, height = WIDTH / NUM_BESIDE - LEFT - GUTTER, _height(panel)
    across, down = width / panel.num_columns, height / panel.num_rows
    gap = 1.0 if panel.has_gaps and min(across, down) >= _LEAST_WITH_GAP else 0.0
    yield text(panel.title, left, top - 8, "strong")
    yield element("rect", x=left, y=top, width=width, height=height, class_="lane")
    paths: dict[str, list[str]] = {}
    for class_, row, column, count in panel.runs:
        box = short(count * across - gap)
        start = f"M{short(left + column * across)} {short(top + row * down)}"
        paths.setdefault(class_, []).append(f"{start}h{box}v{short(down - gap)}h-{box}z")
    for class_, parts in sorted(paths.items()):
        yield element("path", d="".join(parts), class_=class_)
    first, last = panel.rows
    yield text(first, left - 6, top + min(11.0, down / 2 + 4), "tick", "end")
    if panel.num_rows > 1:
        yield text(last, left - 6, top + height - max(0.0, down / 2 - 4), "tick", "end")
    first, last = panel.columns
    yield text(first, left, top + height + 15, "tick")
    if panel.num_columns > 1:
        yield text(last, left + width, top + height + 15, "tick", "end")
