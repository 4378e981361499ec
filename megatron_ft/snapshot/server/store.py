"""State of a node's snapshot server: the node's ranks and their windows, copies of other nodes' windows, the memory
files of both, and the generation.

One lock protects this state. Threads hold the lock only for bookkeeping; they hash, send, receive and write bytes
without it. After a change for which a thread may wait, call ``changed``.
"""

import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ft.errors import ControlError
from megatron_ft.planning.recovery.sources import StoredWindow, Where
from megatron_ft.planning.snapshot.memory import NUM_BUFFERS
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.snapshot.server.windows import (
    NUM_COPY_BUFFERS,
    CarriedPiece,
    CopyWindows,
    HeldWindow,
    OnStorage,
    OwnWindows,
)
from megatron_ft.snapshot.server.wire import Lifeline, Refused
from megatron_ft.snapshot.window import Origin, Slice, Update

# The snapshot server allocates pages with ``posix_fallocate``, because its other threads can run meanwhile. Mapping
# with ``MAP_POPULATE``, as ranks do, would block them.

# Use less than ``MemAvailable``, which is an estimate: when memory runs out, the kernel may kill ranks.
_USABLE_SHARE = 0.9
_CHUNK_BYTES = 1 << 28
"""Number of bytes that one system call allocates. After each call, the number of unallocated bytes is updated."""


class Segment:
    """A mapped memory file. The file is closed when this object is deleted; views of its memory then stay valid."""

    def __init__(self, name: str, num_bytes: int, on_allocated: Callable[[int], None]) -> None:
        """Allocate a memory file with all its pages. Raises OSError if there is not enough memory.

        Args:
            on_allocated: called with the number of bytes allocated since the last call.
        """
        self.num_bytes = num_bytes
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        for start in range(0, num_bytes, _CHUNK_BYTES):
            chunk_bytes = min(_CHUNK_BYTES, num_bytes - start)
            # Allocate now, because a process that touches a page which cannot be allocated gets a SIGBUS.
            os.posix_fallocate(self.descriptor, start, chunk_bytes)
            on_allocated(chunk_bytes)
        self.view = memoryview(mmap.mmap(self.descriptor, num_bytes, flags=mmap.MAP_SHARED))

    def read_only_descriptor(self) -> int:
        """Open the memory file again for reading only, and return the descriptor."""
        # A duplicate would also be writable, and its receiver could change a window from which other ranks restore.
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)


class Memory:
    """All memory files of a process, with a common limit. Threads may use it at the same time."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        """Limit the total size to ``limit_bytes``. With None, the available memory is the limit."""
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._missing_bytes = 0
        """Bytes of running allocations whose pages do not exist yet, so the machine still reports them as available."""
        # Reentrant: garbage collection can run ``_give_back`` in a thread that holds the lock.
        self._lock = threading.RLock()

    def allocate(self, name: str, num_bytes: int) -> Segment:
        """Allocate a memory file. Raises ControlError if ``num_bytes`` exceeds the limit or the available memory."""
        with self._lock:
            self._check(name, num_bytes)
            self.used_bytes += num_bytes
            self._missing_bytes += num_bytes
        missing_bytes = num_bytes

        def allocated(chunk_bytes: int) -> None:
            nonlocal missing_bytes
            missing_bytes -= chunk_bytes
            with self._lock:
                self._missing_bytes -= chunk_bytes

        try:
            # Do not hold the lock here, because the allocation of a large segment takes seconds.
            segment = Segment(name, num_bytes, allocated)
        except OSError as error:
            allocated(missing_bytes)
            self._give_back(num_bytes)
            raise ControlError(f"{name}: cannot allocate {num_bytes} bytes: {error}") from error
        weakref.finalize(segment, self._give_back, num_bytes)
        return segment

    def _check(self, name: str, num_bytes: int) -> None:
        if self.limit_bytes is not None and self.used_bytes + num_bytes > self.limit_bytes:
            raise ControlError(
                f"{name}: cannot allocate {num_bytes} bytes: {self.used_bytes} bytes are in use, and the "
                f"limit is {self.limit_bytes} (memory_limit_bytes of the snapshot server)"
            )
        available = _available_bytes()
        # If two threads allocate at the same time, both must not count the same pages as available.
        if num_bytes > available * _USABLE_SHARE - self._missing_bytes:
            missing = f", less {self._missing_bytes} bytes for allocations in progress" if self._missing_bytes else ""
            raise ControlError(
                f"{name}: cannot allocate {num_bytes} bytes: the machine has {available} bytes available, of which at "
                f"most {_USABLE_SHARE:.0%} may be used{missing}"
            )

    def _give_back(self, num_bytes: int) -> None:
        with self._lock:
            self.used_bytes -= num_bytes


def _available_bytes() -> int:
    """Estimate the memory that can be allocated without swapping.

    Source: proc_meminfo(5), ``MemAvailable``.
    """
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ControlError("/proc/meminfo has no MemAvailable: this machine must run Linux")


PAGE_BYTES = 4096
"""Size in bytes of a status page, and alignment of windows in memory."""
MAX_PROBLEMS = 1000
"""Largest number of problems kept for a rank until it requests them. Older ones are dropped, but still counted."""


@dataclass(frozen=True, slots=True)
class CarriedBytes:
    """Bytes of a piece that was not captured with its slice, because an earlier window already contains these bytes."""

    index: int
    source: memoryview | None
    """The bytes in an earlier window's buffer; None if the buffer of the slice itself already has them."""
    digest: str

    @classmethod
    def of(cls, part: Slice, piece: CarriedPiece, view: memoryview, start_of: Callable[[int], int]) -> "CarriedBytes":
        """Find ``piece`` in ``view``, the memory of all buffers. ``start_of`` returns a buffer's start in ``view``."""
        source = None
        if piece.source is not None:
            first, place = start_of(piece.source) + part.offset, part.pieces[piece.index]
            source = view[first + place.offset : first + place.end]
        return cls(piece.index, source, piece.digest)

    def copy(self, part: Slice, payload: memoryview) -> None:
        """Copy the bytes from the earlier window to the range of the piece in ``payload``, the memory of slice
        ``part``. Raises ControlError if the copied bytes have another hash."""
        if self.source is None:
            return
        piece = part.pieces[self.index]
        payload[piece.offset : piece.end] = self.source
        # Another window may have overwritten the source meanwhile.
        if part.hash_piece(self.index, payload) != self.digest:
            raise ControlError(f"{piece.component!r} of {piece.parameter!r} has changed while it was copied")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a rank and its job, from the first message of the rank."""

    origin: Origin
    peers: Mapping[int, str]
    """Address of every node's snapshot server; it may include the server of this node."""
    peer_nodes: tuple[int, ...]
    """Nodes that store copies of this rank's windows."""
    persist_every: int
    """Every ``persist_every``-th committed window is written to storage; 0 means only on request."""
    persist_url: str | None
    num_persisted: int


@dataclass(slots=True, kw_only=True, eq=False)
class OwnRank:
    """A rank of this node, with its windows and their memory."""

    settings: Settings
    windows: OwnWindows | None = None
    segment: Segment | None = None
    abort: Callable[[], None] | None = None
    """Function that closes the connection of the newest process of this rank; None without a connection."""
    problems: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_PROBLEMS))
    num_problems: int = 0
    replicated_bytes: int = 0
    hashed_bytes: int = 0
    persisted_start: int = -1
    persisted_bytes: int = 0
    failed_start: int = -1
    """Start iteration of the newest window whose write to storage failed in this generation; -1 if no write failed."""
    on_storage: OnStorage | None = None
    """Files that contain the pieces of the newest persisted window."""
    allocating: threading.Lock = field(default_factory=threading.Lock)
    """Lock that is held while the rank's memory is replaced."""

    def view(self, window: HeldWindow, part: Slice) -> memoryview:
        """Return the memory of a slice."""
        assert self.segment is not None, "the window has no memory"
        start = self.offset(window) + part.offset
        return self.segment.view[start : start + part.num_bytes]

    def offset(self, window: HeldWindow) -> int:
        """Return the position of a window's first byte in the rank's memory file."""
        return self._start(window.buffer)

    def gradients(self, window: HeldWindow, part: Slice, update: Update) -> list[memoryview]:
        """Return the memory of each gradient of ``update``. The gradients are stored directly after slice ``part``."""
        assert self.segment is not None, "the window has no memory"
        start = self.offset(window) + part.end
        return [self.segment.view[start + first : start + last] for first, last in update.ranges(part)]

    def carried(self, window: HeldWindow, part: Slice) -> list["CarriedBytes"]:
        """Return the pieces that slice ``part`` takes from earlier windows. Raises ControlError if one is missing."""
        assert self.windows is not None and self.segment is not None, "the window has no memory"
        view = self.segment.view
        return [CarriedBytes.of(part, piece, view, self._start) for piece in self.windows.carried(window, part)]

    def _start(self, buffer: int) -> int:
        assert self.windows is not None, "the window has no memory"
        return PAGE_BYTES + buffer * self.windows.window_bytes

    def note_problem(self, what: str, error: object, start_iteration: int) -> None:
        self.num_problems += 1
        self.problems.append({"what": what, "error": str(error), "start_iteration": start_iteration})

    def give_up(self, window: HeldWindow) -> None:
        """Record that at least one peer will never have a complete copy of ``window``."""
        window.given_up = True
        self.publish()

    def publish(self) -> None:
        """Write the fields of the status page in their order, each with one write of 8 bytes."""
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
            self.failed_start,
            *(replicated.get(buffer, -1) for buffer in range(NUM_BUFFERS)),
            *(given_up.get(buffer, -1) for buffer in range(NUM_BUFFERS)),
        )
        # The rank reads ``COMMITTED_START`` before ``PINNED_BUFFERS``, without a lock, so write them in reverse order.
        page = self.segment.view[: len(values) * 8].cast("q")
        for index, value in enumerate(values):
            page[index] = value


@dataclass(slots=True, kw_only=True, eq=False)
class Copy:
    """This node's copies of the windows that one rank of another node has captured, and the memory of the copies."""

    windows: CopyWindows
    segment: Segment
    receiving: set[int] = field(default_factory=set)
    """Buffers into which a connection is writing now."""

    def offset(self, window: HeldWindow) -> int:
        """Return the position of a window's first byte in the memory file."""
        return self._start(window.buffer)

    def carried(self, window: HeldWindow, part: Slice) -> list[CarriedBytes]:
        """Return the pieces that slice ``part`` takes from earlier copies. Raises ControlError if one is missing."""
        pieces = self.windows.carried(window, part)
        return [CarriedBytes.of(part, piece, self.segment.view, self._start) for piece in pieces]

    def preceding(self, window: HeldWindow, part: Slice) -> memoryview:
        """Return the bytes of the preceding slice, from which ``part.update`` computes pieces of ``part``. Raises
        ControlError if this node does not have that slice."""
        found = self.windows.preceding(window, part)
        start = self.offset(found) + found.slices[0].offset
        return self.segment.view[start : start + found.slices[0].num_bytes]

    def _start(self, buffer: int) -> int:
        return buffer * self.windows.window_bytes


class Store:
    """State of a snapshot server that its threads share."""

    def __init__(self, node: int, token: str, memory: Memory) -> None:
        self.node = node
        self.token = token
        self.memory = memory
        self.lock = threading.Condition()
        self.ranks: dict[int, OwnRank] = {}
        self.filling: HeldWindow | None = None
        """Window of a rank of this node into whose buffer the hasher is copying pieces of earlier windows."""
        self.copies: dict[int, Copy] = {}
        self._allocating_copies: dict[int, threading.Lock] = {}
        """A lock for each rank of other nodes, held while the memory for copies of the rank's windows is replaced."""
        self.run_id: str | None = None
        self.generation = -1
        """Newest generation that any connection has presented."""
        self.own_generation = -1
        """Newest generation that a rank of this node has presented."""
        self.on_peers: Callable[[Mapping[int, str]], None] = lambda peers: None
        """Function that receives the addresses of all nodes to which windows are replicated. Called under the lock."""
        self.on_adopted: Callable[[str], None] = lambda token: None
        """Function that receives the token of the job that has taken this server over. Called under the lock."""
        self.lifeline = Lifeline(None, self.report)

    @property
    def has_windows(self) -> bool:
        """Whether this server has a complete window of any rank. The lock must be held."""
        ranks = {*self.ranks, *self.copies}
        return any(window.complete for rank in ranks for window in self.inventory(rank))

    def changed(self) -> None:
        """Wake all threads that wait for a change. The lock must be held."""
        # Wake all threads, because hasher, senders, persister and flushes wait for different changes.
        self.lock.notify_all()

    def enter(self, run_id: str, generation: int) -> None:
        """Check run and generation of a new connection, and store them as those of this server. The lock must be held.

        Raises:
            Refused: the connection is of another run than this server, or of a stale generation.
        """
        if self.run_id is not None and run_id != self.run_id:
            raise Refused(f"run_id={run_id}: must be {self.run_id}, the run of this snapshot server")
        # Check the generation before anything is changed: a stale process must not end the connection of its successor.
        self.check_generation(generation)
        self.run_id, self.generation = run_id, generation

    def check_generation(self, generation: int) -> None:
        """Check that a request is not from a process of an earlier membership. The lock must be held.

        Raises:
            Refused: ``generation`` is older than the newest generation.
        """
        if generation < self.generation:
            raise Refused(f"generation={generation}: is stale; the newest generation is {self.generation}", "stale")

    def register(self, settings: Settings, abort: Callable[[], None]) -> OwnRank:
        """Use a new connection for a rank of this node, and end the earlier connection of the rank, if there is one.

        The lock must be held.

        Args:
            settings: settings in the first message of the new connection.
            abort: function that closes the new connection.

        Raises:
            Refused: the same cases as ``enter``.
        """
        origin = settings.origin
        self.enter(origin.run_id, origin.generation)
        self.own_generation = max(self.own_generation, origin.generation)
        # Windows and arena of a dead process stay, because the next process of the rank restores its state from them.
        own = self.ranks.setdefault(origin.rank, OwnRank(settings=settings))
        # A process that was replaced may still be alive, and two processes must not begin windows in one arena.
        if own.abort is not None:
            own.abort()
        # A new generation counts commits from 0; a new process of the same generation continues the count.
        if own.windows is not None and origin.generation > own.settings.origin.generation:
            own.windows.new_generation()
            own.failed_start = -1
        own.settings, own.abort = settings, abort
        # Leave out ranks of earlier generations: their peers may have left, and senders to such peers report failures.
        current = [other.settings for other in self.ranks.values() if self.is_current(other)]
        self.on_peers({node: known.peers[node] for known in current for node in known.peer_nodes})
        # The status page still shows windows of the previous generation, which must not count in a vote of this one.
        own.publish()
        self.changed()
        return own

    def check_acting(self, own: OwnRank, settings: Settings) -> None:
        """Check that the process with ``settings`` has the rank's newest connection and may change the rank's windows.

        The lock must be held until the change is made.

        Raises:
            Refused: another process has replaced this process, or its generation is stale.
        """
        self.check_generation(settings.origin.generation)
        if own.settings is not settings:
            raise Refused("a newer connection of this rank has replaced this connection", "stale")

    def is_current(self, own: OwnRank) -> bool:
        return own.settings.origin.generation == self.own_generation

    @contextmanager
    def changing(self, own: OwnRank, settings: Settings) -> Iterator[OwnWindows]:
        """Lock the store for a ``with`` block that changes the windows of ``own``, and then write the status page.
        ``settings`` are those of the process that requests the change.

        Raises:
            Refused: the same cases as ``check_acting``.
            ControlError: no memory was allocated for the rank.
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
        """Return a rank's memory for windows, and the size of a buffer in bytes. The lock must not be held.

        The present memory is reused if it is large enough and ``new`` is false. If it is not reused, it is freed before
        new memory is allocated.

        Args:
            settings: settings of the process that requests the memory.

        Raises:
            Refused: the same cases as ``check_acting``.
            ControlError: there is not enough memory.
        """
        # Serve one process at a time: the memory of a replaced process must be freed before the next one allocates.
        with own.allocating:
            with self.lock:
                self.check_acting(own, settings)
                is_enough = own.windows is not None and own.windows.window_bytes >= window_bytes
                if own.segment is not None and own.windows is not None and is_enough and not new:
                    # The rank may write to every buffer, so the hasher must have left windows of its earlier process.
                    self.lock.wait_for(lambda: not self._is_hashing(own))
                    self.check_acting(own, settings)
                    return own.segment, own.windows.window_bytes
                # Threads that still read a window have views of the old memory, which is freed with the last view.
                own.windows = own.segment = None
            name = f"arena-rank-{own.settings.origin.rank}"
            # Do not hold the lock here: other threads have to answer peers and ranks while pages are allocated.
            segment = self.memory.allocate(name, PAGE_BYTES + NUM_BUFFERS * window_bytes)
            with self.lock:
                try:
                    self.check_acting(own, settings)
                except Refused:
                    # Free the memory before the next process allocates, because the exception would keep a reference to
                    # it.
                    del segment
                    raise
                own.windows, own.segment = OwnWindows(window_bytes), segment
                own.publish()
            return segment, window_bytes

    def _is_hashing(self, own: OwnRank) -> bool:
        is_filling = self.filling is not None and self.filling.rank == own.settings.origin.rank
        return is_filling or (own.windows is not None and own.windows.next_unhashed() is not None)

    def take_copy(self, rank: int, window_bytes: int, generation: int) -> Copy:
        """Return the memory for copies of windows of ``rank``, a rank of another node. The lock must not be held.

        The present memory is reused if its buffers have ``window_bytes`` bytes. Otherwise it is freed before new memory
        is allocated.

        Args:
            generation: generation of the connection that requests the memory.

        Raises:
            Refused: ``generation`` is stale.
            ControlError: there is not enough memory.
        """
        with self.lock:
            allocating = self._allocating_copies.setdefault(rank, threading.Lock())
        # Only one thread at a time: an earlier connection may still allocate for the same rank.
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
        """Free memory that has only windows of earlier generations, because a window of ``generation`` was committed.

        Call this only for a commit of a rank of this node. A node without a rank in ``generation`` must free nothing,
        because its windows may be the only complete ones if a restart uses this node again. The lock must be held.
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
        """Return the windows of ``rank`` that this server has. The lock must be held."""
        places: dict[Where, OwnRank | Copy | None] = {"own": self.ranks.get(rank), "copy": self.copies.get(rank)}
        return [
            window.stored(where, self.node, memory.windows.window_bytes)
            for where, memory in places.items()
            if memory is not None and memory.windows is not None
            for window in memory.windows
        ]

    def find(self, rank: int, key: WindowKey) -> tuple[Segment, int, HeldWindow]:
        """Return memory file, start position and description of a complete window of ``rank``. The lock must be held.

        Raises:
            ControlError: this server does not have the window.
        """
        for memory in (self.ranks.get(rank), self.copies.get(rank)):
            for window in [] if memory is None or memory.windows is None else memory.windows:
                if window.key == key and window.complete:
                    assert memory is not None and memory.segment is not None, "the window has no memory"
                    return memory.segment, memory.offset(window), window
        raise ControlError(f"this server has no complete window {key.start_iteration} of generation {key.generation}")

    def report(self, text: str) -> None:
        print(f"snapshot server {self.node}: {text}", file=sys.stderr, flush=True)
