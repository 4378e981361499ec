"""State of a node's snapshot server: ranks with their arenas, copies for ranks of other nodes, and the generation.

One lock protects all of it and is held only for bookkeeping; bytes are hashed, sent, received and written without it.
After a change that a thread may wait for, ``changed`` is called.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron_ft.errors import ControlError
from megatron_ft.planning.recovery.sources import StoredWindow, Where
from megatron_ft.planning.snapshot.buffers import NUM_BUFFERS
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.snapshot.server.memory import Memory, Segment
from megatron_ft.snapshot.server.windows import NUM_COPY_BUFFERS, CopyWindows, HeldWindow, OwnWindows
from megatron_ft.snapshot.server.wire import Refused
from megatron_ft.snapshot.window import Origin, Slice

PAGE_BYTES = 4096
"""Size of a status page; the size of windows is a multiple of it."""
MAX_PROBLEMS = 1000
"""Largest number of problems that are kept until their rank asks; older ones are dropped and counted in the status
page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A rank and its job, from the rank's first message."""

    origin: Origin
    peers: Mapping[int, str]
    """Address of every node's snapshot server; it may include the server of this node."""
    peer_nodes: tuple[int, ...]
    """Nodes that hold copies of this rank's windows."""
    persist_every: int
    """Number of commits between two windows written to storage; 0: on request only."""
    persist_url: str | None
    num_persisted: int


@dataclass(slots=True, kw_only=True, eq=False)
class OwnRank:
    """A rank of this node."""

    settings: Settings
    windows: OwnWindows | None = None
    segment: Segment | None = None
    abort: Callable[[], None] | None = None
    """Ends the connection of the process that acts for the rank."""
    problems: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_PROBLEMS))
    num_problems: int = 0
    replicated_bytes: int = 0
    hashed_bytes: int = 0
    persisted_start: int = -1
    persisted_bytes: int = 0
    allocating: threading.Lock = field(default_factory=threading.Lock)
    """Held while memory of the rank is replaced."""

    def view(self, window: HeldWindow, part: Slice) -> memoryview:
        """Return the bytes of a slice."""
        assert self.segment is not None, "a window without memory"
        start = self.offset(window) + part.offset
        return self.segment.view[start : start + part.num_bytes]

    def offset(self, window: HeldWindow) -> int:
        """Return the first byte of a window in the segment."""
        assert self.windows is not None, "a window without memory"
        return PAGE_BYTES + window.buffer * self.windows.window_bytes

    def note_problem(self, what: str, error: object, start_iteration: int) -> None:
        self.num_problems += 1
        self.problems.append({"what": what, "error": str(error), "start_iteration": start_iteration})

    def give_up(self, window: HeldWindow) -> None:
        """Record that a peer will never hold ``window``."""
        window.given_up = True
        self.publish()

    def publish(self) -> None:
        """Write the status page, each field with one store, in order."""
        settings, windows = self.settings, self.windows
        if windows is None or self.segment is None:
            return
        generation = settings.origin.generation
        replicated, given_up = windows.replicated(settings.peer_nodes, generation), windows.given_up(generation)
        values = (
            max(replicated.values(), default=-1),
            self.replicated_bytes,
            windows.waiting_bytes(settings.peer_nodes, generation),
            self.num_problems,
            self.persisted_start,
            self.hashed_bytes,
            sum(1 << buffer for buffer in windows.pinned),
            -1 if windows.confirmed is None else windows.confirmed.start_iteration,
            self.persisted_bytes,
            *(replicated.get(buffer, -1) for buffer in range(NUM_BUFFERS)),
            *(given_up.get(buffer, -1) for buffer in range(NUM_BUFFERS)),
        )
        # The rank reads whole words without a lock, commits before pinned buffers: so pinned buffers are written first.
        page = self.segment.view[: len(values) * 8].cast("q")
        for index, value in enumerate(values):
            page[index] = value


@dataclass(slots=True, kw_only=True, eq=False)
class Copy:
    """Windows of a rank of another node, and their memory."""

    windows: CopyWindows
    segment: Segment
    receiving: set[int] = field(default_factory=set)
    """Buffers that are receiving bytes."""

    def offset(self, window: HeldWindow) -> int:
        """Return the first byte of a window in the segment."""
        return window.buffer * self.windows.window_bytes


class Store:
    """All state of a snapshot server."""

    def __init__(self, node: int, token: str, memory: Memory) -> None:
        self.node = node
        self.token = token
        self.memory = memory
        self.lock = threading.Condition()
        self.ranks: dict[int, OwnRank] = {}
        self.copies: dict[int, Copy] = {}
        self._allocating_copies: dict[int, threading.Lock] = {}
        """The lock of each rank; held while memory for its copies is replaced."""
        self.run_id: str | None = None
        self.generation = -1
        """The newest generation that any client has presented."""
        self.own_generation = -1
        """The newest generation that a rank of this node has presented."""
        self.on_peers: Callable[[Mapping[int, str]], None] = lambda peers: None
        """Called with the addresses of all nodes that shall hold copies, with the lock held."""

    def changed(self) -> None:
        """Wake the threads that wait for work. The lock must be held."""
        # All, because hasher, senders, persister and flushes wait on one condition for different things.
        self.lock.notify_all()

    def enter(self, run_id: str, generation: int) -> None:
        """Check run and generation of a first message, and advance to a newer generation. The lock must be held.

        Raises:
            Refused: another run than this server's, or a stale generation.
        """
        if self.run_id is not None and run_id != self.run_id:
            raise Refused(f"run_id={run_id}: this snapshot server serves run {self.run_id}")
        # Before anything is changed: a stale greeting must not end the connection of its successor.
        self.check_generation(generation)
        self.run_id, self.generation = run_id, generation

    def check_generation(self, generation: int) -> None:
        """Refuse a process of an earlier membership, which must not change anything. The lock must be held.

        Raises:
            Refused: ``generation`` is older than the newest one.
        """
        if generation < self.generation:
            raise Refused(f"generation={generation}: is stale, the newest is {self.generation}", "stale")

    def register(self, settings: Settings, abort: Callable[[], None]) -> OwnRank:
        """Let a new connection act for a rank of this node; an earlier one is ended. ``abort`` ends the new one.

        The lock must be held. Raises Refused as ``enter``.
        """
        origin = settings.origin
        self.enter(origin.run_id, origin.generation)
        self.own_generation = max(self.own_generation, origin.generation)
        # Windows and arena of a dead process stay with its rank: its successor restores from them.
        own = self.ranks.setdefault(origin.rank, OwnRank(settings=settings))
        # A process that was replaced may still be alive; two must not begin windows in one arena.
        if own.abort is not None:
            own.abort()
        # A process of the same generation continues the same history, in which earlier commits count.
        if own.windows is not None and origin.generation > own.settings.origin.generation:
            own.windows.new_generation()
        own.settings, own.abort = settings, abort
        # Ranks of earlier generations name peers that may have left: senders to them would report failures without end.
        current = [other.settings for other in self.ranks.values() if self.is_current(other)]
        self.on_peers({node: known.peers[node] for known in current for node in known.peer_nodes})
        # The page still shows the generation before, whose windows must not count in a vote of this one.
        own.publish()
        self.changed()
        return own

    def check_acting(self, own: OwnRank, settings: Settings) -> None:
        """Fence: a process that greeted with ``settings`` and was replaced since must not change the rank's windows.

        The lock must be held until the change is made.

        Raises:
            Refused: another process acts for the rank, or its generation is stale.
        """
        self.check_generation(settings.origin.generation)
        if own.settings is not settings:
            raise Refused("another process acts for this rank now", "stale")

    def is_current(self, own: OwnRank) -> bool:
        return own.settings.origin.generation == self.own_generation

    @contextmanager
    def changing(self, own: OwnRank, settings: Settings) -> Iterator[OwnWindows]:
        """Hold the lock while the process that greeted with ``settings`` changes its rank's windows; then publish.

        Raises:
            Refused: as ``check_acting``.
            ControlError: the rank has no memory.
        """
        with self.lock:
            self.check_acting(own, settings)
            if own.windows is None:
                raise ControlError("no memory was allocated for this rank")
            yield own.windows
            own.publish()
            self.changed()

    def take_arena(
        self, own: OwnRank, settings: Settings, window_bytes: int, *, new: bool = False
    ) -> tuple[Segment, int]:
        """Return memory for windows of a rank, and the size of a window. Reuses large enough memory unless ``new``.

        Otherwise the present memory is freed before new memory is allocated. The lock must not be held.

        Args:
            settings: Greeting of the process that asks.

        Raises:
            Refused: the same cases as ``check_acting``.
            ControlError: there is not enough memory.
        """
        # One after the other: a process that replaces another one finds the memory that this one still took returned.
        with own.allocating:
            with self.lock:
                self.check_acting(own, settings)
                is_enough = own.windows is not None and own.windows.window_bytes >= window_bytes
                if own.segment is not None and own.windows is not None and is_enough and not new:
                    return own.segment, own.windows.window_bytes
                # Threads that still read a window hold views: the old memory is freed when the last of them is gone.
                own.windows = own.segment = None
            name = f"arena-rank-{own.settings.origin.rank}"
            # Without the lock: while pages are allocated, peers expect answers and ranks take their turns.
            segment = self.memory.allocate(name, PAGE_BYTES + NUM_BUFFERS * window_bytes)
            with self.lock:
                try:
                    self.check_acting(own, settings)
                except Refused:
                    # Before the next process allocates: an exception keeps local variables for a while.
                    del segment
                    raise
                own.windows, own.segment = OwnWindows(window_bytes), segment
                own.publish()
            return segment, window_bytes

    def take_copy(self, rank: int, window_bytes: int, generation: int) -> Copy:
        """Return memory for windows of a rank of another node. Reuses the present memory if it has this size.

        Otherwise the present memory is freed before new memory is allocated. The lock must not be held.

        Args:
            generation: Generation of the connection that asks.

        Raises:
            Refused: ``generation`` is stale.
            ControlError: there is not enough memory.
        """
        with self.lock:
            allocating = self._allocating_copies.setdefault(rank, threading.Lock())
        # One after the other: a connection that was given up may still allocate for the same rank.
        with allocating:
            with self.lock:
                self.check_generation(generation)
                if rank in self.copies and self.copies[rank].windows.window_bytes == window_bytes:
                    return self.copies[rank]
                self.copies.pop(rank, None)
            segment = self.memory.allocate(f"copy-rank-{rank}", NUM_COPY_BUFFERS * window_bytes)
            with self.lock:
                self.check_generation(generation)
                self.copies[rank] = Copy(windows=CopyWindows(window_bytes), segment=segment)
                return self.copies[rank]

    def free_older(self, generation: int) -> None:
        """Free memory that holds only windows of earlier generations, after the whole job has one of ``generation``.

        Call it only for a commit of a rank of this node. On a node without a rank in ``generation``, windows of the
        generation before may be the only complete ones for a restart with this node, so all of them stay. The lock must
        be held.
        """
        for rank, copy in list(self.copies.items()):
            generations = [window.generation for window in copy.windows]
            # A copy without windows is new: its first slice is about to arrive.
            if generations and max(generations) < generation and not copy.receiving:
                del self.copies[rank]
        for rank, own in list(self.ranks.items()):
            if own.settings.origin.generation < generation:
                del self.ranks[rank]

    def inventory(self, rank: int) -> list[StoredWindow]:
        """Return the windows of ``rank`` on this server. The lock must be held."""
        return [window.stored(where, self.node) for where, window in self._windows_of(rank)]

    def find(self, rank: int, key: WindowKey) -> tuple[Segment, int, HeldWindow]:
        """Return a complete window of ``rank``: segment, first byte, description. The lock must be held.

        Raises:
            ControlError: this server does not have it.
        """
        for memory in (self.ranks.get(rank), self.copies.get(rank)):
            for window in [] if memory is None or memory.windows is None else memory.windows:
                if window.key == key and window.complete:
                    assert memory is not None and memory.segment is not None, "a window without memory"
                    return memory.segment, memory.offset(window), window
        raise ControlError(f"window {key.start_iteration} of generation {key.generation}: not complete on this server")

    def _windows_of(self, rank: int) -> Iterator[tuple[Where, HeldWindow]]:
        own, copy = self.ranks.get(rank), self.copies.get(rank)
        if own is not None and own.windows is not None:
            yield from (("own", window) for window in own.windows)
        if copy is not None:
            yield from (("copy", window) for window in copy.windows)

    def report(self, text: str) -> None:
        print(f"snapshot server {self.node}: {text}", file=sys.stderr, flush=True)
