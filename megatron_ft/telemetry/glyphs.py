"""Small pictures out of characters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """The characters a terminal can show."""

    heights: str
    """Bars of rising height; the last fills its cell."""
    done: str
    """What a progress bar has behind it."""
    left: str
    """What it has before it."""
    separator: str
    """Between two facts of a line."""
    arrow: str
    """From one figure to another."""

    def bar(self, value: float, top: float) -> str:
        """One character for ``value``, full at ``top`` and above; a blank for what is no number."""
        if not math.isfinite(value) or top <= 0:
            return " "
        return self.heights[min(len(self.heights) - 1, max(0, int(value / top * len(self.heights))))]

    def chart(self, values: Sequence[float | None], *, num_rows: int) -> list[str]:
        """A column per value, ``num_rows`` lines from the top down; ``None`` leaves its column blank."""
        finite = [value for value in values if value is not None]
        low, span = min(finite, default=0.0), (max(finite) - min(finite)) if finite else 0.0
        levels = [None if value is None else self._level(value - low, span, num_rows) for value in values]
        return ["".join(self._cell(level, row) for level in levels) for row in reversed(range(num_rows))]

    def progress(self, share: float, width: int) -> tuple[str, str]:
        """Done and left part of a bar of ``width`` characters."""
        num_done = min(width, max(0, int(share * width)))
        return self.done * num_done, self.left * (width - num_done)

    def _level(self, above: float, span: float, num_rows: int) -> int:
        """Height of a column in parts of a cell, at least one."""
        return 1 + (round(above / span * (num_rows * len(self.heights) - 1)) if span > 0 else 0)

    def _cell(self, level: int | None, row: int) -> str:
        parts = min(len(self.heights), (level or 0) - row * len(self.heights))
        return self.heights[parts - 1] if parts > 0 else " "


BLOCKS = Glyphs(heights="▁▂▃▄▅▆▇█", done="━", left="─", separator="·", arrow="→")
ASCII = Glyphs(heights="_.-~=+*#", done="#", left=".", separator="-", arrow="->")
"""For streams that know nothing else."""


def glyphs_for(encoding: str | None) -> Glyphs:
    """Blocks if ``encoding`` can carry them."""
    try:
        (BLOCKS.heights + BLOCKS.done + BLOCKS.left + BLOCKS.arrow).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS
