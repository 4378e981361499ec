"""Shows the run on the terminal: as a live panel or as plain lines."""

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import TextIO

from rich.box import ASCII as ASCII_BOX
from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megatron_ft.events import ExpertLoad, Metrics, Note, Record, RunFinished, RunStopped
from megatron_ft.formatting import clock, seconds
from megatron_ft.formatting import clock as duration
from megatron_ft.telemetry.expert_load import bin_loads, relative_load
from megatron_ft.telemetry.sinks.base import Clock, Outcome, Sink, SinkContext
from megatron_ft.telemetry.state import RunState

BLUE, ORANGE, VERMILION, GREEN = "#56b4e9", "#e69f00", "#d55e00", "#009e73"
"""Colours of Okabe and Ito's palette, which readers with any colour vision can distinguish. Each colour in the panel
comes with a text or a symbol."""
LEVEL_STYLES = {"info": "default", "good": GREEN, "warning": ORANGE, "bad": f"bold {VERMILION}"}
LEVEL_MARKS = {"info": " ", "good": "+", "warning": "!", "bad": "x"}

NUM_EVENTS = 5
"""Largest number of events that the live panel shows."""
MAX_LAYERS = 8
FULL_BAR = 2.0
"""Load at which the bar of an expert is full. Load is the expert's tokens divided by the mean per expert."""
_LABEL_WIDTH = 11
_FIXED_ROWS = 11
"""Number of rows of the live panel for borders, blanks, headings, progress and figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Symbols:
    """Characters with which the panel is drawn."""

    heights: str
    """Characters that are bars of rising height; the last one fills its cell."""
    done: str
    """Character for the completed part of a progress bar."""
    left: str
    """Character for the remaining part of a progress bar."""
    separator: str
    """Separator between two facts in a line."""
    arrow: str
    """Arrow between two figures, such as the first and the last loss."""

    def bar(self, value: float, top: float) -> str:
        """Return the bar character for ``value``: full height at ``top`` and above, blank for NaN."""
        if not math.isfinite(value) or top <= 0:
            return " "
        return self.heights[min(len(self.heights) - 1, max(0, int(value / top * len(self.heights))))]

    def chart(self, values: Sequence[float | None], *, num_rows: int) -> list[str]:
        """Return the lines of a chart, from top to bottom. Each value has one column, which is blank for None."""
        finite = [value for value in values if value is not None]
        low, span = min(finite, default=0.0), (max(finite) - min(finite)) if finite else 0.0
        levels = [None if value is None else self._level(value - low, span, num_rows) for value in values]
        return ["".join(self._cell(level, row) for level in levels) for row in reversed(range(num_rows))]

    def progress(self, share: float, width: int) -> tuple[str, str]:
        """Return the completed part and the remaining part of a progress bar of ``width`` characters."""
        num_done = min(width, max(0, int(share * width)))
        return self.done * num_done, self.left * (width - num_done)

    def _level(self, above: float, span: float, num_rows: int) -> int:
        return 1 + (round(above / span * (num_rows * len(self.heights) - 1)) if span > 0 else 0)

    def _cell(self, level: int | None, row: int) -> str:
        parts = min(len(self.heights), (level or 0) - row * len(self.heights))
        return self.heights[parts - 1] if parts > 0 else " "

    @classmethod
    def of(cls, encoding: str | None) -> "_Symbols":
        """Return ``BLOCKS`` if ``encoding`` can represent its characters, otherwise ``ASCII``."""
        try:
            (BLOCKS.heights + BLOCKS.done + BLOCKS.left + BLOCKS.arrow).encode(encoding or "ascii")
        except (UnicodeEncodeError, LookupError):
            return ASCII
        return BLOCKS


BLOCKS = _Symbols(heights="▁▂▃▄▅▆▇█", done="━", left="─", separator="·", arrow="→")
ASCII = _Symbols(heights="_.-~=+*#", done="#", left=".", separator="-", arrow="->")
"""Symbols for output streams that cannot encode Unicode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimedNote:
    """Text about an event, with the time of the event."""

    time_unix_seconds: float
    note: Note

    def clock(self) -> str:
        """Return the local time of day of the event, as ``hh:mm:ss``."""
        return time.strftime("%H:%M:%S", time.localtime(self.time_unix_seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class _PanelStyle:
    """Title, size and characters of the live panel."""

    title: str
    width: int
    height: int
    symbols: _Symbols

    @property
    def inner_width(self) -> int:
        """Return the number of columns inside the panel's borders and padding."""
        return max(40, self.width - 6)

    @property
    def num_chart_rows(self) -> int:
        """Return the number of rows of the panel for the loss curve."""
        return 4 if self.height >= 30 else 3

    @property
    def num_events(self) -> int:
        """Return the number of rows of the panel for events."""
        return NUM_EVENTS if self.height >= 30 else 3

    def num_layers(self, state: RunState) -> int:
        """Return the number of layers whose expert load fits into the remaining rows of the panel."""
        others = _FIXED_ROWS + self.num_chart_rows + self.num_events + len(state.failed_sinks)
        return max(1, min(MAX_LAYERS, self.height - 1 - others))


def _panel(state: RunState, notes: Sequence[_TimedNote], style: _PanelStyle, *, now_seconds: float) -> RenderableType:
    """Return the whole live panel.

    Args:
        notes: Events, oldest first; only the newest are shown.
        now_seconds: Current time in seconds since 1970.
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


def _progress(state: RunState, style: _PanelStyle, now_seconds: float) -> Text:
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


def _curve(state: RunState, style: _PanelStyle) -> list[Text]:
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
        "TFLOP/s/GPU": _number(values.get("tflops_per_gpu"), ".3g"),
        "learning rate": _number(values.get("learning_rate"), ".2e"),
        "grad norm": _number(values.get("grad_norm"), ".3f"),
    }
    table = Table.grid(expand=True)
    for _ in cells:
        table.add_column(ratio=1, no_wrap=True)
    table.add_row(*(Text(name, style="dim") for name in cells))
    table.add_row(*(Text(text, style="bold") for text in cells.values()))
    return table


def _standing(state: RunState, style: _PanelStyle) -> Text:
    # One row with the ETTR so far, the interruptions, and the protection against losses.
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


def _expert_load(load: ExpertLoad | None, style: _PanelStyle, max_layers: int) -> list[Text]:
    # A row of bars per MoE layer. If there are too many layers, the same evenly spaced ones are always shown.
    if load is None or not load.layers:
        return [Text("expert load: none reported yet", style="dim")]
    numbers = load.layer_numbers or tuple(range(1, len(load.layers) + 1))
    count = min(max_layers, len(numbers))
    chosen = [round(place * (len(numbers) - 1) / max(1, count - 1)) for place in range(count)]
    some = f", {count} of {len(numbers)} layers" if count < len(numbers) else ""
    head = f"expert load (full bar: {FULL_BAR:.0f} x the mean){some}"
    return [Text(head, style="dim")] + [_layer(numbers[place], load.layers[place], style) for place in chosen]


def _layer(number: int, tokens: Sequence[int], style: _PanelStyle) -> Text:
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


def _events(notes: Sequence[_TimedNote], style: _PanelStyle) -> list[Text]:
    """Return the panel's rows of the newest events. A long event has two rows, to show the process ids at its end."""
    lines = [row for timed in list(notes)[-style.num_events :] for row in _event(timed, style)][-style.num_events :]
    return lines + [Text()] * (style.num_events - len(lines))


def _event(timed: _TimedNote, style: _PanelStyle) -> list[Text]:
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


REFRESHES_PER_SECOND = 2.0
MAX_LINE_GAP_SECONDS = 60.0
"""Longest time in seconds between two lines of plain output (without a live panel) while iterations are trained."""
LINE_GAP_SHARE = 1 / 60
"""Shortest time between two lines of plain output, as a share of the time since the job began."""


class TerminalSink(Sink):
    """Shows progress and events on a stream, as a live panel or as plain lines.

    The time between plain lines grows with the run: a short run shows each iteration, a long run shows one per minute.
    Events and the last iteration are always shown.
    """

    name = "terminal"
    retries = False

    def __init__(
        self,
        progress: str,
        *,
        title: str,
        state: RunState,
        clock: Clock = time.time,
        stream: TextIO | None = None,
    ) -> None:
        """Choose the display by ``progress``: ``live`` (a panel), ``plain`` (lines) or ``auto``. ``auto`` means
        ``live`` if ``stream`` is a terminal, otherwise ``plain``."""
        self._stream = stream if stream is not None else sys.stdout
        self._state = state
        self._clock = clock
        self._title = title
        # rich draws the live panel in a thread of its own.
        self._lock = threading.Lock()
        self._notes: deque[_TimedNote] = deque(maxlen=NUM_EVENTS)
        self._last_line_seconds: float | None = None
        self._skipped_line: Metrics | None = None
        self._symbols = _Symbols.of(getattr(self._stream, "encoding", None))
        self._console = Console(file=self._stream, force_terminal=True, highlight=False)
        live = progress == "live" or (progress == "auto" and self._stream.isatty())
        self._live = self._start_live() if live else None

    @classmethod
    def open(cls, context: SinkContext) -> "TerminalSink":
        progress = context.config.telemetry.progress
        return cls(
            progress,
            title=context.run_dir.name,
            state=context.state(),
            clock=context.clock,
            stream=context.stream,
        )

    def write(self, record: Record) -> None:
        """Show ``record`` on the terminal.

        Raises:
            OSError: the stream is closed.
        """
        with self._lock:
            self._state.take(record)
            note = record.describe()
            skipped = None if note is None or self._skipped_line is None else self._skipped_line.iteration
            is_about_skipped = skipped is not None and skipped == getattr(record, "iteration", 0)
            # Events about an iteration must follow the iteration's line. If this line was left out, it is printed now.
            if isinstance(record, (RunFinished, RunStopped)) or is_about_skipped:
                self._catch_up()
            if note is not None:
                self._show(_TimedNote(time_unix_seconds=record.time_unix_seconds or self._clock(), note=note))
            elif isinstance(record, Metrics) and self._live is None:
                self._show_iteration(record)

    def close(self, outcome: Outcome) -> None:
        """Leave the last content of the panel on the screen, and print one line about the whole run."""
        if self._live is not None:
            self._live.stop()
        self._catch_up()
        self._print(self._closing_line(outcome))

    def _start_live(self) -> Live:
        ours = self._stream in (sys.stdout, sys.stderr)
        live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=REFRESHES_PER_SECOND,
            redirect_stdout=ours,
            redirect_stderr=ours,
            vertical_overflow="crop",
        )
        live.start()
        return live

    def _render(self) -> RenderableType:
        width, height = self._console.size
        style = _PanelStyle(title=self._title, width=width, height=height, symbols=self._symbols)
        with self._lock:
            return _panel(self._state, list(self._notes), style, now_seconds=self._clock())

    def _show(self, timed: _TimedNote) -> None:
        self._notes.append(timed)
        if self._live is None:
            self._print(f"{timed.clock()} {LEVEL_MARKS[timed.note.level]} {timed.note.text}")

    def _show_iteration(self, record: Metrics) -> None:
        now = record.time_unix_seconds or self._clock()
        gap = min(MAX_LINE_GAP_SECONDS, (now - self._state.time_opened_seconds) * LINE_GAP_SHARE)
        last = record.iteration == self._state.train_iterations
        if not last and self._last_line_seconds is not None and now - self._last_line_seconds < gap:
            self._skipped_line = record
            return
        self._last_line_seconds, self._skipped_line = now, None
        self._print(self._iteration_line(record))

    def _catch_up(self) -> None:
        if self._skipped_line is not None:
            self._print(self._iteration_line(self._skipped_line))
            self._skipped_line = None

    def _iteration_line(self, record: Metrics) -> str:
        total = str(self._state.train_iterations)
        values = {name: float(value) for name, value in record.values.items()}
        moment = time.strftime("%H:%M:%S", time.localtime(record.time_unix_seconds))
        parts = [f"{moment}   iteration {record.iteration:>{len(total)}}/{total}", f"loss {values['loss']:7.4f}"]
        parts += [f"grad norm {values['grad_norm']:7.3f}"] if "grad_norm" in values else []
        parts += [f"learning rate {values['learning_rate']:.2e}"] if "learning_rate" in values else []
        parts += [f"{values['tokens_per_second']:>9,.0f} tokens/s"] if "tokens_per_second" in values else []
        remaining = self._state.remaining_seconds()
        return "  ".join([*parts, f"{duration(remaining)} left"] if remaining is not None else parts)

    def _closing_line(self, outcome: Outcome) -> str:
        state = self._state
        parts = [f"{state.iteration} iterations", seconds(outcome.time_unix_seconds - state.time_opened_seconds)]
        if state.first_loss is not None and state.final_loss is not None:
            parts.append(f"loss {state.first_loss:.4f} {self._symbols.arrow} {state.final_loss:.4f}")
        if state.tokens_per_second is not None:
            parts.append(f"{state.tokens_per_second:,.0f} tokens/s")
        return f" {self._symbols.separator} ".join(parts)

    def _print(self, line: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        # A character that the terminal cannot show must not make the sink fail.
        self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()
