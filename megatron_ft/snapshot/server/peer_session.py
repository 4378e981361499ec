"""Connections from other nodes' snapshot servers, each in a thread that receives slices and sends windows."""

import importlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import xxhash

from megatron_ft.errors import CheckpointError, ControlError
from megatron_ft.framing import Message
from megatron_ft.snapshot.server import wire as fields
from megatron_ft.snapshot.server.store import PAGE_BYTES, Copy, Store
from megatron_ft.snapshot.server.windows import NUM_COPY_BUFFERS, HeldWindow
from megatron_ft.snapshot.server.wire import GREETING_BYTES, Refused, Wire, is_token
from megatron_ft.snapshot.window import Slice, Update, Window

MAX_UNAUTHENTICATED = 64
"""Largest number of open connections that have not presented the token. If there is one more, the oldest is closed."""
GREETING_SECONDS = 10.0
"""Time limit for a connection to present the token. After this time, it is closed even if bytes still arrive."""
REPLACE_SECONDS = 10.0
KEEPALIVE_SECONDS = 5.0
_REPEATS = "megatron_ft.snapshot.repeated_updates"
"""Module that computes updates from gradients. It imports torch, which needs more memory than everything else in a
server, so only a server that receives gradients imports it."""
_ARRIVING_BYTES = 1 << 20
"""Number of bytes received at a time. They are hashed while they are still in the processor's cache."""


class PeerSessions:
    """All connections from other nodes. Only one connection of each node may write copies of the node's windows."""

    def __init__(self) -> None:
        self._of_node: dict[int, list[_PeerSession]] = {}
        """Connections of each node that may still write copies, the oldest first."""
        self._lock = threading.Lock()
        self._unauthenticated: dict[_PeerSession, float] = {}
        """Connections that have not presented the token, the oldest first, with the time of their start."""

    def accept(self, sock: socket.socket, store: Store) -> None:
        """Serve a new connection in a thread. If too many have not presented the token, close the oldest of these."""
        session = _PeerSession(sock, store, self)
        with self._lock:
            oldest = next(iter(self._unauthenticated)) if len(self._unauthenticated) >= MAX_UNAUTHENTICATED else None
            if oldest is not None:
                del self._unauthenticated[oldest]
            self._unauthenticated[session] = time.monotonic()
        if oldest is not None:
            oldest.abort()
        session.start()

    def end_all(self) -> None:
        """End all connections that may write copies. Threads that serve them end soon after."""
        with self._lock:
            writing = [session for sessions in self._of_node.values() for session in sessions]
        for session in writing:
            session.abort()

    def greeted(self, session: "_PeerSession") -> None:
        """Record that a connection has presented the token or has ended."""
        with self._lock:
            self._unauthenticated.pop(session, None)

    def expire(self) -> float | None:
        """Close connections that have not presented the token in time. Return the seconds until the next one must be
        closed; None if there is no such connection."""
        now = time.monotonic()
        with self._lock:
            late = [session for session, since in self._unauthenticated.items() if now - since >= GREETING_SECONDS]
            for session in late:
                del self._unauthenticated[session]
            since = next(iter(self._unauthenticated.values()), None)
        for session in late:
            session.abort()
        return None if since is None else since + GREETING_SECONDS - now

    def replace(self, node: int, session: "_PeerSession") -> None:
        """End a node's earlier connections, so that only ``session`` writes. Raises ControlError if this fails."""
        with self._lock:
            # Include connections that earlier calls could not end, because they may still write.
            earlier = [other for other in self._of_node.get(node, ()) if other.is_alive()]
            self._of_node[node] = [*earlier, session]
        for other in earlier:
            other.abort()
        deadline = time.monotonic() + REPLACE_SECONDS
        for other in earlier:
            # Do not hold the lock here: the other thread may need it in order to end.
            other.join(max(0.0, deadline - time.monotonic()))
        if any(other.is_alive() for other in earlier):
            raise ControlError(f"node={node}: an earlier connection did not end within {REPLACE_SECONDS:g} s")


class _PeerSession(threading.Thread):
    """A connection from the snapshot server of another node, with the thread that serves it."""

    def __init__(self, sock: socket.socket, store: Store, sessions: PeerSessions) -> None:
        super().__init__(name="peer", daemon=True)
        self._wire = Wire(sock)
        self._store = store
        self._sessions = sessions
        self._generation = -1

    def abort(self) -> None:
        """Shut the connection down. Other threads may call this."""
        self._wire.abort()

    def run(self) -> None:
        """Answer messages until the peer closes the connection."""
        try:
            if self._answer(self._greet):
                while self._answer(self._serve_one):
                    pass
        except OSError:
            return
        finally:
            self._wire.close()

    def _answer(self, serve: Callable[[], None]) -> bool:
        # Returns whether the connection can continue. After a refusal, the two ends may expect different messages next.
        try:
            serve()
        except (ControlError, CheckpointError) as error:
            refused = error if isinstance(error, Refused) else Refused(str(error))
            self._wire.send(refused.to_json())
            return False
        return True

    def _greet(self) -> None:
        try:
            hello = self._wire.receive(most_bytes=GREETING_BYTES)
            if not is_token(hello.get("token"), self._store.token):
                raise Refused("wrong or missing token")
        finally:
            self._sessions.greeted(self)
        if hello.get("op") != "hello":
            raise ControlError(f"op={hello.get('op')!r:.100}: must be hello in the first message")
        node = fields.integer(hello, "node", most=fields.MAX_RANK)
        generation = fields.integer(hello, "generation")
        with self._store.lock:
            # Check the generation before ``replace``: a server of an older generation must not end a newer connection.
            self._store.enter(fields.text(hello, "run_id", most=255), generation)
        self._generation = generation
        if hello.get("replicates") is True:
            self._sessions.replace(node, self)
        # The earlier connection has ended, so the list includes all slices that it wrote.
        with self._store.lock:
            held = [
                {"rank": rank, "window": asdict(window)}
                for rank in self._store.copies
                for window in self._store.inventory(rank)
                if window.where == "copy"
            ]
        self._wire.send({"op": "welcome", "held": held})

    def _serve_one(self) -> None:
        message = self._wire.receive(patient=True)
        with self._store.lock:
            # Check this for every message: a client of a newer generation may have connected meanwhile.
            self._store.check_generation(self._generation)
        answers = {
            "slice": self._slice,
            "committed": self._committed,
            "inventory": self._inventory,
            "fetch": self._fetch,
        }
        operation = message.get("op")
        if not isinstance(operation, str) or operation not in answers:
            raise ControlError(f"op={operation!r:.100}: must be one of {', '.join(answers)}")
        answers[operation](message)

    def _slice(self, message: Message) -> None:
        """Receive a slice, compare its hashes with the sender's, and acknowledge the slice. After an error the slice is
        not stored.

        The bytes follow the announcement ``message`` directly, unless the announcement contains ``waits``. In that case
        memory may have to be allocated, so the sender first waits for the message ``go``. The sender computes the
        hashes while it sends, and sends them last.
        """
        index = fields.integer(message, "slice", most=fields.MAX_SLICES)
        window_bytes = fields.integer(message, "window_bytes", least=1, most=fields.MAX_BYTES)
        if window_bytes % PAGE_BYTES:
            raise ControlError(f"window_bytes={window_bytes}: must be a multiple of {PAGE_BYTES}")
        incoming, part = _read_announcement(message, self._generation)
        if part.update is not None:
            part.update.check(part, window_bytes)
        rank = incoming.rank
        # Check the first slice before memory is allocated; later slices are checked against their window.
        if index == 0:
            incoming.check_next(index, part, window_bytes)
        waits = message.get("waits") is True
        copy = self._copy_of(rank, window_bytes, may_take=waits)
        window = self._reserve(rank, copy, incoming, index, part)
        try:
            if waits:
                self._wire.send({"op": "go"})
            start = copy.offset(window) + part.offset
            payload = copy.segment.view[start : start + part.num_bytes]
            # Without ``carries``, the sender sends the whole slice, including pieces that were not captured with it.
            if message.get("carries") is True:
                hashes = self._receive_captured(copy, window, part, payload)
            else:
                hashes = _receive_hashed(part, payload, self._wire.receive_into)
            # Both ends compute the hashes, so a difference shows that memory or network has changed the bytes.
            expected = fields.items(self._wire.receive(), "hashes")
            _check_repeated(part, hashes, expected)
            if expected != list(hashes):
                raise Refused(f"slice={index} of window {window.start_iteration}: was damaged in transfer", "hash")
            part.hashes, part.update = hashes, None
            # Check again: while bytes were received, a newer generation may have begun and freed the memory.
            with self._store.lock:
                self._check_copy(rank, copy)
                window.slices.append(part)
        finally:
            with self._store.lock:
                copy.receiving.discard(window.buffer)
        self._wire.send({"op": "ack"})

    def _receive_captured(self, copy: Copy, window: HeldWindow, part: Slice, payload: memoryview) -> tuple[str, ...]:
        # Receives the pieces that were captured with the slice, or gradients from which they are computed. Copies the
        # other pieces from earlier windows in memory.
        update = part.update
        repeated = frozenset() if update is None else update.indices(part)
        for view in part.captured(payload, without=repeated):
            self._wire.receive_into(view)
        gradients = [] if update is None else [bytearray(stop - start) for start, stop in update.ranges(part)]
        for gradient in gradients:
            self._wire.receive_into(memoryview(gradient))
        try:
            with self._store.lock:
                carried = copy.carried(window, part)
                before = None if update is None else copy.preceding(window, part)
            for piece in carried:
                piece.copy(part, payload)
            if update is not None and before is not None:
                importlib.import_module(_REPEATS).repeat_update(update, part, before, payload, gradients)
        except ControlError as error:
            raise Refused(str(error), "carry") from error
        return part.hash_pieces(payload, {piece.index: piece.digest for piece in carried})

    def _copy_of(self, rank: int, window_bytes: int, *, may_take: bool) -> Copy:
        # Allocation may take longer than the sender waits without a message, so send ``wait`` meanwhile.
        with self._store.lock:
            copy = self._store.copies.get(rank)
            if copy is not None and copy.windows.window_bytes == window_bytes:
                return copy
        if not may_take:
            raise ControlError(f"rank={rank}: no memory for windows of {window_bytes} bytes; send waits=true to get it")
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(self._store.take_copy, rank, window_bytes, self._generation)
            while not taken.done():
                if not futures.wait([taken], KEEPALIVE_SECONDS).done:
                    self._wire.send({"op": "wait"})
            return taken.result()

    def _reserve(self, rank: int, copy: Copy, incoming: HeldWindow, index: int, part: Slice) -> HeldWindow:
        with self._store.lock:
            self._check_copy(rank, copy)
            # An earlier connection that could not be ended may still write to the buffer.
            if incoming.buffer in copy.receiving:
                raise ControlError(f"buffer={incoming.buffer}: another connection is writing to it")
            window = copy.windows.expect(incoming, index, part)
            copy.receiving.add(window.buffer)
        return window

    def _check_copy(self, rank: int, copy: Copy) -> None:
        # Raises unless ``copy`` is still in the store. The caller holds the lock until it has changed ``copy``, because
        # the store could replace ``copy`` meanwhile, and an acknowledged slice would then be lost.
        self._store.check_generation(self._generation)
        if self._store.copies.get(rank) is not copy:
            raise ControlError(f"rank={rank}: the memory for copies was freed during the transfer")

    def _committed(self, message: Message) -> None:
        rank = fields.integer(message, "rank", most=fields.MAX_RANK)
        key = fields.window_key(message)
        with self._store.lock:
            # Check this under the same lock as the commit, which must not drop windows of a newer generation.
            self._store.check_generation(self._generation)
            if rank not in self._store.copies:
                raise ControlError(f"rank={rank}: this server has no copy of the rank's windows")
            self._store.copies[rank].windows.commit(key)
        self._wire.send({"op": "ack"})

    def _inventory(self, message: Message) -> None:
        with self._store.lock:
            windows = self._store.inventory(fields.integer(message, "rank", most=fields.MAX_RANK))
        # Numbers of buffers have no meaning on the node that requested the inventory.
        self._wire.send({"op": "inventory", "windows": [asdict(replace(window, buffer=None)) for window in windows]})

    def _fetch(self, message: Message) -> None:
        rank = fields.integer(message, "rank", most=fields.MAX_RANK)
        with self._store.lock:
            segment, offset, window = self._store.find(rank, fields.window_key(message))
            description, num_bytes = window.to_json(), window.num_bytes
        self._wire.send({"op": "window", "window": description, "num_bytes": num_bytes})
        # The other end allocates memory first, which may take long.
        if self._wire.receive(patient=True).get("op") != "go":
            raise ControlError("after the answer to 'fetch', the other server must send 'go'")
        self._wire.send_bytes(segment.view[offset : offset + num_bytes])


def announce(window: HeldWindow, index: int, buffer: int, window_bytes: int) -> Message:
    """Make the message that precedes the bytes of a slice. It has topology and plan only for a window's first slice."""
    about = window.describe()
    if index > 0:
        about |= {"topology": {}, "plan": {}}
    record = window.slices[index]
    place = {"buffer": buffer, "window_bytes": window_bytes, "slice": index}
    return {"op": "slice", "window": about, **place, "record": replace(record, hashes=None).to_json()}


def _read_announcement(message: Message, newest_generation: int) -> tuple[HeldWindow, Slice]:
    """Read the window and the slice that a message of ``announce`` describes. The window is returned without its list
    of slices, and the slice without hashes.

    Raises:
        ControlError, CheckpointError: a field is missing or invalid.
    """
    window = Window.from_json(message.get("window"), whole=False)
    # Refuse a later generation: commits might not supersede such a window, and then it would be kept for too long.
    if window.generation > newest_generation:
        raise ControlError(f"generation={window.generation}: exceeds the connection's generation, {newest_generation}")
    buffer = fields.integer(message, "buffer", most=NUM_COPY_BUFFERS - 1)
    part = Slice.from_json(message.get("record"), hashed=False)
    if "update" in message:
        if message.get("carries") is not True:
            raise ControlError("update: must be sent only together with carries=true")
        part.update = Update.from_json(message["update"])
    return HeldWindow(**vars(window), buffer=buffer), part


def load_torch() -> None:
    """Import torch in a thread. Torch computes pieces of windows from gradients. Without this call, the first window
    with gradients would wait for the import."""
    threading.Thread(target=importlib.import_module, args=(_REPEATS,), name="torch", daemon=True).start()


def _check_repeated(part: Slice, hashes: Sequence[str], expected: Sequence[Any]) -> None:
    """Check that the pieces changed by ``part.update`` have the hashes that the sender computed. Otherwise raise
    Refused, so that the sender sends the whole slice."""
    for index in sorted(part.update.indices(part)) if part.update and len(expected) == len(hashes) else ():
        if hashes[index] != expected[index]:
            piece = part.pieces[index]
            raise Refused(f"the updated {piece.component!r} of {piece.parameter!r} differs from the sender's", "carry")


def _receive_hashed(part: Slice, payload: memoryview, receive_into: Callable[[memoryview], None]) -> tuple[str, ...]:
    """Receive a slice into ``payload``. Return the hash of each piece, computed while its bytes are still in cache."""
    received, hashes = 0, []
    for piece in part.pieces:
        digest, position = xxhash.xxh3_128(), piece.offset
        while position < piece.end:
            if received <= position:
                target = min(part.num_bytes, received + _ARRIVING_BYTES)
                receive_into(payload[received:target])
                received = target
                continue
            stop = min(piece.end, received)
            digest.update(payload[position:stop])
            position = stop
        hashes.append(digest.hexdigest())
    receive_into(payload[received:])
    return tuple(hashes)
