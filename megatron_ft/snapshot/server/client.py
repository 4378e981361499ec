"""A rank's connection to its node's snapshot server. No torch: memory is returned as buffers."""

import mmap
import os
import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatron_ft.errors import ControlError
from megatron_ft.framing import FrameReader, Message, send
from megatron_ft.planning.recovery.sources import StoredWindow
from megatron_ft.planning.snapshot.buffers import NUM_BUFFERS, BufferStates
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.snapshot.server.fields import items, stored_window
from megatron_ft.snapshot.window import Slice, Window

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 60.0
"""Longest time for a snapshot server to answer or to accept a request."""
FLUSH_SECONDS = 600.0
"""Longest wait of ``flush`` for storage."""
PATIENT_SECONDS = FLUSH_SECONDS + 300.0
"""Longest time for an answer if the server allocates memory, asks other nodes or waits for storage."""
MAX_UNREAD = 32
"""Largest number of answers to ``captured`` that may wait in the socket: if it were full, both ends would wait for each
other."""
(
    REPLICATED_START,
    REPLICATED_BYTES,
    WAITING_BYTES,
    NUM_PROBLEMS,
    PERSISTED_START,
    HASHED_BYTES,
    PINNED_BUFFERS,
    COMMITTED_START,
    PERSISTED_BYTES,
) = range(9)
"""Fields of the status page. A commit is in ``COMMITTED_START`` after the buffers that it pins."""
BUFFER_REPLICATED = 9
BUFFER_GIVEN_UP = BUFFER_REPLICATED + NUM_BUFFERS
"""First of ``NUM_BUFFERS`` fields each: the start iteration of the window in each buffer if it was given up; otherwise
-1."""


class KeeperRefused(ControlError):
    """The snapshot server refused a request."""


class Arena:
    """A rank's memory, mapped: a status page and the buffers of windows. The snapshot server owns it."""

    def __init__(self, descriptor: int, window_bytes: int, num_buffers: int, status_bytes: int) -> None:
        """Map the file of ``descriptor``, and close the descriptor."""
        self.window_bytes = window_bytes
        self.num_buffers = num_buffers
        self._status_bytes = status_bytes
        try:
            # All pages are mapped now: faults during the first captures would be measured as stalls of training.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._map = mmap.mmap(descriptor, status_bytes + num_buffers * window_bytes, flags=flags)
        finally:
            os.close(descriptor)
        self._view = memoryview(self._map)
        self._status = self._view[:status_bytes].cast("q")

    def buffer(self, index: int) -> memoryview:
        """Return the bytes of a buffer, ``window_bytes``."""
        assert 0 <= index < self.num_buffers, f"buffer {index} of {self.num_buffers}"
        start = self._status_bytes + index * self.window_bytes
        return self._view[start : start + self.window_bytes]

    def status(self, word: int) -> int:
        """Return a field of the status page as the server last wrote it."""
        return int(self._status[word])

    def close(self) -> None:
        """Unmap. Raises BufferError while a buffer is in use."""
        self._status.release()
        self._view.release()
        self._map.close()


class KeeperClient:
    """One connection for one rank; for one thread.

    Requests that cost one send are not answered at once; a later request may raise their refusal.
    """

    def __init__(self, socket_path: str, *, hello: Mapping[str, Any]) -> None:
        """Connect and present the token; ``hello`` has the fields of the protocol without ``op``.

        Raises:
            ControlError: there is no server, or it refuses.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # A server that is stopped still has a socket, whose queue takes connections that are never answered.
            sock.settimeout(CONNECT_SECONDS)
            sock.connect(socket_path)
        except OSError as error:
            sock.close()
            raise ControlError(f"snapshot server at {socket_path}: {error}") from error
        self._reader = FrameReader(sock)
        self._answers: deque[Message] = deque()
        self._num_unread = 0
        self._arena: Arena | None = None
        self._socket_path = socket_path
        self._committed = -1
        """The newest commit that was sent since the arena was allocated."""
        try:
            self._call({**hello, "op": "hello"})
        except BaseException:
            self.close()
            raise

    def allocate(self, window_bytes: int, *, new: bool = False) -> Arena:
        """Return this rank's memory, for windows of at least ``window_bytes`` bytes.

        Memory of an earlier process that is large enough is mapped again, with its windows. Memory that is too small,
        or any if ``new``, is freed with its windows: fetch them before.

        Raises:
            KeeperRefused: there is not enough memory.
        """
        answer, descriptor = self._call_for_memory({"op": "allocate", "window_bytes": window_bytes, "new": new})
        self._arena = Arena(descriptor, answer["window_bytes"], answer["num_buffers"], answer["status_bytes"])
        # The page is the server's: this client has sent no commit for this memory yet.
        self._committed = self._arena.status(COMMITTED_START)
        return self._arena

    def begin(self, buffer: int, *, start_iteration: int, num_slices: int, plan: Mapping[str, Any]) -> None:
        """Assign a buffer to a new window. Costs one send.

        Refused while the buffer is being written to storage, or if it holds the newest window that was committed, or
        confirmed by ``committed``, in this generation.
        """
        about = {"buffer": buffer, "start_iteration": start_iteration, "num_slices": num_slices, "plan": plan}
        self._request({"op": "begin", **about})

    def captured(self, buffer: int, index: int, part: Slice) -> None:
        """Report that slice ``index`` of a buffer's window is complete and will not change. Costs one send."""
        self._request({"op": "captured", "buffer": buffer, "slice": index, "record": part.to_json()})

    def committed(self, start_iteration: int, *, captured_in: int | None = None) -> None:
        """Report that the whole job has replicated this window, or has just continued from it. Costs one send.

        Refused if this server does not have it completely. ``captured_in``: the generation that captured it; None: this
        client's.
        """
        captured = {} if captured_in is None else {"captured_in": captured_in}
        self._request({"op": "committed", "start_iteration": start_iteration, **captured})
        # The request is not answered yet: until the page shows it, the server may still pin a buffer for this commit.
        self._committed = start_iteration

    def abandon(self, start_iteration: int) -> None:
        """Forget a window that the job will not commit. Costs one send; refused if the server does not have it or it is
        committed."""
        self._request({"op": "abandon", "start_iteration": start_iteration})

    def buffer_states(self) -> BufferStates:
        """Return the state of this rank's buffers as the server last wrote it."""
        arena = self._arena
        if arena is None:
            return BufferStates()
        # Read before what is pinned: the server writes it after.
        knows_commits = arena.status(COMMITTED_START) == self._committed
        pinned = arena.status(PINNED_BUFFERS)
        buffers = range(arena.num_buffers)
        return BufferStates(
            replicated={buffer: arena.status(BUFFER_REPLICATED + buffer) for buffer in buffers},
            given_up={buffer: arena.status(BUFFER_GIVEN_UP + buffer) for buffer in buffers},
            pinned=frozenset(buffer for buffer in buffers if pinned >> buffer & 1),
            knows_commits=knows_commits,
        )

    def persist(self, start_iteration: int) -> None:
        """Request that a window is written to storage. Raises KeeperRefused if the server does not have it, or there is
        no ``persist_url``."""
        self._call({"op": "persist", "start_iteration": start_iteration})

    def flush(self) -> bool:
        """Wait until all requested windows are on storage; return False if that takes too long."""
        return bool(self._call({"op": "flush"}, PATIENT_SECONDS)["done"])

    def problems(self) -> list[dict[str, Any]]:
        """Return ``what``, ``error`` and ``start_iteration`` of each problem since the last call."""
        return list(self._call({"op": "problems"})["problems"])

    def inventory(self, rank: int, *, ask_peers: bool = False) -> list[StoredWindow]:
        """Return the windows of ``rank`` in memory of this node, and also of the peers that answer if ``ask_peers``."""
        seconds = PATIENT_SECONDS if ask_peers else ANSWER_SECONDS
        answer = self._call({"op": "inventory", "rank": rank, "ask_peers": ask_peers}, seconds)
        return [stored_window(entry) for entry in items(answer, "windows")]

    def fetch(self, rank: int, key: WindowKey, *, node: int) -> tuple[Window, memoryview]:
        """Fetch a complete window of a node, and its bytes, which ``Slice.check_payload`` must check.

        The bytes stay mapped as long as something refers to them; changes to them are private to this process.

        Raises:
            KeeperRefused: the node does not have it, or it does not arrive.
            CheckpointError: its description cannot be read.
        """
        answer, descriptor = self._call_for_memory({"op": "fetch", "rank": rank, "node": node, **asdict(key)})
        try:
            num_bytes = answer["num_bytes"]
            page = answer["offset"] % mmap.ALLOCATIONGRANULARITY
            start, length = answer["offset"] - page, max(1, page + num_bytes)
            content = memoryview(mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY, offset=start))
        finally:
            os.close(descriptor)
        return Window.from_json(answer["window"]), content[page : page + num_bytes]

    def close(self) -> None:
        """Close the connection; the server keeps all windows."""
        self._reader.close()

    def _call_for_memory(self, message: Message) -> tuple[Message, int]:
        answer = self._call(message, PATIENT_SECONDS)
        if not self._reader.descriptors:
            raise ControlError(f"snapshot server: the answer to {message['op']} has no file descriptor")
        return answer, self._reader.descriptors.popleft()

    def _request(self, message: Message) -> None:
        # The answer is read with that of a later request; unread ones must fit the socket's buffer.
        if self._num_unread >= MAX_UNREAD:
            self._read_answers()
        self._send(message)
        self._num_unread += 1

    def _call(self, message: Message, seconds: float | None = None) -> Message:
        self._send(message)
        self._num_unread += 1
        return self._read_answers(seconds)

    def _read_answers(self, seconds: float | None = None) -> Message:
        # Read all answers that are due, each within ``seconds``; the last one counts, unless one is a refusal.
        self._reader.sock.settimeout(ANSWER_SECONDS if seconds is None else seconds)
        # All are read before one is raised: the next request must find its own answer first.
        answers = [self._receive() for _ in range(self._num_unread)]
        self._num_unread = 0
        for answer in answers:
            if answer["op"] == "error":
                while self._reader.descriptors:
                    os.close(self._reader.descriptors.popleft())
                raise KeeperRefused(f"snapshot server: {answer['reason']}")
        return answers[-1]

    def _send(self, message: Message) -> None:
        self._reader.sock.settimeout(ANSWER_SECONDS)
        try:
            send(self._reader.sock, message)
        except TimeoutError as error:
            raise self._unresponsive() from error
        except OSError as error:
            raise ControlError(f"snapshot server: the connection was lost: {error}") from error

    def _receive(self) -> Message:
        while not self._answers:
            try:
                messages, closed = self._reader.pump()
            except TimeoutError as error:
                raise self._unresponsive() from error
            self._answers.extend(messages)
            if closed and not self._answers:
                raise ControlError("snapshot server: the connection was lost")
        return self._answers.popleft()

    def _unresponsive(self) -> ControlError:
        seconds = self._reader.sock.gettimeout()
        return ControlError(
            f"snapshot server at {self._socket_path}: no answer within {seconds:g} s; it is stopped or blocked"
        )
