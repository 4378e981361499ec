"""Writes records as lines of ``metrics.jsonl`` and ``events.jsonl``."""

import json
import os
from collections import deque
from pathlib import Path

from megatron_ft.durable import cut_half_line
from megatron_ft.events import LogTruncated, Metrics, Record
from megatron_ft.telemetry.read import EVENTS_FILE, METRICS_FILE
from megatron_ft.telemetry.sinks.base import Outcome, Sink, SinkContext

MAX_PENDING_LINES = 20_000
"""Largest number of lines that wait in memory while the disk does not accept lines. If there are more, the oldest lines
are dropped and counted."""


class JsonlSink(Sink):
    """Appends one line per record to a file. When ``write`` returns, the operating system has the line.

    A durable record (see ``events.Record.durable``) is forced to disk, with all lines before it. If the disk does not
    accept lines, they stay in memory, and every later ``write`` tries again. A failed write leaves no incomplete line
    in the file. If a crash left an incomplete line, ``open`` removes it.
    """

    def __init__(self, path: Path, *, metrics: bool) -> None:
        """Open the file. If ``metrics`` is true, only metrics records are written to it; otherwise all other records.

        Raises:
            OSError: the file cannot be opened.
        """
        self.name = path.name
        self._metrics = metrics
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._reports: list[Record] = []
        if num_dropped_bytes := cut_half_line(self._file):
            self._reports.append(LogTruncated(file=self.name, num_dropped_bytes=num_dropped_bytes))
        self._pending: deque[bytes] = deque()
        self._unsynced = False

    @classmethod
    def open(cls, context: SinkContext, *, metrics: bool) -> "JsonlSink":
        return cls(context.run_dir / (METRICS_FILE if metrics else EVENTS_FILE), metrics=metrics)

    def write(self, record: Record) -> None:
        """Append the record's line to the file. First append the lines that earlier calls could not write.

        Raises:
            OSError: the disk did not accept the lines; they stay in memory until the next call.
        """
        if isinstance(record, Metrics) is self._metrics:
            line = json.dumps(record.to_record(), allow_nan=False, separators=(",", ":"))
            # A new line is queued even if the disk works. It is removed from the queue only when all of it is written.
            self._pending.append(line.encode() + b"\n")
            if len(self._pending) > MAX_PENDING_LINES:
                self._pending.popleft()
                self.num_lost_records += 1
            self._unsynced |= record.durable
        self._flush()

    def take_reports(self) -> list[Record]:
        reports, self._reports = self._reports, []
        return reports

    def close(self, outcome: Outcome) -> None:
        """Write the lines that still wait in memory, and force the file to disk.

        Raises:
            OSError: some lines could not be written.
        """
        self._unsynced = True
        try:
            self._flush()
        finally:
            os.close(self._file)

    def _flush(self) -> None:
        while self._pending:
            self._append(self._pending[0])
            self._pending.popleft()
        if self._unsynced:
            # One call also makes all earlier lines of the file durable.
            os.fsync(self._file)
            self._unsynced = False

    def _append(self, line: bytes) -> None:
        # A reader must never see an incomplete line that is followed by other lines.
        start = os.fstat(self._file).st_size
        written = 0
        try:
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError:
            os.ftruncate(self._file, start)
            raise
