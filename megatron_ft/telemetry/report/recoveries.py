"""Finds the recoveries in a run's records. Determines for each recovery which records belong to it, and its cost."""

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from megatron_ft import events
from megatron_ft.events import Metrics, Record
from megatron_ft.telemetry.goodput import duration, instant
from megatron_ft.telemetry.report.files import Decision

_Kind = TypeVar("_Kind", bound=Record)

# Records come from files. A damaged record may name any number of ranks, each of which would need memory.
MAX_RANKS = 4096
"""Largest number of ranks of one membership that the report stores; further ranks in a record are ignored."""
NUM_AROUND = 3
"""Number of iterations that the report shows before a recovery, and number that it shows after a recovery."""
_NEVER = float("inf")

_Beginning = events.RanksRestarted | events.RecoveryStarted | events.MembershipChanged | events.StageRecovery
"""Kinds of records about the start of a new membership. They contain the membership's generation (its number)."""
_FAILURES = (events.RankFailed, events.FailpointHit)
_SOURCES = (events.CheckpointLoaded, events.WindowReplayed, events.SnapshotProblem)
"""Kinds of records about the state from which ranks continue. Such a record does not name its recovery."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Times of a recovery, in seconds since 1970."""

    begin: float
    """Time of the first failure, or of the request to change the membership."""
    decided: float
    """Time at which ranks began to recover."""
    ready: float
    """Time at which the recovery's last recorded work ended, so that training can continue."""
    before: tuple[Metrics, ...] = ()
    """Metrics of the last iterations before the recovery, in rising order. Empty if no iteration was reported since
    the previous recovery."""
    after: tuple[Metrics, ...] = ()
    """Metrics of the first iterations after the recovery."""

    @property
    def pause_seconds(self) -> float | None:
        """Return the time from ``begin`` until the first iteration after the recovery was reported."""
        first = self.after[0].time_unix_seconds if self.after else None
        return None if first is None else max(0.0, first - self.begin)


@dataclass(slots=True, kw_only=True)
class Recovery:
    """One recovery, or one requested change of membership, with all records that belong to it."""

    job: int
    """Job in which the recovery happened: its index among all jobs of the run, counted from 0."""
    generation: int
    """Generation of the membership that begins with the recovery; 0 if a new job continues the run."""
    nodes_before: tuple[int | None, ...]
    """Node on which each rank ran before the recovery, by rank; None if the records do not show the node."""
    nodes_after: tuple[int | None, ...]
    """Node on which each rank runs after the recovery, by rank; None if the records do not show the node."""
    number: int = 0
    """Index of the recovery among the recoveries of the run, counted from 1."""
    records: list[Record] = field(default_factory=list)
    """Records that belong to the recovery, in the order of writing."""
    decision: Decision | None = None
    """Decision of the controller that led to the recovery; None if the run's folder has no such decision."""
    course: Course | None = None
    """Times of the recovery; None if its records contain no times."""
    num_again: int | None = None
    """Number of iterations that were reported before the recovery and trained again after it. None if no record shows
    which iterations were reported before it."""

    def every(self, kind: type[_Kind]) -> list[_Kind]:
        """Return all records of the recovery that have the class ``kind``."""
        return [record for record in self.records if isinstance(record, kind)]

    def newest(self, kind: type[_Kind]) -> _Kind | None:
        """Return the newest record of the recovery that has the class ``kind``; None if there is none."""
        return next(reversed(self.every(kind)), None)

    @property
    def is_new_job(self) -> bool:
        """Return whether a new job continued the run."""
        return self.generation == 0

    @property
    def is_restart(self) -> bool:
        """Return whether all ranks after the recovery are new processes, in the same job or in a later job."""
        return self.is_new_job or bool(self.every(events.RanksRestarted))

    @property
    def is_failure(self) -> bool:
        """Return whether a loss of ranks or nodes caused the recovery. The result is false for a change of membership
        on request, and for a new job that follows a job without a recorded failure of a rank."""
        if self.is_new_job or self.every(events.RankFailed):
            return bool(self.every(events.RankFailed))
        lost = self.decision is not None and bool(self.decision.lost_nodes)
        return lost or self.is_restart or bool(self.every(events.StageRecovery))

    @property
    def lost(self) -> str:
        """Describe the nodes and ranks that were lost, e.g. ``node 2; ranks 4-5 (SIGKILL)``, and count the ranks that
        failed as a consequence. If none was lost, return why the recovery or change of membership happened."""
        failures = {record.rank: record for record in self.every(events.RankFailed)}
        causes: dict[str, list[int]] = {}
        for rank, record in failures.items():
            if record.first or record.signal:
                is_raised = record.signal is None and record.exit_code is None
                causes.setdefault("raised" if is_raised else record.ending, []).append(rank)
        nodes = () if self.decision is None else self.decision.lost_nodes
        named = [f"node{'s' * (len(nodes) > 1)} {ranges(nodes)}"] if nodes else []
        named += [f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)} ({ending})" for ending, ranks in causes.items()]
        others = len(failures) - sum(map(len, causes.values()))
        if named and others:
            named.append(f"{others} more rank{'s' * (others != 1)} as a consequence")
        return "; ".join(named) or self._reason

    @property
    def _reason(self) -> str:
        for kind in (events.MembershipChanged, events.RanksRestarted, events.RunStopped, events.RunFinished):
            if (record := self.newest(kind)) is not None:
                return record.reason
        if self.is_new_job:
            return "the previous job ended without a record"
        return "not known" if self.decision is None else self.decision.reason

    @property
    def strategy(self) -> str:
        """Return the name of the strategy that recovered the state; ``RecoveryStarted`` lists the names."""
        started = self.newest(events.RecoveryStarted)
        if started is None and self.every(events.CheckpointLoaded):
            return "checkpoint"  # earlier versions reported nothing else of a new job that loads a checkpoint
        return "not known" if started is None else started.strategy

    @property
    def iteration(self) -> int:
        """Return the last iteration that the recovered state includes. Ranks continue with the iteration after it."""
        for kind in (events.RecoveryStarted, events.MembershipChanged, events.StageRecovery):
            if not self.is_new_job and (record := self.newest(kind)) is not None:
                return record.iteration
        started = self.newest(events.RunStarted)
        return 0 if started is None else started.resumed_from_iteration or 0

    @property
    def seconds(self) -> float | None:
        """Return the time from the decision to recover until all ranks were ready to train."""
        changed = self.newest(events.MembershipChanged)
        if changed is not None and not self.every(events.StageRecovery):
            return duration(changed.seconds)
        if self.is_new_job:
            ready = self.newest(events.RanksReady)
            return None if ready is None else duration(ready.seconds)
        return None if self.course is None else self.course.ready - self.course.decided

    @property
    def pause_seconds(self) -> float | None:
        """Return the time from the first failure until the next iteration was reported."""
        return None if self.course is None or self.is_new_job else self.course.pause_seconds

    @property
    def num_replayed(self) -> int:
        """Return the largest number of iterations that a rank replayed from snapshot windows or upstream logs."""
        work = [*self.every(events.StageRecovery), *self.every(events.WindowReplayed)]
        return max((record.num_iterations for record in work), default=0)

    @property
    def num_failed_ranks(self) -> int:
        """Return the number of ranks with a record of their failure. The ranks of a lost node may lack this record, so
        more ranks may have failed."""
        return len({record.rank for record in self.every(events.RankFailed)})

    @property
    def declined(self) -> tuple[str, ...]:
        """Return a text for each recovery strategy and each source of state that was not used, with the reason."""
        started, decision = self.newest(events.RecoveryStarted), self.decision
        in_processes = None if decision is None else decision.declined
        head = () if in_processes is None else (f"continuing without a restart: {in_processes}",)
        return head if started is None else head + started.declined

    @classmethod
    def find(
        cls, records: Iterable[Record], decisions: Iterable[Decision], metrics: Sequence[Metrics]
    ) -> "tuple[tuple[Recovery, ...], int]":
        """Return all recoveries and changes of membership of a run, oldest first, and the run's number of jobs.

        Args:
            records: All events of the run, in the order of writing.
            decisions: Decisions of the controller, in the order of writing.
            metrics: All metrics records of the run, in the order of writing.
        """
        folding = _Folding()
        for record in records:
            folding.take(record)
        recoveries = folding.recoveries
        by_generation = {(recovery.job, recovery.generation): recovery for recovery in recoveries}
        for decision in decisions:
            # Generations count from 0 in every job, so the time of a decision determines its job.
            begun = [
                job for job, at in enumerate(folding.starts) if at is not None and at <= decision.time_unix_seconds
            ]
            recovery = by_generation.get((max(begun, default=0), decision.generation + 1))
            if recovery is not None:
                recovery.decision = decision
                if decision.nodes and len(decision.nodes) <= MAX_RANKS:
                    recovery.nodes_after = decision.nodes
        _join_layouts(recoveries)
        _add_times(recoveries, metrics)
        return tuple(recoveries), folding.job + 1


def ranges(numbers: Sequence[int]) -> str:
    """Format numbers as ranges: ``1, 4-7``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _join_layouts(recoveries: Sequence[Recovery]) -> None:
    earlier = None
    for recovery in recoveries:
        if earlier is not None and earlier.job == recovery.job:
            recovery.nodes_before = earlier.nodes_after
        is_known = recovery.decision is not None or bool(recovery.every(events.MembershipChanged))
        if recovery.every(events.StageRecovery) and not is_known:
            # Ranks keep their numbers. No record names the nodes of the new processes yet.
            failed = {record.rank for record in recovery.every(events.RankFailed)}
            nodes = enumerate(recovery.nodes_before)
            recovery.nodes_after = tuple(None if rank in failed else node for rank, node in nodes)
        earlier = recovery


def _add_times(recoveries: Sequence[Recovery], metrics: Sequence[Metrics]) -> None:
    timed = sorted(
        ((at, record) for record in metrics if (at := instant(record.time_unix_seconds)) is not None),
        key=lambda pair: pair[0],
    )
    ats, trained = [at for at, _ in timed], [record for _, record in timed]
    begins = [_beginning(recovery) for recovery in recoveries]
    untils = [*(_NEVER if begin is None else begin for begin in begins[1:]), _NEVER]
    since, earlier = -_NEVER, None
    for number, (recovery, begin, until) in enumerate(zip(recoveries, begins, untils, strict=False), 1):
        recovery.number = number
        if begin is not None:
            decided = max(begin, min(_decided(recovery), default=begin))
            first, last = bisect.bisect_right(ats, since), bisect.bisect_right(ats, decided)
            end = bisect.bisect_right(ats, until)
            # The last iteration before a change can be reported after the decision.
            while last < end and trained[last].iteration <= recovery.iteration:
                last += 1
            recovery.course = Course(
                begin=begin,
                decided=decided,
                ready=max(decided, max(_over(recovery), default=decided)),
                before=tuple(trained[max(first, last - NUM_AROUND) : last]),
                after=tuple(trained[last : min(end, last + NUM_AROUND)]),
            )
        recovery.num_again = _num_again(recovery, earlier)
        since, earlier = -_NEVER if begin is None else begin, recovery


def _num_again(recovery: Recovery, earlier: Recovery | None) -> int | None:
    course = recovery.course
    if course is not None and course.before:
        reported = [record.iteration for record in course.before]
    elif course is not None and earlier is not None:
        reported = [earlier.iteration]  # nothing was trained since
    else:
        failed = recovery.every(events.RankFailed)
        reported = [record.iteration - 1 for record in failed if record.iteration is not None]
    return max(0, max(reported) - recovery.iteration) if reported else None


def _beginning(recovery: Recovery) -> float | None:
    # Returns the time of the first failure or of the request, in seconds since 1970; None if no record has a time.
    faults = [record for record in recovery.every(events.FailpointHit) if record.action != "delay"]
    failures: list[Record] = [*faults, *recovery.every(events.RankFailed)]
    return min([*_times(failures), *_decided(recovery)], default=None)


def _decided(recovery: Recovery) -> Iterator[float]:
    if recovery.decision is not None and (at := instant(recovery.decision.time_unix_seconds)) is not None:
        yield at
    yield from _times(recovery.every(events.RanksRestarted))
    yield from _times(_started(recovery))
    for changed in recovery.every(events.MembershipChanged):
        yield from (at - (duration(changed.seconds) or 0.0) for at in _times([changed]))
    for work in recovery.every(events.StageRecovery):
        if (began := instant(work.began_unix_seconds)) is not None:
            yield began


def _over(recovery: Recovery) -> Iterator[float]:
    yield from _times(_started(recovery))
    for kind in (events.MembershipChanged, events.RanksReady, events.WindowReplayed):
        yield from _times(recovery.every(kind))
    for work in recovery.every(events.StageRecovery):
        began, length = instant(work.began_unix_seconds), duration(work.seconds)
        if began is not None and length is not None:
            yield began + length


def _started(recovery: Recovery) -> list[Record]:
    # A later job of the run has no timeline, because its ranks do not continue ranks of an earlier job.
    return [record for record in recovery.every(events.RecoveryStarted) if record.generation > 0]


def _times(records: Sequence[Record]) -> list[float]:
    return [at for record in records if (at := instant(record.time_unix_seconds)) is not None]


@dataclass(slots=True, kw_only=True)
class _Folding:
    """Assigns the records of a run to recoveries. Records must arrive in the order of writing."""

    recoveries: list[Recovery] = field(default_factory=list)
    pending: list[Record] = field(default_factory=list)
    """Records of failures, ends of jobs and loaded state. They belong to the next recovery, if one follows."""
    job: int = -1
    has_ended: bool = True
    """Whether the newest job has ended. If so, the next ``RunStarted`` record belongs to a new job."""
    starts: list[float | None] = field(default_factory=list)
    """Time at which each job of the run began."""
    nodes: tuple[int | None, ...] = ()
    """Node on which each rank of the current membership runs, by rank; None if the records do not show the node."""
    by_generation: dict[int, Recovery] = field(default_factory=dict)
    current: Recovery | None = None

    def take(self, record: Record) -> None:
        if isinstance(record, events.RunStarted):
            self._start(record)
        elif isinstance(record, (events.RunStopped, events.RunFinished)):
            self.pending.append(record)
            self.current, self.by_generation, self.has_ended = None, {}, True
        elif isinstance(record, _Beginning) and record.generation > 0:
            recovery = self.by_generation.get(record.generation) or self._open(record.generation, self.nodes)
            if isinstance(record, events.MembershipChanged):
                self.nodes = recovery.nodes_after = _spread(record.world_size, record.nodes)
            recovery.records.append(record)
        elif isinstance(record, _FAILURES):
            self.pending.append(record)
        elif isinstance(record, (*_SOURCES, events.RecoveryStarted)):
            # ``RecoveryStarted`` of generation 0 belongs to the job that starts next. Earlier versions also wrote it in
            # restarts.
            is_of_next = isinstance(record, events.RecoveryStarted) and not self._is_restarting
            if self.current is None or self.pending or is_of_next:
                self.pending.append(record)
            else:
                self.current.records.append(record)
        elif isinstance(record, (events.RanksReady, events.PlacementInForce)):
            is_due = not isinstance(record, events.PlacementInForce) or record.reason == "membership"
            # The first record of each kind belongs to the recovery, and later ones to training.
            if is_due and self.current is not None and not self.current.every(type(record)):
                self.current.records.append(record)

    @property
    def _is_restarting(self) -> bool:
        recovery = self.current
        is_restart = recovery is not None and bool(recovery.every(events.RanksRestarted))
        return is_restart and not recovery.every(events.RunStarted)

    def _start(self, record: events.RunStarted) -> None:
        nodes = _spread(record.world_size, range(_bounded(record.num_nodes or 0)))
        if self.current is not None and self._is_restarting:
            self._count_job(record)
            self.current.nodes_after = nodes
            self.current.records.append(record)
        else:
            self.has_ended = True
            self._count_job(record)
            self.by_generation, self.current = {}, None
            if record.resumed_from_iteration is not None:
                self._open(0, nodes).records.append(record)
            self.pending = []
        self.nodes = nodes

    def _count_job(self, record: events.RunStarted) -> None:
        if self.has_ended:
            self.job, self.has_ended = self.job + 1, False
            self.starts.append(instant(record.time_unix_seconds))

    def _open(self, generation: int, nodes_after: tuple[int | None, ...]) -> Recovery:
        job = self.job + self.has_ended
        recovery = Recovery(job=job, generation=generation, nodes_before=self.nodes, nodes_after=nodes_after)
        recovery.records, self.pending = self.pending, []
        self.recoveries.append(recovery)
        self.by_generation[generation] = self.current = recovery
        return recovery


def _spread(world_size: int, nodes: Sequence[int]) -> tuple[int | None, ...]:
    # Returns the node of each of ``world_size`` ranks, evenly divided over ``nodes``; None for each rank if the
    # division is uneven.
    world_size = _bounded(world_size)
    each = world_size // len(nodes) if nodes and world_size % len(nodes) == 0 else 0
    return tuple(node for node in nodes for _ in range(each)) if each else (None,) * world_size


def _bounded(count: int) -> int:
    return min(MAX_RANKS, max(0, count))
