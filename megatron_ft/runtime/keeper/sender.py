"""Sends the windows of this node's ranks to one peer: a thread, a connection, one slice at a time, in order."""

import threading
import time
import weakref

from megatron_ft.errors import ControlError
from megatron_ft.runtime.keeper.copies import PeerBuffers, SendCommit, SendSlice, read_held
from megatron_ft.runtime.keeper.peers import announce
from megatron_ft.runtime.keeper.store import OwnRank, Store
from megatron_ft.runtime.keeper.windows import Window
from megatron_ft.runtime.keeper.wire import Refused, Wire, connect

AWAY_SECONDS = 2.0
"""A peer that cannot be reached for so long while something waits for it is a problem."""
FIRST_RETRY_SECONDS = 0.05
LAST_RETRY_SECONDS = 1.0
MAX_DAMAGED = 3
"""Times a slice may arrive damaged before its window is given up for this peer."""

Work = tuple[OwnRank, SendSlice | SendCommit]


class Sender(threading.Thread):
    """Replicates to one node."""

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
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._failing_since: float | None = None
        self._num_damaged = 0
        self._given_up: weakref.WeakSet[Window] = weakref.WeakSet()
        """Windows that are not sent any more."""
        self._reported: weakref.WeakSet[Window] = weakref.WeakSet()

    def stop(self) -> None:
        """End the thread. The store's lock must be held."""
        self._stopped = True
        if self._wire is not None:
            self._wire.shut_down()
        self._store.changed()

    def run(self) -> None:
        """Wait for work and do it until stopped."""
        while self._work_once():
            pass
        self._disconnect()

    def _work_once(self) -> bool:
        """Whether to go on. Nothing of the work is referred to while the thread waits for more."""
        with self._store.lock:
            self._store.lock.wait_for(lambda: self._stopped or self._next() is not None)
            work = self._next()
            generation = self._store.own_generation
        if self._stopped:
            return False
        assert work is not None, "woken without work"
        try:
            if self._wire is None or self._generation != generation:
                self._connect(generation)
            else:
                self._do(self._wire, work)
                self._retry_seconds, self._failing_since = FIRST_RETRY_SECONDS, None
        except (ControlError, OSError) as error:
            self._failed(work, generation, error)
        return True

    def _next(self) -> Work | None:
        """What to do next, among the ranks that replicate to this node, the oldest iteration first; lock held."""
        if self._fenced >= self._store.own_generation:
            return None
        found = []
        for rank, own in self._store.ranks.items():
            if own.windows is None or self._node not in own.settings.peer_nodes or not self._store.is_current(own):
                continue
            buffers = self._buffers.setdefault(rank, PeerBuffers())
            action = buffers.next_action(own.windows, self._store.own_generation, self._given_up)
            if action is not None:
                found.append((own, action))
        return min(found, key=lambda work: _iteration(work[1]), default=None)

    def _do(self, wire: Wire, work: Work) -> None:
        own, action = work
        if isinstance(action, SendCommit):
            self._send_commit(wire, action)
        else:
            self._send_slice(wire, own, action)

    def _connect(self, generation: int) -> None:
        """Connect, and learn what the peer holds: what was acknowledged before counts no more."""
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
                    own.windows.note_acknowledged(window, self._node, buffers.num_received(window))
                own.publish()

    def _send_commit(self, wire: Wire, action: SendCommit) -> None:
        generation, start = action.window.key
        rank = action.window.origin.rank
        wire.call({"op": "committed", "rank": rank, "generation": generation, "start_iteration": start})
        with self._store.lock:
            self._buffers[rank].note_committed(action.window)

    def _send_slice(self, wire: Wire, own: OwnRank, action: SendSlice) -> None:
        window, part = action.window, action.window.slices[action.index]
        with self._store.lock:
            if own.windows is None or own.segment is None or window not in own.windows:
                return
            payload = own.view(window, part)
            window_bytes = own.windows.window_bytes
        wire.call(announce(window, action.index, action.buffer, window_bytes))
        wire.send_bytes(payload)
        wire.answer()
        with self._store.lock:
            self._num_damaged = 0
            buffers = self._buffers[window.origin.rank]
            buffers.note_sent(action)
            own.replicated_bytes += part.num_bytes
            if own.windows is not None and window in own.windows:
                own.windows.note_acknowledged(window, self._node, action.index + 1)
            own.publish()
            self._store.changed()

    def _failed(self, work: Work, generation: int, error: ControlError | OSError) -> None:
        """Decide what a failure means; the window may have been forgotten while it was sent, which is none."""
        own, action = work
        kind = error.kind if isinstance(error, Refused) else "broken"
        with self._store.lock:
            if kind == "hash":
                self._damaged(own, action.window, error)
                return
            self._disconnect()
            if kind == "stale":
                self._fenced = generation
                self._note(own, action.window, error)
                return
            now = time.monotonic()
            self._failing_since = now if self._failing_since is None else self._failing_since
            long_enough = isinstance(error, TimeoutError) or now - self._failing_since > AWAY_SECONDS
            if kind == "refused" or long_enough:
                self._note(own, action.window, error)
            deadline = now + self._retry_seconds
            self._retry_seconds = min(2 * self._retry_seconds, LAST_RETRY_SECONDS)
            while not self._stopped and (left := deadline - time.monotonic()) > 0:
                self._store.lock.wait(left)

    def _damaged(self, own: OwnRank, window: Window, error: ControlError | OSError) -> None:
        """Bytes of a window that was begun anew meanwhile are not a problem; others are sent again a few times."""
        if own.windows is None or window not in own.windows:
            return
        self._num_damaged += 1
        if self._num_damaged >= MAX_DAMAGED:
            self._num_damaged = 0
            self._given_up.add(window)
            self._note(own, window, error)

    def _note(self, own: OwnRank, window: Window, error: Exception) -> None:
        """Report a window's trouble once."""
        if window in self._reported:
            return
        self._reported.add(window)
        own.note_problem("replicate", f"node {self._node} at {self.address}: {error}", window.start_iteration)
        self._store.report(f"window {window.start_iteration} of rank {window.origin.rank}: {error}")
        own.publish()

    def _disconnect(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None


def _iteration(action: SendSlice | SendCommit) -> int:
    return action.window.start_iteration + (action.index if isinstance(action, SendSlice) else 0)
