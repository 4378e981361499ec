"""Tables of a page."""

from collections.abc import Sequence, Set

from megatron_ft.telemetry.report.markup import Element, element


def table(
    caption: str,
    header: Sequence[str],
    rows: Sequence[Sequence[Element | str]],
    *,
    numbers: Set[int] = frozenset(),
    words: int | None = None,
) -> Element:
    """A table.

    Args:
        numbers: the columns, from 0, that stand at the right.
        words: the column that takes long text.
    """

    def cell(name: str, column: int, content: Element | str) -> Element:
        scope = "col" if name == "th" else None
        class_ = "number" if column in numbers else "words" if column == words else None
        return element(name, content, class_=class_, scope=scope)

    head = element("tr", *(cell("th", column, title) for column, title in enumerate(header)))
    body = [element("tr", *(cell("td", column, content) for column, content in enumerate(row))) for row in rows]
    inside = element(
        "table",
        element("caption", caption),
        element("thead", head),
        element("tbody", *body),
        class_="few" if len(header) == 2 and words is None else None,
    )
    return element("div", inside, class_="table")
