"""Computes the state of a run so far from its records. The terminal and the summary show parts of this state."""

import math
from collections import deque
from dataclasses import dataclass, field

from megatron_ft.events import (
    CheckpointSaved,
    Evaluation,
    ExpertLoad,
    IterationSkipped,
    Metrics,
    Record,
    RecordRefused,
    RunStarted,
    SinkFailed,
    SinkRecovered,
)
from megatron_ft.telemetry.run_figures import RunFigures

NUM_RECENT_ITERATIONS = 20
"""Number of newest metrics records from which the current pace of training is computed."""
MAX_CURVE_BINS = 480
"""Largest number of points of the loss curve in memory."""


@dataclass(slots=True, kw_only=True)
class RunState:
    """Figures of a run so far. They are computed from its records, which must be added oldest first."""

    time_opened_seconds: float
    """Time at which this job began, in seconds since 1970."""
    train_iterations: int
    """Last iteration of the run according to its configuration."""
    started: RunStarted | None = None
    """Record of the last time at which all ranks were started or restarted in this job."""
    iteration: int = 0
    """Newest reported iteration."""
    first_loss: float | None = None
    """Loss of the run's first iteration, which an earlier job of the run may have reported."""
    latest: Metrics | None = None
    evaluation: Evaluation | None = None
    expert_load: ExpertLoad | None = None
    num_skipped: int = 0
    """Number of iterations in this job that the commit vote rejected."""
    checkpoints: list[int] = field(default_factory=list)
    """Iterations of the checkpoints that this job saved."""
    num_tokens: int = 0
    """Sum of the tokens in this job's metrics records."""
    training_seconds: float = 0.0
    """Sum of ``iteration_seconds`` in this job's metrics records."""
    final_loss: float | None = None
    failed_sinks: dict[str, str] = field(default_factory=dict)
    """Names of the sinks that currently accept no records, each with the reason."""
    num_refused_records: int = 0
    """Number of records of this job that were refused because they were invalid."""
    run: RunFigures = field(default_factory=RunFigures)
    """Figures that need several records, such as this job's goodput."""
    _recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=NUM_RECENT_ITERATIONS + 1))
    """Time and iteration of the newest metrics records."""
    _bins: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Sum and count of the finite losses at each point of the loss curve, by the index of the point."""

    def take(self, record: Record) -> None:
        """Add a record of this job."""
        self.run.take(record)
        match record:
            case Metrics():
                self._take_metrics(record)
            case RunStarted():
                self.started = record
                self.train_iterations = record.train_iterations or self.train_iterations
                self.iteration = record.resumed_from_iteration or 0
            case Evaluation():
                self.evaluation = record
            case ExpertLoad():
                self.expert_load = record
            case IterationSkipped():
                self.num_skipped += 1
                self.iteration = max(self.iteration, record.iteration)
            case CheckpointSaved():
                self.checkpoints.append(record.iteration)
            case SinkFailed():
                self.failed_sinks[record.sink] = record.error
            case SinkRecovered():
                self.failed_sinks.pop(record.sink, None)
            case RecordRefused():
                self.num_refused_records += 1

    @property
    def tokens_per_second(self) -> float | None:
        """Return this job's tokens divided by the time of its iterations; None before its first iteration."""
        return self.num_tokens / self.training_seconds if self.training_seconds > 0 else None

    def remaining_seconds(self) -> float | None:
        """Return the expected seconds until the run's last iteration. The pace is that of the newest iterations, with
        the pauses between them. Return None if the pace is not known."""
        if len(self._recent) < 2:
            return None
        (start, first), (end, last) = self._recent[0], self._recent[-1]
        # Iterations go back after a recovery, and wall clocks can be set back.
        if last <= first or end < start:
            return None
        return max(0, self.train_iterations - self.iteration) * (end - start) / (last - first)

    def loss_curve(self, width: int) -> list[float | None]:
        """Divide the run's iterations into ``width`` equal parts, and return the mean loss of each part. The result is
        None for a part without losses."""
        return [self._mean(position * self._num_bins // width) for position in range(width)]

    @property
    def _num_bins(self) -> int:
        return max(1, min(self.train_iterations, MAX_CURVE_BINS))

    def _bin_of(self, iteration: int) -> int:
        return min(self._num_bins - 1, (iteration - 1) * self._num_bins // max(1, self.train_iterations))

    def _mean(self, position: int) -> float | None:
        total, count = self._bins.get(position, (0.0, 0))
        return total / count if count else None

    def _take_metrics(self, record: Metrics) -> None:
        self.latest, self.iteration = record, record.iteration
        loss = float(record.values["loss"])
        if self.first_loss is None:
            self.first_loss = loss
        self.final_loss = loss
        # One NaN would blank its whole part of the curve.
        if math.isfinite(loss):
            position = self._bin_of(record.iteration)
            total, count = self._bins.get(position, (0.0, 0))
            self._bins[position] = total + loss, count + 1
        self.num_tokens += int(record.values.get("tokens", 0))
        self.training_seconds += float(record.values.get("iteration_seconds", 0.0))
        if record.time_unix_seconds is not None:
            self._recent.append((record.time_unix_seconds, record.iteration))
