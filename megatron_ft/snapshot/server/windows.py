"""Decides which buffer holds which window, which window may be dropped, and what is sent next. Pure: no sockets,
threads or memory.

A rank of this node has three buffers: for its newest committed window, the window that is being replicated, and the one
that is being filled. A rank of another node has two for copies: the sender chooses the buffer of a window; the receiver
refuses to overwrite its newest committed window.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_ft.errors import ControlError
from megatron_ft.planning.recovery.sources import StoredWindow, Where
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.snapshot.server.fields import MAX_RANK, integer, items, stored_window
from megatron_ft.snapshot.window import Slice, Window

NUM_COPY_BUFFERS = 2


@dataclass(kw_only=True, eq=False)
class HeldWindow(Window):
    """A window in a buffer of this node. Compared by identity: a second capture of the same iterations is another
    window."""

    buffer: int
    acknowledged: dict[int, int] = field(default_factory=dict)
    """Number of slices that each peer node has received and verified."""
    given_up: bool = False
    """Whether some peer will never hold it."""
    committed: bool = False

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def stored(self, where: Where, node: int) -> StoredWindow:
        """Return an entry for an inventory."""
        return StoredWindow(
            start_iteration=self.start_iteration,
            generation=self.generation,
            num_slices=self.num_slices,
            num_held=self.num_hashed,
            where=where,
            node=node,
            committed=self.committed,
            buffer=self.buffer,
        )


def is_superseded(old: WindowKey, was_committed: bool, by: WindowKey) -> bool:
    """Whether a window may be dropped after ``by`` is committed: an earlier committed window, or one of an older
    state."""
    is_older = old.generation < by.generation or old.start_iteration < by.start_iteration
    return old != by and (was_committed or is_older)


class OwnWindows:
    """The windows of one rank of this node."""

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.pinned: set[int] = set()
        """Buffers that are being written to storage and must not change."""
        self.confirmed: HeldWindow | None = None
        """The newest window that was committed, or confirmed to be committed, in this generation."""
        self._order: list[HeldWindow] = []
        """Windows in the order in which they were begun, at most one for each buffer."""
        self._num_commits = 0
        self._is_new_commit = False

    def __iter__(self) -> Iterator[HeldWindow]:
        return iter(list(self._order))

    def __contains__(self, window: HeldWindow) -> bool:
        return any(window is held for held in self._order)

    @property
    def committed(self) -> HeldWindow | None:
        """The newest committed window."""
        return next((window for window in self._order if window.committed), None)

    def new_generation(self) -> None:
        """Keep windows until they are overwritten or confirmed by a commit; start to count commits again."""
        self._num_commits, self._is_new_commit, self.confirmed = 0, False, None

    def begin(self, window: HeldWindow) -> None:
        """Assign its buffer to a new window. Forgets incomplete windows and an uncommitted one of the same iterations.

        Raises:
            ControlError: the buffer is pinned, or holds the newest window that was committed in this generation.
        """
        buffer, held = window.buffer, self._in_buffer(window.buffer)
        if buffer in self.pinned:
            raise ControlError(f"buffer={buffer}: is being written to storage")
        if held is not None and held is self.confirmed:
            raise ControlError(f"buffer={buffer}: contains window {held.start_iteration}, the newest committed one")
        # A rank fills one window at a time: an incomplete one will never be completed, and an uncommitted one of the
        # same iterations is of a history that the job has left.
        for other in self:
            is_same = other.start_iteration == window.start_iteration and not other.committed
            if other is held or is_same or not other.captured:
                self._order.remove(other)
        self._order.append(window)

    def capture(self, buffer: int, index: int, part: Slice) -> None:
        """Add a slice to the window of a buffer.

        Raises:
            ControlError: the buffer has no window.
            CheckpointError: the slice does not fit.
        """
        window = self._in_buffer(buffer)
        if window is None:
            raise ControlError(f"buffer={buffer}: no window was begun in it")
        window.check_next(index, part, self.window_bytes)
        window.slices.append(part)

    def next_unhashed(self) -> tuple[HeldWindow, Slice] | None:
        """Return the oldest slice whose hashes are not known."""
        waiting = ((window, part) for window in self._order for part in window.slices if part.hashes is None)
        return next(waiting, None)

    def replicated(self, peers: Sequence[int], generation: int) -> dict[int, int]:
        """Return the windows of this generation that are complete on this node and all ``peers``: buffer to first
        iteration."""
        return {
            window.buffer: window.start_iteration
            for window in self._of_generation(generation)
            if window.complete and all(window.acknowledged.get(node, 0) == window.num_slices for node in peers)
        }

    def given_up(self, generation: int) -> dict[int, int]:
        """Return the windows of this generation that some peer will never hold: buffer to first iteration."""
        return {window.buffer: window.start_iteration for window in self._of_generation(generation) if window.given_up}

    def waiting_bytes(self, peers: Sequence[int], generation: int) -> int:
        """Return the bytes of this generation that peers have not received yet, each peer counted."""
        return sum(
            part.num_bytes
            for window in self._of_generation(generation)
            for node in peers
            for part in window.slices[window.acknowledged.get(node, 0) :]
        )

    def commit(self, start_iteration: int, generation: int, captured_in: int | None = None) -> HeldWindow:
        """Record in ``generation`` that the whole job holds a window, and forget the windows that it supersedes.

        For a window that an earlier generation captured (``captured_in``), this confirms it, which does not count for
        ``is_persist_due``, because a rank that resumed from another source has nothing to confirm. A window that was
        captured again is another one, with separate copies, although its bytes are the same.

        Raises:
            ControlError: no complete window of that generation starts there.
        """
        captured_in = generation if captured_in is None else captured_in
        window = self.find(start_iteration, captured_in)
        self._is_new_commit = not window.committed and captured_in == generation
        self._num_commits += self._is_new_commit
        # The committed window survives, and newer ones of its generation, which are still being replicated.
        self._order = [held for held in self if not is_superseded(held.key, held.committed, window.key)]
        window.committed, self.confirmed = True, window
        return window

    def abandon(self, start_iteration: int, generation: int) -> None:
        """Forget a window that the job will not commit.

        Raises:
            ControlError: no window of ``generation`` starts there, or it is committed.
        """
        key = WindowKey(start_iteration=start_iteration, generation=generation)
        found = [window for window in self._order if window.key == key]
        if not found or found[0].committed:
            raise ControlError(f"start_iteration={start_iteration}: there is no window to abandon")
        self._order.remove(found[0])

    def is_persist_due(self, persist_every: int) -> bool:
        """Return whether the newly committed window must be persisted: every ``persist_every``-th commit of this
        generation; 0: never."""
        return persist_every > 0 and self._is_new_commit and self._num_commits % persist_every == 0

    def find(self, start_iteration: int, generation: int | None = None) -> HeldWindow:
        """Return the complete window that starts at ``start_iteration``: if there are several, the committed one, then
        the newest.

        A committed one is preferred to a later capture, because every rank has it.

        Raises:
            ControlError: there is none.
        """
        found = [
            window
            for window in self._order
            if window.complete and window.start_iteration == start_iteration and generation in (None, window.generation)
        ]
        if not found:
            raise ControlError(f"start_iteration={start_iteration}: there is no complete window")
        return max(found, key=lambda window: (window.committed, window.generation))

    def _in_buffer(self, buffer: int) -> HeldWindow | None:
        return next((window for window in self._order if window.buffer == buffer), None)

    def _of_generation(self, generation: int) -> Iterator[HeldWindow]:
        return (window for window in self._order if window.generation == generation)


class CopyWindows:
    """The receiving end: windows of one rank of another node."""

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.buffers: list[HeldWindow | None] = [None] * NUM_COPY_BUFFERS

    def __iter__(self) -> Iterator[HeldWindow]:
        return iter([window for window in self.buffers if window is not None])

    def expect(self, incoming: HeldWindow, index: int, part: Slice) -> HeldWindow:
        """Return the window to which an announced slice belongs; the first slice of a window takes the buffer.

        Raises:
            ControlError: the buffer holds the newest committed window.
            CheckpointError: the slice is not the next one, or does not fit.
        """
        # The announced window is kept only with its first slice: that one alone has topology and plan.
        held = self.buffers[incoming.buffer]
        if held is not None and held.key == incoming.key and index > 0:
            held.check_next(index, part, self.window_bytes)
            return held
        # It may be the only copy of the job's state that a loss leaves: the sender's choice is not trusted with it.
        if held is not None and held.committed:
            raise ControlError(f"buffer={incoming.buffer}: contains window {held.start_iteration}, which is committed")
        # A slice that does not fit must not cost the window that the buffer holds now.
        incoming.check_next(index, part, self.window_bytes)
        self.buffers[incoming.buffer] = incoming
        return incoming

    def commit(self, key: WindowKey) -> None:
        """Mark a window as committed, and forget the windows that it supersedes.

        Raises:
            ControlError: there is no complete copy of it.
        """
        window = next((window for window in self if window.key == key and window.complete), None)
        if window is None:
            raise ControlError(
                f"window {key.start_iteration} of generation {key.generation}: there is no complete copy"
            )
        for number, other in enumerate(self.buffers):
            if other is not None and is_superseded(other.key, other.committed, key):
                self.buffers[number] = None
        window.committed = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSlice:
    """Send a slice into a buffer of the peer."""

    window: HeldWindow
    index: int
    buffer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCommit:
    """Report to the peer that a window in its buffers is committed."""

    window: HeldWindow


class PeerBuffers:
    """The sending end: a peer's copies of one rank."""

    def __init__(self, held: Iterable[StoredWindow] = ()) -> None:
        """Begin with the peer's own inventory. Raises ControlError for an invalid buffer."""
        self.buffers: list[StoredWindow | None] = [None] * NUM_COPY_BUFFERS
        for window in held:
            if window.buffer not in range(NUM_COPY_BUFFERS):
                raise ControlError(f"buffer={window.buffer}: must be from 0 to {NUM_COPY_BUFFERS - 1}")
            self.buffers[window.buffer] = window

    def find(self, key: WindowKey) -> StoredWindow | None:
        """Return the peer's entry for a window."""
        return next((held for held in self.buffers if held is not None and held.key == key), None)

    def num_received(self, window: HeldWindow) -> int:
        """Return the number of slices of a window that the peer has, or will have when it has answered."""
        found = self.find(window.key)
        return found.num_held if found else 0

    def next_action(
        self, own: OwnWindows, generation: int, given_up: Collection[HeldWindow] = ()
    ) -> SendSlice | SendCommit | None:
        """Choose what to send next: a commit first, then slices in order; None if there is nothing to send.

        Windows of this generation are sent, and the newest committed window of any generation, so that a new peer gets
        it; those in ``given_up`` are not.
        """
        # A commit comes before slices: it frees the peer's other buffer for them.
        committed = self._wanted_commit(own)
        found = None if committed is None else self.find(committed.key)
        if committed and found and not found.committed and found.complete:
            return SendCommit(window=committed)
        wanted = [window for window in own if window not in given_up]
        live = {window.key for window in wanted}
        # In the order of capture, each whole before the next: the oldest is the next one that the job can commit.
        for window in wanted:
            if window is committed or (window.generation == generation and not window.committed):
                action = self._next_slice(window, live, generation)
                if action is not None or self.num_received(window) < window.num_slices:
                    return action
        return None

    def _wanted_commit(self, own: OwnWindows) -> HeldWindow | None:
        # A node that returns may hold an older committed window than its peer does. The peer's is overwritten only if
        # the job has confirmed in this generation that it went back to the older one.
        window = own.committed
        newest = max((_age(held.key) for held in self.buffers if held is not None and held.committed), default=None)
        is_older = window is not None and newest is not None and _age(window.key) < newest
        return None if is_older and window is not own.confirmed else window

    def _next_slice(self, window: HeldWindow, live: Collection[WindowKey], generation: int) -> SendSlice | None:
        index, found = self.num_received(window), self.find(window.key)
        if index >= len(window.slices):
            return None
        buffer = found.buffer if found else self._choose_buffer(live, generation)
        return None if buffer is None else SendSlice(window=window, index=index, buffer=buffer)

    def _choose_buffer(self, live: Collection[WindowKey], generation: int) -> int | None:
        # A free buffer, or one whose window will never be committed: forgotten here, or of an older generation.
        if None in self.buffers:
            return self.buffers.index(None)
        for number, held in enumerate(self.buffers):
            assert held is not None, "no buffer is free"
            if not held.committed and (held.key not in live or held.generation < generation):
                return number
        return None

    def note_sent(self, action: SendSlice | SendCommit) -> None:
        """Count a sent slice or commit as held by the peer: after a refusal the connection ends, and ``read_held``
        replaces this object."""
        if isinstance(action, SendCommit):
            self._note_committed(action.window.key)
            return
        key = action.window.key
        held = self.find(key)
        self.buffers[action.buffer] = StoredWindow(
            start_iteration=key.start_iteration,
            generation=key.generation,
            num_slices=action.window.num_slices,
            num_held=action.index + 1,
            where="copy",
            committed=held is not None and held.committed,
            buffer=action.buffer,
        )

    def _note_committed(self, key: WindowKey) -> None:
        for number, held in enumerate(self.buffers):
            if held is not None and is_superseded(held.key, held.committed, key):
                self.buffers[number] = None
            elif held is not None and held.key == key:
                self.buffers[number] = replace(held, committed=True)


def _age(key: WindowKey) -> tuple[int, int]:
    return key.generation, key.start_iteration


def read_held(answer: Mapping[str, Any]) -> dict[int, PeerBuffers]:
    """Read the buffers of a peer by rank, from its first answer. Raises ControlError if it is malformed."""
    by_rank: dict[int, list[StoredWindow]] = {}
    for entry in items(answer, "held"):
        if not isinstance(entry, dict):
            raise ControlError(f"held={entry!r:.100}: must be an object")
        by_rank.setdefault(integer(entry, "rank", most=MAX_RANK), []).append(stored_window(entry.get("window")))
    return {rank: PeerBuffers(windows) for rank, windows in by_rank.items()}
