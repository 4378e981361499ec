"""HTML and SVG as a tree: text and attributes are escaped in one place, whatever a run's files hold."""

import html
import re
from dataclasses import dataclass

_UNSHOWN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufffe\uffff]"
)
"""What no page may hold, what cannot be written as UTF-8, and what turns the direction of the text after it."""
_VOID = frozenset({"meta"})


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
