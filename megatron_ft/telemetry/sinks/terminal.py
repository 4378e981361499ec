"""Shows the run on the terminal: as a live panel or as plain lines."""

import sys
import threading
import time
from collections import deque
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live

from megatron_ft.events import Metrics, Record, RunFinished, RunStopped
from megatron_ft.formatting import clock as duration
from megatron_ft.formatting import seconds
from megatron_ft.telemetry.sinks.base import Clock, Outcome, Sink, SinkContext
from megatron_ft.telemetry.sinks.panel import LEVEL_MARKS, NUM_EVENTS, PanelStyle, TimedNote, panel, symbols_for
from megatron_ft.telemetry.state import RunState

REFRESHES_PER_SECOND = 2.0
MAX_LINE_GAP_SECONDS = 60.0
"""Longest time between two plain lines during training."""
LINE_GAP_SHARE = 1 / 60
"""Shortest time between two plain lines, as a share of the time since the run began."""


class TerminalSink(Sink):
    """Shows progress and events on a stream, as a live panel or as plain lines.

    Plain lines become rarer as a run gets longer: a short run shows each iteration, a long one shows one a minute.
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
        """Choose the display by ``progress``: ``live``, ``plain`` or ``auto`` (live if ``stream`` is a terminal)."""
        self._stream = stream if stream is not None else sys.stdout
        self._state = state
        self._clock = clock
        self._title = title
        # rich draws the live panel in a thread of its own.
        self._lock = threading.Lock()
        self._notes: deque[TimedNote] = deque(maxlen=NUM_EVENTS)
        self._last_line_seconds: float | None = None
        self._skipped_line: Metrics | None = None
        self._symbols = symbols_for(getattr(self._stream, "encoding", None))
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
        """Show ``record``.

        Raises:
            OSError: the stream is closed.
        """
        with self._lock:
            self._state.take(record)
            note = record.describe()
            skipped = None if note is None or self._skipped_line is None else self._skipped_line.iteration
            is_about_skipped = skipped is not None and skipped == getattr(record, "iteration", 0)
            # An event about an iteration comes after its line, even if that line was left out before.
            if isinstance(record, (RunFinished, RunStopped)) or is_about_skipped:
                self._catch_up()
            if note is not None:
                self._show(TimedNote(time_unix_seconds=record.time_unix_seconds or self._clock(), note=note))
            elif isinstance(record, Metrics) and self._live is None:
                self._show_iteration(record)

    def close(self, outcome: Outcome) -> None:
        """Leave the last state on the screen, and one line about the whole run."""
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
        style = PanelStyle(title=self._title, width=width, height=height, symbols=self._symbols)
        with self._lock:
            return panel(self._state, list(self._notes), style, now_seconds=self._clock())

    def _show(self, timed: TimedNote) -> None:
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
