"""Replicates the windows of this node's ranks to one peer: a thread, a connection, slices in order.

A slice is sent without waiting for the acknowledgement of the one before; answers are read as they arrive.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from megatron_ft.errors import ControlError
from megatron_ft.snapshot.server.peer_session import announce
from megatron_ft.snapshot.server.store import OwnRank, Store
from megatron_ft.snapshot.server.windows import HeldWindow, PeerBuffers, SendCommit, SendSlice, read_held
from megatron_ft.snapshot.server.wire import Refused, Wire, connect
from megatron_ft.snapshot.window import Slice

AWAY_SECONDS = 2.0
"""Time without a connection to the peer, while slices wait, after which a problem is reported."""
FIRST_RETRY_SECONDS = 0.05
LAST_RETRY_SECONDS = 1.0
MAX_DAMAGED = 3
"""Number of times that a slice may arrive damaged before its window is given up for this peer."""
MAX_UNANSWERED = 4
"""Largest number of slices that are on their way or being verified."""


@dataclass(frozen=True, slots=True)
class Work:
    """An action for a rank's window."""

    own: OwnRank
    action: SendSlice | SendCommit

    @property
    def iteration(self) -> int:
        """Iteration that was captured; the oldest is sent first."""
        index = self.action.index if isinstance(self.action, SendSlice) else 0
        return self.action.window.start_iteration + index


class Sender(threading.Thread):
    """Replicates to one node until stopped."""

    def __init__(self, node: int, address: str, store: Store) -> None:
        super().__init__(name=f"sender-{node}", daemon=True)
        self.address = address
        self._node = node
        self._store = store
        self._stopped = False
        self._wire: Wire | None = None
        self._generation = -1
        self._fenced = -1
        self._buffers: dict[int, PeerBuffers] = {}
        """Expected content of the peer's buffers by rank, after it has answered."""
        self._accepted_bytes: dict[int, int] = {}
        """Bytes of a window for which the peer has memory, by rank."""
        self._unanswered: deque[Work] = deque()
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._failing_since: float | None = None
        self._num_damaged = 0
        self._given_up: weakref.WeakSet[HeldWindow] = weakref.WeakSet()
        """Windows that are no longer sent, because they arrived damaged too often."""
        self._reported: weakref.WeakSet[HeldWindow] = weakref.WeakSet()

    def stop(self) -> None:
        """End the thread. The store's lock must be held."""
        self._stopped = True
        if self._wire is not None:
            # The thread may wait in a send or for an answer: only the end of the connection wakes it at once.
            self._wire.abort()
        self._store.changed()

    def run(self) -> None:
        """Wait for work and do it until stopped."""
        while self._work_once():
            pass
        self._disconnect()

    def _work_once(self) -> bool:
        # Returns whether to continue. A separate function, so that no local variable keeps memory while it waits.
        with self._store.lock:
            self._store.lock.wait_for(lambda: self._stopped or self._unanswered or self._next() is not None)
            work = self._next()
            generation = self._store.own_generation
        if self._stopped:
            return False
        try:
            if work is None or len(self._unanswered) == MAX_UNANSWERED:
                self._take_answer()
            elif self._wire is None or self._generation != generation:
                # A newer membership greets again: the peer's fence compares the generation of the greeting.
                self._connect(generation)
            else:
                self._send(work)
        except (ControlError, OSError) as error:
            self._failed(work, generation, error)
        return True

    def _next(self) -> Work | None:
        # Choose among the ranks that replicate to this node; the lock is held.
        if self._fenced >= self._store.own_generation:
            return None
        found = []
        for rank, own in self._store.ranks.items():
            if own.windows is None or self._node not in own.settings.peer_nodes or not self._store.is_current(own):
                continue
            buffers = self._buffers.setdefault(rank, PeerBuffers())
            action = buffers.next_action(own.windows, self._store.own_generation, self._given_up)
            if action is not None:
                found.append(Work(own, action))
        return min(found, key=lambda work: work.iteration, default=None)

    def _connect(self, generation: int) -> None:
        # The peer's own list replaces what it acknowledged before: it may have been restarted.
        self._disconnect()
        about = {"token": self._store.token, "node": self._store.node, "run_id": self._store.run_id}
        greeting = {**about, "generation": generation, "replicates": True}
        self._wire, answer = connect(self.address, greeting)
        with self._store.lock:
            self._generation, self._buffers = generation, read_held(answer)
            if self._stopped:
                return
            for rank, own in self._store.ranks.items():
                if own.windows is None or self._node not in own.settings.peer_nodes:
                    continue
                buffers = self._buffers.setdefault(rank, PeerBuffers())
                for window in own.windows:
                    window.acknowledged[self._node] = buffers.num_received(window)
                own.publish()

    def _send(self, work: Work) -> None:
        assert self._wire is not None, "connected"
        if isinstance(work.action, SendCommit):
            self._send_commit(self._wire, work, work.action)
        else:
            self._send_slice(self._wire, work, work.action)
        while self._unanswered and self._wire.has_arrived():
            self._take_answer()

    def _send_commit(self, wire: Wire, work: Work, action: SendCommit) -> None:
        wire.send({"op": "committed", "rank": action.window.rank, **asdict(action.window.key)})
        self._sent(work)

    def _send_slice(self, wire: Wire, work: Work, action: SendSlice) -> None:
        own, window, part = work.own, action.window, action.window.slices[action.index]
        with self._store.lock:
            if own.windows is None or own.segment is None or window not in own.windows:
                return
            # The view keeps the memory while bytes are sent without the lock. If the rank overwrites them, the peer
            # refuses them, because the hashes that follow belong to other bytes or are missing.
            payload = own.view(window, part)
            window_bytes = own.windows.window_bytes
        rank = window.rank
        # The peer may need minutes to allocate: bytes sent before that would fill the socket, and count as a stall.
        waits = self._accepted_bytes.get(rank) != window_bytes
        wire.send({**announce(window, action.index, action.buffer, window_bytes), "waits": waits}, goes_on=not waits)
        if waits:
            # Answers arrive in order: those of earlier slices come before ``go``.
            while self._unanswered:
                self._take_answer()
            wire.answer()
            self._accepted_bytes[rank] = window_bytes
        wire.send_bytes(payload, goes_on=True)
        wire.send({"op": "hashes", "hashes": self._hashes(work, part)})
        self._sent(work)

    def _hashes(self, work: Work, part: Slice) -> Sequence[str]:
        # None if the window was forgotten meanwhile: then the peer refuses the bytes.
        own, window = work.own, work.action.window
        with self._store.lock:
            self._store.lock.wait_for(
                lambda: self._stopped or part.hashes is not None or own.windows is None or window not in own.windows
            )
            return part.hashes or ()

    def _sent(self, work: Work) -> None:
        with self._store.lock:
            self._buffers[work.action.window.rank].note_sent(work.action)
        self._unanswered.append(work)

    def _take_answer(self) -> None:
        # Answers arrive in the order of what was sent.
        assert self._wire is not None, "nothing was sent"
        self._wire.answer()
        work = self._unanswered.popleft()
        self._retry_seconds, self._failing_since = FIRST_RETRY_SECONDS, None
        if isinstance(work.action, SendCommit):
            return
        own, window, index = work.own, work.action.window, work.action.index
        with self._store.lock:
            self._num_damaged = 0
            own.replicated_bytes += window.slices[index].num_bytes
            if own.windows is not None and window in own.windows:
                window.acknowledged[self._node] = index + 1
            own.publish()

    def _failed(self, work: Work | None, generation: int, error: ControlError | OSError) -> None:
        # The connection ends, and the next one begins with what the peer holds. A window that was forgotten while it
        # was sent is no failure.
        if not isinstance(error, Refused):
            error = self._refusal() or error
        # Answers have the order of requests: what failed is the oldest request without an answer.
        work = self._unanswered[0] if self._unanswered else work
        assert work is not None, "nothing can fail without work"
        kind = error.kind if isinstance(error, Refused) else "broken"
        self._disconnect()
        with self._store.lock:
            if kind == "hash":
                self._damaged(work, error)
                return
            # The peer has seen a newer generation: nothing is sent before a rank of this node has joined it.
            if kind == "stale":
                self._fenced = generation
                self._note(work, error)
                return
            now = time.monotonic()
            self._failing_since = now if self._failing_since is None else self._failing_since
            long_enough = isinstance(error, TimeoutError) or now - self._failing_since > AWAY_SECONDS
            if kind == "refused" or long_enough:
                self._note(work, error)
            # Waiting on the condition releases the lock and ends at once when the sender is stopped.
            deadline = now + self._retry_seconds
            self._retry_seconds = min(2 * self._retry_seconds, LAST_RETRY_SECONDS)
            while not self._stopped and (left := deadline - time.monotonic()) > 0:
                self._store.lock.wait(left)

    def _refusal(self) -> Refused | None:
        # A peer that refuses ends the connection: its reason may still be unread.
        try:
            while self._unanswered and self._wire is not None and self._wire.has_arrived():
                self._take_answer()
        except Refused as refused:
            return refused
        except (ControlError, OSError):
            return None  # the connection is being given up for an error that is reported
        return None

    def _damaged(self, work: Work, error: ControlError | OSError) -> None:
        # Bytes of a window that was overwritten meanwhile are no problem; others are sent again a few times.
        if work.own.windows is None or work.action.window not in work.own.windows:
            return
        self._num_damaged += 1
        if self._num_damaged >= MAX_DAMAGED:
            self._num_damaged = 0
            self._given_up.add(work.action.window)
            work.own.give_up(work.action.window)
            self._note(work, error)

    def _note(self, work: Work, error: Exception) -> None:
        # Once for each window.
        own, window = work.own, work.action.window
        if window in self._reported:
            return
        self._reported.add(window)
        own.note_problem("replicate", f"node {self._node} at {self.address}: {error}", window.start_iteration)
        self._store.report(f"window {window.start_iteration} of rank {window.rank}: {error}")
        own.publish()

    def _disconnect(self) -> None:
        self._unanswered.clear()
        self._buffers, self._accepted_bytes = {}, {}
        if self._wire is not None:
            self._wire.close()
            self._wire = None
