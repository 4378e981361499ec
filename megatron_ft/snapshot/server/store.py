"""What a node's keeper holds: ranks with their arenas, copies for ranks of other nodes, and the generation.

One lock guards all of it and is held only for bookkeeping; bytes are hashed, sent, received and written outside it.
Whoever changes something that a thread may wait for calls ``changed``.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ft.errors import ControlError
from megatron_ft.planning.recovery.sources import StoredWindow, Where
from megatron_ft.planning.snapshot.buffers import NUM_BUFFERS
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.snapshot.server.copies import NUM_COPY_BUFFERS, CopyWindows
from megatron_ft.snapshot.server.memory import Memory, Segment
from megatron_ft.snapshot.server.own_windows import HeldWindow, OwnWindows
from megatron_ft.snapshot.server.wire import Refused
from megatron_ft.snapshot.window import Origin, Slice

PAGE_BYTES = 4096
"""Size of a status page; windows have a multiple of it."""
MAX_PROBLEMS = 1000
"""Problems that wait for their rank to ask; older ones are dropped, and counted in the status page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a rank said about itself and its job."""

    origin: Origin
    peers: Mapping[int, str]
    """Address of every node's keeper, this one's perhaps among them."""
    peer_nodes: tuple[int, ...]
    """Nodes that hold copies of this rank's windows."""
    persist_every: int
    """A window in so many is written to storage; 0: none unless asked."""
    persist_url: str | None
    num_persisted: int


@dataclass(slots=True, kw_only=True, eq=False)
class OwnRank:
    """A rank of this node."""

    settings: Settings
    windows: OwnWindows | None = None
    segment: Segment | None = None
    hang_up: Callable[[], None] | None = None
    """Ends the connection of the process that speaks for the rank."""
    problems: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_PROBLEMS))
    num_problems: int = 0
    replicated_bytes: int = 0
    hashed_bytes: int = 0
    persisted_start: int = -1
    persisted_bytes: int = 0

    def view(self, window: HeldWindow, part: Slice) -> memoryview:
        """The bytes of a slice."""
        assert self.segment is not None, "a window without memory"
        start = self.offset(window) + part.offset
        return self.segment.view[start : start + part.num_bytes]

    def offset(self, window: HeldWindow) -> int:
        """First byte of a window within the segment."""
        assert self.windows is not None, "a window without memory"
        return PAGE_BYTES + window.buffer * self.windows.window_bytes

    def note_problem(self, what: str, error: object, start_iteration: int) -> None:
        """Keep a problem until the rank asks for it."""
        self.num_problems += 1
        self.problems.append({"what": what, "error": str(error), "start_iteration": start_iteration})

    def give_up(self, window: HeldWindow) -> None:
        """A peer will never hold ``window``."""
        window.given_up = True
        self.publish()

    def publish(self) -> None:
        """Write the status page, each word with one store, in order."""
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
            time.process_time_ns(),
            sum(1 << buffer for buffer in windows.pinned),
            windows.confirmed_start,
            self.persisted_bytes,
            *(replicated.get(buffer, -1) for buffer in range(NUM_BUFFERS)),
            *(given_up.get(buffer, -1) for buffer in range(NUM_BUFFERS)),
        )
        page = self.segment.view[: len(values) * 8].cast("q")
        for index, value in enumerate(values):
            page[index] = value


@dataclass(slots=True, kw_only=True, eq=False)
class Copy:
    """What is kept for a rank of another node."""

    windows: CopyWindows
    segment: Segment
    receiving: set[int] = field(default_factory=set)
    """Buffers into which bytes flow at this moment."""

    def offset(self, window: HeldWindow) -> int:
        """First byte of a window within the segment."""
        return window.buffer * self.windows.window_bytes


class Store:
    """All state of a keeper."""

    def __init__(self, node: int, token: str, memory: Memory) -> None:
        self.node = node
        self.token = token
        self.memory = memory
        self.lock = threading.Condition()
        self.ranks: dict[int, OwnRank] = {}
        self.copies: dict[int, Copy] = {}
        self.run_id: str | None = None
        self.generation = -1
        """The newest that anybody has spoken of."""
        self.own_generation = -1
        """The newest that a rank of this node has spoken of."""
        self.on_peers: Callable[[Mapping[int, str]], None] = lambda peers: None
        """Called with the addresses of all nodes that shall hold copies, lock held."""

    def changed(self) -> None:
        """Wake threads that wait for something to do. The lock must be held."""
        self.lock.notify_all()

    def enter(self, run_id: str, generation: int) -> None:
        """Take note of a generation. The lock must be held.

        Raises:
            Refused: another run than the keeper's, or a generation that is over.
        """
        if self.run_id is not None and run_id != self.run_id:
            raise Refused(f"run_id={run_id}: this keeper serves run {self.run_id}")
        self.check_generation(generation)
        self.run_id, self.generation = run_id, generation

    def check_generation(self, generation: int) -> None:
        """Fence: what belongs to a membership that is over is refused. The lock must be held.

        Raises:
            Refused: ``generation`` is older than the newest one.
        """
        if generation < self.generation:
            raise Refused(f"generation={generation}: is over, {self.generation} is the newest", "stale")

    def welcome(self, settings: Settings, hang_up: Callable[[], None]) -> OwnRank:
        """A rank of this node has come, perhaps again. The lock must be held. Raises Refused as ``enter``."""
        origin = settings.origin
        self.enter(origin.run_id, origin.generation)
        self.own_generation = max(self.own_generation, origin.generation)
        own = self.ranks.setdefault(origin.rank, OwnRank(settings=settings))
        if own.hang_up is not None:
            own.hang_up()
        if own.windows is not None and origin.generation > own.settings.origin.generation:
            own.windows.new_generation()
        own.settings, own.hang_up = settings, hang_up
        current = [other.settings for other in self.ranks.values() if self.is_current(other)]
        self.on_peers({node: known.peers[node] for known in current for node in known.peer_nodes})
        own.publish()
        self.changed()
        return own

    def is_current(self, own: OwnRank) -> bool:
        """Whether a rank belongs to the newest generation of this node."""
        return own.settings.origin.generation == self.own_generation

    def take_arena(self, own: OwnRank, window_bytes: int, *, anew: bool = False) -> tuple[Segment, int]:
        """The memory of a rank and the size of its windows: what it had, if that is enough, else (or ``anew``) new.

        What it had goes before new memory is taken. The lock must not be held.

        Raises:
            ControlError: the memory is not there.
        """
        with self.lock:
            is_enough = own.windows is not None and own.windows.window_bytes >= window_bytes
            if own.segment is not None and own.windows is not None and is_enough and not anew:
                return own.segment, own.windows.window_bytes
            own.windows = own.segment = None
        name = f"arena-rank-{own.settings.origin.rank}"
        segment = self.memory.allocate(name, PAGE_BYTES + NUM_BUFFERS * window_bytes)
        with self.lock:
            own.windows, own.segment = OwnWindows(window_bytes), segment
            own.publish()
        return segment, window_bytes

    def take_copy(self, rank: int, window_bytes: int) -> Copy:
        """New memory for a rank of another node; what it had is given back first. The lock must not be held.

        Raises:
            ControlError: the memory is not there.
        """
        with self.lock:
            self.copies.pop(rank, None)
        segment = self.memory.allocate(f"copy-rank-{rank}", NUM_COPY_BUFFERS * window_bytes)
        with self.lock:
            self.copies[rank] = Copy(windows=CopyWindows(window_bytes), segment=segment)
            return self.copies[rank]

    def let_go(self, generation: int) -> None:
        """The whole job holds a window of ``generation``: memory of ranks that were here earlier is given back.

        Only a rank of this node may say so. On a node that has none in ``generation``, windows of the generation
        before may be the only complete ones for a restart that this node is part of: all of them stay.

        The lock must be held.
        """
        for rank, copy in list(self.copies.items()):
            generations = [window.generation for window in copy.windows]
            if generations and max(generations) < generation and not copy.receiving:
                del self.copies[rank]
        for rank, own in list(self.ranks.items()):
            if own.settings.origin.generation < generation:
                del self.ranks[rank]

    def inventory(self, rank: int) -> list[StoredWindow]:
        """Windows of ``rank`` that are here. The lock must be held."""
        return [window.stored(where, self.node) for where, window in self._windows_of(rank)]

    def find(self, rank: int, key: WindowKey) -> tuple[Segment, int, HeldWindow]:
        """A complete window of ``rank``: its segment, its first byte there, and what it is. The lock must be held.

        Raises:
            ControlError: it is not here.
        """
        for memory in (self.ranks.get(rank), self.copies.get(rank)):
            for window in [] if memory is None or memory.windows is None else memory.windows:
                if window.key == key and window.complete:
                    assert memory is not None and memory.segment is not None, "a window without memory"
                    return memory.segment, memory.offset(window), window
        raise ControlError(f"window {key.start_iteration} of generation {key.generation}: no complete one is here")

    def _windows_of(self, rank: int) -> Iterator[tuple[Where, HeldWindow]]:
        own, copy = self.ranks.get(rank), self.copies.get(rank)
        if own is not None and own.windows is not None:
            yield from (("own", window) for window in own.windows)
        if copy is not None:
            yield from (("copy", window) for window in copy.windows)

    def report(self, text: str) -> None:
        """A line in the keeper's log."""
        print(f"keeper {self.node}: {text}", file=sys.stderr, flush=True)
