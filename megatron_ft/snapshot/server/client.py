"""Connection of a rank to its node's snapshot server. It does not import torch, and returns memory as memoryviews."""

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
from megatron_ft.planning.snapshot.memory import NUM_BUFFERS, BufferStates
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.snapshot.server.wire import items, stored_window
from megatron_ft.snapshot.window import Slice, StoredLevel, Window

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 60.0
"""Time limit for the snapshot server to accept or answer a request."""
FLUSH_SECONDS = 600.0
"""Time limit for ``flush`` to wait for storage."""
PATIENT_SECONDS = FLUSH_SECONDS + 300.0
"""Time limit for requests for which the server allocates memory, asks other nodes or waits for storage."""
MAX_UNREAD = 32
"""Largest number of answers that the client leaves unread. More answers could fill the socket buffer, and then client
and server would wait for each other."""
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
    FAILED_START,
) = range(10)
"""Indices of fields of the status page, memory in which the server shows a rank the state of the rank's windows. The
server writes ``COMMITTED_START`` after ``PINNED_BUFFERS``."""
BUFFER_REPLICATED = 10
BUFFER_GIVEN_UP = BUFFER_REPLICATED + NUM_BUFFERS
"""First indices of two groups of ``NUM_BUFFERS`` fields. Field ``BUFFER_REPLICATED + i`` is the start iteration of the
window in buffer i if all peers have this window, otherwise -1. Field ``BUFFER_GIVEN_UP + i`` is the start iteration of
the window in buffer i if at least one peer will never have this window, otherwise -1."""


class KeeperRefused(ControlError):
    """The snapshot server refused a request."""


class Arena:
    """A rank's memory for windows, mapped into this process: a status page and buffers. The snapshot server owns it."""

    def __init__(self, descriptor: int, window_bytes: int, num_buffers: int, status_bytes: int) -> None:
        """Map the memory file ``descriptor`` and close the descriptor."""
        self.window_bytes = window_bytes
        self.num_buffers = num_buffers
        self._status_bytes = status_bytes
        try:
            # All pages are mapped now, because page faults in the first captures would count as stalls of training.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._map = mmap.mmap(descriptor, status_bytes + num_buffers * window_bytes, flags=flags)
        finally:
            os.close(descriptor)
        self._view = memoryview(self._map)
        self._status = self._view[:status_bytes].cast("q")

    def buffer(self, index: int) -> memoryview:
        """Return the memory of a buffer, ``window_bytes`` bytes."""
        assert 0 <= index < self.num_buffers, f"buffer {index} of {self.num_buffers}"
        start = self._status_bytes + index * self.window_bytes
        return self._view[start : start + self.window_bytes]

    def status(self, word: int) -> int:
        """Return field ``word`` of the status page, as the server last wrote it."""
        return int(self._status[word])

    def close(self) -> None:
        """Unmap the memory. Raises BufferError while a view of a buffer exists."""
        self._status.release()
        self._view.release()
        self._map.close()


class KeeperClient:
    """A rank's connection to its snapshot server, for use in one thread.

    ``begin``, ``captured`` and ``committed`` do not wait for an answer. If the server refuses such a request, a later
    request raises ``KeeperRefused``.
    """

    def __init__(self, socket_path: str, *, hello: Mapping[str, Any]) -> None:
        """Connect to the server and send the first message; ``hello`` contains its fields, except ``op``.

        Raises:
            ControlError: no server answers, or the server refuses the connection.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # If the server's process is stopped, connections still enter the queue of its socket, but get no answer.
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
        self.generation: int = hello["generation"]
        """Generation of this rank, which is recorded in the windows that it captures."""
        self._committed = -1
        """Start iteration of the newest window that this client has reported as committed since ``allocate``. Before
        the first report, it is the start iteration of the committed window on the status page."""
        self.unreachable: list[str] = []
        """Why other nodes did not answer the newest ``inventory``, one text for each node."""
        try:
            self._call({**hello, "op": "hello"})
        except BaseException:
            self.close()
            raise

    def allocate(self, window_bytes: int, *, new: bool = False) -> Arena:
        """Return this rank's memory for windows, with buffers of at least ``window_bytes`` bytes.

        If the server still has memory of an earlier process of the rank, and it is large enough, this memory is
        returned with its windows. If it is too small, or if ``new`` is true, it is freed, so fetch its windows first.

        Raises:
            KeeperRefused: there is not enough memory.
        """
        answer, descriptor = self._call_for_memory({"op": "allocate", "window_bytes": window_bytes, "new": new})
        self._arena = Arena(descriptor, answer["window_bytes"], answer["num_buffers"], answer["status_bytes"])
        # Begin with the commit on the status page, because this client has reported no commit for this memory yet.
        self._committed = self._arena.status(COMMITTED_START)
        return self._arena

    def begin(self, buffer: int, *, start_iteration: int, num_slices: int, plan: Mapping[str, Any]) -> None:
        """Assign a buffer to a new window. Does not wait for the answer.

        The server refuses this while the buffer is being written to storage. It also refuses this for the buffer of the
        newest window that was committed in this generation or confirmed by ``committed``.
        """
        about = {"buffer": buffer, "start_iteration": start_iteration, "num_slices": num_slices, "plan": plan}
        self._request({"op": "begin", **about})

    def captured(self, buffer: int, index: int, part: Slice) -> None:
        """Report that slice ``index`` of a buffer's window is complete and final. Does not wait for the answer."""
        update = {} if part.update is None else {"update": part.update.to_json()}
        self._request({"op": "captured", "buffer": buffer, "slice": index, "record": part.to_json(), **update})

    def committed(
        self,
        start_iteration: int,
        *,
        captured_in: int | None = None,
        is_written: bool = False,
        level: StoredLevel | None = None,
    ) -> None:
        """Report that all ranks have replicated a window or have continued from it. Does not wait for the answer.

        The server refuses this if its copy of the window is incomplete. ``captured_in`` is the generation that captured
        the window; None means the generation of this client. If ``is_written``, the server writes the window to storage
        now, regardless of the setting ``persist_every``. ``level`` is then the state that the file must contain
        instead of the window's state in memory; None to write the state in memory.
        """
        captured = {} if captured_in is None else {"captured_in": captured_in}
        stored = {"stored": None if level is None else level.to_json()} if is_written else {}
        self._request({"op": "committed", "start_iteration": start_iteration, **captured, **stored})
        # The server may handle this request later, and then pin a buffer to write it to storage. So it is unknown which
        # buffers are pinned until the status page shows this commit.
        self._committed = start_iteration

    def keep(self, key: WindowKey) -> None:
        """Report that all ranks have continued from a window of an earlier generation. Call this if peers have this
        rank's part of the window, but this node does not. The peers then keep their copies until the next commit."""
        self._call({"op": "keep", **asdict(key)})
        self._committed = key.start_iteration

    def abandon(self, start_iteration: int) -> None:
        """Discard a window that the job will not commit. Afterwards the server does not write to the window's buffer.

        Raises:
            KeeperRefused: the server does not have the window, or the window is committed.
        """
        self._call({"op": "abandon", "start_iteration": start_iteration})

    def buffer_states(self) -> BufferStates:
        """Return the state of this rank's buffers, as the server last wrote it to the status page."""
        arena = self._arena
        if arena is None:
            return BufferStates()
        # Read the newest commit before the pinned buffers, because the server writes it after the pinned buffers.
        knows_commits = arena.status(COMMITTED_START) == self._committed
        pinned = arena.status(PINNED_BUFFERS)
        buffers = range(arena.num_buffers)
        return BufferStates(
            replicated={buffer: arena.status(BUFFER_REPLICATED + buffer) for buffer in buffers},
            given_up={buffer: arena.status(BUFFER_GIVEN_UP + buffer) for buffer in buffers},
            pinned=frozenset(buffer for buffer in buffers if pinned >> buffer & 1),
            knows_commits=knows_commits,
            failed_start=arena.status(FAILED_START),
        )

    def persist(self, start_iteration: int) -> None:
        """Request that a window is written to storage.

        Raises:
            KeeperRefused: the server does not have the window, or no ``persist_url`` is configured.
        """
        self._call({"op": "persist", "start_iteration": start_iteration})

    def flush(self) -> bool:
        """Wait until all requested windows are on storage. Return False if this takes more than ``FLUSH_SECONDS``."""
        return bool(self._call({"op": "flush"}, PATIENT_SECONDS)["done"])

    def problems(self) -> list[dict[str, Any]]:
        """Return the server's failures to copy, replicate, write or delete windows of this rank since the last call.
        Each has the keys ``what``, ``error`` and ``start_iteration``."""
        return list(self._call({"op": "problems"})["problems"])

    def inventory(self, rank: int, *, ask_peers: bool = False) -> list[StoredWindow]:
        """Return the windows of ``rank`` on this node and, if ``ask_peers``, on all other nodes that answer. Set
        ``unreachable`` to the reasons why others did not answer."""
        seconds = PATIENT_SECONDS if ask_peers else ANSWER_SECONDS
        answer = self._call({"op": "inventory", "rank": rank, "ask_peers": ask_peers}, seconds)
        self.unreachable = items(answer, "unreachable")
        return [stored_window(entry) for entry in items(answer, "windows")]

    def fetch(self, rank: int, key: WindowKey, *, node: int) -> tuple[Window, memoryview]:
        """Fetch a complete window of ``rank`` from the server of ``node``. Return its description and its bytes.

        The caller must check the bytes with ``Slice.check_payload``. The bytes stay mapped as long as a reference to
        them exists. Changes to the bytes are visible only in this process.

        Raises:
            KeeperRefused: the node does not have the window, or the transfer failed.
            CheckpointError: the description of the window cannot be read.
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
        """Close the connection. The server keeps all windows of the rank."""
        self._reader.close()

    def _call_for_memory(self, message: Message) -> tuple[Message, int]:
        answer = self._call(message, PATIENT_SECONDS)
        if not self._reader.descriptors:
            raise ControlError(f"snapshot server: its answer to the request {message['op']} has no file descriptor")
        return answer, self._reader.descriptors.popleft()

    def _request(self, message: Message) -> None:
        # A later request reads this answer. Until then, unread answers must fit the socket buffer.
        if self._num_unread >= MAX_UNREAD:
            self._read_answers()
        self._send(message)
        self._num_unread += 1

    def _call(self, message: Message, seconds: float | None = None) -> Message:
        self._send(message)
        self._num_unread += 1
        return self._read_answers(seconds)

    def _read_answers(self, seconds: float | None = None) -> Message:
        # Reads all unread answers, each within ``seconds``. Returns the last one, or raises if any is a refusal.
        self._reader.sock.settimeout(ANSWER_SECONDS if seconds is None else seconds)
        # Read all answers before a refusal is raised, so that the next request reads its own answer.
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
            f"snapshot server at {self._socket_path}: no answer within {seconds:g} s; its process is stopped or blocked"
        )
