"""Writes records to all sinks of a run. A sink that fails does not affect the others."""

import importlib.util
import inspect
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import find_target
from megatron_ft.config.telemetry import TelemetryConfig
from megatron_ft.errors import ConfigError
from megatron_ft.events import Metrics, Record, RecordRefused, RunFinished, RunStopped, SinkFailed, SinkRecovered
from megatron_ft.telemetry.metrics import check_metrics
from megatron_ft.telemetry.read import METRICS_FILE, first_metrics
from megatron_ft.telemetry.sinks.base import Clock, Outcome, Sink, SinkContext

_LOGS = ("metrics", "events")


class SinkSet:
    """Checks records, adds the time and passes them to every sink. All methods are thread-safe.

    An invalid record becomes a ``record_refused`` event. When a sink fails, the other sinks receive one ``sink_failed``
    event. When the sink works again, all sinks receive one ``sink_recovered`` event.
    """

    def __init__(self, sinks: Sequence[Sink], *, clock: Clock) -> None:
        """Create a set that writes to ``sinks``, and closes them, in the given order. If a sink fails while it is
        closed, only the sinks after it receive the ``sink_failed`` event."""
        self._sinks = tuple(sinks)
        self._clock = clock
        # The lock is reentrant, because a sink that fails on a record causes an event for the other sinks.
        self._lock = threading.RLock()
        self._failed: dict[str, str] = {}
        self._num_lost: dict[str, int] = {}
        self._iteration: int | None = None
        self._ended = False
        self._deliver_reports()

    @property
    def failed(self) -> Mapping[str, str]:
        """Return the names of the sinks that currently accept no records, each with the reason."""
        return dict(self._failed)

    def write(self, record: Mapping[str, Any] | Record) -> None:
        """Write ``record``, which is a JSON object or a dataclass, to all sinks. Never raises an exception."""
        with self._lock:
            self._deliver(self._checked(record))
            self._deliver_reports()

    def close(self, exit_code: int, reason: str, *, is_complete: bool = True) -> None:
        """Write a record of the run's end if there is none yet, then close every sink. Never raises an exception.

        Args:
            is_complete: whether the run is complete, so that no later job continues it. Used if ``exit_code`` is 0.
        """
        with self._lock:
            if not self._ended and exit_code == 0:
                self.write(RunFinished(exit_code=0, reason=reason, iteration=self._iteration, is_complete=is_complete))
            elif not self._ended:
                self.write(RunStopped(exit_code=exit_code, reason=reason, iteration=self._iteration))
            outcome = Outcome(exit_code=exit_code, reason=reason, time_unix_seconds=self._clock())
            for position, sink in enumerate(self._sinks):
                self._close(sink, outcome, still_open=self._sinks[position + 1 :])

    def _checked(self, report: Mapping[str, Any] | Record) -> Record:
        try:
            raw = report.to_record() if isinstance(report, Record) else report
            # A record with a time keeps that time. It may have waited on its node while the controller was replaced.
            record = Record.from_record({"time_unix_seconds": self._clock()} | dict(raw))
            if isinstance(record, Metrics):
                check_metrics(record.values)
        except (ValueError, TypeError) as error:
            return RecordRefused(problem=str(error), content=repr(report), time_unix_seconds=self._clock())
        if isinstance(record, Metrics):
            self._iteration = record.iteration
        self._ended |= isinstance(record, (RunFinished, RunStopped))
        return record

    def _deliver_reports(self) -> None:
        for report in [report for sink in self._sinks for report in sink.take_reports()]:
            self._deliver(self._checked(report))

    def _deliver(self, record: Record) -> None:
        for sink in self._sinks:
            # A sink that retries receives every record. It stores records that it could not write, and reports when it
            # works again.
            if sink.retries or sink.name not in self._failed:
                self._offer(sink, record)

    def _offer(self, sink: Sink, record: Record) -> None:
        try:
            sink.write(record)
        except Exception as error:  # noqa: BLE001 (whatever a sink raises, training continues; it is reported)
            self._mark_failed(sink, error)
        else:
            self._mark_working(sink)

    def _mark_failed(self, sink: Sink, error: Exception) -> None:
        if sink.name in self._failed:
            return
        self._num_lost[sink.name] = sink.num_lost_records
        # ``_failure`` marks the sink as failed first. Otherwise a sink that also fails on this event would cause an
        # endless loop.
        self._deliver(self._failure(sink, error))

    def _mark_working(self, sink: Sink) -> None:
        if self._failed.pop(sink.name, None) is None:
            return
        num_lost = sink.num_lost_records - self._num_lost.pop(sink.name)
        self._deliver(SinkRecovered(sink=sink.name, num_lost_records=num_lost, time_unix_seconds=self._clock()))

    def _close(self, sink: Sink, outcome: Outcome, *, still_open: Sequence[Sink]) -> None:
        try:
            sink.close(outcome)
        except Exception as error:  # noqa: BLE001 (reported to the sinks that are still open)
            if sink.name not in self._failed:
                failure = self._failure(sink, error)
                for other in still_open:
                    self._offer(other, failure)

    def _failure(self, sink: Sink, error: Exception) -> SinkFailed:
        first_line = next(iter(str(error).strip().splitlines()), "")
        text = f"{type(error).__name__}: {first_line}".rstrip(": ")
        self._failed[sink.name] = text
        return SinkFailed(sink=sink.name, error=text, time_unix_seconds=self._clock())


def open_sinks(
    config: JobConfig, run_dir: Path, *, world_size: int, clock: Clock = time.time, stream: TextIO | None = None
) -> SinkSet:
    """Open the sinks in the configuration key ``telemetry.sinks``. The terminal sink writes to ``stream``.

    Raises:
        ConfigError: the ``_target_`` of an entry names no subclass of ``Sink``, or the method ``open`` of the subclass
            does not accept the other keys of the entry.
        OSError: a log file of the run cannot be opened; in this case nothing has been written.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    earlier = first_metrics(run_dir) if (run_dir / METRICS_FILE).exists() else None
    context = SinkContext(
        config=config,
        run_dir=run_dir,
        world_size=world_size,
        clock=clock,
        stream=stream,
        first_loss=None if earlier is None else float(earlier.values["loss"]),
    )
    specs = {name: spec for name, spec in config.telemetry.sinks.items() if spec is not None}
    own = TelemetryConfig().sinks
    # Sinks are closed in this order. The failure of a sink is reported to the sinks after it. The events file and the
    # terminal come last, so that they report failures of all other sinks.
    names = [name for name in specs if name not in own] + [name for name in own if name in specs]
    # The log files are opened first. If one cannot be opened, no other sink has started anything.
    opened = {name: open_sink(name, specs[name], context) for name in sorted(names, key=lambda name: name not in _LOGS)}
    return SinkSet([sink for name in names if (sink := opened[name]) is not None], clock=clock)


def check_sinks(config: JobConfig) -> None:
    """Check that every configured sink exists and that its packages are installed. Runs before anything is written.

    Raises:
        ConfigError: ``_target_`` names no subclass of ``Sink``, or a package is missing.
    """
    for name, spec in config.telemetry.sinks.items():
        for package in () if spec is None else _sink_class(f"telemetry.sinks.{name}", spec).needs:
            if importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"telemetry.sinks.{name}: needs the package {package}, which is not installed. Install it with "
                    f"'pip install -c requirements/constraints.txt {package}', or set telemetry.sinks.{name}=null"
                )


def _sink_class(key: str, spec: Mapping[str, Any]) -> type[Sink]:
    found = find_target(key, spec)
    if not (isinstance(found, type) and issubclass(found, Sink)):
        raise ConfigError.of(f"{key}._target_", spec["_target_"], f"must name a subclass of {Sink.__qualname__}")
    return found


def open_sink(name: str, spec: Mapping[str, Any], context: SinkContext) -> Sink | None:
    key = f"telemetry.sinks.{name}"
    found = _sink_class(key, spec)
    options = {option: value for option, value in spec.items() if option != "_target_"}
    try:
        # Arguments are checked before the call, so that a TypeError inside ``open`` is not reported as a configuration
        # error.
        inspect.signature(found.open).bind(context, **options)
    except TypeError as error:
        raise ConfigError.of(
            key, dict(spec), f"must have exactly the keys that {found.__name__}.open accepts: {error}"
        ) from None
    return found.open(context, **options)
