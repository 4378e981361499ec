"""Reports of an agent in order, kept until the controller has them."""

import json
import threading
from collections import deque
from collections.abc import Callable

from megatron_ft.framing import Message

# Two limits: with one, ranks would be paused and resumed for each item.
HIGH_WATER_ITEMS = 2000
LOW_WATER_ITEMS = 500
_BATCH_ITEMS = 500
# Well below ``rpc.MAX_MESSAGE_BYTES``. A larger item, of at most 16 MiB, travels alone.
_BATCH_BYTES = 4 * 1024 * 1024


class Outbox:
    """A numbered queue between one producer and one sender.

    ``put`` never blocks; a producer that can wait checks ``is_full`` and resumes when ``on_drained`` is called.
    """

    def __init__(self, on_drained: Callable[[], None]) -> None:
        self._items: deque[tuple[int, Message]] = deque()
        self._first = 0
        self._full = False
        self._changed = threading.Condition()
        self._on_drained = on_drained

    def put(self, item: Message) -> None:
        """Add one item."""
        num_bytes = len(json.dumps(item))
        with self._changed:
            self._items.append((num_bytes, item))
            self._full = self._full or len(self._items) >= HIGH_WATER_ITEMS
            self._changed.notify_all()

    @property
    def is_full(self) -> bool:
        """Whether the producer should wait."""
        with self._changed:
            return self._full

    def wait_batch(self) -> tuple[int, list[Message]]:
        """Wait for items to send; return the number of the first, and the items."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._items))
            batch: list[Message] = []
            total_bytes = 0
            for num_bytes, item in self._items:
                if len(batch) == _BATCH_ITEMS or (batch and total_bytes + num_bytes > _BATCH_BYTES):
                    break
                batch.append(item)
                total_bytes += num_bytes
            return self._first, batch

    def acknowledge(self, next_number: int) -> None:
        """Drop all items before ``next_number``, which the controller has."""
        with self._changed:
            while self._first < next_number and self._items:
                self._items.popleft()
                self._first += 1
            drained = self._full and len(self._items) <= LOW_WATER_ITEMS
            self._full = self._full and not drained
            self._changed.notify_all()
        if drained:
            self._on_drained()
