"""When a recovery began, was decided and was over, and which iterations lie around it."""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_ft import events
from megatron_ft.events import Metrics, Record
from megatron_ft.telemetry.report.episodes import Episode
from megatron_ft.telemetry.times import duration, instant

NUM_AROUND = 3
"""Iterations that are shown before and after a recovery."""
_HARMLESS = ("delay",)
"""Injected faults that nothing has to recover from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A recovery's times, in seconds since 1970."""

    begin: float
    """The first failure, or when the change was asked for."""
    decided: float
    """When ranks began to go on."""
    ready: float
    """When the last of what is known of it was over."""
    before: tuple[Metrics, ...] = ()
    """The last iterations before, the newest last; none where nothing was trained since the recovery ahead of it."""
    after: tuple[Metrics, ...] = ()
    """The first iterations after."""

    @property
    def pause_seconds(self) -> float | None:
        """From the beginning until the first iteration after it was reported."""
        first = self.after[0].time_unix_seconds if self.after else None
        return None if first is None else max(0.0, first - self.begin)


class Times:
    """Metrics by the time they were reported; those without one are left out."""

    def __init__(self, metrics: Sequence[Metrics]) -> None:
        """``metrics``: of all attempts, in the order they were written."""
        timed = [(at, record) for record in metrics if (at := instant(record.time_unix_seconds)) is not None]
        timed.sort(key=lambda pair: pair[0])
        self._times = [at for at, _ in timed]
        self._metrics = [record for _, record in timed]

    def between(self, begin: float, end: float, most: int) -> tuple[Metrics, ...]:
        """Those after ``begin`` and up to ``end``: the first ``most`` of them, or the last ``-most``."""
        first = bisect.bisect_right(self._times, begin)
        last = bisect.bisect_right(self._times, end)
        if most < 0:
            return tuple(self._metrics[max(first, last + most) : last])
        return tuple(self._metrics[first : min(last, first + most)])


def course(episode: Episode, times: Times, since: float, until: float) -> Course | None:
    """The times of a recovery; None where its records have none.

    Args:
        since: when the one ahead of it began, in seconds since 1970.
        until: when the next one began.
    """
    begin = beginning(episode)
    if begin is None:
        return None
    decided = max(begin, min(_decided(episode), default=begin))
    ready = max(decided, max(_over(episode), default=decided))
    before = times.between(since, decided, -NUM_AROUND)
    return Course(
        begin=begin, decided=decided, ready=ready, before=before, after=times.between(decided, until, NUM_AROUND)
    )


def beginning(episode: Episode) -> float | None:
    """The first failure, or when the change was asked for, in seconds since 1970; None where nothing says it."""
    return min([*_failed(episode), *_decided(episode)], default=None)


def _failed(episode: Episode) -> Iterator[float]:
    for record in episode.every(events.FailpointHit):
        if record.action not in _HARMLESS:
            yield from _at(record)
    for failed in episode.every(events.RankFailed):
        yield from _at(failed)


def _decided(episode: Episode) -> Iterator[float]:
    if episode.decision is not None and (at := instant(episode.decision.time_unix_seconds)) is not None:
        yield at
    for record in [*episode.every(events.RanksRestarted), *episode.every(events.RecoveryDecided)]:
        yield from _at(record)
    for changed in episode.every(events.MembershipChanged):
        yield from _at(changed, before=changed.seconds)
    for work in episode.every(events.StageRecovery):
        if (began := instant(work.began_unix_seconds)) is not None:
            yield began


def _over(episode: Episode) -> Iterator[float]:
    kinds = (events.RecoveryDecided, events.MembershipChanged, events.RanksReady, events.WindowReplayed)
    for kind in kinds:
        for record in episode.every(kind):
            yield from _at(record)
    for work in episode.every(events.StageRecovery):
        began, length = instant(work.began_unix_seconds), duration(work.seconds)
        if began is not None and length is not None:
            yield began + length


def _at(record: Record, before: float = 0.0) -> Iterator[float]:
    """When a record was stamped, less ``before`` seconds where these can be."""
    at = instant(record.time_unix_seconds)
    if at is not None:
        yield at - (duration(before) or 0.0)
