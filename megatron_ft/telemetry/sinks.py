"""All sinks of a run behind one ``write``; a sink that fails takes nothing else down."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from megatron_ft.config.job import JobConfig
from megatron_ft.events import (
    Metrics,
    Record,
    RecordRefused,
    RunFinished,
    RunStopped,
    SinkFailed,
    SinkRecovered,
)
from megatron_ft.telemetry.alerts import AlertSink
from megatron_ft.telemetry.metrics import check_metrics
from megatron_ft.telemetry.sink import Outcome, Sink

Clock = Callable[[], float]
"""Seconds since 1970."""


class SinkSet:
    """Checks and stamps records and hands them to every sink. Any thread may call it.

    What is no valid record is kept as a ``record_refused`` event. A sink's failure is told to the other
    sinks once, as a ``sink_failed`` event, and so is its recovery.
    """

    def __init__(self, sinks: Sequence[Sink], *, clock: Clock) -> None:
        self._sinks = tuple(sinks)
        self._clock = clock
        self._lock = threading.RLock()
        self._failed: dict[str, str] = {}
        self._num_lost: dict[str, int] = {}
        self._iteration: int | None = None
        self._ended = False

    @property
    def failed(self) -> Mapping[str, str]:
        """Sinks that take no records now, and why."""
        return dict(self._failed)

    def write(self, record: Mapping[str, Any] | Record) -> None:
        """Report ``record``, in its JSON form or as the dataclass. Raises nothing."""
        with self._lock:
            self._deliver(self._checked(record))
            for alert in self._alerts():
                self._deliver(self._checked(alert))

    def close(self, exit_code: int, reason: str) -> None:
        """Report the run's end, unless that was done, and close every sink. Raises nothing."""
        with self._lock:
            if not self._ended:
                ending = RunFinished if exit_code == 0 else RunStopped
                self.write(ending(exit_code=exit_code, reason=reason, iteration=self._iteration))
            outcome = Outcome(exit_code=exit_code, reason=reason, time_unix_seconds=self._clock())
            for position, sink in enumerate(self._sinks):
                self._close(sink, outcome, still_open=self._sinks[position + 1 :])

    def _checked(self, report: Mapping[str, Any] | Record) -> Record:
        """``report`` as a valid record with a time stamp."""
        try:
            raw = report.to_record() if isinstance(report, Record) else report
            record = Record.from_record({"time_unix_seconds": self._clock()} | dict(raw))
            if isinstance(record, Metrics):
                check_metrics(record.values)
        except (ValueError, TypeError) as error:
            return RecordRefused(problem=str(error), content=repr(report), time_unix_seconds=self._clock())
        if isinstance(record, Metrics):
            self._iteration = record.iteration
        self._ended |= isinstance(record, (RunFinished, RunStopped))
        return record

    def _alerts(self) -> list[Record]:
        return [alert for sink in self._sinks if isinstance(sink, AlertSink) for alert in sink.take_found()]

    def _deliver(self, record: Record) -> None:
        for sink in self._sinks:
            if sink.retries or sink.name not in self._failed:
                self._offer(sink, record)

    def _offer(self, sink: Sink, record: Record) -> None:
        try:
            sink.write(record)
        except Exception as error:  # noqa: BLE001 (whatever a sink raises, training goes on; it is reported)
            self._mark_failed(sink, error)
        else:
            self._mark_working(sink)

    def _mark_failed(self, sink: Sink, error: Exception) -> None:
        if sink.name in self._failed:
            return
        self._failed[sink.name] = _one_line(error)
        self._num_lost[sink.name] = sink.num_lost_records
        self._deliver(SinkFailed(sink=sink.name, error=_one_line(error), time_unix_seconds=self._clock()))

    def _mark_working(self, sink: Sink) -> None:
        if self._failed.pop(sink.name, None) is None:
            return
        num_lost = sink.num_lost_records - self._num_lost.pop(sink.name)
        self._deliver(SinkRecovered(sink=sink.name, num_lost_records=num_lost, time_unix_seconds=self._clock()))

    def _close(self, sink: Sink, outcome: Outcome, *, still_open: Sequence[Sink]) -> None:
        try:
            sink.close(outcome)
        except Exception as error:  # noqa: BLE001 (reported to the sinks that are still open)
            if sink.name in self._failed:
                return
            failure = SinkFailed(sink=sink.name, error=_one_line(error), time_unix_seconds=self._clock())
            self._failed[sink.name] = failure.error
            for other in still_open:
                self._offer(other, failure)


def open_sinks(
    config: JobConfig,
    run_dir: Path,
    *,
    world_size: int,
    clock: Clock = time.time,
    stream: TextIO | None = None,
) -> SinkSet:
    """The sinks ``config.telemetry`` asks for, writing to ``run_dir`` and ``stream`` (standard output).

    Raises:
        OSError: a log file of the run cannot be opened; nothing has been written then.
    """
    from megatron_ft.telemetry.build import build_sinks

    sinks, first_records = build_sinks(config, run_dir, world_size=world_size, clock=clock, stream=stream)
    sink_set = SinkSet(sinks, clock=clock)
    for record in first_records:
        sink_set.write(record)
    return sink_set


def _one_line(error: Exception) -> str:
    """An error's type and first line."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}".rstrip(": ")
