"""The ranks of one node as its agent sees them: their sockets, what they say and are told, how they end.

On the control plane a rank goes by the number it was started with as long as it lives, whatever number later
memberships give it.
"""

import contextlib
import os
import selectors
import socket
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ft.control.outbox import Outbox
from megatron_ft.framing import FrameReader, Message, send

_LOG_TAIL_BYTES = 8192
_TELL_SECONDS = 5.0


@dataclass
class _Rank:
    rank: int
    log: Path
    reader: FrameReader | None = None
    last: Message = field(default_factory=dict)
    done: bool = False


class Ranks:
    """Everything between a node's ranks and the outbox of its agent, in the agent's main thread."""

    def __init__(self, node: int, listener: socket.socket, selector: selectors.BaseSelector, outbox: Outbox) -> None:
        """``listener`` is where ranks connect; ``accept`` is to be called when one does."""
        self._node = node
        self._listener = listener
        self._selector = selector
        self._outbox = outbox
        self._ranks: dict[int, _Rank] = {}
        self._strangers: set[FrameReader] = set()
        self._paused = False
        self.generation = 0
        """Of the membership that the ranks belong to; everything they say bears it."""

    @property
    def numbers(self) -> list[int]:
        """Ranks whose exit has not been seen."""
        return sorted(self._ranks)

    def expect(self, rank: int, generation: int, log: Path) -> None:
        """A rank is about to be started."""
        self.generation = generation
        self._ranks[rank] = _Rank(rank, log)

    def accept(self) -> None:
        """Take new connections."""
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._greet(FrameReader(connection))

    def tell(self, message: Message) -> list[int]:
        """Say something to every rank that is connected; those that do not take it."""
        deaf = []
        for state in self._ranks.values():
            if state.reader is None:
                continue
            state.reader.sock.settimeout(_TELL_SECONDS)
            try:
                send(state.reader.sock, message)
            except OSError:  # it has gone, which its exit tells, or its buffer is full
                deaf.append(state.rank)
            finally:
                state.reader.sock.setblocking(False)
        return deaf

    def exited(self, message: Message) -> None:
        """A rank's process has ended. What it said comes first: it waits in sockets of this process."""
        state = self._ranks[message["rank"]]
        self.accept()
        for stranger in list(self._strangers):
            self._read_stranger(stranger)
        if state.reader is not None:
            self._read_rank(state, state.reader, until_empty=True)
        tail = "" if state.done else tail_of(state.log)
        about = {"node": self._node, "done": state.done, "log": str(state.log), "log_tail": tail}
        self._put(state, {**message, **about, **state.last})
        del self._ranks[state.rank]

    def resume(self) -> None:
        """Read ranks again if that was paused and the outbox has room."""
        if self._paused and not self._outbox.is_full:
            self._paused = False
            for state in self._ranks.values():
                if state.reader is not None:
                    self._watch(state, state.reader)

    def _greet(self, reader: FrameReader) -> None:
        self._strangers.add(reader)
        self._selector.register(reader.sock, selectors.EVENT_READ, lambda: self._read_stranger(reader))

    def _read_stranger(self, reader: FrameReader) -> None:
        """The first message of a connection says which rank it is."""
        if reader not in self._strangers:
            return
        messages, closed = reader.pump()
        if not messages and not closed:
            return
        self._strangers.discard(reader)
        self._selector.unregister(reader.sock)
        state = self._ranks.get(messages[0].get("rank", -1)) if messages else None
        if state is None or state.reader is not None or not self._is_greeting(messages[0]):
            reader.close()
            return
        state.reader = reader
        self._put(state, {"op": "reported"})
        for message in messages[1:]:
            self._rank_said(state, message)
        if not closed and not self._paused:
            self._watch(state, reader)

    def _is_greeting(self, message: Message) -> bool:
        return message["op"] == "hello" and message.get("generation") == self.generation

    def _watch(self, state: _Rank, reader: FrameReader) -> None:
        self._selector.register(reader.sock, selectors.EVENT_READ, lambda: self._read_rank(state, reader))

    def _read_rank(self, state: _Rank, reader: FrameReader, *, until_empty: bool = False) -> None:
        if state.reader is None:
            return
        while True:
            messages, closed = reader.pump()
            for message in messages:
                self._rank_said(state, message)
            if closed:
                self._forget(state, reader)
                return
            if not (until_empty and messages):
                break
        if self._outbox.is_full and not self._paused:
            self._pause()

    def _pause(self) -> None:
        """Read no rank until the controller has caught up; their sockets fill and they wait."""
        self._paused = True
        for state in self._ranks.values():
            if state.reader is not None:
                self._selector.unregister(state.reader.sock)

    def _forget(self, state: _Rank, reader: FrameReader) -> None:
        if reader.sock in self._selector.get_map():
            self._selector.unregister(reader.sock)
        reader.close()
        state.reader = None

    def _rank_said(self, state: _Rank, message: Message) -> None:
        match message["op"]:
            case "record":
                self._put(state, {"op": "record", "record": message["record"]})
            case "progress":
                state.last = {"iteration": message["iteration"], "phase": message["phase"]}
            case "done":
                state.done = True
            case "raised" | "broken":
                self._put(state, {**message, "node": self._node, **state.last})

    def _put(self, state: _Rank, item: Message) -> None:
        self._outbox.put({**item, "rank": state.rank, "generation": self.generation})


def tail_of(path: Path) -> str:
    """The last lines of a log."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            size = file.tell()
            file.seek(max(0, size - _LOG_TAIL_BYTES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-30:])
    except OSError as error:
        return f"(cannot read {path}: {error})"
