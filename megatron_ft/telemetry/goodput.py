"""Measures goodput: it divides the wall time of a run into useful training and each kind of loss.

The input is the run's records. The metrics of an iteration contain its duration. The time between two iterations is
assigned to the events recorded in that time: a recovery, a pause between jobs, or other work.
"""

import math
import statistics
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_ft import events
from megatron_ft.events import Metrics, Record
from megatron_ft.planning.cost.training_time import checkpoint_overhead, effective_training_time_ratio

_ENDS = (events.RunFinished, events.RunStopped)
_MOST = 10**15
"""Metrics records with at least this iteration number are ignored. A token count of at least this counts as 0."""
# Valid times are in the years 2001 to 5138. A clock that was never set begins in 1970 and would add decades to the wall
# time.
_EARLIEST_SECONDS, _LATEST_SECONDS = 1e9, 1e11
_LONGEST_SECONDS = 1e9


def instant(seconds: float | None) -> float | None:
    """Return ``seconds``, a time in seconds since 1970, if it is in the years 2001 to 5138, otherwise None."""
    return seconds if seconds is not None and _EARLIEST_SECONDS <= seconds <= _LATEST_SECONDS else None


def duration(seconds: float | None) -> float | None:
    """Return ``seconds``, a duration, if it is from 0 to 1e9, otherwise None."""
    return seconds if seconds is not None and 0.0 <= seconds <= _LONGEST_SECONDS else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Wall time of a run, divided into useful time and losses. The parts ``useful_seconds`` to ``other_seconds`` add up
    to ``wall_seconds``."""

    wall_seconds: float
    """Time from the run's first record to its newest record, including the time between jobs."""
    useful_seconds: float
    """Time of useful iterations, which were committed and not lost later. An iteration that ran twice counts once. Time
    in which training waited for the capture of snapshots is not included."""
    stalled_seconds: float
    """Time that training waited for the capture of snapshots, for checkpoints, or for experts to move between ranks."""
    again_seconds: float
    """Time of iterations that were reported, then lost in a failure and run again."""
    skipped_seconds: float
    """Time of iterations that the commit vote rejected."""
    recovery_seconds: float
    """Time from the last report before a failure or a change of membership to the start of the next iteration."""
    between_jobs_seconds: float
    """Time from the last record of each job to the first record of the run's next job."""
    other_seconds: float
    """Time of starts, evaluations and all other work between iterations."""
    num_iterations: int
    num_interruptions: int
    """Number of interruptions: recoveries, changes of membership, and later jobs that continued the run. Several
    interruptions count as one if no iteration was reported between them."""
    num_tokens: int
    """Tokens of the useful iterations."""
    iteration_seconds: float | None
    """Median duration of the useful iterations."""

    @property
    def ettr(self) -> float | None:
        """Return the effective training time ratio, useful time divided by wall time; None if no time has passed."""
        return self.useful_seconds / self.wall_seconds if self.wall_seconds > 0 else None

    @property
    def tokens_per_second(self) -> float | None:
        """Return the goodput: tokens of the useful iterations divided by wall time."""
        return self.num_tokens / self.wall_seconds if self.wall_seconds > 0 else None

    @property
    def lost_per_interruption_seconds(self) -> float:
        """Return the mean time that an interruption costs: the pause in training, plus the time of the iterations that
        had to run again."""
        return (self.recovery_seconds + self.again_seconds) / max(1, self.num_interruptions)

    @property
    def mtbf_seconds(self) -> float:
        """Return the mean time between interruptions. The time of the interruptions themselves is left out. The result
        is infinite if there were no interruptions."""
        up_seconds = self.wall_seconds - self.recovery_seconds - self.between_jobs_seconds
        return up_seconds / self.num_interruptions if self.num_interruptions else math.inf

    @property
    def predicted_ettr(self) -> float | None:
        """Return the effective training time ratio (ETTR) that the formula in ``docs/telemetry.md`` predicts from this
        run's figures, or None if there are no useful iterations yet."""
        if self.useful_seconds <= 0 or self.mtbf_seconds <= 0:
            return None
        per_iteration = self.useful_seconds / self.num_iterations
        return effective_training_time_ratio(
            overhead=checkpoint_overhead(self.stalled_seconds / self.num_iterations, per_iteration),
            recovery_seconds=self.lost_per_interruption_seconds,
            mtbf_seconds=self.mtbf_seconds,
        )

    def summary(self) -> dict[str, float | int | None]:
        """Return the figures for ``summary.json``; ``docs/telemetry.md`` explains each."""
        shares = ("useful", "stalled", "again", "skipped", "recovery", "between_jobs", "other")
        return {
            "ettr": self.ettr,
            "ettr_predicted": self.predicted_ettr,
            "tokens_per_second": self.tokens_per_second,
            "wall_seconds": self.wall_seconds,
            **{f"{share}_seconds": getattr(self, f"{share}_seconds") for share in shares},
            "iterations": self.num_iterations,
            "interruptions": self.num_interruptions,
            "mtbf_seconds": self.mtbf_seconds if self.num_interruptions else None,
            "iteration_seconds": self.iteration_seconds,
        }

    @classmethod
    def measure(cls, records: Iterable[Record]) -> "Goodput":
        """Measure the goodput of a run from all of its events and metrics, in any order."""
        meter = GoodputMeter()
        timed = [(at, record) for record in records if (at := instant(record.time_unix_seconds)) is not None]
        # At equal times metrics come first, because an iteration ends before events that are recorded at its end.
        for _, record in sorted(timed, key=lambda pair: (pair[0], not isinstance(pair[1], Metrics))):
            meter.take(record)
        return meter.result()


@dataclass(slots=True, kw_only=True)
class _Gap:
    """Events since the newest ``metrics`` record: failures of ranks (``fails``), recoveries and new jobs that continue
    the run (``continues``), and pauses between jobs."""

    begin: float
    """Time at which the newest metrics of an iteration were recorded."""
    fails: bool = False
    continues: bool = False
    source: int | None = None
    """Last iteration that the recovered state includes; ranks continue with the iteration after it."""
    between_jobs_seconds: float = 0.0
    ended: float | None = None
    """Time at which a job ended; None while a job runs."""

    @property
    def is_recovery(self) -> bool:
        return self.fails or self.continues

    def pass_to(self, at: float, *, ends_job: bool) -> None:
        """Process the time ``at`` of the next record, which ends a job if ``ends_job`` is true. If the record before it
        ended a job, count the time between the two records as time between jobs."""
        if self.ended is not None:
            self.between_jobs_seconds += max(0.0, at - self.ended)
        self.ended = at if ends_job else None

    def parts(self, seconds: float) -> tuple[float, float]:
        between = min(self.between_jobs_seconds, seconds)
        return between, seconds - between


@dataclass(slots=True)
class _Counted:
    """Useful iterations so far. The arrays ``newest`` to ``tokens`` have one entry per reported iteration. An entry
    also covers the unreported iterations since the previous entry."""

    newest: "array[int]" = field(default_factory=lambda: array("q"))
    counts: "array[int]" = field(default_factory=lambda: array("q"))
    seconds: "array[float]" = field(default_factory=lambda: array("d"))
    tokens: "array[float]" = field(default_factory=lambda: array("d"))
    num_iterations: int = 0
    """Number of useful iterations. It and the totals of time and tokens are integers, so subtractions are exact."""
    total_nanoseconds: int = 0
    total_tokens: int = 0

    def add(self, iteration: int, count: int, seconds: float, tokens: float) -> None:
        for column, value in ((self.newest, iteration), (self.counts, count)):
            column.append(value)
        for figures, figure in ((self.seconds, seconds), (self.tokens, tokens)):
            figures.append(figure)
        self._sum(1, count, seconds, tokens)

    def go_back(self, iteration: int) -> float:
        """Remove the iterations after ``iteration``, because a recovery discarded them. Return their total seconds."""
        lost = 0.0
        # The newest entries are removed first. The last removed entry may also cover iterations that remain useful.
        while self.newest and self.newest[-1] > iteration:
            newest, count = self.newest.pop(), self.counts.pop()
            seconds, tokens = self.seconds.pop(), self.tokens.pop()
            self._sum(-1, count, seconds, tokens)
            kept = max(0, iteration - (newest - count))
            if kept:
                self.add(iteration, kept, seconds * kept / count, tokens * kept / count)
            lost += seconds * (count - kept) / count
        return lost

    def _sum(self, sign: int, count: int, seconds: float, tokens: float) -> None:
        self.num_iterations += sign * count
        self.total_nanoseconds += sign * round(1e9 * seconds)
        self.total_tokens += sign * round(tokens)


class GoodputMeter:
    """Divides the wall time of a run into useful time and losses. Records are added one by one, oldest first. The meter
    stores four numbers for each reported iteration."""

    def __init__(self) -> None:
        self._counted = _Counted()
        self._position: int | None = None
        """Newest reported iteration."""
        self._again = self._skipped = self._captures = self._waits = 0.0
        self._recovery = self._between_jobs = self._other = 0.0
        self._num_interruptions = 0
        self._first: float | None = None
        self._newest = 0.0
        self._gap = _Gap(begin=0.0)

    def take(self, record: Record) -> None:
        """Add a record. A record without a valid time is ignored."""
        at = instant(record.time_unix_seconds)
        if at is None:
            return
        if self._first is None:
            self._first, self._newest, self._gap = at, at, _Gap(begin=at)
        self._newest = max(self._newest, at)
        self._gap.pass_to(at, ends_job=isinstance(record, _ENDS))
        if isinstance(record, Metrics):
            if 0 < record.iteration < _MOST:
                self._train(record, at)
        elif isinstance(record, events.IterationSkipped):
            self._skip(record.iteration)
        else:
            self._note(record)

    def result(self) -> Goodput:
        """Return the goodput of all records so far. This takes time proportional to the number of iterations."""
        counted = self._counted
        each = [seconds / count for seconds, count in zip(counted.seconds, counted.counts, strict=True)]
        return self._shares(
            math.fsum(counted.seconds), math.fsum(counted.tokens), statistics.median(each) if each else None
        )

    def so_far(self) -> Goodput:
        """Return the goodput so far in constant time. The median duration of iterations is left out (None)."""
        return self._shares(self._counted.total_nanoseconds / 1e9, self._counted.total_tokens, None)

    def _shares(self, counted: float, num_tokens: float, iteration_seconds: float | None) -> Goodput:
        between, tail = self._gap.parts(0.0 if self._first is None else self._newest - self._gap.begin)
        is_recovery = self._gap.is_recovery
        other = self._other + (0.0 if is_recovery else tail)
        captures, waits = min(self._captures, counted), min(self._waits, other)
        return Goodput(
            wall_seconds=0.0 if self._first is None else self._newest - self._first,
            useful_seconds=counted - captures,
            stalled_seconds=captures + waits,
            again_seconds=self._again,
            skipped_seconds=self._skipped,
            recovery_seconds=self._recovery + (tail if is_recovery else 0.0),
            between_jobs_seconds=self._between_jobs + between,
            other_seconds=other - waits,
            num_iterations=self._counted.num_iterations,
            num_interruptions=self._num_interruptions + is_recovery,
            num_tokens=round(num_tokens),
            iteration_seconds=iteration_seconds,
        )

    def _train(self, record: Metrics, at: float) -> None:
        gap, iteration = self._gap, record.iteration
        at = max(at, gap.begin)
        self._gap = _Gap(begin=at)
        # The parts must add up to the wall time, even if a record has a wrong duration.
        length = min(duration(_figure(record, "iteration_seconds")) or 0.0, at - gap.begin)
        between, before = gap.parts(at - gap.begin - length)
        # After a recovery, the iteration follows the state from which ranks continued, not the last reported iteration.
        before_it = gap.source if gap.source is not None else self._position
        follows = iteration - 1 if before_it is None else max(0, min(iteration - 1, before_it))
        self._again += self._counted.go_back(follows)
        num_unreported = iteration - 1 - follows
        # If not every iteration is reported, the unreported ones are assumed to take as long as the reported one.
        unreported = min(before, num_unreported * length)
        tokens = _figure(record, "tokens") * (1 + num_unreported)
        self._counted.add(iteration, 1 + num_unreported, length + unreported, tokens)
        self._position = iteration
        self._between_jobs += between
        if gap.is_recovery:
            self._recovery += before - unreported
            # A failure counts as an interruption only if a record names the state from which ranks continued.
            self._num_interruptions += gap.continues
        else:
            self._other += before - unreported

    def _skip(self, iteration: int) -> None:
        if self._position == iteration:
            self._skipped += self._counted.go_back(iteration - 1)

    def _note(self, record: Record) -> None:
        match record:
            case events.RankFailed():
                self._gap.fails = True
            case events.RanksRestarted():
                self._gap.continues = True
            case events.RecoveryStarted() | events.MembershipChanged() | events.StageRecovery():
                if record.generation > 0:  # generation 0 is the start of a job, which ``RunStarted`` counts
                    self._gap.continues, self._gap.source = True, record.iteration
            case events.RunStarted():
                self._gap.continues |= self._position is not None
                self._gap.source = record.resumed_from_iteration or 0
            case events.WindowCommitted():
                self._captures += duration(record.stalled_seconds) or 0.0
            case events.CheckpointSaved():
                self._waits += duration(record.blocked_seconds) or 0.0
            case events.PlacementInForce():
                self._waits += duration(record.seconds) or 0.0


def _figure(record: Metrics, name: str) -> float:
    # Returns a figure of an iteration; 0 if it is missing or impossible.
    value = float(record.values.get(name, 0.0))
    return value if math.isfinite(value) and 0.0 <= value < _MOST else 0.0
