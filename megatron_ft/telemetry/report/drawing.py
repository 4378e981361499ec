"""Builds HTML and SVG as a tree of elements, with tables, scales, axes and marks.

All text and attributes are escaped here, whatever the files of a run contain.
"""

import html
import math
import re
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

_UNSHOWN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufffe\uffff]"
)
"""Characters that a page must not contain, that UTF-8 cannot encode, or that change the direction of text."""
_VOID = frozenset({"meta"})
CHARACTER_WIDTH = 6.4
"""Width in pixels to reserve for a character of a drawing; most characters need a little less."""


@dataclass(frozen=True, slots=True)
class Element:
    """HTML or SVG element with attributes and children."""

    name: str
    attributes: tuple[tuple[str, str], ...]
    children: tuple["Element | str", ...]

    def render(self) -> str:
        """Return the element as text that HTML and XML parsers read."""
        attributes = "".join(f' {name}="{html.escape(clean(value))}"' for name, value in self.attributes)
        if self.name in _VOID:
            return f"<{self.name}{attributes}/>"
        inside = "".join(_render(child) for child in self.children)
        return f"<{self.name}{attributes}>{inside}</{self.name}>"


def element(tag: str, /, *children: "Element | str | None", **attributes: "str | float | None") -> Element:
    """Make an element. ``None`` leaves a child or an attribute out.

    An underscore at the end of an attribute's name is removed; other underscores become hyphens. ``short`` writes
    numbers.
    """
    pairs = tuple(
        (key.rstrip("_").replace("_", "-"), value if isinstance(value, str) else short(value))
        for key, value in attributes.items()
        if value is not None
    )
    return Element(tag, pairs, tuple(child for child in children if child is not None))


def clean(text: str) -> str:
    """Replace each character that a page cannot or must not show."""
    return _UNSHOWN.sub("\ufffd", text)


def short(value: float) -> str:
    """Write a number of a drawing, rounded to a hundredth."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _render(child: Element | str) -> str:
    return child.render() if isinstance(child, Element) else html.escape(clean(child), quote=False)


def table(
    caption: str,
    header: Sequence[str],
    rows: Sequence[Sequence[Element | str]],
    *,
    numbers: Set[int] = frozenset(),
    words: int | None = None,
) -> Element:
    """Make a table.

    Args:
        numbers: Columns, counted from 0, that are aligned to the right.
        words: Column with long text.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Linear map of figures to pixels."""

    low: float
    high: float
    begin: float
    """Pixel of ``low``."""
    end: float
    """Pixel of ``high``."""

    def __call__(self, value: float) -> float:
        """Return the pixel of ``value``, limited to the drawing."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.begin + min(1.0, max(0.0, share)) * (self.end - self.begin)

    def ticks(self, most: int) -> list[float]:
        """Return at most ``most`` round figures inside the scale."""
        step = _round_step((self.high - self.low) / max(1, most))
        if step is None:
            return [self.low]
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [number * step for number in range(first, last + 1)]


def _round_step(least: float) -> float | None:
    # 1, 2 or 5 times a power of ten, at least ``least``; None where there is no such.
    # Steps below this would vanish in the rounding of floats.
    if not math.isfinite(least) or least < 1e-12:
        return None
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= least)


def figure(value: float) -> str:
    """Write the figure of a tick: ``0.25``, ``1,200``, ``3e+06``."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:,.10g}" if abs(value) >= 1000 else f"{value:.6g}"


def drawing(
    name: str, *shapes: Element | None, width: int, height: int, title: str, description: str, role: str = "img"
) -> Element:
    """Make an SVG of fixed size.

    Args:
        name: Unique on the page.
        description: Describes the drawing for readers who do not see it.
        role: ``group`` if the drawing contains links, ``img`` otherwise.
    """
    return element(
        "div",
        element(
            "svg",
            element("title", title, id=f"{name}-title"),
            element("desc", description, id=f"{name}-description"),
            *shapes,
            viewBox=f"0 0 {width} {height}",
            role=role,
            aria_labelledby=f"{name}-title {name}-description",
        ),
        class_="plot",
    )


def text(content: str, x: float, y: float, class_: str = "", anchor: str = "start") -> Element:
    """Make a text; ``y`` is the baseline."""
    return element("text", content, x=x, y=y, class_=class_ or None, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Element:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def cross(x: float, y: float, words: str, size: float = 4.5) -> Element:
    """Make the mark of a failure; ``words`` appear while the pointer is on it."""
    path = f"M{x - size:.2f} {y - size:.2f}l{2 * size} {2 * size}m0 {-2 * size}l{-2 * size} {2 * size}"
    return element("path", element("title", words), d=path, class_="failure")


def swatch(class_: str) -> Element:
    """Make the coloured square of a legend entry."""
    shape = element("rect", x=0, y=1, width=22, height=10, class_=class_)
    return element("svg", shape, viewBox="0 0 22 12", aria_hidden="true")


def x_axis(
    scale: Scale,
    y: float,
    *,
    label: str,
    most: int = 8,
    words: Callable[[float], str] = figure,
    top: float | None = None,
) -> Element:
    """Draw ticks and figures below ``y``, and grid lines up to ``top`` if it is given."""
    parts = []
    for tick in scale.ticks(most):
        x = scale(tick)
        if top is not None:
            parts.append(line(x, top, x, y, "grid"))
        parts.append(text(words(tick), x, y + 16, "tick", "middle"))
    middle = (scale.begin + scale.end) / 2
    return element(
        "g", line(scale.begin, y, scale.end, y, "axis"), *parts, text(label, middle, y + 34, "label", "middle")
    )


def y_axis(scale: Scale, left: float, right: float, *, label: str, most: int = 6) -> Element:
    """Draw figures left of ``left`` and grid lines to ``right``. ``label`` stands above, over marks of 30 pixels."""
    parts = [
        part
        for tick in scale.ticks(most)
        for part in (
            line(left, scale(tick), right, scale(tick), "grid"),
            text(figure(tick), left - 8, scale(tick) + 4, "tick", "end"),
        )
    ]
    return element("g", *parts, text(label, left - 8, scale.end - 36, "label", "start"))
