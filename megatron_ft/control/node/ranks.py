"""The connections of a node's agent to the node's ranks: sockets, messages, exits, and the queue of the ranks' reports.

In the control plane, a rank keeps the number with which it was started, even if its number in a membership changes.
"""

import contextlib
import json
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ft.control.detector import SignsOfLife
from megatron_ft.errors import ControlError
from megatron_ft.framing import FrameReader, Message, send

# Reading from ranks pauses at the high limit and resumes at the low one. With one limit, it would pause at each item.
HIGH_WATER_ITEMS = 2000
LOW_WATER_ITEMS = 500
_BATCH_ITEMS = 500
# This is well below ``rpc.MAX_MESSAGE_BYTES``. A larger item, of at most 16 MiB, is sent alone.
_BATCH_BYTES = 4 * 1024 * 1024
_LOG_TAIL_BYTES = 8192
# The agent serves all ranks in one thread, so a rank that does not read must not block this thread for long.
_SEND_SECONDS = 5.0
GREETING_BYTES = 4096
"""Largest size in bytes of the first message of a connection."""
MAX_UNAUTHENTICATED = 256
"""Largest number of open connections whose rank is not known yet. If there are more, the oldest are closed."""
_BUSY_SECONDS = 0.5
"""Processor time in seconds. A rank that has used more since the last ping is alive, even if it has not answered."""


class Outbox:
    """A queue of numbered items from one producer to one sender.

    ``put`` never blocks. A producer that can wait checks ``is_full``, and resumes when ``on_drained`` is called.
    """

    def __init__(self, on_drained: Callable[[], None]) -> None:
        self._items: deque[tuple[int, Message]] = deque()
        self._first = 0
        self._full = False
        self._changed = threading.Condition()
        self._on_drained = on_drained

    def put(self, item: Message) -> None:
        """Add one item to the queue."""
        num_bytes = len(json.dumps(item))
        with self._changed:
            self._items.append((num_bytes, item))
            self._full = self._full or len(self._items) >= HIGH_WATER_ITEMS
            self._changed.notify_all()

    @property
    def is_full(self) -> bool:
        """Whether the queue is full, so that the producer should wait until ``on_drained`` is called."""
        with self._changed:
            return self._full

    def wait_batch(self) -> tuple[int, list[Message]]:
        """Wait for items to send. Return the index of the first item, and the items."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._items))
            batch: list[Message] = []
            total_bytes = 0
            for num_bytes, item in self._items:
                if len(batch) == _BATCH_ITEMS or (batch and total_bytes + num_bytes > _BATCH_BYTES):
                    break
                batch.append(item)
                total_bytes += num_bytes
            return self._first, batch

    def acknowledge(self, next_number: int) -> None:
        """Drop all items before ``next_number``, because the controller has received them."""
        with self._changed:
            while self._first < next_number and self._items:
                self._items.popleft()
                self._first += 1
            drained = self._full and len(self._items) <= LOW_WATER_ITEMS
            self._full = self._full and not drained
            self._changed.notify_all()
        if drained:
            self._on_drained()


@dataclass
class _Rank:
    rank: int
    start: int
    log: Path
    reader: FrameReader | None = None
    last: Message = field(default_factory=dict)
    step: int = 0
    """Count of progress reports that the rank has sent in the iteration of ``last``, its newest report."""
    is_passed_on: bool = True
    """Whether ``last``, the newest progress report, was forwarded to the controller."""
    is_pinged: bool = False
    """Whether the rank has not answered the last ping yet."""
    processor_seconds: float = 0.0
    """Processor time that the rank had used when it was last pinged."""
    process_id: int | None = None
    done: bool = False
    is_complete: bool = False
    """Whether the rank has reported that the run is complete."""


class Ranks:
    """Exchanges messages with a node's ranks, and adds their reports to the outbox. Runs in the agent's main thread."""

    def __init__(
        self,
        node: int,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        outbox: Outbox,
        *,
        heartbeat_timeout_seconds: float,
    ) -> None:
        """Store ``listener``, the socket to which ranks connect. The caller calls ``accept`` for each new connection.

        Args:
            heartbeat_timeout_seconds: time without an answer to a ping after which a rank counts as unresponsive.
        """
        self._signs = SignsOfLife[int](heartbeat_timeout_seconds)
        limit = f"{heartbeat_timeout_seconds:g} s (detector.heartbeat_timeout_seconds)"
        self._limit = f"was unresponsive for {limit}"
        self._node = node
        self._listener = listener
        self._selector = selector
        self._outbox = outbox
        self._ranks: dict[int, _Rank] = {}
        self._unnamed: dict[FrameReader, None] = {}
        self._paused = False
        self.generation = 0
        """Generation of the membership to which the ranks belong; every report contains it."""

    @property
    def numbers(self) -> list[int]:
        """Return the numbers of the ranks whose exit has not been recorded."""
        return sorted(self._ranks)

    def expect(self, rank: int, *, start: int, generation: int, log: Path) -> None:
        """Expect a connection from a rank that is about to start; ``start`` is the index of the ``Start`` order."""
        self.generation = generation
        self._ranks[rank] = _Rank(rank, start, log)

    def accept(self) -> None:
        """Accept all connections that wait at the socket to which ranks connect."""
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._greet(FrameReader(connection, first_frame_bytes=GREETING_BYTES))

    def broadcast(self, message: Message) -> list[int]:
        """Send a message to every connected rank. Return the ranks that could not receive it."""
        connected = [state for state in self._ranks.values() if state.reader is not None]
        return [state.rank for state in connected if not self._send(state, message)]

    def _send(self, state: _Rank, message: Message) -> bool:
        assert state.reader is not None, "the rank is not connected"
        state.reader.sock.settimeout(_SEND_SECONDS)
        try:
            send(state.reader.sock, message)
        except OSError:  # the rank has ended, which its exit will show, or its buffer is full
            return False
        finally:
            state.reader.sock.setblocking(False)
        return True

    def spawned(self, rank: int, process_id: int) -> None:
        """Record that a rank's process was started."""
        self._ranks[rank].process_id = process_id

    def check_life(self, now: float) -> list[int]:
        """Ping the ranks, and forward the progress of all ranks. A rank that has not answered the last ping is not
        pinged again. Return unresponsive ranks, which must be killed.

        The caller must call this several times within the timeout. While reading from the ranks is paused, no rank
        counts as unresponsive. A rank that uses processor time counts as alive, because the thread that computes may
        block the thread that answers pings.

        Args:
            now: present time, on the same clock in all calls.
        """
        hung = []
        for rank in self._signs.silent(now):
            state = self._ranks[rank]
            # While reading is paused, the answers of ranks wait in the sockets.
            if self._paused or processor_seconds(state.process_id) > state.processor_seconds + _BUSY_SECONDS:
                self._owe_nothing(state, now)
            else:
                hung.append(rank)
                self._signs.forget(rank)
                about = {"node": self._node, "at_seconds": time.time(), "hung": self._limit, **state.last}
                self._put(state, {"op": "hung", **about})
        for state in self._ranks.values():
            self._check_life(state, now)
        return hung

    def _check_life(self, state: _Rank, now: float) -> None:
        # Progress is forwarded once per check, not once per phase: the controller receives the progress of all ranks.
        if not state.is_passed_on:
            state.is_passed_on = True
            self._put(state, {"op": "progress", "step": state.step, **state.last})
        if self._signs.seconds_since(state.rank, now) is None or state.is_pinged or state.reader is None:
            return
        state.is_pinged = True
        state.processor_seconds = processor_seconds(state.process_id)
        self._send(state, {"op": "ping"})

    def _owe_nothing(self, state: _Rank, now: float) -> None:
        state.is_pinged = False
        self._signs.hear(state.rank, now)

    def exited(self, message: Message) -> None:
        """Record that a rank's process has ended. First read the rank's messages that still wait in its socket."""
        state = self._ranks[message["rank"]]
        # The rank's last messages may explain its end, so they are reported before the exit.
        self.accept()
        for reader in list(self._unnamed):
            self._read_first(reader)
        if state.reader is not None:
            self._read_rank(state, state.reader, until_empty=True)
        tail = "" if state.done else tail_of(state.log)
        about = {"node": self._node, "done": state.done, "is_complete": state.is_complete}
        self._put(state, {**message, **about, "log": str(state.log), "log_tail": tail, **state.last})
        self._signs.forget(state.rank)
        del self._ranks[state.rank]

    def resume(self) -> None:
        """Continue to read from the ranks, if reading was paused and the outbox has space."""
        if self._paused and not self._outbox.is_full:
            self._paused = False
            for state in self._ranks.values():
                if state.reader is not None:
                    self._watch(state, state.reader)

    def _greet(self, reader: FrameReader) -> None:
        self._unnamed[reader] = None
        self._selector.register(reader.sock, selectors.EVENT_READ, lambda: self._read_first(reader))
        if len(self._unnamed) > MAX_UNAUTHENTICATED:
            oldest = next(iter(self._unnamed))
            self._leave(oldest)
            oldest.close()

    def _read_first(self, reader: FrameReader) -> None:
        if reader not in self._unnamed:
            return
        try:
            messages, closed = reader.pump()
        except ControlError:  # the peer is not a rank of this job
            messages, closed = [], True
        if not messages and not closed:
            return
        self._leave(reader)
        state = self._named(messages[0]) if messages else None
        # Refuse processes of older ``Start`` orders, and a second connection for the same rank.
        if state is None or state.reader is not None or not _greets(messages[0], state):
            reader.close()
            return
        state.reader = reader
        self._signs.hear(state.rank, time.monotonic())
        self._put(state, {"op": "reported"})
        for message in messages[1:]:
            self._receive(state, message)
        if not closed and not self._paused:
            self._watch(state, reader)

    def _leave(self, reader: FrameReader) -> None:
        del self._unnamed[reader]
        self._selector.unregister(reader.sock)

    def _named(self, message: Message) -> _Rank | None:
        rank = message.get("rank")
        return self._ranks.get(rank) if type(rank) is int else None

    def _watch(self, state: _Rank, reader: FrameReader) -> None:
        self._selector.register(reader.sock, selectors.EVENT_READ, lambda: self._read_rank(state, reader))

    def _read_rank(self, state: _Rank, reader: FrameReader, *, until_empty: bool = False) -> None:
        # The rank's exit may have been handled since ``select`` returned, and has then closed the reader.
        if state.reader is None:
            return
        while True:
            messages, closed = reader.pump()
            for message in messages:
                self._receive(state, message)
            if closed:
                self._forget(state, reader)
                return
            if not (until_empty and messages):
                break
        if self._outbox.is_full and not self._paused:
            self._pause()

    def _pause(self) -> None:
        # Stop reading from ranks until the controller has received queued items. Sockets fill, and ranks wait.
        self._paused = True
        for state in self._ranks.values():
            if state.reader is not None:
                self._selector.unregister(state.reader.sock)

    def _forget(self, state: _Rank, reader: FrameReader) -> None:
        self._signs.forget(state.rank)
        if reader.sock in self._selector.get_map():
            self._selector.unregister(reader.sock)
        reader.close()
        state.reader = None

    def _receive(self, state: _Rank, message: Message) -> None:
        # Every message shows that the rank lives, not only the answer to a ping.
        self._owe_nothing(state, time.monotonic())
        match message["op"]:
            case "record":
                self._put(state, {"op": "record", "record": message["record"]})
            case "progress":
                is_next = state.last.get("iteration") != message["iteration"]
                state.step = 1 if is_next else state.step + 1
                state.last = {"iteration": message["iteration"], "phase": message["phase"]}
                state.is_passed_on = False
            case "done":
                state.done, state.is_complete = True, message["is_complete"]
            case "pong":
                pass
            case "raised" | "broken":
                self._put(state, {**message, "node": self._node, **state.last})

    def _put(self, state: _Rank, item: Message) -> None:
        about = {"rank": state.rank, "start": state.start, "generation": self.generation}
        self._outbox.put({**item, **about})


def _greets(message: Message, state: _Rank) -> bool:
    return bool(message.get("op") == "hello") and message.get("start") == state.start


def processor_seconds(process_id: int | None) -> float:
    """Return the processor time in seconds that a process has used, or 0 if it has ended."""
    try:
        # The name of the command, in parentheses, can itself contain spaces and parentheses (proc(5)).
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def size_of(path: Path) -> int:
    """Return the size of a log in bytes, or 0 if it does not exist yet."""
    return path.stat().st_size if path.exists() else 0


def last_line(path: Path, begin_bytes: int) -> str:
    """Skip ``begin_bytes`` bytes of a log, and return the last non-blank line of the rest; empty if there is none."""
    lines = _last_lines(path, begin_bytes)
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def tail_of(path: Path) -> str:
    """Return the last lines of a log."""
    return "\n".join(_last_lines(path)[-30:])


def _last_lines(path: Path, begin_bytes: int = 0) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin_bytes, size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return [f"(cannot read {path}: {error})"]
