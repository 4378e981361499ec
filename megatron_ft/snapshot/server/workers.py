"""Threads that hash captured slices, write windows to storage, and replicate windows, with one thread per peer."""

import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from megatron_ft.errors import CheckpointError, ControlError
from megatron_ft.snapshot.server.peer_session import announce
from megatron_ft.snapshot.server.store import OwnRank, Store
from megatron_ft.snapshot.server.windows import (
    HeldWindow,
    OnStorage,
    OwnWindows,
    PeerBuffers,
    SendCommit,
    SendSlice,
    file_of,
)
from megatron_ft.snapshot.server.wire import Refused, Wire, connect
from megatron_ft.snapshot.storage.window_file import write_window
from megatron_ft.snapshot.storage.window_folder import WindowFolder
from megatron_ft.snapshot.window import Slice, StoredLevel

# Slices are sent in order, without waiting for the previous acknowledgement. Answers are read as they arrive.

AWAY_SECONDS = 2.0
"""Time after which a problem is reported if slices have to be sent and there is no connection to the peer."""
FIRST_RETRY_SECONDS = 0.05
LAST_RETRY_SECONDS = 1.0
MAX_DAMAGED = 3
"""Number of damaged transfers of a slice after which its window is no longer sent to this peer."""
MAX_UNANSWERED = 4
"""Largest number of slices and commits that have been sent to a peer and that the peer has not acknowledged yet."""


@dataclass(frozen=True, slots=True)
class _Work:
    """A slice or commit to send, and the rank to which it belongs."""

    own: OwnRank
    action: SendSlice | SendCommit
    sent_bytes: int = 0
    """Bytes of the slice that were sent; the peer copies the other bytes from an earlier window."""

    @property
    def iteration(self) -> int:
        """Iteration of the slice, or first iteration of the committed window. Among the slices and commits of all
        ranks, the one with the lowest iteration is sent first."""
        index = self.action.index if isinstance(self.action, SendSlice) else 0
        return self.action.window.start_iteration + index


class Sender(threading.Thread):
    """Thread that replicates windows to one peer until it is stopped."""

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
        """Windows in the peer's buffers, by rank: its first answer, updated by the slices and commits sent since."""
        self._accepted_bytes: dict[int, int] = {}
        """Size of the windows for which the peer has allocated memory, by rank."""
        self._unanswered: deque[_Work] = deque()
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._failing_since: float | None = None
        self._num_damaged = 0
        self._given_up: weakref.WeakSet[HeldWindow] = weakref.WeakSet()
        """Windows that are no longer sent to this peer, because their slices arrived damaged too often."""
        self._reported: weakref.WeakSet[HeldWindow] = weakref.WeakSet()
        self._sent_whole: weakref.WeakSet[HeldWindow] = weakref.WeakSet()
        """Windows that are sent whole, because the peer could not copy pieces from an earlier window."""

    def stop(self) -> None:
        """Stop the thread. The store's lock must be held."""
        self._stopped = True
        if self._wire is not None:
            # The thread may be waiting in a send or for an answer. Only the end of the connection wakes it at once.
            self._wire.abort()
        self._store.changed()

    def run(self) -> None:
        """Send slices and commits as they become available, until the thread is stopped."""
        while self._work_once():
            pass
        self._disconnect()

    def _work_once(self) -> bool:
        # Returns whether to continue. A separate function, so that no local variable keeps memory alive during waits.
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
                # Connect again for a newer membership, because the peer checks the generation of the first message.
                self._connect(generation)
            else:
                self._send(work)
        except (ControlError, OSError) as error:
            self._failed(work, generation, error)
        return True

    def _next(self) -> _Work | None:
        # Chooses among the ranks that replicate to this peer. The caller has the lock.
        if self._fenced >= self._store.own_generation:
            return None
        found = []
        for rank, own in self._store.ranks.items():
            if own.windows is None or self._node not in own.settings.peer_nodes or not self._store.is_current(own):
                continue
            buffers = self._buffers.setdefault(rank, PeerBuffers())
            action = buffers.next_action(own.windows, self._store.own_generation, self._given_up)
            if action is not None:
                found.append(_Work(own, action))
        return min(found, key=lambda work: work.iteration, default=None)

    def _connect(self, generation: int) -> None:
        # The peer's list replaces its earlier acknowledgements, because the peer may have been restarted.
        self._disconnect()
        about = {"token": self._store.token, "node": self._store.node, "run_id": self._store.run_id}
        greeting = {**about, "generation": generation, "replicates": True}
        self._wire, answer = connect(self.address, greeting)
        with self._store.lock:
            self._generation, self._buffers = generation, PeerBuffers.read_held(answer)
            if self._stopped:
                return
            for rank, own in self._store.ranks.items():
                if own.windows is None or self._node not in own.settings.peer_nodes:
                    continue
                buffers = self._buffers.setdefault(rank, PeerBuffers())
                for window in own.windows:
                    window.acknowledged[self._node] = buffers.num_received(window)
                own.publish()

    def _send(self, work: _Work) -> None:
        assert self._wire is not None, "connected"
        if isinstance(work.action, SendCommit):
            self._send_commit(self._wire, work, work.action)
        else:
            self._send_slice(self._wire, work, work.action)
        while self._unanswered and self._wire.has_arrived():
            self._take_answer()

    def _send_commit(self, wire: Wire, work: _Work, action: SendCommit) -> None:
        wire.send({"op": "committed", "rank": action.window.rank, **asdict(action.window.key)})
        self._sent(work)

    def _send_slice(self, wire: Wire, work: _Work, action: SendSlice) -> None:
        own, window, part = work.own, action.window, action.window.slices[action.index]
        with self._store.lock:
            if own.windows is None or own.segment is None or window not in own.windows:
                return
            # The view keeps the memory alive while bytes are sent without the lock. If the rank overwrites the bytes,
            # the peer refuses the slice, because the hashes that are sent last do not match or are missing.
            payload = own.view(window, part)
            window_bytes = own.windows.window_bytes
            is_whole, buffers = part.captured_at is None, self._buffers[window.rank]
            has_carried = is_whole or buffers.has_carried(own.windows, window, part)
            may_carry = window not in self._sent_whole and has_carried
            update = part.update if may_carry and buffers.can_repeat(own.windows, window, part) else None
            carries = may_carry and (not is_whole or update is not None)
            gradients = [] if update is None else own.gradients(window, part, update)
        # The peer cannot copy the pieces that were not captured with this slice, so they are sent, too. Wait for the
        # hashes first: before the hasher computes them, it copies these pieces from earlier windows into the slice.
        if not is_whole and not carries and not self._hashes(work, part):
            return
        rank = window.rank
        # The peer may need minutes to allocate memory; until then the bytes would fill the socket and count as a stall.
        waits = self._accepted_bytes.get(rank) != window_bytes
        about = {"waits": waits, "carries": carries}
        if update is not None:
            about["update"] = update.to_json()
        wire.send({**announce(window, action.index, action.buffer, window_bytes), **about}, goes_on=not waits)
        if waits:
            # Answers arrive in order: those of earlier slices come before ``go``.
            while self._unanswered:
                self._take_answer()
            wire.answer()
            self._accepted_bytes[rank] = window_bytes
        without = frozenset() if update is None else update.indices(part)
        views = [*part.captured(payload, without=without), *gradients] if carries else [payload]
        for view in views:
            wire.send_bytes(view, goes_on=True)
        wire.send({"op": "hashes", "hashes": self._hashes(work, part)})
        self._sent(replace(work, sent_bytes=sum(view.nbytes for view in views)))

    def _hashes(self, work: _Work, part: Slice) -> Sequence[str]:
        # Returns no hashes if the window was dropped or the sender was stopped. Then the peer refuses the bytes.
        own, window = work.own, work.action.window
        with self._store.lock:
            self._store.lock.wait_for(
                lambda: (
                    self._stopped
                    or part.hashes is not None
                    or own.windows is None
                    or window not in own.windows
                    or window.given_up
                )
            )
            return part.hashes or ()

    def _sent(self, work: _Work) -> None:
        with self._store.lock:
            self._buffers[work.action.window.rank].note_sent(work.action)
        self._unanswered.append(work)

    def _take_answer(self) -> None:
        # Answers arrive in the order in which slices and commits were sent.
        assert self._wire is not None, "nothing was sent"
        self._wire.answer()
        work = self._unanswered.popleft()
        self._retry_seconds, self._failing_since = FIRST_RETRY_SECONDS, None
        if isinstance(work.action, SendCommit):
            return
        own, window, index = work.own, work.action.window, work.action.index
        with self._store.lock:
            self._num_damaged = 0
            own.replicated_bytes += work.sent_bytes
            if own.windows is not None and window in own.windows:
                window.acknowledged[self._node] = index + 1
            own.publish()

    def _failed(self, work: _Work | None, generation: int, error: ControlError | OSError) -> None:
        # Closes the connection. The next connection begins with a new list of the windows that the peer has.
        if not isinstance(error, Refused):
            error = self._refusal() or error
        # Answers come in the order of requests, so the oldest request without an answer has failed.
        work = self._unanswered[0] if self._unanswered else work
        kind = error.kind if isinstance(error, Refused) else "broken"
        self._disconnect()
        if work is None:
            return  # the last answer came after its time limit
        with self._store.lock:
            if kind == "hash":
                self._damaged(work, error)
                return
            if kind == "carry":
                self._sent_whole.add(work.action.window)
                self._note(work, error)
                return
            # The peer knows a newer generation. Send nothing until a rank of this node belongs to a newer one, too.
            if kind == "stale":
                self._fenced = generation
                self._note(work, error)
                return
            now = time.monotonic()
            self._failing_since = now if self._failing_since is None else self._failing_since
            long_enough = isinstance(error, TimeoutError) or now - self._failing_since > AWAY_SECONDS
            if kind == "refused" or long_enough:
                self._note(work, error)
            # Wait on the condition: this releases the lock, and ends at once when the sender is stopped.
            deadline = now + self._retry_seconds
            self._retry_seconds = min(2 * self._retry_seconds, LAST_RETRY_SECONDS)
            while not self._stopped and (left := deadline - time.monotonic()) > 0:
                self._store.lock.wait(left)

    def _refusal(self) -> Refused | None:
        # Returns the refusal of the peer, if any. A peer that refuses a message ends the connection, so a send may fail
        # before the refusal was read.
        try:
            while self._unanswered and self._wire is not None and self._wire.has_arrived():
                self._take_answer()
        except Refused as refused:
            return refused
        except (ControlError, OSError):
            return None  # the caller reports the first error
        return None

    def _damaged(self, work: _Work, error: ControlError | OSError) -> None:
        # If the window was overwritten meanwhile, nothing is wrong. Otherwise the slice is sent again a few times.
        if work.own.windows is None or work.action.window not in work.own.windows:
            return
        self._num_damaged += 1
        if self._num_damaged >= MAX_DAMAGED:
            self._num_damaged = 0
            self._given_up.add(work.action.window)
            work.own.give_up(work.action.window)
            self._note(work, error)

    def _note(self, work: _Work, error: Exception) -> None:
        # Report only one problem for each window.
        own, window = work.own, work.action.window
        if window in self._reported:
            return
        self._reported.add(window)
        own.note_problem("replicate", f"node {self._node} at {self.address}: {error}", window.start_iteration)
        failed = f"window {window.start_iteration} of rank {window.rank} was not sent to node {self._node}"
        self._store.report(f"{failed}: {error}")
        own.publish()

    def _disconnect(self) -> None:
        self._unanswered.clear()
        self._buffers, self._accepted_bytes = {}, {}
        if self._wire is not None:
            self._wire.close()
            self._wire = None


class Hasher(threading.Thread):
    """Thread that hashes captured slices, the oldest first. Hashing releases the GIL, so that other threads run."""

    def __init__(self, store: Store) -> None:
        super().__init__(name="hasher", daemon=True)
        self._store = store

    def run(self) -> None:
        """Hash slices until the process ends."""
        while True:
            self._hash_one()

    def _hash_one(self) -> None:
        # This is a separate function, so that no local variable keeps memory alive while the thread waits.
        with self._store.lock:
            self._store.lock.wait_for(lambda: self._next() is not None)
            found = self._next()
            assert found is not None, "there is no slice to hash"
            own, window, part = found
            # The view keeps the memory alive if the rank gets another arena while the bytes are hashed.
            payload = own.view(window, part)
            try:
                carried = own.carried(window, part)
            except ControlError as error:
                return self._give_up(own, window, error)
            self._store.filling = window
        failure = None
        try:
            for piece in carried:
                piece.copy(part, payload)
        except ControlError as error:
            failure = error
        with self._store.lock:
            self._store.filling = None
            self._store.changed()
            if failure is not None:
                return self._give_up(own, window, failure)
        hashes = part.hash_pieces(payload, {piece.index: piece.digest for piece in carried})
        with self._store.lock:
            # If another window has the buffer now, ``part`` belongs to no window, and its hashes are not used.
            part.hashes = hashes
            own.hashed_bytes += part.captured_bytes
            own.publish()
            self._store.changed()
        return None

    def _give_up(self, own: OwnRank, window: HeldWindow, error: ControlError) -> None:
        # All ranks drop the window at their next vote, and the next window captures everything it needs.
        own.note_problem("carry", error, window.start_iteration)
        own.give_up(window)
        self._store.changed()

    def _next(self) -> tuple[OwnRank, HeldWindow, Slice] | None:
        for own in self._store.ranks.values():
            found = None if own.windows is None else own.windows.next_unhashed()
            if found is not None:
                return own, *found
        return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Write:
    own: OwnRank
    windows: OwnWindows
    window: HeldWindow
    payload: list[memoryview]
    url: str
    level: StoredLevel | None
    """State that the file must contain instead of the window's state in memory; None to write the state in memory."""


class Persister(threading.Thread):
    """Thread that writes requested windows to storage, in the order of the requests.

    The thread writes from the memory into which the window was captured. From the request until the end of the write,
    this memory must not be overwritten.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(name="persister", daemon=True)
        self._store = store
        self._due: deque[_Write] = deque()

    def request(self, own: OwnRank, window: HeldWindow, level: StoredLevel | None = None) -> None:
        """Request that a window is written, unless this was already requested. The store's lock must be held.

        Args:
            level: state that the file must contain; None if it must contain the window's state that is in memory.
        """
        assert own.windows is not None and own.settings.persist_url is not None, (
            "the rank must have memory for windows, and persist_url must be set"
        )
        if any(due.window is window for due in self._due):
            return
        # A file is never replaced, because its new level could differ from the level of the other ranks' files.
        if own.on_storage is not None and own.on_storage.window.key == window.key:
            return
        # The views keep the memory alive. The pin keeps its content, because no window may begin in a pinned buffer.
        payload = [own.view(window, part) for part in window.slices]
        own.windows.pinned.add(window.buffer)
        url = own.settings.persist_url
        self._due.append(_Write(own=own, windows=own.windows, window=window, payload=payload, url=url, level=level))
        own.publish()

    def is_due(self, own: OwnRank) -> bool:
        """Return whether a requested window of this rank is not written yet. The store's lock must be held."""
        return any(due.own is own for due in self._due)

    def run(self) -> None:
        """Write requested windows until the process ends."""
        while True:
            self._write_one()

    def _write_one(self) -> None:
        # This is a separate function, so that no local variable keeps memory alive while the thread waits.
        with self._store.lock:
            self._store.lock.wait_for(lambda: self._due)
            # The request stays in the queue until the window is written, so that a flush waits for it.
            due = self._due[0]
        num_bytes, error = self._write(due)
        with self._store.lock:
            self._due.popleft()
            # Unpin also after a failure, because full storage must not stop captures. The rank may have another arena
            # by now, so the request has its own reference to the windows.
            due.windows.pinned.discard(due.window.buffer)
            if error is None:
                due.own.persisted_start = due.window.start_iteration
                due.own.persisted_bytes += num_bytes
            else:
                due.own.note_problem("persist", error, due.window.start_iteration)
                due.own.failed_start = due.window.start_iteration
            due.own.publish()
            self._store.changed()
        # Older windows are deleted only after this one is durable.
        if error is None:
            self._delete_old(due)

    def _write(self, due: _Write) -> tuple[int, Exception | None]:
        # Pieces that are in the file of an earlier window are not written again.
        own, window = due.own, due.window
        try:
            window, places = file_of(own.on_storage, window, due.level)
            write_window(due.url, window, due.payload, places=places)
        except (CheckpointError, OSError) as error:
            self._store.report(f"cannot write window {window.start_iteration} of rank {window.rank}: {error}")
            return 0, error
        # This needs no lock, because only this thread uses ``on_storage``.
        own.on_storage = OnStorage.after(own.on_storage, window, places)
        if any(places):
            pieces = zip(window.slices[0].pieces, places, strict=True)
            return sum(piece.num_bytes for piece, place in pieces if place is None), None
        return sum(part.nbytes for part in due.payload), None

    def _delete_old(self, due: _Write) -> None:
        # Deletes old windows, unless ``num_persisted`` is 0, which keeps all.
        window, num_persisted = due.window, due.own.settings.num_persisted
        # Only rank 0 deletes, because two processes would rename the same directories.
        if window.rank != 0 or num_persisted == 0:
            return
        try:
            # Only this rank's share of the payload is read; the other files are opened and compared.
            WindowFolder(due.url).retain(num_persisted, window.world_size, part=0, num_parts=window.world_size)
        except (CheckpointError, OSError) as error:
            with self._store.lock:
                due.own.note_problem("retain", error, window.start_iteration)
                due.own.publish()
