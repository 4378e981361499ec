"""The two buffers of a peer that hold copies of a rank's windows, seen from both ends. Pure.

The sender decides which buffer a window goes to; the receiver refuses to overwrite its newest committed window.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_ft.errors import ControlError
from megatron_ft.planning.recovery.sources import StoredWindow
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.snapshot.server.fields import MAX_RANK, integer, items, stored_window
from megatron_ft.snapshot.server.own_windows import HeldWindow, OwnWindows, is_superseded
from megatron_ft.snapshot.window import Slice

NUM_COPY_BUFFERS = 2


class CopyWindows:
    """The receiving end: the windows of one rank of another node."""

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.buffers: list[HeldWindow | None] = [None] * NUM_COPY_BUFFERS

    def __iter__(self) -> Iterator[HeldWindow]:
        return iter([window for window in self.buffers if window is not None])

    def expect(self, incoming: HeldWindow, index: int, part: Slice) -> HeldWindow:
        """Choose the window that an announced slice belongs to; the first slice of a window takes the buffer.

        Raises:
            ControlError: the buffer holds the newest committed window.
            CheckpointError: the slice is not the next one, or does not fit.
        """
        # The announced window is kept only with its first slice: that one alone has topology and plan.
        held = self.buffers[incoming.buffer]
        if held is not None and held.key == incoming.key and index > 0:
            held.check_next(index, part, self.window_bytes)
            return held
        if held is not None and held.committed:
            raise ControlError(f"buffer={incoming.buffer}: holds window {held.start_iteration}, which is committed")
        incoming.check_next(index, part, self.window_bytes)
        self.buffers[incoming.buffer] = incoming
        return incoming

    def commit(self, key: WindowKey) -> None:
        """Mark a window as committed, and forget the windows that it supersedes.

        Raises:
            ControlError: it is not here, or incomplete.
        """
        window = next((window for window in self if window.key == key and window.complete), None)
        if window is None:
            raise ControlError(f"window {key.start_iteration} of generation {key.generation}: no complete copy is here")
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
    """Report to the peer that a window which it holds is committed."""

    window: HeldWindow


class PeerBuffers:
    """The sending end: what a peer holds of one rank."""

    def __init__(self, held: Iterable[StoredWindow] = ()) -> None:
        """Take the peer's own inventory. Raises ControlError for a buffer that cannot be."""
        self.buffers: list[StoredWindow | None] = [None] * NUM_COPY_BUFFERS
        for window in held:
            if window.buffer not in range(NUM_COPY_BUFFERS):
                raise ControlError(f"buffer={window.buffer}: must be from 0 to {NUM_COPY_BUFFERS - 1}")
            self.buffers[window.buffer] = window

    def find(self, key: WindowKey) -> StoredWindow | None:
        """The peer's entry of a window."""
        return next((held for held in self.buffers if held is not None and held.key == key), None)

    def num_received(self, window: HeldWindow) -> int:
        """Number of slices of a window that the peer has, or will have when it has answered."""
        found = self.find(window.key)
        return found.num_held if found else 0

    def next_action(
        self, own: OwnWindows, generation: int, given_up: Collection[HeldWindow] = ()
    ) -> SendSlice | SendCommit | None:
        """Choose what to send next: a commit first, then slices in order; None while there is nothing to send.

        Windows of this generation are sent, and the newest committed one of any generation, so that a new peer gets
        it; those in ``given_up`` are not.
        """
        committed = self._wanted_commit(own)
        found = None if committed is None else self.find(committed.key)
        if committed and found and not found.committed and found.complete:
            return SendCommit(window=committed)
        wanted = [window for window in own if window not in given_up]
        live = {window.key for window in wanted}
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
        """Count what was sent as held: a refusal ends the connection, and ``read_held`` replaces this object."""
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
    """Buffers of a peer by rank, from its answer to the greeting. Raises ControlError if it is malformed."""
    by_rank: dict[int, list[StoredWindow]] = {}
    for entry in items(answer, "held"):
        if not isinstance(entry, dict):
            raise ControlError(f"held={entry!r:.100}: must be an object")
        by_rank.setdefault(integer(entry, "rank", most=MAX_RANK), []).append(stored_window(entry.get("window")))
    return {rank: PeerBuffers(windows) for rank, windows in by_rank.items()}
