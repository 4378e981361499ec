"""Lets copies run while this rank waits for messages of adjacent pipeline stages (bubbles; MoEtion, section 5.3)."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_ft.planning.snapshot.bubbles import IdleProfile

CHUNK_BYTES = 1 << 20
"""Largest number of bytes of one copy (chunk) while a slice uses bubbles. A chunk takes a fraction of a millisecond, so
only the last chunk that begins in a bubble can overlap with computation."""
_NUM_ITERATIONS = 5
"""Number of newest iterations from which the waits of the next iteration are predicted: a prediction is the shortest
measured time. If the waits are shorter than predicted, copies do not fit into the bubbles and delay the update. If the
waits are longer, copies only slow down computation."""


@dataclass(slots=True, kw_only=True)
class CopyTimes:
    """Bytes that were copied from a batch of pieces, and the time that this took."""

    idle_bytes: int = 0
    """Bytes that were copied while the rank waited for a message."""
    idle_seconds: float = 0.0
    """Duration of the copies of ``idle_bytes``."""
    busy_bytes: int = 0
    """Bytes that were copied at any other time."""
    busy_seconds: float = 0.0
    """Duration of the copies of ``busy_bytes``."""

    def add(self, num_bytes: int, seconds: float, *, is_idle: bool) -> None:
        """Add one copy. ``is_idle``: whether the rank waited for a message when the copy began."""
        if is_idle:
            self.idle_bytes += num_bytes
            self.idle_seconds += seconds
        else:
            self.busy_bytes += num_bytes
            self.busy_seconds += seconds


class IdleGate:
    """Measures the waits of a rank for messages, and shows the copying thread when it may copy.

    The thread that trains calls all methods except ``await_turn``, which the copying thread calls.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._turn = threading.Event()
        self._is_idle = False
        self._is_free = True
        """Whether copies may run while the rank computes."""
        self._is_counting = False
        self._num_waits, self._usual_num_waits = 0, -1
        self._idle_seconds = self._last_wait_end = 0.0
        self._recent: deque[tuple[float, float]] = deque(maxlen=_NUM_ITERATIONS)
        """Pair for each of the newest iterations: total seconds of its waits; seconds from its last wait to its end."""
        self._idle_rate = self._busy_rate = 0.0
        self._new = CopyTimes()
        """Bytes and durations of the copies that are not yet included in a copy rate (bytes per second)."""
        self.idle_seconds = 0.0
        """Seconds for which the rank waited for messages in the newest complete iteration; 0 without such waits."""
        self._update()

    # -- waits --------------------------------------------------------------------------------------------

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """Measure the waits of one iteration. The ``with`` block is the iteration, up to the reduction of gradients or
        later. The waits are used to predict those of later iterations, unless the block raises or has no waits."""
        self._num_waits, self._idle_seconds, self._is_counting = 0, 0.0, True
        try:
            yield
            self.idle_seconds = self._idle_seconds
            if self._num_waits:
                self._recent.append((self._idle_seconds, self._clock() - self._last_wait_end))
                self._usual_num_waits = self._num_waits
        finally:
            self._is_counting = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let copies run during the ``with`` block, in which this rank waits for a message."""
        began = self._clock()
        self._is_idle = True
        self._update()
        try:
            yield
        finally:
            self._is_idle = False
            self._last_wait_end = self._clock()
            if self._is_counting:
                self._num_waits += 1
                self._idle_seconds += self._last_wait_end - began
                # After the last wait of the iteration there is no other bubble, so the rest is copied now.
                self._is_free = self._is_free or self._num_waits == self._usual_num_waits
            self._update()

    def forget(self) -> None:
        """Forget the waits of earlier iterations, because the ranks form a new pipeline, in which waits may differ."""
        self._recent.clear()
        self._usual_num_waits, self.idle_seconds = -1, 0.0

    # -- copies -------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Begin a batch, whose copies wait for bubbles until ``release`` is called or no more bubbles are expected."""
        self._is_free = False
        self._update()

    def release(self) -> None:
        """Let the rest of the batch be copied without waiting for bubbles."""
        self._is_free = True
        self._update()

    def await_turn(self, *, may_compete: bool) -> bool:
        """Wait until the next chunk may be copied. Return whether the rank waits for a message now.

        Args:
            may_compete: whether the chunk may be copied while the rank computes, even if more bubbles are expected.
        """
        if not may_compete:
            self._turn.wait()
        return self._is_idle

    def learn(self, times: CopyTimes) -> None:
        """Update the copy rates (bytes per second) from a copied batch. A rate is updated as soon as ``CHUNK_BYTES``
        have been copied since its last update, which may need several batches."""
        new = self._new
        new.add(times.idle_bytes, times.idle_seconds, is_idle=True)
        new.add(times.busy_bytes, times.busy_seconds, is_idle=False)
        if new.idle_bytes >= CHUNK_BYTES:
            self._idle_rate, new.idle_bytes, new.idle_seconds = new.idle_bytes / new.idle_seconds, 0, 0.0
        if new.busy_bytes >= CHUNK_BYTES:
            self._busy_rate, new.busy_bytes, new.busy_seconds = new.busy_bytes / new.busy_seconds, 0, 0.0

    def bytes_at_once(self, num_bytes: int) -> int:
        """Return how many of the ``num_bytes`` of a new batch to copy without waiting for a bubble. Return
        ``num_bytes`` if no waits or rates have been measured yet."""
        if not self._recent:
            return num_bytes
        profile = IdleProfile(
            idle_seconds=min(idle for idle, _ in self._recent),
            tail_seconds=min(tail for _, tail in self._recent),
            idle_bytes_per_second=self._idle_rate or self._busy_rate,
            busy_bytes_per_second=self._busy_rate or self._idle_rate,
        )
        return profile.bytes_at_once(num_bytes)

    def _update(self) -> None:
        if self._is_idle or self._is_free:
            self._turn.set()
        else:
            self._turn.clear()
