"""The recoveries of a run as a page tells them: what was lost, which rung served, what it cost."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_ft import events
from megatron_ft.events import Metrics
from megatron_ft.telemetry.report.course import Course, Times, beginning, course
from megatron_ft.telemetry.report.episodes import Episode
from megatron_ft.telemetry.report.spans import has_failed
from megatron_ft.telemetry.report.story import Timeline, timeline
from megatron_ft.telemetry.times import duration, instant
from megatron_ft.telemetry.wording import note

_NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing that was recorded of a recovery."""

    seconds: float | None
    """After the first failure; None where its record has no time."""
    level: str
    """As ``wording.Note`` has it."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One way of going on: after a failure, in another job, or because nodes were to join or leave."""

    number: int
    """Counted from 1 over the whole run."""
    generation: int
    """The generation that it begins; 0 for a job that goes on with the run."""
    is_failure: bool
    """Whether something was lost; otherwise the change was asked for."""
    lost: str
    """What was lost or changed, in words."""
    rung: str
    """What state it went on from."""
    iteration: int
    """Newest iteration of that state."""
    seconds: float | None
    """From the decision until all was ready."""
    pause_seconds: float | None
    """From the first failure until the first iteration after it was reported."""
    num_replayed: int
    """Iterations replayed from windows or logs by the rank that replayed most."""
    num_failed_ranks: int
    """Ranks that are known to have failed; those of a node that is lost may go without a word."""
    num_again: int | None
    """Iterations that had been reported and were trained once more; None where that is not known."""
    declined: tuple[str, ...]
    """What was not used, each with its reason."""
    steps: tuple[Step, ...]
    timeline: Timeline | None
    """None where records have no times, and for a job that goes on with the run."""


def recoveries(episodes: Sequence[Episode], metrics: Sequence[Metrics]) -> tuple[Recovery, ...]:
    """All recoveries of a run, in the order they began.

    Args:
        metrics: of all attempts, in the order they were written.
    """
    times = Times(metrics)
    begins = [beginning(episode) for episode in episodes]
    untils = [*(_NEVER if begin is None else begin for begin in begins[1:]), _NEVER]
    sinces = [-_NEVER, *(-_NEVER if begin is None else begin for begin in begins)]
    found: list[Recovery] = []
    for episode, since, until in zip(episodes, sinces, untils, strict=False):
        found.append(_recovery(episode, course(episode, times, since, until), found[-1] if found else None))
    return tuple(found)


def _recovery(episode: Episode, run: Course | None, earlier: Recovery | None) -> Recovery:
    iteration = _iteration(episode)
    is_resume = episode.generation == 0
    return Recovery(
        number=1 if earlier is None else earlier.number + 1,
        generation=episode.generation,
        is_failure=has_failed(episode),
        lost=_lost(episode),
        rung=_rung(episode),
        iteration=iteration,
        seconds=_seconds(episode, run),
        pause_seconds=None if run is None or is_resume else run.pause_seconds,
        num_replayed=_num_replayed(episode),
        num_failed_ranks=len({record.rank for record in episode.every(events.RankFailed)}),
        num_again=_num_again(episode, run, iteration, earlier),
        declined=tuple(_declined(episode)),
        steps=tuple(_steps(episode, run)),
        timeline=None if run is None or is_resume else timeline(episode, run),
    )


def _iteration(episode: Episode) -> int:
    decided, changed = episode.newest(events.RecoveryDecided), episode.newest(events.MembershipChanged)
    for record in (decided, changed, episode.newest(events.StageRecovery)):
        if record is not None:
            return record.iteration
    started = episode.newest(events.RunStarted)
    return 0 if started is None else started.resumed_from_iteration or 0


def _rung(episode: Episode) -> str:
    if (decided := episode.newest(events.RecoveryDecided)) is not None:
        return decided.rung
    if episode.every(events.StageRecovery):
        return "localized"
    if episode.every(events.MembershipChanged):
        return "replicas"
    chosen = episode.newest(events.RecoveryChosen)
    if chosen is not None:
        return chosen.source
    return "checkpoint" if episode.every(events.CheckpointLoaded) else "not known"


def _lost(episode: Episode) -> str:
    """``node 2; ranks 4-5 (SIGKILL)``, with those that failed because of others counted only; else the reason."""
    failures = {record.rank: record for record in episode.every(events.RankFailed)}
    causes: dict[str, list[int]] = {}
    for rank, record in failures.items():
        if record.first or record.signal:
            causes.setdefault(record.signal or _ending(record), []).append(rank)
    nodes = () if episode.decision is None else episode.decision.lost_nodes
    named = [f"node{'s' * (len(nodes) > 1)} {ranges(nodes)}"] if nodes else []
    named += [f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)} ({ending})" for ending, ranks in causes.items()]
    others = len(failures) - sum(map(len, causes.values()))
    if named and others:
        named.append(f"{others} more rank{'s' * (others != 1)} because of it")
    return "; ".join(named) or _reason(episode)


def ranges(numbers: Sequence[int]) -> str:
    """``1, 4-7``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _ending(record: events.RankFailed) -> str:
    return "raised" if record.exit_code is None else f"exit code {record.exit_code}"


def _reason(episode: Episode) -> str:
    ended = episode.newest(events.RunStopped) or episode.newest(events.RunFinished)
    for record in (episode.newest(events.MembershipChanged), episode.newest(events.RanksRestarted), ended):
        if record is not None:
            return record.reason
    if episode.generation == 0:
        return "the job before ended without a word"
    return "not known" if episode.decision is None else episode.decision.reason


def _seconds(episode: Episode, run: Course | None) -> float | None:
    """As the membership says it; longer where stages were brought back after it, from the times of records else."""
    changed = episode.newest(events.MembershipChanged)
    if changed is not None and not episode.every(events.StageRecovery):
        return duration(changed.seconds)
    if episode.generation == 0:
        ready = episode.newest(events.RanksReady)
        return None if ready is None else duration(ready.seconds)
    return None if run is None else run.ready - run.decided


def _num_replayed(episode: Episode) -> int:
    stages = [record.num_iterations for record in episode.every(events.StageRecovery)]
    windows = [record.num_iterations for record in episode.every(events.WindowReplayed)]
    return max([*stages, *windows], default=0)


def _num_again(episode: Episode, run: Course | None, iteration: int, earlier: Recovery | None) -> int | None:
    if run is not None and run.before:
        return max(0, max(record.iteration for record in run.before) - iteration)
    reported = [record.iteration - 1 for record in episode.every(events.RankFailed) if record.iteration is not None]
    if run is not None and earlier is not None:
        reported = [earlier.iteration]  # nothing was trained since
    return max(0, max(reported) - iteration) if reported else None


def _declined(episode: Episode) -> Iterator[str]:
    if episode.decision is not None and episode.decision.declined is not None:
        yield f"going on without a restart: {episode.decision.declined}"
    for record in episode.every(events.RecoveryDecided)[-1:] or episode.every(events.RecoveryChosen)[-1:]:
        yield from record.declined


def _steps(episode: Episode, run: Course | None) -> list[Step]:
    """In the order of their times; those without one come last."""
    begin = None if run is None else run.begin
    steps = [
        Step(seconds=_after(begin, record.time_unix_seconds), level=told.level, text=told.text)
        for record in episode.records
        if (told := note(record)) is not None
    ]
    if episode.decision is not None:
        text = episode.decision.declined or f"decided where to go on: {episode.decision.reason}"
        level = "warning" if episode.decision.declined else "info"
        steps.append(Step(seconds=_after(begin, episode.decision.time_unix_seconds), level=level, text=text))
    for first in () if run is None else run.after[:1]:
        text = f"first iteration after it: {first.iteration}"
        steps.append(Step(seconds=_after(begin, first.time_unix_seconds), level="good", text=text))
    return sorted(steps, key=lambda step: _NEVER if step.seconds is None else step.seconds)


def _after(begin: float | None, at: float | None) -> float | None:
    known = instant(at)
    return None if begin is None or known is None else known - begin
