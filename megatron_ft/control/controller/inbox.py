"""Queue of the controller's thread: items in order of arrival, each with its time of arrival."""

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
    """Position of an item in the sequence of a node's agent; it increases with each item."""

    node: int
    session: int
    number: int


@dataclass(slots=True)
class Item:
    """An item that an agent has delivered."""

    origin: Origin | None
    """None for items without a number, which have no effect when they are delivered twice."""
    content: Message
    report: Report | None = None
    """The parsed report in ``content``; None if it contains none."""
    arrived_seconds: float = 0.0
    """Arrival time on the controller's clock."""
    has_effect: threading.Event = field(default_factory=threading.Event)
    """Set when the item has been processed. Each item has its own, so that only the call that waits for it wakes."""

    def wait(self, timeout_seconds: float, sign_seconds: float, sign: Callable[[], None]) -> bool:
        """Wait until this item, and thus all earlier ones, have been processed; return whether that was in time.

        Args:
            sign: called every ``sign_seconds`` during the wait.
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
    """An event that did not come from an agent. Events of the launcher have numbers."""

    event: MachineEvent
    arrived_seconds: float
    """Arrival time on the controller's clock. For a ``Tick``: everything that arrived before it has been processed."""
    number: int | None = None


class Inbox:
    """A queue from many threads to one. Arrival times follow the order of the queue."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queue: queue.SimpleQueue[Item | Posted] = queue.SimpleQueue()
        # Held from reading the clock until the item is in the queue, so that times rise along the queue.
        self._arriving = threading.Lock()
        self._is_closed = False
        self._first: Item | Posted | None = None
        """The first item, if ``take`` has examined it and left it in the queue."""

    # --- any thread ------------------------------------------------------------------------------------------------

    def post(self, event: MachineEvent, number: int | None = None) -> None:
        """Add an event; also safe in signal handlers."""
        # Without the lock, which the interrupted thread may hold. ``SimpleQueue.put`` is reentrant.
        self._queue.put(Posted(event, self._clock(), number))

    def put(self, items: Sequence[Item]) -> None:
        """Add items; after ``close`` they count as processed."""
        with self._arriving:
            for item in items:
                item.arrived_seconds = self._clock()
                if self._is_closed:
                    item.has_effect.set()
                else:
                    self._queue.put(item)

    # --- the thread that takes ----------------------------------------------------------------------------------------

    def take(self, until_seconds: float) -> Item | Posted:
        """Return the next item if it arrived before ``until_seconds``; otherwise wait for that time and return a tick.

        So no deadline expires only because the controller was busy when an item arrived.
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
        try:
            return self._queue.get(timeout=max(0.0, until_seconds - self._clock())), until_seconds
        except queue.Empty:
            pass
        with self._arriving:  # an item may have got its time and not yet its place
            now = max(self._clock(), until_seconds)
            return (None if self._queue.empty() else self._queue.get()), now

    def close(self) -> None:
        """Close the queue: all present and future items count as processed."""
        # Under the lock: an item that arrives now is either found below or released by ``put``.
        with self._arriving:
            self._is_closed = True
        left, self._first = [self._first], None
        while not self._queue.empty():
            left.append(self._queue.get())
        for found in left:
            if isinstance(found, Item):
                found.has_effect.set()
