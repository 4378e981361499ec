"""A run's events cut into recoveries: which records belong to which way of going on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from megatron_ft import events
from megatron_ft.events import Record
from megatron_ft.telemetry.report.files import Decision
from megatron_ft.telemetry.times import instant

_Kind = TypeVar("_Kind", bound=Record)

MAX_RANKS = 4096
"""Ranks of one membership that a page follows one by one."""

Beginning = events.RanksRestarted | events.RecoveryDecided | events.MembershipChanged | events.StageRecovery
"""Records that name the generation that they begin."""
_FAILURES = (events.RankFailed, events.FailpointHit)
_SOURCES = (events.RecoveryChosen, events.CheckpointLoaded, events.WindowReplayed, events.SnapshotProblem)
"""What ranks continue from; these records do not name their recovery."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The ranks of a membership."""

    nodes: tuple[int | None, ...]
    """The node of each rank; None where no record says it."""

    @classmethod
    def spread(cls, world_size: int, nodes: Sequence[int]) -> "Layout":
        """``world_size`` ranks, evenly over ``nodes`` in their order."""
        each = world_size // len(nodes) if nodes and world_size % len(nodes) == 0 else 0
        if not each:
            return cls(nodes=(None,) * world_size)
        return cls(nodes=tuple(node for node in nodes for _ in range(each)))


@dataclass(slots=True, kw_only=True)
class Episode:
    """One recovery, or one change of membership that was asked for: what was recorded of it."""

    job: int
    """Which of the jobs of this run, from 0: each start of the command is one."""
    generation: int
    """The generation it leads to; 0 where a later job goes on with the run."""
    before: Layout
    """Ranks until then."""
    after: Layout
    """Ranks from then on."""
    records: list[Record] = field(default_factory=list)
    """In the order they were written."""
    decision: Decision | None = None
    """How the control plane decided it."""

    def every(self, kind: type[_Kind]) -> list[_Kind]:
        """Its records of a kind."""
        return [record for record in self.records if isinstance(record, kind)]

    def newest(self, kind: type[_Kind]) -> _Kind | None:
        """Its newest record of a kind."""
        return next(reversed(self.every(kind)), None)

    @property
    def is_restart(self) -> bool:
        """Whether all ranks are new processes, in the same job or in a later one."""
        return self.generation == 0 or any(isinstance(record, events.RanksRestarted) for record in self.records)


@dataclass(slots=True, kw_only=True)
class _Folding:
    episodes: list[Episode] = field(default_factory=list)
    pending: list[Record] = field(default_factory=list)
    """Read, and not yet of a recovery: failures, and what a job that starts continues from."""
    job: int = -1
    has_ended: bool = True
    """Whether the next start of ranks is that of another job."""
    starts: list[float | None] = field(default_factory=list)
    """When each job began."""
    layout: Layout = field(default_factory=lambda: Layout(nodes=()))
    by_generation: dict[int, Episode] = field(default_factory=dict)
    current: Episode | None = None

    def take(self, record: Record) -> None:
        if isinstance(record, events.RunStarted):
            self._start(record)
        elif isinstance(record, (events.RunStopped, events.RunFinished)):
            self.pending.append(record)
            self.current, self.by_generation, self.has_ended = None, {}, True
        elif isinstance(record, Beginning):
            if record.generation > 0:
                self._begin(record)
        elif isinstance(record, _FAILURES):
            self.pending.append(record)
        elif isinstance(record, _SOURCES):
            is_new = self.current is None or bool(self.pending)
            (self.pending if is_new else self.current.records).append(record)  # type: ignore[union-attr]
        elif isinstance(record, (events.RanksReady, events.PlacementInForce)):
            self._add_to_current(record)

    def _start(self, record: events.RunStarted) -> None:
        layout = Layout.spread(_bounded(record.world_size), range(_bounded(record.num_nodes or 0)))
        current = self.current
        if current is not None and current.every(events.RanksRestarted) and not current.every(events.RunStarted):
            self._count_job(record)
            current.after = layout
            current.records.append(record)
        else:
            self.has_ended = True
            self._count_job(record)
            self.by_generation, self.current = {}, None
            if record.resumed_from_iteration is not None:
                self._open(0, layout).records.append(record)
            self.pending = []
        self.layout = layout

    def _count_job(self, record: events.RunStarted) -> None:
        if self.has_ended:
            self.job, self.has_ended = self.job + 1, False
            self.starts.append(instant(record.time_unix_seconds))

    def _begin(self, record: Beginning) -> None:
        episode = self.by_generation.get(record.generation) or self._open(record.generation, self.layout)
        if isinstance(record, events.MembershipChanged):
            episode.after = Layout.spread(_bounded(record.world_size), record.nodes)
            self.layout = episode.after
        episode.records.append(record)

    def _open(self, generation: int, after: Layout) -> Episode:
        job = self.job + self.has_ended
        episode = Episode(job=job, generation=generation, before=self.layout, after=after)
        episode.records, self.pending = self.pending, []
        self.episodes.append(episode)
        self.by_generation[generation] = self.current = episode
        return episode

    def _add_to_current(self, record: events.RanksReady | events.PlacementInForce) -> None:
        if self.current is None:
            return
        if isinstance(record, events.PlacementInForce) and record.reason != "membership":
            return
        if not any(isinstance(earlier, type(record)) for earlier in self.current.records):
            self.current.records.append(record)


def episodes(records: Iterable[Record], decisions: Iterable[Decision]) -> list[Episode]:
    """Recoveries and changes of membership, in the order they began.

    Args:
        records: all events of a run, in the order they were written.
        decisions: of the control plane, in the same order.
    """
    folding = _Folding()
    for record in records:
        folding.take(record)
    found = {(episode.job, episode.generation): episode for episode in folding.episodes}
    for decision in decisions:
        key = (_job_at(folding.starts, decision.time_unix_seconds), decision.generation + 1)
        if key in found:
            _decide(found[key], decision)
    earlier = None
    for episode in folding.episodes:
        if earlier is not None and earlier.job == episode.job:
            episode.before = earlier.after
        is_told = episode.decision is not None or bool(episode.every(events.MembershipChanged))
        if episode.every(events.StageRecovery) and not is_told:
            episode.after = _same_places(episode)
        earlier = episode
    return folding.episodes


def num_jobs(records: Iterable[Record]) -> int:
    """How often the command was started, as far as ranks came to train: restarts of ranks inside a job are none."""
    folding = _Folding()
    for record in records:
        folding.take(record)
    return folding.job + 1


def _decide(episode: Episode, decision: Decision) -> None:
    episode.decision = decision
    if decision.nodes and len(decision.nodes) <= MAX_RANKS:
        episode.after = Layout(nodes=decision.nodes)


def _same_places(episode: Episode) -> Layout:
    """Ranks that keep their numbers: who fills the places of those that failed is not told yet."""
    failed = {record.rank for record in episode.every(events.RankFailed)}
    return Layout(nodes=tuple(None if rank in failed else node for rank, node in enumerate(episode.before.nodes)))


def _job_at(starts: Sequence[float | None], at_seconds: float) -> int:
    begun = [job for job, start in enumerate(starts) if start is not None and start <= at_seconds]
    return max(begun, default=0)


def _bounded(count: int) -> int:
    return min(MAX_RANKS, max(0, count))
