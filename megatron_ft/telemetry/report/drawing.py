"""Elements of a page: HTML and SVG as a tree, tables, scales, axes and marks.

Text and attributes are escaped in one place, whatever a run's files hold.
"""

import html
import math
import re
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

_UNSHOWN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufffe\uffff]"
)
"""Characters that no page may hold, that are no UTF-8, or that turn the direction of the text after them."""
_VOID = frozenset({"meta"})
CHARACTER_WIDTH = 6.4
"""Pixels of a character of the drawings' text, a little more than most need."""


@dataclass(frozen=True, slots=True)
class Element:
    """One element with its attributes and what is inside it."""

    name: str
    attributes: tuple[tuple[str, str], ...]
    children: tuple["Element | str", ...]

    def render(self) -> str:
        """The element as text that both an HTML and an XML parser read."""
        attributes = "".join(f' {name}="{html.escape(clean(value))}"' for name, value in self.attributes)
        if self.name in _VOID:
            return f"<{self.name}{attributes}/>"
        inside = "".join(_render(child) for child in self.children)
        return f"<{self.name}{attributes}>{inside}</{self.name}>"


def element(tag: str, /, *children: "Element | str | None", **attributes: "str | float | None") -> Element:
    """An element. ``None`` leaves a child or an attribute out.

    Names of attributes: an underscore at the end falls away, others are hyphens; figures are written in short.
    """
    pairs = tuple(
        (key.rstrip("_").replace("_", "-"), value if isinstance(value, str) else short(value))
        for key, value in attributes.items()
        if value is not None
    )
    return Element(tag, pairs, tuple(child for child in children if child is not None))


def clean(text: str) -> str:
    """``text`` with a mark in place of each character that a page cannot or must not show."""
    return _UNSHOWN.sub("\ufffd", text)


def short(value: float) -> str:
    """A figure of a drawing, to a hundredth."""
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
        """The pixel of ``value``, inside the drawing."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.begin + min(1.0, max(0.0, share)) * (self.end - self.begin)

    def ticks(self, most: int) -> list[float]:
        """Round figures inside the scale, ``most`` of them at most."""
        step = _round_step((self.high - self.low) / max(1, most))
        if step is None:
            return [self.low]
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [number * step for number in range(first, last + 1)]


def _round_step(least: float) -> float | None:
    """1, 2 or 5 times a power of ten, at least ``least``; None where there is no such."""
    # Steps below this would vanish in the rounding of floats.
    if not math.isfinite(least) or least < 1e-12:
        return None
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= least)


def figure(value: float) -> str:
    """A figure at an axis: ``0.25``, ``1,200``, ``3e+06``."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:,.10g}" if abs(value) >= 1000 else f"{value:.6g}"


def drawing(
    name: str, *shapes: Element | None, width: int, height: int, title: str, description: str, role: str = "img"
) -> Element:
    """An SVG of its own size.

    Args:
        name: unique on the page.
        description: the drawing in words.
        role: ``group`` where something in it can be followed, ``img`` else.
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
    """Words at a place; ``y`` is their baseline."""
    return element("text", content, x=x, y=y, class_=class_ or None, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Element:
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def cross(x: float, y: float, words: str, size: float = 4.5) -> Element:
    """The mark of a failure; ``words`` show while it is pointed at."""
    path = f"M{x - size:.2f} {y - size:.2f}l{2 * size} {2 * size}m0 {-2 * size}l{-2 * size} {2 * size}"
    return element("path", element("title", words), d=path, class_="failure")


def swatch(class_: str) -> Element:
    """A colour of a legend."""
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
    """Ticks and words below ``y``; lines up to ``top`` where it is given."""
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
    """Words at the left of ``left`` and lines across to ``right``; ``label`` stands on top, above marks of 30."""
    parts = [
        part
        for tick in scale.ticks(most)
        for part in (
            line(left, scale(tick), right, scale(tick), "grid"),
            text(figure(tick), left - 8, scale(tick) + 4, "tick", "end"),
        )
    ]
    return element("g", *parts, text(label, left - 8, scale.end - 36, "label", "start"))
