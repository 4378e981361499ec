"""Queue of the controller's thread: what arrived, in order, each with the time of its arrival."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_ft.control.membership.events import MachineEvent, Tick
from megatron_ft.control.messages import Report
from megatron_ft.framing import Message


class Origin(NamedTuple):
    """Position of an item among those of a node's process: later ones of a node are greater."""

    node: int
    session: int
    number: int


@dataclass(slots=True)
class Item:
    """Something that a node has delivered."""

    origin: Origin | None
    """None for what is not numbered: a second one changes nothing."""
    content: Message
    report: Report | None = None
    """``content``, read; None of what is not a report."""
    arrived_seconds: float = 0.0
    """Arrival time, on the controller's clock."""
    has_effect: threading.Event = field(default_factory=threading.Event)
    """Set when it has had its effect. Each item has its own, so that only the call that waits for it wakes."""

    def wait(self, timeout_seconds: float, sign_seconds: float, sign: Callable[[], None]) -> bool:
        """Wait until this item, and so all that came before it, has had its effect; whether that was in time.

        Args:
            sign: called every ``sign_seconds`` of the wait.
        """
        deadline = time.monotonic() + timeout_seconds
        # A node whose call waits for a busy controller lives. Without signs the detector would lose it.
        while not self.has_effect.wait(min(sign_seconds, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return False
            sign()
        return True


@dataclass(frozen=True, slots=True)
class Posted:
    """An event from elsewhere; those of the launcher are numbered."""

    event: MachineEvent
    arrived_seconds: float
    """Arrival time, on the controller's clock. For a ``Tick``: everything that came before has been processed."""
    number: int | None = None


class Inbox:
    """A queue from many threads to one. What is put in has its time and its place in the same order."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queue: queue.SimpleQueue[Item | Posted] = queue.SimpleQueue()
        # Held from reading the clock until the item is in the queue, so that times rise along the queue.
        self._arriving = threading.Lock()
        self._is_closed = False
        self._first: Item | Posted | None = None
        """The first of the queue, where ``take`` has looked at it and left it."""

    # --- any thread ------------------------------------------------------------------------------------------------

    def post(self, event: MachineEvent, number: int | None = None) -> None:
        """Put in an event; safe in signal handlers, too."""
        # Without the lock, which the interrupted thread may hold. ``SimpleQueue.put`` is reentrant.
        self._queue.put(Posted(event, self._clock(), number))

    def put(self, items: Sequence[Item]) -> None:
        """Put in items; once the inbox is closed they count as taken."""
        with self._arriving:
            for item in items:
                item.arrived_seconds = self._clock()
                if self._is_closed:
                    item.has_effect.set()
                else:
                    self._queue.put(item)

    # --- the thread that takes ----------------------------------------------------------------------------------------

    def take(self, until_seconds: float) -> Item | Posted:
        """The next arrival, if it arrived before ``until_seconds``; else, once that time has come, a tick.

        So nothing is late only because the one that takes was busy when it came.
        """
        all_taken_seconds = until_seconds
        if self._first is None:
            self._first, all_taken_seconds = self._wait(until_seconds)
        # What arrived after the deadline waits at the front: the deadline expires first.
        if self._first is None or self._first.arrived_seconds >= until_seconds:
            return Posted(Tick(), all_taken_seconds if self._first is None else self._first.arrived_seconds)
        found, self._first = self._first, None
        return found

    def _wait(self, until_seconds: float) -> tuple[Item | Posted | None, float]:
        """The first of the queue, or None and a time before which everything has been taken."""
        try:
            return self._queue.get(timeout=max(0.0, until_seconds - self._clock())), until_seconds
        except queue.Empty:
            pass
        with self._arriving:  # an item may have got its time and not yet its place
            now = max(self._clock(), until_seconds)
            return (None if self._queue.empty() else self._queue.get()), now

    def close(self) -> None:
        """Nothing is taken any more: what is there, and what still comes, counts as taken."""
        # Under the lock: an item that arrives now is either found below or released by ``put``.
        with self._arriving:
            self._is_closed = True
        left, self._first = [self._first], None
        while not self._queue.empty():
            left.append(self._queue.get())
        for found in left:
            if isinstance(found, Item):
                found.has_effect.set()
