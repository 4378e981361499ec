"""An agent's side of its connection to the controller: calls, and the queue of reports that wait for delivery."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from megatron_ft.control.certificates import Certificates
from megatron_ft.control.rpc import RpcClient, RpcError
from megatron_ft.framing import Message

# Two limits: with one, ranks would be paused and resumed for each item.
HIGH_WATER_ITEMS = 2000
LOW_WATER_ITEMS = 500
_BATCH_ITEMS = 500
# Well below ``rpc.MAX_MESSAGE_BYTES``. A larger item, of at most 16 MiB, travels alone.
_BATCH_BYTES = 4 * 1024 * 1024


class Outbox:
    """A queue of numbered items between one producer and one sender.

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


_PAUSE_SECONDS = 0.2


class ControllerClient:
    """Calls the controller for one node's agent. Safe in several threads."""

    def __init__(self, address: str, *, token: str, certificates: Certificates | None = None) -> None:
        self._client = RpcClient(address, "Controller", token=token, certificates=certificates)
        # Held from comparison to assignment: threads can finish in another order than their answers came.
        self._fence = threading.Lock()
        self._epoch = 0

    def call(
        self, method: str, body: Mapping[str, Any], *, timeout_seconds: float, wait_for_peer: bool = False
    ) -> Message:
        """Call the controller, see ``RpcClient.call``. The answer of a controller that has been replaced is rejected.

        Raises:
            RpcError: the controller did not answer in time, is gone, refused the call, or has a stale epoch.
        """
        answer = self._client.call(method, body, timeout_seconds=timeout_seconds, wait_for_peer=wait_for_peer)
        epoch = int(answer["epoch"])
        with self._fence:
            newest = self._epoch = max(self._epoch, epoch)
        # Not a refusal by the peer: the controller in charge serves at the same address, and the next call reaches it.
        if epoch < newest:
            message = (
                f"Controller.{method} at {self._client.address}: answered by the controller of epoch {epoch}, "
                f"which epoch {newest} has replaced"
            )
            raise RpcError(message, refused=False)
        return answer

    def insist(self, method: str, body: Mapping[str, Any], *, timeout_seconds: float) -> Message:
        """Repeat a call until the controller or its replacement answers.

        Raises:
            RpcError: the controller refused the call, or did not answer in time.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            left_seconds = deadline - time.monotonic()
            try:
                return self.call(method, body, timeout_seconds=left_seconds, wait_for_peer=True)
            except RpcError as error:
                if error.refused or time.monotonic() + _PAUSE_SECONDS > deadline:
                    raise
            threading.Event().wait(_PAUSE_SECONDS)
