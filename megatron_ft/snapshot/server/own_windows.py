"""Which buffer of a rank holds what, what may go, and how far each window is. Pure: no sockets, threads or memory.

A window lives in one of three buffers: the newest committed one, the one that is being replicated, and the one that
is being filled.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ft.errors import ControlError
from megatron_ft.planning.snapshot.buffers import NUM_BUFFERS

PAGE_BYTES = 4096
FORMAT_VERSION = 2

Key = tuple[int, int]
"""Generation and first iteration: what tells a rank's windows apart."""


@dataclass(slots=True, kw_only=True, eq=False)
class Slice:
    """One slice of a window: where its bytes are and what they are."""

    iteration: int
    offset: int
    """Within the window's buffer."""
    num_bytes: int
    header: Mapping[str, Any]
    pieces: Sequence[Sequence[Any]]
    """``[parameter, tensor_part, component, dtype, start, stop, offset within the slice, num_bytes]``."""
    hashes: Sequence[str] | None = None
    """xxh3_128 of each piece, once known."""

    def to_json(self) -> dict[str, Any]:
        """As in a manifest."""
        assert self.hashes is not None, "a slice without hashes has no record"
        listed = [[*piece, digest] for piece, digest in zip(self.pieces, self.hashes, strict=True)]
        return {**self.announcement(), "pieces": listed}

    def announcement(self) -> dict[str, Any]:
        """As ``to_json``, without the hashes, which may not be known yet."""
        about = {"iteration": self.iteration, "offset": self.offset, "num_bytes": self.num_bytes}
        return {**about, "header": self.header, "pieces": self.pieces}

    @classmethod
    def announced(cls, record: Mapping[str, Any]) -> "Slice":
        """Inverse of ``announcement``, for a record whose fields were checked."""
        names = ("iteration", "offset", "num_bytes", "header", "pieces")
        return cls(**{name: record[name] for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who captured a window."""

    run_id: str
    generation: int
    rank: int
    world_size: int
    topology: Mapping[str, Any]


@dataclass(kw_only=True, eq=False)
class Window:
    """What one buffer holds."""

    origin: Origin
    start_iteration: int
    num_slices: int
    plan: Mapping[str, Any]
    buffer: int
    slices: list[Slice] = field(default_factory=list)
    acknowledged: dict[int, int] = field(default_factory=dict)
    """For each peer node, how many slices it holds and has verified."""
    given_up: bool = False
    """Whether there is a peer that will never hold it."""
    committed: bool = False

    @property
    def key(self) -> Key:
        """Generation and first iteration."""
        return self.origin.generation, self.start_iteration

    @property
    def captured(self) -> bool:
        """Whether every slice is there."""
        return len(self.slices) == self.num_slices

    @property
    def complete(self) -> bool:
        """Whether every slice is there and hashed."""
        return self.captured and all(part.hashes is not None for part in self.slices)

    @property
    def num_bytes(self) -> int:
        """Bytes from the start of the buffer to the end of the last slice."""
        return self.slices[-1].offset + self.slices[-1].num_bytes if self.slices else 0

    def check_slice(self, index: int, part: Slice, window_bytes: int) -> None:
        """Whether ``part`` may be the next slice.

        Raises:
            ControlError: out of order, out of bounds, or not where a slice may begin.
        """
        where = f"slice={index} of window {self.start_iteration}"
        if index != len(self.slices) or self.captured:
            raise ControlError(f"{where}: must be slice {len(self.slices)} of {self.num_slices}")
        if part.iteration != self.start_iteration + index:
            raise ControlError(f"{where}: iteration={part.iteration} must be {self.start_iteration + index}")
        first = align(self.num_bytes)
        if part.offset != first or part.offset + part.num_bytes > window_bytes:
            raise ControlError(
                f"{where}: {part.num_bytes} bytes at {part.offset}: must begin at {first}, the next multiple of "
                f"{PAGE_BYTES}, and end before byte {window_bytes}"
            )

    def manifest(self) -> dict[str, Any]:
        """The window's manifest as plain values."""
        origin = self.origin
        return {
            "format_version": FORMAT_VERSION,
            "run_id": origin.run_id,
            "generation": origin.generation,
            "topology": origin.topology,
            "rank": origin.rank,
            "world_size": origin.world_size,
            "start_iteration": self.start_iteration,
            "num_slices": self.num_slices,
            "plan": self.plan,
            "slices": [part.to_json() for part in self.slices],
        }

    def summary(self) -> dict[str, Any]:
        """One line of an inventory."""
        return {
            "start_iteration": self.start_iteration,
            "num_slices": self.num_slices,
            "generation": self.origin.generation,
            "world_size": self.origin.world_size,
            "committed": self.committed,
            "complete": self.complete,
        }


def align(num_bytes: int) -> int:
    """The next multiple of a page."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def is_superseded(old: Key, was_committed: bool, by: Key) -> bool:
    """Whether a window may go once ``by`` is committed: an earlier committed one, or one of an older state."""
    return old != by and (was_committed or old[0] < by[0] or old[1] < by[1])


def best(windows: Sequence[Window], start_iteration: int, generation: int | None = None) -> Window:
    """The complete window that starts at ``start_iteration``; of several the committed, then the newest one.

    A committed one comes before one that was captured again since, for every rank has the same one.

    Raises:
        ControlError: there is none.
    """
    found = [
        window
        for window in windows
        if window.complete
        and window.start_iteration == start_iteration
        and generation in (None, window.origin.generation)
    ]
    if not found:
        raise ControlError(f"start_iteration={start_iteration}: no complete window starts there")
    return max(found, key=lambda window: (window.committed, window.origin.generation))


class OwnWindows:
    """The windows of one rank of this node."""

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.pinned: set[int] = set()
        """Buffers that somebody reads and needs unchanged."""
        self._buffers: list[Window | None] = [None] * NUM_BUFFERS
        self._order: list[Window] = []
        self._num_commits = 0
        self._is_new_commit = False
        self._protected: Window | None = None
        """Committed, or confirmed to be, in this generation."""

    def __iter__(self) -> Iterator[Window]:
        """Windows in the order in which they were begun."""
        return iter(list(self._order))

    def __contains__(self, window: Window) -> bool:
        return any(window is held for held in self._order)

    @property
    def committed(self) -> Window | None:
        """The newest committed window."""
        return next((window for window in self._order if window.committed), None)

    def new_generation(self) -> None:
        """Windows stay until they are overwritten or confirmed by a commit; commits count from one again."""
        self._num_commits, self._is_new_commit, self._protected = 0, False, None

    def begin(self, buffer: int, window: Window) -> None:
        """Give a buffer to a new window. Incomplete windows and an earlier try at the same window are forgotten.

        Raises:
            ControlError: the buffer is pinned, or holds the newest window that was committed in this generation.
        """
        if buffer in self.pinned:
            raise ControlError(f"buffer={buffer}: is being written to storage")
        held = self._buffers[buffer]
        if held is not None and held is self._protected:
            raise ControlError(f"buffer={buffer}: holds window {held.start_iteration}, the newest committed one")
        same = [other for other in self if other.start_iteration == window.start_iteration and not other.committed]
        for other in [held, *(other for other in self if not other.captured), *same]:
            self._forget(other)
        self._buffers[buffer] = window
        self._order.append(window)

    def capture(self, buffer: int, index: int, part: Slice) -> Window:
        """Add a slice to the window of a buffer.

        Raises:
            ControlError: nothing was begun there, or the slice does not fit.
        """
        window = self._buffers[buffer]
        if window is None:
            raise ControlError(f"buffer={buffer}: nothing was begun there")
        window.check_slice(index, part, self.window_bytes)
        window.slices.append(part)
        return window

    def next_unhashed(self) -> tuple[Window, Slice] | None:
        """The oldest slice whose hashes are not known."""
        waiting = ((window, part) for window in self._order for part in window.slices if part.hashes is None)
        return next(waiting, None)

    def note_acknowledged(self, window: Window, node: int, num_slices: int) -> None:
        """A peer holds the first ``num_slices`` of a window."""
        window.acknowledged[node] = num_slices

    def replicated(self, peers: Sequence[int], generation: int) -> dict[int, int]:
        """Windows of this generation that are complete here and with all ``peers``: buffer to first iteration."""
        return {
            window.buffer: window.start_iteration
            for window in self._order
            if window.origin.generation == generation
            and window.complete
            and all(window.acknowledged.get(node, 0) == window.num_slices for node in peers)
        }

    def given_up(self, generation: int) -> dict[int, int]:
        """Windows of this generation that a peer will never hold: buffer to first iteration."""
        return {
            window.buffer: window.start_iteration
            for window in self._order
            if window.origin.generation == generation and window.given_up
        }

    def waiting_bytes(self, peers: Sequence[int], generation: int) -> int:
        """Bytes of this generation that have yet to reach peers, each peer counted."""
        return sum(
            part.num_bytes
            for window in self._order
            if window.origin.generation == generation
            for node in peers
            for part in window.slices[window.acknowledged.get(node, 0) :]
        )

    def commit(self, start_iteration: int, generation: int, captured_in: int | None = None) -> Window:
        """Note in ``generation`` that the whole job holds a window: what it supersedes is forgotten.

        One that an earlier generation captured, ``captured_in``, is confirmed by it, which does not count for
        ``is_persist_due``: a rank that resumed from elsewhere has nothing to confirm. A window that was captured
        again is another one, with copies of its own, though its bytes are the same.

        Raises:
            ControlError: no complete window of that generation starts there.
        """
        captured_in = generation if captured_in is None else captured_in
        window = best(self._order, start_iteration, captured_in)
        self._is_new_commit = not window.committed and captured_in == generation
        self._num_commits += self._is_new_commit
        for other in self:
            if is_superseded(other.key, other.committed, window.key):
                self._forget(other)
        window.committed, self._protected = True, window
        return window

    def abandon(self, start_iteration: int, generation: int) -> None:
        """Forget a window that the job will not commit.

        Raises:
            ControlError: none of ``generation`` starts there, or it is committed.
        """
        found = [window for window in self._order if window.key == (generation, start_iteration)]
        if not found or found[0].committed:
            raise ControlError(f"start_iteration={start_iteration}: no window that could be given up starts there")
        self._forget(found[0])

    @property
    def confirmed(self) -> Window | None:
        """The newest window that was committed, or confirmed to be, in this generation."""
        return self._protected

    @property
    def confirmed_start(self) -> int:
        """First iteration of the newest window that was committed, or confirmed to be, in this generation; -1: none."""
        return -1 if self._protected is None else self._protected.start_iteration

    def is_persist_due(self, persist_every: int) -> bool:
        """Whether the commit just made is one of every ``persist_every`` of this generation; 0: never."""
        return persist_every > 0 and self._is_new_commit and self._num_commits % persist_every == 0

    def find(self, start_iteration: int, generation: int | None = None) -> Window:
        """A complete window.

        Raises:
            ControlError: there is none.
        """
        return best(self._order, start_iteration, generation)

    def _forget(self, window: Window | None) -> None:
        if window is None or window not in self:
            return
        self._buffers[window.buffer] = None
        self._order = [other for other in self._order if other is not window]


def hash_pieces(part: Slice, payload: memoryview, digest: Callable[[memoryview], str]) -> list[str]:
    """The hash of each piece of a slice whose bytes are ``payload``."""
    return [digest(payload[piece[6] : piece[6] + piece[7]]) for piece in part.pieces]
