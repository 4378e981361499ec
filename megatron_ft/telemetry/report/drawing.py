"""Builds HTML and SVG as a tree of elements, with tables, scales, axes and marks.

This module escapes all text and attributes, because the files of a run may contain anything.
"""

import html
import math
import re
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

_UNSHOWN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufffe\uffff]"
)
"""Characters to replace in a page's text: those that HTML forbids, surrogates, and those that change its direction."""
_VOID = frozenset({"meta"})
CHARACTER_WIDTH = 6.4
"""Width in pixels to reserve for a character of a drawing. Most characters are a little narrower."""


@dataclass(frozen=True, slots=True)
class Element:
    """HTML or SVG element with attributes and children."""

    name: str
    attributes: tuple[tuple[str, str], ...]
    children: tuple["Element | str", ...]

    def render(self) -> str:
        """Return the element as text that both HTML and XML parsers can read."""
        attributes = "".join(f' {name}="{html.escape(_clean(value))}"' for name, value in self.attributes)
        if self.name in _VOID:
            return f"<{self.name}{attributes}/>"
        inside = "".join(_render(child) for child in self.children)
        return f"<{self.name}{attributes}>{inside}</{self.name}>"

    @classmethod
    def cross(cls, x: float, y: float, words: str, size: float = 4.5) -> "Element":
        """Draw the mark of a failure: a cross at pixel (x, y), with ``words`` as its tooltip."""
        path = f"M{x - size:.2f} {y - size:.2f}l{2 * size} {2 * size}m0 {-2 * size}l{-2 * size} {2 * size}"
        return Element.of("path", Element.of("title", words), d=path, class_="failure")

    @classmethod
    def drawing(
        cls,
        name: str,
        *shapes: "Element | None",
        width: int,
        height: int,
        title: str,
        description: str,
        role: str = "img",
    ) -> "Element":
        """Make an SVG of fixed size that contains ``shapes``.

        Args:
            name: Name of the drawing, unique on the page.
            description: Describes the drawing for readers who do not see it.
            role: ``group`` if the drawing contains links, ``img`` otherwise.
        """
        return Element.of(
            "div",
            Element.of(
                "svg",
                Element.of("title", title, id=f"{name}-title"),
                Element.of("desc", description, id=f"{name}-description"),
                *shapes,
                viewBox=f"0 0 {width} {height}",
                role=role,
                aria_labelledby=f"{name}-title {name}-description",
            ),
            class_="plot",
        )

    @classmethod
    def of(cls, tag: str, /, *children: "Element | str | None", **attributes: "str | float | None") -> "Element":
        """Make an element. A child or an attribute that is ``None`` is left out.

        In an attribute's name, a final underscore is removed and other underscores become hyphens. Numbers are
        formatted by ``short``.
        """
        pairs = tuple(
            (key.rstrip("_").replace("_", "-"), value if isinstance(value, str) else short(value))
            for key, value in attributes.items()
            if value is not None
        )
        return cls(tag, pairs, tuple(child for child in children if child is not None))

    @classmethod
    def line(cls, x1: float, y1: float, x2: float, y2: float, class_: str) -> "Element":
        return Element.of("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)

    @classmethod
    def swatch(cls, class_: str) -> "Element":
        """Make the coloured square of a legend entry."""
        shape = Element.of("rect", x=0, y=1, width=22, height=10, class_=class_)
        return Element.of("svg", shape, viewBox="0 0 22 12", aria_hidden="true")

    @classmethod
    def table(
        cls,
        caption: str,
        header: Sequence[str],
        rows: "Sequence[Sequence[Element | str]]",
        *,
        numbers: Set[int] = frozenset(),
        words: int | None = None,
    ) -> "Element":
        """Make an HTML table.

        Args:
            numbers: Columns, counted from 0, that are aligned to the right.
            words: Column, counted from 0, that contains long text.
        """

        def cell(name: str, column: int, content: Element | str) -> Element:
            scope = "col" if name == "th" else None
            class_ = "number" if column in numbers else "words" if column == words else None
            return Element.of(name, content, class_=class_, scope=scope)

        head = Element.of("tr", *(cell("th", column, title) for column, title in enumerate(header)))
        body = [Element.of("tr", *(cell("td", column, content) for column, content in enumerate(row))) for row in rows]
        inside = Element.of(
            "table",
            Element.of("caption", caption),
            Element.of("thead", head),
            Element.of("tbody", *body),
            class_="few" if len(header) == 2 and words is None else None,
        )
        return Element.of("div", inside, class_="table")


def _clean(text: str) -> str:
    """Replace each character that a page cannot or must not show."""
    return _UNSHOWN.sub("\ufffd", text)


def short(value: float) -> str:
    """Format a number for use in a drawing, rounded to a hundredth."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _render(child: Element | str) -> str:
    return child.render() if isinstance(child, Element) else html.escape(_clean(child), quote=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Linear map of values to pixels."""

    low: float
    high: float
    begin: float
    """Pixel at which ``low`` is drawn."""
    end: float
    """Pixel at which ``high`` is drawn."""

    def __call__(self, value: float) -> float:
        """Return the pixel at which ``value`` is drawn. A value outside the scale is drawn at the nearer end of it."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.begin + min(1.0, max(0.0, share)) * (self.end - self.begin)

    def ticks(self, most: int) -> list[float]:
        """Return at most ``most`` round numbers inside the scale, at which ticks are drawn."""
        step = _round_step((self.high - self.low) / max(1, most))
        if step is None:
            return [self.low]
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [number * step for number in range(first, last + 1)]

    def y_axis(self, left: float, right: float, *, label: str, most: int = 6) -> Element:
        """Draw a vertical axis: its numbers to the left of x = ``left``, and grid lines from ``left`` to ``right``.
        ``label`` is written above the axis."""
        parts = [
            part
            for tick in self.ticks(most)
            for part in (
                Element.line(left, self(tick), right, self(tick), "grid"),
                text(figure(tick), left - 8, self(tick) + 4, "tick", "end"),
            )
        ]
        return Element.of("g", *parts, text(label, left - 8, self.end - 36, "label", "start"))


def _round_step(least: float) -> float | None:
    # Returns the smallest step of 1, 2 or 5 times a power of ten that is at least ``least``. Returns None if ``least``
    # is not finite, or so small that the step would vanish in the rounding of floats.
    if not math.isfinite(least) or least < 1e-12:
        return None
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= least)


def figure(value: float) -> str:
    """Format a number for an axis or a table, e.g. ``0.25``, ``1,200`` or ``3e+06``."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:,.10g}" if abs(value) >= 1000 else f"{value:.6g}"


def text(content: str, x: float, y: float, class_: str = "", anchor: str = "start") -> Element:
    """Make an SVG text with its baseline at ``y``."""
    return Element.of("text", content, x=x, y=y, class_=class_ or None, text_anchor=anchor)


def x_axis(
    scale: Scale,
    y: float,
    *,
    label: str,
    most: int = 8,
    words: Callable[[float], str] = figure,
    top: float | None = None,
) -> Element:
    """Draw a horizontal axis at pixel ``y``, with its numbers below it. If ``top`` is given, also draw grid lines from
    ``y`` up to ``top``."""
    parts = []
    for tick in scale.ticks(most):
        x = scale(tick)
        if top is not None:
            parts.append(Element.line(x, top, x, y, "grid"))
        parts.append(text(words(tick), x, y + 16, "tick", "middle"))
    middle = (scale.begin + scale.end) / 2
    return Element.of(
        "g", Element.line(scale.begin, y, scale.end, y, "axis"), *parts, text(label, middle, y + 34, "label", "middle")
    )
