"""Detects lost nodes by missing heartbeats, and hanging ranks by missing progress. Callers pass the time."""

import statistics
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from megatron_ft.control.membership.events import JobHung, NodeLost, RankHung
from megatron_ft.control.membership.state import TRAINING, MembershipPolicy, State, layout_of
from megatron_ft.failpoints import ITERATION_PHASES

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorPolicy:
    """Limits of the detector. ``DetectorConfig`` describes the fields."""

    heartbeat_interval_seconds: float = 1.0
    heartbeat_timeout_seconds: float = 10.0
    vanished_seconds: float | None = 2.0
    lost_controller_seconds: float = 60.0
    hang_seconds: float | None = 600.0
    hang_iterations: float | None = 10.0
    min_hang_seconds: float = 30.0


class SignsOfLife(Generic[Key]):
    """Finds senders of heartbeats whose last heartbeat is too old. A key identifies each sender. The caller passes all
    times, in seconds of one clock."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._heard: dict[Key, float] = {}
        self._asked_at: float | None = None
        self.was_held_up = False
        """Whether more than half of the timeout passed between the last two calls of ``silent``."""

    def hear(self, key: Key, now: float) -> None:
        """Record a heartbeat of the sender ``key``, and expect further heartbeats. Safe in any thread."""
        self._heard[key] = now

    def forget(self, key: Key) -> None:
        """Expect no more heartbeats of the sender ``key``."""
        self._heard.pop(key, None)

    def seconds_since(self, key: Key, now: float) -> float | None:
        """Return the time since the last heartbeat of the sender ``key``, or None for an unknown sender."""
        heard = self._heard.get(key)
        return None if heard is None else now - heard

    def silent(self, now: float) -> list[Key]:
        """Return the keys of senders whose heartbeat is overdue. Call this method several times within the timeout.

        If more than half of the timeout has passed since the last call, the caller itself may have missed heartbeats.
        In that case, the timeout of each key begins again.
        """
        self.was_held_up = self._asked_at is not None and now - self._asked_at > self._timeout_seconds / 2
        self._asked_at = now
        if self.was_held_up:
            # The keys are copied, because other threads record heartbeats meanwhile.
            for key in list(self._heard):
                self.hear(key, now)
        return [key for key, heard in list(self._heard.items()) if now - heard >= self._timeout_seconds]


@dataclass(frozen=True, slots=True)
class Place:
    """Progress of a rank: iteration, phase, and the number of the rank's report in this iteration (``step``)."""

    iteration: int
    phase: str
    step: int


FIRST_ITERATIONS = 3
"""``hang_iterations`` applies when this many iterations of a membership were measured. The first ones are slower."""
_MEASURED_ITERATIONS = 50


class Detector:
    """Finds nodes whose agent does not answer, and ranks without progress."""

    def __init__(self, membership: MembershipPolicy, policy: DetectorPolicy) -> None:
        self._membership = membership
        self._policy = policy
        self._nodes = SignsOfLife[int](policy.heartbeat_timeout_seconds)
        self._places: dict[int, Place] = {}
        self._progress_at = 0.0
        self._generation: int | None = None
        self._newest: tuple[int, float] | None = None
        self._durations: deque[float] = deque(maxlen=_MEASURED_ITERATIONS)

    def hear(self, node: int, now: float) -> None:
        """Record a call of a node's agent. May be called in any thread."""
        self._nodes.hear(node, now)

    def forget(self, node: int) -> None:
        """Forget a node whose agent has ended."""
        self._nodes.forget(node)

    def progress(self, rank: int, place: Place, now: float) -> None:
        """Record the progress of a rank."""
        self._places[rank] = place
        self._progress_at = now
        if self._newest is None or place.iteration > self._newest[0]:
            if self._newest is not None:
                # Agents report once per heartbeat, so several iterations may have passed.
                self._durations.append((now - self._newest[1]) / (place.iteration - self._newest[0]))
            self._newest = (place.iteration, now)

    def place(self, rank: int) -> Place | None:
        """Return the newest progress that a rank has reported, or None if it has reported none."""
        return self._places.get(rank)

    def seconds_since_word(self, node: int, now: float) -> float | None:
        """Return the seconds since the last call of a node's agent, or None if the node has no agent."""
        return self._nodes.seconds_since(node, now)

    def look(self, state: State, now: float, at_seconds: float) -> list[NodeLost | RankHung | JobHung]:
        """Return events for the losses and hangs that were found since the last call.

        Args:
            now: present time, on the same clock as in all other calls.
            at_seconds: present time in seconds since 1970.
        """
        found: list[NodeLost | RankHung | JobHung] = []
        limit = f"(detector.heartbeat_timeout_seconds={self._policy.heartbeat_timeout_seconds:g})"
        for node in self._nodes.silent(now):
            self.forget(node)
            found.append(NodeLost(node, at_seconds, f"no heartbeat from its agent {limit}"))
        if self._nodes.was_held_up:
            # Reports of progress may have arrived but not been processed yet, so this limit begins again, too.
            self._progress_at = now
        return found + self._hung(state, now, at_seconds)

    def _hung(self, state: State, now: float, at_seconds: float) -> list[NodeLost | RankHung | JobHung]:
        if state.generation != self._generation or state.phase not in TRAINING or state.broken:
            # While ranks form a membership or report positions, they make no progress, so this time does not count.
            self._places, self._progress_at, self._generation = {}, now, state.generation
            self._newest = None
            self._durations.clear()
        hang_seconds, limit = self._limit()
        if hang_seconds is None or now - self._progress_at < hang_seconds:
            return []
        # Ranks that are killed now need time to end, so the time limit begins again before another hang is reported.
        self._progress_at = now
        policy = self._membership
        ranks = layout_of(policy, state).processes_without(frozenset()) - state.gone
        if not ranks:
            return []
        places = {rank: self._places.get(rank) for rank in ranks}
        # If all ranks wait at the same point, the cause is unknown, and killing some ranks would lose nodes needlessly.
        if len({None if place is None else (place.iteration, place.phase) for place in places.values()}) == 1:
            where = _where(next(iter(places.values())))
            return [JobHung(at_seconds, f"no rank made progress {limit}: all are {where}")]
        behind = min(_order(place) for place in places.values())
        hung = sorted(rank for rank, place in places.items() if _order(place) == behind)
        return [
            RankHung(rank, at_seconds, f"made no progress {limit}: it is {_where(places[rank])}", max(0, behind[0]))
            for rank in hung
        ]

    def _limit(self) -> tuple[float | None, str]:
        """Return the longest allowed time without progress in seconds (None: no limit), and a text that names the
        configuration key of this limit."""
        policy = self._policy
        if policy.hang_seconds is None:
            return None, ""
        is_training = all(place.phase in ITERATION_PHASES for place in self._places.values())
        if policy.hang_iterations is not None and is_training and len(self._durations) >= FIRST_ITERATIONS:
            seconds = max(policy.min_hang_seconds, policy.hang_iterations * statistics.median(self._durations))
            if seconds < policy.hang_seconds:
                return seconds, f"for {seconds:.0f} s (detector.hang_iterations={policy.hang_iterations:g})"
        return policy.hang_seconds, f"for detector.hang_seconds={policy.hang_seconds:g}"


def _order(place: Place | None) -> tuple[int, int]:
    return (-1, 0) if place is None else (place.iteration, place.step)


def _where(place: Place | None) -> str:
    return "before the first iteration" if place is None else f"in iteration {place.iteration}, phase {place.phase}"
