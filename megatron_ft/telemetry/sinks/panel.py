"""Live display of a run on the terminal, as one panel of fixed shape."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import wrap

from rich.box import ASCII as ASCII_BOX
from rich.box import ROUNDED
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megatron_ft.events import ExpertLoad, Note
from megatron_ft.formatting import clock
from megatron_ft.telemetry.expert_load import bin_loads, relative_load
from megatron_ft.telemetry.state import RunState

BLUE, ORANGE, VERMILION, GREEN = "#56b4e9", "#e69f00", "#d55e00", "#009e73"
"""Colours of Okabe and Ito's palette, distinguishable with any colour vision. Colour is never the only sign."""
LEVEL_STYLES = {"info": "default", "good": GREEN, "warning": ORANGE, "bad": f"bold {VERMILION}"}
LEVEL_MARKS = {"info": " ", "good": "+", "warning": "!", "bad": "x"}

NUM_EVENTS = 5
"""Limit of events shown."""
MAX_LAYERS = 8
FULL_BAR = 2.0
"""Load at which the bar of an expert is full: tokens divided by the mean over experts."""
_LABEL_WIDTH = 11
_FIXED_ROWS = 11
"""Rows of borders, blanks, headings, progress and figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbols:
    """Characters that a terminal can show."""

    heights: str
    """Bars of rising height; the last one fills the cell."""
    done: str
    """Character for the part of a progress bar that is done."""
    left: str
    """Character for the part that is left."""
    separator: str
    """Separator between two facts of a line."""
    arrow: str
    """Arrow from one figure to another."""

    def bar(self, value: float, top: float) -> str:
        """Return one character for ``value``. The bar is full at ``top`` and above, and blank for NaN."""
        if not math.isfinite(value) or top <= 0:
            return " "
        return self.heights[min(len(self.heights) - 1, max(0, int(value / top * len(self.heights))))]

    def chart(self, values: Sequence[float | None], *, num_rows: int) -> list[str]:
        """Return ``num_rows`` lines from top to bottom with a column per value; ``None`` leaves a column blank."""
        finite = [value for value in values if value is not None]
        low, span = min(finite, default=0.0), (max(finite) - min(finite)) if finite else 0.0
        levels = [None if value is None else self._level(value - low, span, num_rows) for value in values]
        return ["".join(self._cell(level, row) for level in levels) for row in reversed(range(num_rows))]

    def progress(self, share: float, width: int) -> tuple[str, str]:
        """Return the done part and the rest of a bar of ``width`` characters."""
        num_done = min(width, max(0, int(share * width)))
        return self.done * num_done, self.left * (width - num_done)

    def _level(self, above: float, span: float, num_rows: int) -> int:
        return 1 + (round(above / span * (num_rows * len(self.heights) - 1)) if span > 0 else 0)

    def _cell(self, level: int | None, row: int) -> str:
        parts = min(len(self.heights), (level or 0) - row * len(self.heights))
        return self.heights[parts - 1] if parts > 0 else " "


BLOCKS = Symbols(heights="▁▂▃▄▅▆▇█", done="━", left="─", separator="·", arrow="→")
ASCII = Symbols(heights="_.-~=+*#", done="#", left=".", separator="-", arrow="->")
"""Symbols for streams without Unicode."""


def symbols_for(encoding: str | None) -> Symbols:
    """Return ``BLOCKS`` if ``encoding`` has the characters, else ``ASCII``."""
    try:
        (BLOCKS.heights + BLOCKS.done + BLOCKS.left + BLOCKS.arrow).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedNote:
    """Note with the time of its creation."""

    time_unix_seconds: float
    note: Note

    def clock(self) -> str:
        """Return the local time of day."""
        return time.strftime("%H:%M:%S", time.localtime(self.time_unix_seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelStyle:
    """Size and characters of the panel."""

    title: str
    width: int
    height: int
    symbols: Symbols

    @property
    def inner_width(self) -> int:
        """Return the number of columns inside borders and padding."""
        return max(40, self.width - 6)

    @property
    def num_chart_rows(self) -> int:
        """Return the number of rows of the loss curve."""
        return 4 if self.height >= 30 else 3

    @property
    def num_events(self) -> int:
        """Return the number of rows for events."""
        return NUM_EVENTS if self.height >= 30 else 3

    def num_layers(self, state: RunState) -> int:
        """Return the number of rows left for expert load."""
        others = _FIXED_ROWS + self.num_chart_rows + self.num_events + len(state.failed_sinks)
        return max(1, min(MAX_LAYERS, self.height - 1 - others))


def panel(state: RunState, notes: Sequence[TimedNote], style: PanelStyle, *, now_seconds: float) -> RenderableType:
    """Draw the whole panel.

    Args:
        notes: Events, oldest first; the last few are shown.
        now_seconds: Wall clock.
    """
    style = replace(style, width=min(style.width, 120))
    parts: list[RenderableType] = [
        _progress(state, style, now_seconds),
        Text(),
        *_curve(state, style),
        Text(),
        _figures(state),
        _standing(state, style),
        Text(),
        *_expert_load(state.expert_load, style, style.num_layers(state)),
        Text(),
        *_events(notes, style),
        *_degraded(state),
    ]
    return Panel(
        Group(*parts),
        title=Text(style.title, style="bold"),
        title_align="left",
        border_style="dim" if not state.failed_sinks else VERMILION,
        box=ASCII_BOX if style.symbols is ASCII else ROUNDED,
        width=style.width,
        padding=(0, 2),
    )


def _progress(state: RunState, style: PanelStyle, now_seconds: float) -> Text:
    total = str(state.train_iterations)
    label = f"{state.iteration:>{len(total)}} / {total}"
    remaining = state.remaining_seconds()
    times = f"{clock(now_seconds - state.time_opened_seconds)} elapsed"
    times += f" {style.symbols.separator} {clock(remaining) if remaining is not None else '-:--'} left"
    width = style.inner_width - _LABEL_WIDTH - len(label) - 2 - 2 - 28
    done, left = style.symbols.progress(state.iteration / max(1, state.train_iterations), width)
    return Text.assemble(
        ("iteration".ljust(_LABEL_WIDTH), "dim"),
        (label, "bold"),
        "  ",
        (done, BLUE),
        (left, "dim"),
        "  ",
        (times.rjust(28), "default"),
        no_wrap=True,
    )


def _curve(state: RunState, style: PanelStyle) -> list[Text]:
    values = state.loss_curve(style.inner_width - _LABEL_WIDTH)
    finite = [value for value in values if value is not None]
    num_rows = style.num_chart_rows
    labels = ["loss"] + [""] * (num_rows - 1)
    if finite:
        labels = ["loss".ljust(5) + f"{max(finite):.2f}".rjust(5)] + [""] * (num_rows - 2)
        labels += [f"{min(finite):.2f}".rjust(10)]
    rows = style.symbols.chart(values, num_rows=num_rows)
    return [
        Text.assemble((label.ljust(_LABEL_WIDTH), "dim"), (row, BLUE), no_wrap=True)
        for label, row in zip(labels, rows, strict=True)
    ]


def _figures(state: RunState) -> Table:
    values = state.latest.values if state.latest else {}
    evaluation = f"{state.evaluation.loss:.4f} @ {state.evaluation.iteration}" if state.evaluation else "-"
    cells = {
        "loss": _number(values.get("loss"), ".4f"),
        "evaluation": evaluation,
        "tokens/s": _number(values.get("tokens_per_second"), ",.0f"),
        "learning rate": _number(values.get("learning_rate"), ".2e"),
        "grad norm": _number(values.get("grad_norm"), ".3f"),
    }
    table = Table.grid(expand=True)
    for _ in cells:
        table.add_column(ratio=1, no_wrap=True)
    table.add_row(*(Text(name, style="dim") for name in cells))
    table.add_row(*(Text(text, style="bold") for text in cells.values()))
    return table


def _standing(state: RunState, style: PanelStyle) -> Text:
    # ETTR so far, interruptions and what protects the run; always one row.
    goodput, run = state.run.goodput, state.run
    parts = []
    if goodput.ettr is not None and goodput.num_iterations:
        parts.append(f"ETTR {100 * goodput.ettr:.1f} %")
    if goodput.num_interruptions:
        parts.append(f"{goodput.num_interruptions} interruption{'s' * (goodput.num_interruptions != 1)}")
    if run.window_iterations is not None:
        parts.append(f"window of {run.window_iterations:.0f}")
    if run.survival is not None:
        parts.append(f"survives the next loss: {100 * run.survival:.0f} %")
    text = f" {style.symbols.separator} ".join(parts)
    label = ("so far".ljust(_LABEL_WIDTH) if parts else "", "dim")
    return Text.assemble(label, text, no_wrap=True, overflow="ellipsis")


def _expert_load(load: ExpertLoad | None, style: PanelStyle, max_layers: int) -> list[Text]:
    # A row of bars per MoE layer; where there are many, always the same evenly spaced ones.
    if load is None or not load.layers:
        return [Text("expert load: none reported yet", style="dim")]
    numbers = load.layer_numbers or tuple(range(1, len(load.layers) + 1))
    count = min(max_layers, len(numbers))
    chosen = [round(place * (len(numbers) - 1) / max(1, count - 1)) for place in range(count)]
    some = f", {count} of {len(numbers)} layers" if count < len(numbers) else ""
    head = f"expert load (full bar: {FULL_BAR:.0f} x the even share){some}"
    return [Text(head, style="dim")] + [_layer(numbers[place], load.layers[place], style) for place in chosen]


def _layer(number: int, tokens: Sequence[int], style: PanelStyle) -> Text:
    width = style.inner_width - _LABEL_WIDTH - 18
    loads = relative_load(tokens)
    shown = bin_loads(loads, width)
    cell = max(1, min(4, width // max(1, len(shown))))
    row = Text(f"layer {number:>3}".ljust(_LABEL_WIDTH), style="dim", no_wrap=True)
    for load in shown:
        bar = style.symbols.bar(load, FULL_BAR) * max(1, cell - 1) + " " * (cell > 1)
        row.append(bar, style=f"not dim {ORANGE if load >= FULL_BAR else BLUE}")
    row.append(f"  busiest {max(loads, default=0.0):4.2f} x", style="dim")
    return row


def _events(notes: Sequence[TimedNote], style: PanelStyle) -> list[Text]:
    """The newest events, each in one row or two: process ids, which people copy, stand at the end of a long one."""
    lines = [row for timed in list(notes)[-style.num_events :] for row in _event(timed, style)][-style.num_events :]
    return lines + [Text()] * (style.num_events - len(lines))


def _event(timed: TimedNote, style: PanelStyle) -> list[Text]:
    label_width, mark = _LABEL_WIDTH - 2, LEVEL_MARKS[timed.note.level]
    width = style.inner_width - label_width
    text, indent = f"{mark} {timed.note.text}", " " * (len(mark) + 1)
    first, *others = wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)
    rows = [(f"{timed.clock()} ", first)]
    if others:
        rows.append(("", indent + " ".join(row.strip() for row in others)))
    return [
        Text.assemble(
            (label.ljust(label_width), "dim"),
            (text, LEVEL_STYLES[timed.note.level]),
            no_wrap=True,
            overflow="ellipsis",
        )
        for label, text in rows
    ]


def _degraded(state: RunState) -> list[Text]:
    return [
        Text(
            f"DEGRADED: {sink} no longer accepts records ({error})",
            style=f"bold {VERMILION}",
            no_wrap=True,
            overflow="ellipsis",
        )
        for sink, error in state.failed_sinks.items()
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(float(value), form)
