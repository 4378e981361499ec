"""The timeline of one recovery: what each rank did, from the last iterations before to the first ones after."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ft.telemetry.report.course import Course
from megatron_ft.telemetry.report.episodes import Episode
from megatron_ft.telemetry.report.lanes import KINDS, Lane, places
from megatron_ft.telemetry.report.spans import fill, has_failed, training

_MARGIN = 0.35
"""Share of a recovery's length that is shown before and after it."""
_LEAST_MARGIN_SECONDS = 0.2
FAILURE = "failure"
"""The moment that a recovery's time counts from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """A moment that all ranks share."""

    seconds: float
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What is drawn of a recovery. All times are seconds after its first failure, or after it was asked for."""

    begin: float
    end: float
    lanes: tuple[Lane, ...]
    """By stage, then by rank; what is gone comes last."""
    instants: tuple[Instant, ...]
    """The one that time counts from comes first."""

    @property
    def zero(self) -> str:
        """What time is counted from, in words."""
        return "the failure" if self.instants[0].words == FAILURE else "it was asked for"

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is to be seen, in the order of ``KINDS``."""
        seen = {span.kind for lane in self.lanes for span in lane.spans}
        return tuple(kind for kind in KINDS if kind in seen)


def timeline(episode: Episode, course: Course) -> Timeline:
    """Lanes and moments of a recovery.

    Args:
        course: its times, see ``course.py``.
    """
    lanes = tuple(fill(lane, episode, course) for lane in places(episode, course.begin))
    first, last = course.before[:1], course.after[-1:]
    margin = max(_MARGIN * (course.ready - course.begin), _LEAST_MARGIN_SECONDS)
    trained = [record.time_unix_seconds - course.begin for record in last if record.time_unix_seconds is not None]
    resumed = training(course.after, course.ready, course.begin)[:1]
    ready = max(course.ready - course.begin, *(span.begin for span in resumed), 0.0)
    end = min(max(ready, *trained, 0.0), ready + margin)
    earliest = min((span.begin for span in training(course.before, 0.0, course.begin)), default=-margin)
    return Timeline(
        begin=max(-margin, earliest) if first else -margin,
        end=max(end, 1e-3),
        lanes=lanes,
        instants=tuple(_instants(episode, course)),
    )


def _instants(episode: Episode, course: Course) -> Iterator[Instant]:
    yield Instant(seconds=0.0, words=FAILURE if has_failed(episode) else "asked for")
    if course.decided > course.begin:
        yield Instant(seconds=course.decided - course.begin, words="decided")
    if course.ready > course.decided:
        yield Instant(seconds=course.ready - course.begin, words="ready")
    for first in course.after[:1]:
        if first.time_unix_seconds is not None:
            at = first.time_unix_seconds - course.begin
            yield Instant(seconds=at, words=f"iteration {first.iteration} done")
