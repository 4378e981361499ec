"""What fills a lane: when a rank trained, stood, computed again."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_ft import events
from megatron_ft.events import Metrics
from megatron_ft.telemetry.report.course import Course
from megatron_ft.telemetry.report.episodes import Episode
from megatron_ft.telemetry.report.lanes import KINDS, Lane, Span
from megatron_ft.telemetry.times import duration, instant
from megatron_ft.telemetry.wording import seconds, size


def fill(lane: Lane, episode: Episode, course: Course) -> Lane:
    """``lane`` with what its rank did."""
    spans: list[Span] = []
    if lane.previous is not None:
        end = float("inf") if lane.died_seconds is None else lane.died_seconds
        spans += [_until(span, end) for span in _before(episode, course) if span.begin < end]
    if lane.rank is not None:
        spans += _while_going_on(lane, episode, course)
        spans += training(course.after, course.ready, course.begin)
    return replace(lane, spans=tuple(spans))


def _until(span: Span, end: float) -> Span:
    return replace(span, end=max(span.begin, min(span.end, end)))


def _before(episode: Episode, course: Course) -> list[Span]:
    """Iterations before, and the one that the failure broke off."""
    spans = training(course.before, 0.0, course.begin)
    newest = course.before[-1].time_unix_seconds if course.before else None
    if has_failed(episode) and spans and newest is not None and course.begin > newest:
        iteration = course.before[-1].iteration + 1
        words = f"iteration {iteration} was under way"
        spans.append(Span(kind="unfinished", begin=newest - course.begin, end=0.0, label=str(iteration), words=words))
    return spans


def has_failed(episode: Episode) -> bool:
    """Whether something was lost; otherwise the change was asked for, or another job went on with the run."""
    if episode.generation == 0:
        return bool(episode.every(events.RankFailed))
    lost = episode.decision is not None and episode.decision.lost_nodes
    is_localized = bool(episode.every(events.StageRecovery))
    return bool(lost) or is_localized or episode.is_restart or bool(episode.every(events.RankFailed))


def training(metrics: Sequence[Metrics], from_seconds: float, zero: float) -> list[Span]:
    """Trained iterations, none of which began before ``from_seconds`` or before the end of the one ahead of it.

    Args:
        zero: the time that spans are counted from.
    """
    spans: list[Span] = []
    free_from = from_seconds
    for record in metrics:
        end, length = record.time_unix_seconds, duration(float(record.values.get("iteration_seconds", -1.0)))
        if end is None:
            continue
        begin = max(free_from, end - length) if length is not None else free_from
        if 0.0 < begin <= end:
            words = f"iteration {record.iteration} trained"
            spans.append(
                Span(kind="trains", begin=begin - zero, end=end - zero, label=str(record.iteration), words=words)
            )
        free_from = max(free_from, end)
    return spans


def _while_going_on(lane: Lane, episode: Episode, course: Course) -> Iterator[Span]:
    """From the decision until the rank trains: what is behind comes first."""
    for changed in episode.every(events.MembershipChanged):
        yield from _ended("forms", changed.time_unix_seconds, changed.seconds, course, "", "the membership forms")
    if episode.is_restart:
        words = "processes start and build their part"
        yield from _ended("starts", course.ready, course.ready - course.decided, course, "", words)
    for loaded in episode.every(events.CheckpointLoaded):
        words = f"loads the checkpoint of iteration {loaded.iteration}"
        yield from _ended("loads", loaded.time_unix_seconds, loaded.seconds, course, f"to {loaded.iteration}", words)
    if lane.work is not None:
        yield from _own(lane.work, course)
    elif not episode.every(events.StageRecovery):
        for replayed in episode.every(events.WindowReplayed):
            words = f"replays iterations {replayed.start_iteration + 1} to {replayed.iteration}"
            label = f"{replayed.num_iterations} iterations"
            yield from _ended("replays", replayed.time_unix_seconds, replayed.seconds, course, label, words)


def _ended(
    kind: str, end: float | None, length: float | None, course: Course, label: str, words: str
) -> Iterator[Span]:
    """What is known by its end and its length."""
    until, length = instant(end), duration(length)
    if until is not None and length is not None:
        relative = until - course.begin
        words = f"{words}: {seconds(length)}"
        yield Span(kind=kind, begin=relative - length, end=relative, label=label, words=words)


def _own(work: events.StageRecovery, course: Course) -> Iterator[Span]:
    began, length = instant(work.began_unix_seconds), duration(work.seconds)
    if began is None or length is None:
        return
    label = f"{work.num_iterations} iterations" if work.role == "replays" else work.role
    begin = began - course.begin
    kind = work.role if work.role in KINDS else "other"
    yield Span(kind=kind, begin=begin, end=begin + length, label=label, words=f"{told(work)}: {seconds(length)}")


def told(work: events.StageRecovery) -> str:
    """What a rank did in a recovery, in words."""
    if work.role == "replays":
        passes = f"{work.num_forward_passes} forward passes"
        return f"replays iterations {work.start_iteration + 1} to {work.iteration}, {passes}, {moved(work)}"
    return f"{work.role}, {moved(work)}" if work.bytes_moved else work.role


def moved(work: events.StageRecovery) -> str:
    """``14.2 MB sent``."""
    direction = {"replays": "received", "serves": "sent"}.get(work.role, "moved")
    return f"{size(work.bytes_moved)} {direction}"
