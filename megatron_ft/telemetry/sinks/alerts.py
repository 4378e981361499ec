"""Reports an alert when a figure of the run passes its limit, and its end when the figure is within the limit again."""

import shutil
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ft import events
from megatron_ft.events import AlertCleared, AlertRaised, Metrics, Record
from megatron_ft.planning.iteration import ALERT_NAMES, Alert, AlertFigures, AlertLimits, windows_behind
from megatron_ft.telemetry.sinks.base import Sink, SinkContext

NUM_WINDOWS = 5
"""The share of time in which training waited for captures is computed over this number of newest windows."""
NUM_ITERATIONS = 20
"""The median duration of this number of newest iterations is taken as the duration of each iteration of a window."""
DISK_SECONDS = 30.0
"""Shortest time in seconds between two checks of the free disk space."""


def _free_share(folder: Path) -> float:
    """Return the share of the file system of ``folder`` that is free for ordinary users.

    Raises:
        OSError: there is no such folder.
    """
    usage = shutil.disk_usage(folder)
    return usage.free / max(1, usage.used + usage.free)


class AlertSink(Sink):
    """Computes those figures of a run that have a limit. Reports when a figure passes its limit, and when the figure is
    within its limit again."""

    name = "alerts"

    def __init__(self, limits: AlertLimits, *, free_disk_share: Callable[[], float]) -> None:
        """Create a sink that compares figures with ``limits``. ``free_disk_share`` returns the share of the disk that
        is free, or raises OSError."""
        self._limits = limits
        self._free_disk_share = free_disk_share
        self._raised: set[str] = set()
        self._found: list[Record] = []
        self._iteration = 0
        self._disk_checked_at: float | None = None
        self._free: float | None = None
        self._survival: float | None = None
        self._newest: Mapping[str, float] = {}
        """Metrics of the newest iteration."""
        self._seconds: deque[float] = deque(maxlen=NUM_ITERATIONS)
        self._interval: int | None = None
        self._since = 0
        self._windows: deque[tuple[float, int]] = deque(maxlen=NUM_WINDOWS)
        self._lost: float | None = None

    @classmethod
    def open(cls, context: SinkContext) -> "AlertSink":
        limits = AlertLimits(**{name: getattr(context.config.telemetry, f"alert_{name}") for name in ALERT_NAMES})
        return cls(limits, free_disk_share=partial(_free_share, context.run_dir))

    def write(self, record: Record) -> None:
        """Update the figures from ``record`` and compare all of them with their limits.

        Raises:
            OSError: the free disk space cannot be read.
        """
        match record:
            case Metrics():
                self._take_metrics(record)
            case events.RunStarted():
                self._interval = None
                # All ranks have started again and capture with another plan, so earlier windows do not count.
                self._windows.clear()
                self._lost = None
                self._iteration = record.resumed_from_iteration or 0
            case events.MembershipChanged() | events.RecoveryStarted():
                self._iteration = record.iteration
            case events.PlacementInForce():
                self._survival = record.single_loss_survival
            case events.SnapshotPlanned():
                self._interval, self._since = max(1, record.interval_iterations), record.iteration
            case events.WindowCommitted():
                self._since = record.iteration
                self._windows.append((record.stalled_seconds, record.num_iterations))
                if record.at_risk_share is not None and record.lost_share is not None:
                    self._lost = record.at_risk_share + record.lost_share
            case _:
                return
        self._judge()

    def take_reports(self) -> list[Record]:
        found, self._found = self._found, []
        return found

    def _take_metrics(self, record: Metrics) -> None:
        self._iteration, self._newest = record.iteration, record.values
        if (seconds := record.values.get("iteration_seconds")) is not None and 0.0 < float(seconds) < float("inf"):
            self._seconds.append(float(seconds))
        now, checked_at = record.time_unix_seconds, self._disk_checked_at
        # The difference is absolute, so that checks continue after the wall clock was set back.
        if now is not None and (checked_at is None or abs(now - checked_at) >= DISK_SECONDS):
            self._disk_checked_at = now
            if self._limits.free_disk_share is not None:
                self._free = self._free_disk_share()

    def _judge(self) -> None:
        figures = AlertFigures(
            single_loss_survival=self._survival,
            stall_share=self._stall_share(),
            windows_behind=self._windows_behind(),
            free_disk_share=self._free,
            slowest_rank_over_median=self._newest.get("slowest_rank_over_median"),
            lost_token_share=self._lost,
        )
        for alert in self._limits.judge(figures):
            # An alert is reported once when a limit is crossed, not for each iteration beyond the limit.
            if alert.is_beyond != (alert.name in self._raised):
                self._raised ^= {alert.name}
                self._found.append(self._record(alert))

    def _record(self, alert: Alert) -> AlertRaised | AlertCleared:
        about: dict[str, Any] = {"alert": alert.name, "value": alert.value, "limit": alert.limit}
        if not alert.is_beyond:
            return AlertCleared(iteration=self._iteration, **about)
        if alert.name == "slowest_rank_over_median":
            about |= {"rank": int(self._newest["slowest_rank"]), "node": int(self._newest["slowest_node"])}
        return AlertRaised(iteration=self._iteration, **about)

    def _stall_share(self) -> float | None:
        # The first window may wait for memory, so the share is computed only over NUM_WINDOWS windows.
        num_iterations = sum(count for _, count in self._windows)
        if len(self._windows) < NUM_WINDOWS or not self._seconds or num_iterations <= 0:
            return None
        return sum(stalled for stalled, _ in self._windows) / (num_iterations * statistics.median(self._seconds))

    def _windows_behind(self) -> float | None:
        if self._interval is None:
            return None
        return windows_behind(self._iteration, since_iteration=self._since, interval_iterations=self._interval)
