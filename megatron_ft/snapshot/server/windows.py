"""Records which window is in each buffer, and decides which window may be dropped and which slice is sent next.

A rank of this node has three buffers: one for its newest committed window, one for the window that is being replicated,
and one for the window that is being captured. For a rank of another node there are two buffers for copies. The sender
chooses the buffer of a copy; the receiver refuses to overwrite its newest committed window. This module is pure: it
uses no sockets, threads or memory.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_ft.errors import CheckpointError, ControlError
from megatron_ft.planning.recovery.sources import StoredWindow, Where
from megatron_ft.planning.snapshot.plan import MAX_PARTIAL_FILES, WindowKey
from megatron_ft.snapshot.server.wire import MAX_RANK, integer, items, stored_window
from megatron_ft.snapshot.window import Slice, StoredLevel, Window

NUM_COPY_BUFFERS = 2


@dataclass(kw_only=True, eq=False)
class HeldWindow(Window):
    """A window in a buffer of this node. Two captures of the same iterations are different windows, so windows are
    compared by object identity."""

    buffer: int
    acknowledged: dict[int, int] = field(default_factory=dict)
    """Number of slices that each peer has received and verified, by node."""
    given_up: bool = False
    """Whether at least one peer will never have a complete copy of this window."""
    committed: bool = False
    before: "HeldWindow | None" = None
    """Complete window whose buffer this window reuses, if any. The older bytes stay in the buffer until overwritten."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def stored(self, where: Where, node: int, buffer_bytes: int) -> StoredWindow:
        """Return the entry of this window in an inventory (a server's list of the windows that it has)."""
        return StoredWindow(
            start_iteration=self.start_iteration,
            generation=self.generation,
            num_slices=self.num_slices,
            num_held=self.num_hashed,
            where=where,
            node=node,
            committed=self.committed,
            buffer=self.buffer,
            buffer_bytes=buffer_bytes,
        )


def _is_superseded(old: WindowKey, was_committed: bool, by: WindowKey) -> bool:
    """Return whether window ``old`` may be dropped after window ``by`` was committed. It may be dropped if it was
    committed before ``by``, is of an earlier generation than ``by``, or starts earlier than ``by``."""
    is_older = old.generation < by.generation or old.start_iteration < by.start_iteration
    return old != by and (was_committed or is_older)


@dataclass(frozen=True, slots=True)
class CarriedPiece:
    """Piece of a slice that was not captured with the slice, because an earlier window contains the same bytes."""

    index: int
    source: int | None
    """Buffer that has the bytes, at the same offset; None if the buffer of the slice itself still has them."""
    digest: str


def _carried(part: Slice, window: HeldWindow, sources: Iterable[HeldWindow]) -> list[CarriedPiece]:
    """Find the pieces of ``part``, a slice of ``window``, that were not captured with the slice but are in memory.

    Raises:
        ControlError: such a piece is neither in the buffer of ``window`` nor in a window of ``sources``.
    """
    places = [] if window.before is None else [(None, window.before)]
    places += [(source.buffer, source) for source in sources if source is not window]  # type: ignore[misc]
    known = [
        (buffer, source.slices[0], source.slices[0].hashes)
        for buffer, source in places
        if source.complete and source.num_slices == 1 and source.generation == window.generation
    ]
    found = []
    for index, piece in enumerate(part.pieces):
        if part.is_captured(index):
            continue
        hit = next(((buffer, hashes) for buffer, other, hashes in known if part.has_same(index, other)), None)
        if hit is None or hit[1] is None:
            raise ControlError(
                f"window {window.start_iteration}: was captured without {piece.component!r} of {piece.parameter!r}, "
                f"and no window in memory has this tensor's state of iteration {(part.captured_at or ())[index]}"
            )
        found.append(CarriedPiece(index, hit[0], hit[1][index]))
    return found


def _precedes(other: HeldWindow, window: HeldWindow, part: Slice) -> bool:
    is_like = other.num_slices == 1 and other.generation == window.generation
    return is_like and other is not window and part.repeats(other.slices[0])


@dataclass(frozen=True, slots=True)
class OnStorage:
    """The newest persisted window of a rank. ``places`` contains, for each piece of the window, the window whose file
    has the piece: the window itself or an earlier one."""

    window: HeldWindow
    places: tuple[WindowKey, ...]
    num_partial: int
    """Number of files that were written since the last file with all pieces."""

    def places_of(self, window: HeldWindow) -> list[WindowKey | None]:
        """Return, for each piece of ``window``, the earlier window whose file already contains the piece, or None if
        the piece must be written. Return an empty list if all pieces must be written."""
        is_like = window.num_slices == self.window.num_slices == 1 and window.generation == self.window.generation
        if not is_like or self.num_partial >= MAX_PARTIAL_FILES:
            return []
        part, before = window.slices[0], self.window.slices[0]
        if part.captured_at is None or len(part.pieces) != len(before.pieces):
            return []
        return [place if part.has_same(index, before) else None for index, place in enumerate(self.places)]

    @classmethod
    def after(
        cls, former: "OnStorage | None", window: HeldWindow, places: Sequence[WindowKey | None]
    ) -> "OnStorage | None":
        """Return the files that have the pieces of ``window`` after it is written; None if it has several slices. For
        pieces that earlier files have, ``places`` (from ``file_of``) contains the windows of these files."""
        if window.num_slices != 1:
            return None
        found = tuple(place or window.key for place in places) or (window.key,) * len(window.slices[0].pieces)
        is_partial = former is not None and any(place is not None for place in places)
        return cls(window, found, former.num_partial + 1 if former is not None and is_partial else 0)


def file_of(
    former: OnStorage | None, window: HeldWindow, level: StoredLevel | None
) -> tuple[HeldWindow, list[WindowKey | None]]:
    """Return the description of a rank's next file, which persists ``window``, and a list. The list contains, for each
    piece, the earlier window whose file contains the piece, or None if the piece is written from memory. The list is
    empty if all pieces are written from memory.

    Args:
        former: the newest file of the rank; None if there is none.
        level: state that the file must have; None if it must have the state of ``window`` that is in memory.

    Raises:
        CheckpointError: neither memory nor an earlier file has the state of a piece.
    """
    if level is None:
        return window, [] if former is None else former.places_of(window)
    (part,) = window.slices
    before = None if level.is_whole or former is None or former.window.generation != window.generation else former
    stored = replace(part, captured_at=level.captured_at, header={**part.header, **level.header})
    places: list[WindowKey | None] = []
    hashes: list[str] = []
    for index, piece in enumerate(part.pieces):
        # A file of several slices has no ``OnStorage`` record, so ``before`` has one slice.
        source = part
        if before is not None and stored.has_same(index, before.window.slices[0]):
            source = before.window.slices[0]
        elif not stored.has_same(index, part):
            raise CheckpointError(
                f"{piece.component!r} of {piece.parameter!r}: its state of iteration {level.captured_at[index]} is "
                "neither in memory nor in an earlier file. This window is not written; a later one will have all states"
            )
        assert source.hashes is not None, "a committed window has hashes"
        places.append(None if source is part or before is None else before.places[index])
        hashes.append(source.hashes[index])
    return replace(window, slices=[replace(stored, hashes=tuple(hashes))], before=None), places


class _Fillings:
    """Records which window was written last to each buffer, even if it was dropped since then."""

    def __init__(self) -> None:
        self._last: dict[int, HeldWindow] = {}

    def begin(self, window: HeldWindow) -> None:
        """Record that ``window`` is written to its buffer from now on."""
        last = self._last.get(window.buffer)
        # Drop the older reference, because a chain of these references would keep all windows of the run.
        if last is not None:
            last.before = None
        window.before = last if last is not None and last.complete else None
        self._last[window.buffer] = window


class OwnWindows:
    """Windows of one rank of this node."""

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self._fillings = _Fillings()
        self.pinned: set[int] = set()
        """Buffers that are being written to storage and must not change."""
        self.confirmed: HeldWindow | None = None
        """The newest window that was committed in this generation, or from which the job has continued at the start of
        this generation. If only peers have this window, no buffer of this rank contains it."""
        self._order: list[HeldWindow] = []
        """Windows in the order in which they began, at most one for each buffer."""
        self._num_commits = 0
        self._is_new_commit = False

    def __iter__(self) -> Iterator[HeldWindow]:
        return iter(list(self._order))

    def __contains__(self, window: HeldWindow) -> bool:
        return any(window is held for held in self._order)

    @property
    def committed(self) -> HeldWindow | None:
        """The newest committed window, or None if no window is committed."""
        return next((window for window in self._order if window.committed), None)

    def new_generation(self) -> None:
        """Begin a new generation, and count its commits from 0. Windows stay until overwritten or superseded."""
        self._num_commits, self._is_new_commit, self.confirmed = 0, False, None

    def begin(self, window: HeldWindow) -> None:
        """Assign a buffer to a new window. Drop incomplete windows and an uncommitted window of the same iterations.

        Raises:
            ControlError: the buffer is being written to storage, or has the newest window committed in this generation.
        """
        buffer, held = window.buffer, self._in_buffer(window.buffer)
        if buffer in self.pinned:
            raise ControlError(f"buffer={buffer}: must not be overwritten while it is being written to storage")
        if held is not None and held is self.confirmed:
            newest = f"window {held.start_iteration}, the newest committed one"
            raise ControlError(f"buffer={buffer}: must not be overwritten, because it contains {newest}")
        # A rank captures one window at a time, so an incomplete window will never be completed. An uncommitted window
        # of the same iterations was captured before the job went back to an earlier state.
        for other in self:
            is_same = other.start_iteration == window.start_iteration and not other.committed
            if other is held or is_same or not other.captured:
                self._order.remove(other)
        self._order.append(window)
        self._fillings.begin(window)

    def carried(self, window: HeldWindow, part: Slice) -> list[CarriedPiece]:
        """Return the pieces that slice ``part`` takes from earlier windows. Raises ControlError if one is missing."""
        return _carried(part, window, reversed(self._order))

    def capture(self, buffer: int, index: int, part: Slice) -> None:
        """Add a slice to the window in a buffer.

        Raises:
            ControlError: no window was begun in the buffer.
            CheckpointError: the slice is not the next one of the window, or is at a wrong position.
        """
        window = self._in_buffer(buffer)
        if window is None:
            raise ControlError(f"buffer={buffer}: no window was begun in this buffer")
        window.check_next(index, part, self.window_bytes)
        window.slices.append(part)

    def next_unhashed(self) -> tuple[HeldWindow, Slice] | None:
        """Return the oldest slice without hashes, and its window. Return None if all slices have hashes. Skip windows
        that were given up, because at least one peer will never have them."""
        windows = (window for window in self._order if not window.given_up)
        return next(((window, part) for window in windows for part in window.slices if part.hashes is None), None)

    def replicated(self, peers: Sequence[int], generation: int) -> dict[int, int]:
        """Return the windows of ``generation`` that this node and all ``peers`` have, as {buffer: start iteration}."""
        return {
            window.buffer: window.start_iteration
            for window in self._of_generation(generation)
            if window.complete and all(window.acknowledged.get(node, 0) == window.num_slices for node in peers)
        }

    def given_up(self, generation: int) -> dict[int, int]:
        """Return the windows of ``generation`` that at least one peer will never have, as {buffer: start iteration}."""
        return {window.buffer: window.start_iteration for window in self._of_generation(generation) if window.given_up}

    def waiting_bytes(self, peers: Sequence[int], generation: int) -> int:
        """Return the sum, over all peers, of the bytes of windows of ``generation`` that the peer has not received."""
        return sum(
            part.captured_bytes
            for window in self._of_generation(generation)
            for node in peers
            for part in window.slices[window.acknowledged.get(node, 0) :]
        )

    def commit(self, start_iteration: int, generation: int, captured_in: int | None = None) -> HeldWindow:
        """Record that all ranks have a window, and drop the windows that it supersedes.

        If ``captured_in`` is an earlier generation, the call confirms that the job has continued from the window.
        ``is_persist_due`` does not count such a call as a commit: ranks that received their state from elsewhere do not
        make this call, and the counts of all ranks must be equal. Windows of the same iterations from different
        generations are different windows, each with its own copies.

        Raises:
            ControlError: no complete window of that generation starts at ``start_iteration``.
        """
        captured_in = generation if captured_in is None else captured_in
        window = self.find(start_iteration, captured_in)
        self._is_new_commit = not window.committed and captured_in == generation
        self._num_commits += self._is_new_commit
        # Keep the committed window, and newer windows of its generation, which are still being replicated.
        self._order = [held for held in self if not _is_superseded(held.key, held.committed, window.key)]
        window.committed, self.confirmed = True, window
        return window

    def abandon(self, start_iteration: int, generation: int) -> HeldWindow:
        """Drop and return a window that the job will not commit.

        Raises:
            ControlError: no window of ``generation`` starts at ``start_iteration``, or the window is committed.
        """
        key = WindowKey(start_iteration=start_iteration, generation=generation)
        found = [window for window in self._order if window.key == key]
        if not found or found[0].committed:
            missing = f"there is no uncommitted window of generation {generation}"
            raise ControlError(f"start_iteration={start_iteration}: {missing}")
        self._order.remove(found[0])
        return found[0]

    def is_persist_due(self, persist_every: int) -> bool:
        """Return whether the window that was just committed must be written to storage. This is true for every
        ``persist_every``-th commit of the generation, and never if ``persist_every`` is 0."""
        return persist_every > 0 and self._is_new_commit and self._num_commits % persist_every == 0

    def find(self, start_iteration: int, generation: int | None = None) -> HeldWindow:
        """Return the complete window of ``generation`` (None: any) that starts at ``start_iteration``. If there are
        several, prefer the committed window, because every rank has it, and then the newest generation.

        Raises:
            ControlError: there is no such window.
        """
        found = [
            window
            for window in self._order
            if window.complete and window.start_iteration == start_iteration and generation in (None, window.generation)
        ]
        if not found:
            raise ControlError(f"start_iteration={start_iteration}: no complete window starts there")
        return max(found, key=lambda window: (window.committed, window.generation))

    def _in_buffer(self, buffer: int) -> HeldWindow | None:
        return next((window for window in self._order if window.buffer == buffer), None)

    def _of_generation(self, generation: int) -> Iterator[HeldWindow]:
        return (window for window in self._order if window.generation == generation)


class CopyWindows:
    """Copies of windows of one rank of another node, on the receiving side."""

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.buffers: list[HeldWindow | None] = [None] * NUM_COPY_BUFFERS
        self._fillings = _Fillings()

    def __iter__(self) -> Iterator[HeldWindow]:
        return iter([window for window in self.buffers if window is not None])

    def expect(self, incoming: HeldWindow, index: int, part: Slice) -> HeldWindow:
        """Return the window to which an announced slice belongs. Slice 0 of a window replaces the window in its buffer.

        Raises:
            ControlError: the buffer has the newest committed window.
            CheckpointError: the slice is not the next one of the window, or is at a wrong position.
        """
        # A new window begins only with slice 0, because only the announcement of slice 0 has topology and plan.
        held = self.buffers[incoming.buffer]
        if held is not None and held.key == incoming.key and index > 0:
            held.check_next(index, part, self.window_bytes)
            return held
        # After a loss this window may be the only copy of the job's state, so a mistake of the sender must not drop it.
        if held is not None and held.committed:
            committed = f"window {held.start_iteration}, which is committed"
            raise ControlError(f"buffer={incoming.buffer}: must not be overwritten, because it contains {committed}")
        # Check the slice first: an invalid one must not drop the window that is in the buffer now.
        incoming.check_next(index, part, self.window_bytes)
        self.buffers[incoming.buffer] = incoming
        self._fillings.begin(incoming)
        return incoming

    def carried(self, window: HeldWindow, part: Slice) -> list[CarriedPiece]:
        """Return the pieces that slice ``part`` takes from earlier copies. Raises ControlError if one is missing."""
        return _carried(part, window, self)

    def preceding(self, window: HeldWindow, part: Slice) -> HeldWindow:
        """Find the preceding iteration's window, to which ``part.update`` applies. Raises ControlError if missing."""
        found = next((other for other in self if other.complete and _precedes(other, window, part)), None)
        if found is None:
            raise ControlError(f"window {window.start_iteration}: the window of the preceding iteration is missing")
        return found

    def commit(self, key: WindowKey) -> None:
        """Mark a window as committed, and drop the windows that it supersedes.

        Raises:
            ControlError: this server has no complete copy of the window.
        """
        window = next((window for window in self if window.key == key and window.complete), None)
        if window is None:
            raise ControlError(
                f"window {key.start_iteration} of generation {key.generation}: this server has no complete copy"
            )
        for number, other in enumerate(self.buffers):
            if other is not None and _is_superseded(other.key, other.committed, key):
                self.buffers[number] = None
        window.committed = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSlice:
    """Next action of a sender to a peer: send slice ``index`` of ``window`` into ``buffer`` of the peer."""

    window: HeldWindow
    index: int
    buffer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCommit:
    """Next action of a sender to a peer: report that ``window``, of which the peer has a copy, is committed."""

    window: HeldWindow


class PeerBuffers:
    """Copies of one rank's windows in the buffers of a peer, as known on the sending side."""

    def __init__(self, held: Iterable[StoredWindow] = ()) -> None:
        """Start with ``held``, the windows that the peer says it has. Raises ControlError for an invalid buffer."""
        self.buffers: list[StoredWindow | None] = [None] * NUM_COPY_BUFFERS
        for window in held:
            if window.buffer not in range(NUM_COPY_BUFFERS):
                raise ControlError(f"buffer={window.buffer}: must be from 0 to {NUM_COPY_BUFFERS - 1}")
            self.buffers[window.buffer] = window

    def find(self, key: WindowKey) -> StoredWindow | None:
        """Return the window with ``key`` in the peer's buffers, or None if the peer does not have it."""
        return next((held for held in self.buffers if held is not None and held.key == key), None)

    def num_received(self, window: HeldWindow) -> int:
        """Return how many slices of a window were sent to the peer, including slices without an acknowledgement."""
        found = self.find(window.key)
        return found.num_held if found else 0

    def next_action(
        self, own: OwnWindows, generation: int, given_up: Collection[HeldWindow] = ()
    ) -> SendSlice | SendCommit | None:
        """Choose what to send next: a commit if one is due, otherwise the next slice of the oldest window that the peer
        lacks. Return None if there is nothing to send. Windows of ``generation`` are sent, and the newest committed
        window of any generation, so that a new peer gets this window. Windows in ``given_up`` are not sent."""
        # A commit is sent before slices, because it frees the peer's other buffer for them.
        committed = self._wanted_commit(own)
        found = None if committed is None else self.find(committed.key)
        if committed and found and not found.committed and found.complete:
            return SendCommit(window=committed)
        # A window that was given up will never be committed, so it needs no copies, and its hashes may be missing.
        wanted = [w for w in own if w not in given_up and (w.committed or not w.given_up)]
        live = {window.key for window in wanted}
        # Complete one window after the other in the order of capture, because the job commits the oldest one next.
        for window in wanted:
            if window is committed or (window.generation == generation and not window.committed):
                action = self._next_slice(window, live, generation)
                if action is not None or self.num_received(window) < window.num_slices:
                    return action
        return None

    def _wanted_commit(self, own: OwnWindows) -> HeldWindow | None:
        # A restarted node may have an older committed window than its peer. The older window replaces the peer's window
        # only if the job has confirmed in this generation that it has continued from the older window.
        window = own.confirmed or own.committed
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
        # Choose a free buffer, or one whose window will not be committed: dropped here, or of an older generation.
        if None in self.buffers:
            return self.buffers.index(None)
        for number, held in enumerate(self.buffers):
            assert held is not None, "no buffer is free"
            if not held.committed and (held.key not in live or held.generation < generation):
                return number
        return None

    def has_carried(self, own: OwnWindows, window: HeldWindow, part: Slice) -> bool:
        """Return whether the peer can copy all pieces of ``part`` that were not captured with it. The peer can do this
        if there is a complete window which both nodes have, and which contains all these pieces."""
        carried = [index for index in range(len(part.pieces)) if not part.is_captured(index)]
        for other in own:
            held = self.find(other.key)
            is_there = held is not None and held.complete and other.complete and other is not window
            is_like = other.generation == window.generation and other.num_slices == 1
            if is_there and is_like and all(part.has_same(index, other.slices[0]) for index in carried):
                return True
        return False

    def can_repeat(self, own: OwnWindows, window: HeldWindow, part: Slice) -> bool:
        """Return whether the peer has the slice from which it can compute pieces of ``part``, a slice of ``window``,
        with ``part.update``."""
        earlier = (other for other in own if other.complete and _precedes(other, window, part))
        found = (self.find(other.key) for other in earlier)
        return any(held is not None and held.complete for held in found)

    def note_sent(self, action: SendSlice | SendCommit) -> None:
        """Record a sent slice or commit as if the peer had accepted it. If the peer refuses it, the connection ends,
        and the next connection begins with a new object from ``PeerBuffers.read_held``."""
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
            if held is not None and _is_superseded(held.key, held.committed, key):
                self.buffers[number] = None
            elif held is not None and held.key == key:
                self.buffers[number] = replace(held, committed=True)

    @classmethod
    def read_held(cls, answer: Mapping[str, Any]) -> "dict[int, PeerBuffers]":
        """Read the lists of windows, by rank, in the peer's first answer. Raises ControlError if it is invalid."""
        by_rank: dict[int, list[StoredWindow]] = {}
        for entry in items(answer, "held"):
            if not isinstance(entry, dict):
                raise ControlError(f"held={entry!r:.100}: must be an object")
            by_rank.setdefault(integer(entry, "rank", most=MAX_RANK), []).append(stored_window(entry.get("window")))
        return {rank: cls(windows) for rank, windows in by_rank.items()}


def _age(key: WindowKey) -> tuple[int, int]:
    return key.generation, key.start_iteration
