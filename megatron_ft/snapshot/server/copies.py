"""The two buffers that a keeper has for a rank of another node, seen from both ends. Pure.

The sender decides which buffer a window goes to; the receiver refuses to lose its newest committed window.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ft.errors import ControlError
from megatron_ft.snapshot.server.fields import MAX_SLICES, integer, items
from megatron_ft.snapshot.server.own_windows import Key, OwnWindows, Slice, Window, is_superseded

NUM_COPY_BUFFERS = 2


class CopyWindows:
    """The receiving end: the windows of one rank of another node."""

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.buffers: list[Window | None] = [None] * NUM_COPY_BUFFERS

    def __iter__(self) -> Iterator[Window]:
        return iter([window for window in self.buffers if window is not None])

    def expect(self, incoming: Window, index: int, part: Slice) -> Window:
        """The window that a slice which is about to arrive belongs to; the first slice takes the buffer.

        Raises:
            ControlError: the buffer holds the newest committed window, or the slice is not the next one.
        """
        held = self.buffers[incoming.buffer]
        if held is not None and held.key == incoming.key and index > 0:
            held.check_slice(index, part, self.window_bytes)
            return held
        if held is not None and held.committed:
            raise ControlError(f"buffer={incoming.buffer}: holds window {held.start_iteration}, which is committed")
        incoming.check_slice(index, part, self.window_bytes)
        self.buffers[incoming.buffer] = incoming
        return incoming

    def commit(self, key: Key) -> None:
        """Mark a window; what it supersedes goes.

        Raises:
            ControlError: it is not here, or incomplete.
        """
        window = next((window for window in self if window.key == key and window.complete), None)
        if window is None:
            raise ControlError(f"window {key[1]} of generation {key[0]}: no complete copy is here")
        for number, other in enumerate(self.buffers):
            if other is not None and is_superseded(other.key, other.committed, key):
                self.buffers[number] = None
        window.committed = True

    def held(self, rank: int) -> list[dict[str, Any]]:
        """What is in which buffer, for the sender."""
        return [
            {
                "rank": rank,
                "buffer": window.buffer,
                "generation": window.origin.generation,
                "start_iteration": window.start_iteration,
                "num_slices": window.num_slices,
                "num_received": len(window.slices),
                "committed": window.committed,
            }
            for window in self
        ]


@dataclass(slots=True, kw_only=True)
class Held:
    """What the sender knows of one buffer of a peer."""

    key: Key
    num_slices: int
    num_received: int
    committed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSlice:
    """Next: send this slice into that buffer of the peer."""

    window: Window
    index: int
    buffer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCommit:
    """Next: tell the peer that this window, which it holds, is committed."""

    window: Window


class PeerBuffers:
    """The sending end: what a peer holds of one rank."""

    def __init__(self, held: Iterable[Mapping[str, Any]] = ()) -> None:
        """``held``: entries of ``CopyWindows.held``."""
        self.buffers: list[Held | None] = [None] * NUM_COPY_BUFFERS
        for entry in held:
            self.buffers[integer(entry, "buffer", most=NUM_COPY_BUFFERS - 1)] = Held(
                key=(integer(entry, "generation"), integer(entry, "start_iteration")),
                num_slices=integer(entry, "num_slices", least=1, most=MAX_SLICES),
                num_received=integer(entry, "num_received", most=MAX_SLICES),
                committed=entry.get("committed") is True,
            )

    def find(self, key: Key) -> tuple[int, Held] | None:
        """The buffer with a window."""
        found = ((number, held) for number, held in enumerate(self.buffers) if held is not None and held.key == key)
        return next(found, None)

    def num_received(self, window: Window) -> int:
        """Slices of a window that the peer has, or will have when it has answered."""
        found = self.find(window.key)
        return found[1].num_received if found else 0

    def next_action(
        self, own: OwnWindows, generation: int, given_up: Collection[Window] = ()
    ) -> SendSlice | SendCommit | None:
        """The next thing to send: a commit first, then slices in order; None while nothing may go.

        Windows of this generation go, and the newest committed one of any generation, so that a new peer gets it;
        those in ``given_up`` do not.
        """
        committed = self._wanted_commit(own)
        found = None if committed is None else self.find(committed.key)
        if committed and found and not found[1].committed and found[1].num_received == found[1].num_slices:
            return SendCommit(window=committed)
        wanted = [window for window in own if window not in given_up]
        live = {window.key for window in wanted}
        for window in wanted:
            if window is committed or (window.origin.generation == generation and not window.committed):
                action = self._next_slice(window, live, generation)
                if action is not None or self.num_received(window) < window.num_slices:
                    return action
        return None

    def _wanted_commit(self, own: OwnWindows) -> Window | None:
        """The committed window that the peer should have. A node that comes back may remember an older one than its
        peer does: that goes only if the job has confirmed in this generation that it went back to it.
        """
        window = own.committed
        newest = max((held.key for held in self.buffers if held is not None and held.committed), default=None)
        is_older = window is not None and newest is not None and window.key < newest
        return None if is_older and window is not own.confirmed else window

    def _next_slice(self, window: Window, live: Collection[Key], generation: int) -> SendSlice | None:
        index, found = self.num_received(window), self.find(window.key)
        if index >= len(window.slices):
            return None
        buffer = found[0] if found else self._place(live, generation)
        return None if buffer is None else SendSlice(window=window, index=index, buffer=buffer)

    def _place(self, live: Collection[Key], generation: int) -> int | None:
        """A free buffer, or one whose window will never be committed: forgotten here, or of an older generation."""
        if None in self.buffers:
            return self.buffers.index(None)
        for number, held in enumerate(self.buffers):
            assert held is not None, "free buffers were looked for"
            if not held.committed and (held.key not in live or held.key[0] < generation):
                return number
        return None

    def note_sent(self, action: SendSlice | SendCommit) -> None:
        """What was sent counts as held: what cannot be taken ends the connection, and ``read_held`` begins anew."""
        if isinstance(action, SendCommit):
            self._note_committed(action.window.key)
            return
        held = self.buffers[action.buffer]
        if held is None or held.key != action.window.key:
            held = Held(key=action.window.key, num_slices=action.window.num_slices, num_received=0)
            self.buffers[action.buffer] = held
        held.num_received = action.index + 1

    def _note_committed(self, key: Key) -> None:
        """The peer marks a window and lets go of what that supersedes."""
        for number, held in enumerate(self.buffers):
            if held is not None and is_superseded(held.key, held.committed, key):
                self.buffers[number] = None
            elif held is not None and held.key == key:
                held.committed = True


def read_held(answer: Mapping[str, Any]) -> dict[int, PeerBuffers]:
    """What a peer said on greeting that it holds, by rank.

    Raises:
        ControlError: malformed.
    """
    by_rank: dict[int, list[Mapping[str, Any]]] = {}
    for entry in items(answer, "held"):
        by_rank.setdefault(integer(entry, "rank"), []).append(entry)
    return {rank: PeerBuffers(entries) for rank, entries in by_rank.items()}
