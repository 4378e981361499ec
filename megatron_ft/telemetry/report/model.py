"""Content of a report page as plain values, computed from the records of a run."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_ft import events
from megatron_ft.errors import EXIT_CODES
from megatron_ft.events import Metrics, Record, RunStarted
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.records import OtherRecord
from megatron_ft.telemetry.goodput import Goodput, instant
from megatron_ft.telemetry.read import newest_of_each
from megatron_ft.telemetry.report.files import RunFiles
from megatron_ft.telemetry.report.maps import ExpertLoads
from megatron_ft.telemetry.report.recoveries import Recovery

_HIGHEST = 1e30
"""Losses of at least this magnitude are not drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """Outcome of the run according to its records."""

    level: str
    """``good`` if the run finished, ``bad`` if it stopped early, ``open`` if it has not reported its end."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Mark on the loss curve at the iteration of a failure, a recovery or a change of membership."""

    iteration: int
    kind: str
    """Kind of the mark: ``failure``, ``recovery`` or ``change`` (of the membership)."""
    words: str
    number: int | None = None
    """Index of the recovery, counted from 1; None for a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Content of the report page of a run."""

    name: str
    model: str | None
    size: str | None
    """Text with the number of ranks, the number of nodes and the device of the newest job."""
    outcome: _Outcome
    iteration: int | None
    """Newest reported iteration."""
    train_iterations: int | None
    """Last iteration of the run according to its configuration."""
    loss: tuple[tuple[int, float], ...]
    """Pairs (iteration, loss in nats per token), one per iteration. Losses that are not finite are left out."""
    evaluations: tuple[tuple[int, float], ...]
    """(iteration, validation loss in nats per token) of each evaluation."""
    marks: tuple[Mark, ...]
    recoveries: tuple[Recovery, ...]
    alerts: tuple[events.AlertRaised | events.AlertCleared, ...]
    goodput: Goodput
    """Wall time of all jobs of the run, divided into useful time and losses."""
    speed: Mapping[str, float]
    """Median of each metric in ``SPEED_METRICS`` over the newest ``SPEED_ITERATIONS`` iterations, by name."""
    loads: ExpertLoads | None
    """Load of the experts of each layer; None if no record contains loads."""
    placements: tuple[events.PlacementInForce, ...]
    """All placements of expert replicas that the run has used."""
    plans: tuple[PlacementPlan, ...]
    """Newest placement of experts on ranks, for each pipeline stage; empty if the run's folder contains none."""
    others: tuple[OtherRecord, ...]
    """Events of kinds that this package does not define, in the order of writing."""
    num_jobs: int
    """Number of jobs of this run so far."""
    num_events: int
    num_metrics: int
    newest_unix_seconds: float | None
    """Time of the newest record."""

    @classmethod
    def of(cls, files: RunFiles) -> "RunReport":
        """Compute the content of the report page from the files of a run."""
        newest = newest_of_each(files.metrics)
        started = next((record for record in reversed(files.events) if isinstance(record, RunStarted)), None)
        # All metrics are used, not only the newest of each iteration, because iterations that ran again show the cost
        # of a failure.
        found, num_jobs = Recovery.find(files.events, files.decisions, files.metrics)
        times = [
            at for record in (*files.events, *files.metrics) if (at := instant(record.time_unix_seconds)) is not None
        ]
        return cls(
            name=started.run_name if started else files.folder,
            model=started.model if started else None,
            size=_size(files.events, started),
            outcome=_outcome(files.events),
            iteration=newest[-1].iteration if newest else None,
            train_iterations=started.train_iterations if started else None,
            loss=tuple(_points(newest)),
            evaluations=tuple(_evaluations(files.events)),
            marks=tuple(_marks(files.events, found)),
            recoveries=found,
            alerts=tuple(
                record for record in files.events if isinstance(record, events.AlertRaised | events.AlertCleared)
            ),
            goodput=Goodput.measure((*files.metrics, *files.events)),
            speed=_medians(newest[-SPEED_ITERATIONS:]),
            loads=ExpertLoads.of(files.events),
            placements=tuple(record for record in files.events if isinstance(record, events.PlacementInForce)),
            plans=files.plans,
            others=tuple(record for record in files.events if isinstance(record, OtherRecord)),
            num_jobs=num_jobs,
            num_events=len(files.events),
            num_metrics=len(files.metrics),
            newest_unix_seconds=max(times, default=None),
        )


SPEED_METRICS = ("tokens_per_second_per_gpu", "tflops_per_gpu", "mfu", "memory_peak_bytes")
SPEED_ITERATIONS = 100


def _medians(metrics: Sequence[Metrics]) -> dict[str, float]:
    found = {}
    for name in SPEED_METRICS:
        if values := [float(record.values[name]) for record in metrics if name in record.values]:
            found[name] = statistics.median(values)
    return found


def _size(records: Sequence[Record], started: RunStarted | None) -> str | None:
    if started is None:
        return None
    num_ranks, num_nodes = started.world_size, started.num_nodes
    after = records[max(index for index, record in enumerate(records) if record is started) :]
    for changed in (record for record in after if isinstance(record, events.MembershipChanged)):
        num_ranks, num_nodes = changed.world_size, len(changed.nodes)
    nodes = "" if num_nodes is None else f" on {num_nodes} node{'s' * (num_nodes != 1)}"
    device = "" if started.device is None else f", {started.device}"
    return f"{num_ranks} rank{'s' * (num_ranks != 1)}{nodes}{device}"


def _outcome(records: Sequence[Record]) -> _Outcome:
    kinds = (RunStarted, events.RunFinished, events.RunStopped)
    last = next((record for record in reversed(records) if isinstance(record, kinds)), None)
    if isinstance(last, events.RunFinished):
        return _Outcome(level="good", text=f"finished: {last.reason}")
    if isinstance(last, events.RunStopped):
        meaning = EXIT_CODES.get(last.exit_code)
        code = f"exit code {last.exit_code}" + (f", {meaning}" if meaning else "")
        return _Outcome(level="bad", text=f"stopped: {last.reason} ({code})")
    if last is None:
        return _Outcome(level="open", text="nothing reported yet")
    return _Outcome(level="open", text="no end reported: the run continues, or it ended without a record")


def _points(metrics: Sequence[Metrics]) -> Iterator[tuple[int, float]]:
    for record in metrics:
        if (loss := _finite(record.values.get("loss"))) is not None:
            yield record.iteration, loss


def _evaluations(records: Sequence[Record]) -> list[tuple[int, float]]:
    found = {
        record.iteration: loss
        for record in records
        if isinstance(record, events.Evaluation) and (loss := _finite(record.loss)) is not None
    }
    return sorted(found.items())


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) and abs(value) < _HIGHEST else None


def _marks(records: Sequence[Record], found: Sequence[Recovery]) -> Iterator[Mark]:
    failed: dict[int, list[str]] = {}
    for record in records:
        if isinstance(record, events.RankFailed) and record.iteration is not None:
            failed.setdefault(record.iteration, []).append(f"rank {record.rank} ({record.ending})")
    for iteration, ranks in sorted(failed.items()):
        yield Mark(iteration=iteration, kind="failure", words=f"failed in iteration {iteration}: {', '.join(ranks)}")
    for recovery in found:
        # Ranks of a node that is lost completely may leave no record of their end.
        if recovery.is_failure and not recovery.num_failed_ranks:
            iteration = recovery.iteration + (recovery.num_again or 0) + 1
            yield Mark(iteration=iteration, kind="failure", words=f"failed in iteration {iteration}: {recovery.lost}")
        words = f"{recovery.strategy}, continues after iteration {recovery.iteration}: {recovery.lost}"
        kind = "recovery" if recovery.is_failure else "change"
        yield Mark(iteration=recovery.iteration, kind=kind, words=words, number=recovery.number)
