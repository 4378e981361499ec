"""Base class of sinks that send records to an experiment tracker, such as wandb, in a separate thread."""

import heapq
import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ft import events
from megatron_ft.events import Evaluation, ExpertLoad, Metrics, Record, RunStarted
from megatron_ft.serde import JsonValue
from megatron_ft.telemetry.expert_load import load_figures
from megatron_ft.telemetry.read import EVENTS_FILE, METRICS_FILE, read_lines
from megatron_ft.telemetry.run_figures import RunFigures
from megatron_ft.telemetry.sinks.base import Outcome, Sink

MAX_QUEUED_RECORDS = 100_000
CLOSE_SECONDS = 60.0
"""Longest time in seconds that a job waits at its end until a tracker has received all records."""


class QueuedSink(Sink):
    """Queues records for a separate thread, so that a slow experiment tracker never delays the caller.

    Only this thread imports and uses the tracker's package. After an error of the tracker, ``write`` always raises.
    """

    retries = False

    def __init__(self, run_dir: Path) -> None:
        """Start the sink's thread. A subclass must set its attributes before this call, as the thread uses them."""
        # The lengths of the files must be read before the thread starts, and before this job writes to the files.
        self.reported = Reported.so_far(run_dir)
        self._queue: queue.Queue[Record | Outcome] = queue.Queue(MAX_QUEUED_RECORDS)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=f"{self.name}-sink", daemon=True)
        self._thread.start()

    def start(self) -> "StepSender":
        """Open the experiment tracker. Only the sink's thread calls this. May raise any exception."""
        raise NotImplementedError

    @property
    def num_lost_records(self) -> int:  # type: ignore[override]
        """Return the number of records that were queued but never sent, because the tracker failed."""
        return self._queue.qsize() if self._error else 0

    def write(self, record: Record) -> None:
        """Queue the record.

        Raises:
            Exception: the tracker has failed; this is the exception that it raised.
            queue.Full: the tracker is too slow, so the queue is full.
        """
        if self._error is not None:
            raise self._error
        # This must not block, because the calling thread also writes to all other sinks.
        self._queue.put_nowait(record)

    def close(self, outcome: Outcome) -> None:
        """Wait until all queued records are sent, then end the tracker's run.

        Raises:
            Exception: any exception that the tracker has raised.
            TimeoutError: the tracker did not finish within ``CLOSE_SECONDS``. The tracker keeps the records that it
                has accepted.
        """
        if self._error is None:
            self._queue.put(outcome, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(f"{self.name} did not finish within {CLOSE_SECONDS:.0f} s")

    def _work(self) -> None:
        try:
            sender = self.start()
            while not isinstance(item := self._queue.get(), Outcome):
                sender.take(item)
                if self._queue.empty():
                    sender.pause()
            sender.finish(item.exit_code)
        except Exception as error:  # noqa: BLE001 (handed to the next write or close)
            self._error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Step of an experiment tracker: all metrics of one iteration."""

    iteration: int
    figures: Mapping[str, float]
    """Value of each metric by name."""


class Steps:
    """Groups the records of each iteration into one step. A step is complete when the next iteration is reported.
    Records must be added oldest first. If an iteration is reported again, its new records replace its earlier records.
    If the step of the iteration was already sent to the tracker, the new records are ignored instead."""

    def __init__(self, *, sent: int) -> None:
        """Prepare to return only steps after ``sent``, the newest step that the tracker already has."""
        self.run = RunFigures()
        self._sent = sent
        self._iteration = self._highest = 0
        self._figures: dict[str, float] = {}

    def sent(self, iteration: int) -> None:
        """Mark all steps up to ``iteration`` as sent to the tracker. These steps are not returned again."""
        self._sent = max(self._sent, iteration)

    def repeat_after(self, iteration: int) -> None:
        """Mark all steps after ``iteration`` as not sent, so that they are returned when reported again."""
        self._sent = min(self._sent, iteration)

    def take(self, record: Record) -> Step | None:
        """Add a record. Return the step that the record completes, or None."""
        complete = None
        match record:
            case RunStarted():
                complete = self._resume(record.resumed_from_iteration or 0)
            case events.MembershipChanged() | events.RecoveryStarted():
                if record.generation > 0 and record.iteration < self._iteration:
                    # The job continues without a restart. The newest iteration is void, and was not sent yet.
                    self._figures, self._iteration = {}, record.iteration
            case Metrics() | ExpertLoad() | Evaluation():
                if record.iteration > self._iteration:
                    complete, self._iteration = self.finish(), record.iteration
        self.run.take(record)
        if isinstance(record, (Metrics, ExpertLoad, Evaluation)) and record.iteration == self._iteration > self._sent:
            self._figures |= _figures(record)
        return complete

    def finish(self) -> Step | None:
        """Return the step of the newest iteration, complete or not; None if it has no figures to send."""
        is_first_time, self._highest = self._iteration > self._highest, max(self._highest, self._iteration)
        figures, self._figures = self._figures, {}
        if not figures:
            if is_first_time and self._iteration <= self._sent:
                self.run.hand_out()  # the tracker already has these figures, in this step
            return None
        return Step(iteration=self._iteration, figures=figures | self.run.hand_out())

    def _resume(self, iteration: int) -> Step | None:
        # A started job continues after ``iteration``, so reports about later iterations are void.
        if self._iteration > iteration:
            self._figures = {}
        complete, self._iteration = self.finish(), min(self._iteration, iteration)
        return complete


def _figures(record: Metrics | ExpertLoad | Evaluation) -> Mapping[str, float]:
    match record:
        case Metrics():
            return record.values
        case ExpertLoad():
            return load_figures(record)
        case Evaluation():
            return {"evaluation_loss": record.loss}


@dataclass(frozen=True, slots=True)
class Reported:
    """Records of the run's earlier jobs: the content that the run's files had when this job began."""

    run_dir: Path
    num_bytes: Mapping[str, int]
    """Length in bytes of each file when this job began, by the name of the file."""

    @classmethod
    def so_far(cls, run_dir: Path) -> "Reported":
        """Return the current content of the run's files. Lines that are appended later are left out."""
        paths = [path for name in (METRICS_FILE, EVENTS_FILE) if (path := run_dir / name).exists()]
        return cls(run_dir, {path.name: path.stat().st_size for path in paths})

    def records(self, *, loads_after: int) -> Iterator[Record]:
        """Yield all records, oldest first. Skip the long ``ExpertLoad`` records of iterations up to ``loads_after``.

        Raises:
            ValueError: a line is damaged; the message names file and line. An unfinished last line is no error.
        """

        def parse(line: dict[str, JsonValue]) -> Record | None:
            iteration = line.get("iteration")
            is_old = isinstance(iteration, int) and iteration <= loads_after
            return None if is_old and line.get("kind") == ExpertLoad.kind else Record.read(line)

        files = (
            read_lines(self.run_dir / name, parse, num_bytes=num_bytes) for name, num_bytes in self.num_bytes.items()
        )
        known = ((record for record in file if record is not None) for file in files)
        # Each file is in the order of writing, and a merge keeps that order.
        return heapq.merge(*known, key=lambda record: record.time_unix_seconds or 0.0)


class StepSender:
    """Sends steps to a tracker. First come steps that earlier jobs of the run reported but that the tracker lacks. Only
    the thread of a ``QueuedSink`` uses this object."""

    def __init__(self, reported: Reported, *, last_step: int) -> None:
        """Prepare to send the steps after ``last_step``, the newest that the tracker has from earlier jobs."""
        self.steps = Steps(sent=last_step)
        # Steps that the tracker lacks. They are sent after the next ``RunStarted`` record, which names the iteration
        # after which the run continues. Steps of later iterations are void and are not sent.
        self._missed: dict[int, Step] = {}
        for record in reported.records(loads_after=last_step):
            if (step := self.steps.take(record)) is not None:
                self._missed[step.iteration] = step

    def send(self, step: Step) -> None:
        """Send one step to the tracker."""
        raise NotImplementedError

    def begin_attempt(self, record: RunStarted) -> None:
        """Handle ``record``: all ranks were (re)started. Called after all steps before it were sent."""

    def pause(self) -> None:
        """Write buffered data to the tracker. Called whenever the queue of records is empty."""

    def end(self, exit_code: int) -> None:
        """End the tracker's run."""

    def take(self, record: Record) -> None:
        """Add a record. If it completes a step, send this step."""
        step = self.steps.take(record)
        if isinstance(record, RunStarted):
            missed, self._missed = self._missed, {}
            for iteration in sorted(missed):
                if iteration <= (record.resumed_from_iteration or 0):
                    self._send(missed[iteration])
        if step is not None:
            self._send(step)
        if isinstance(record, RunStarted):
            self.begin_attempt(record)

    def finish(self, exit_code: int) -> None:
        """Send the step of the newest iteration, then end the tracker's run."""
        if (step := self.steps.finish()) is not None:
            self._send(step)
        self.end(exit_code)

    def _send(self, step: Step) -> None:
        self.send(step)
        self.steps.sent(step.iteration)
