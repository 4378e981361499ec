"""Connection from one rank, with the thread that serves it. Each request gets one answer."""

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

from megatron_ft.errors import CheckpointError, ControlError
from megatron_ft.framing import FrameReader, Message, send
from megatron_ft.planning.snapshot.memory import NUM_BUFFERS
from megatron_ft.planning.snapshot.plan import align
from megatron_ft.snapshot.server import wire as fields
from megatron_ft.snapshot.server.client import FLUSH_SECONDS
from megatron_ft.snapshot.server.peer_session import load_torch
from megatron_ft.snapshot.server.store import (
    PAGE_BYTES,
    Memory,
    OwnRank,
    Segment,
    Settings,
    Store,
)
from megatron_ft.snapshot.server.windows import HeldWindow, OwnWindows
from megatron_ft.snapshot.server.wire import Refused, Unusable, abort, connect, is_token, read_adoption
from megatron_ft.snapshot.server.workers import Persister
from megatron_ft.snapshot.window import Origin, Slice, StoredLevel, Update

_MAX_INQUIRIES = 16
"""Largest number of peers that are asked for their inventories (lists of their windows) at the same time."""
_RETRY_SECONDS = 0.1
"""Time before a failed request for an inventory is sent again. It doubles with each failure."""
_ASKING_SECONDS = 6.0
"""Time after which a failed request for an inventory is not sent again. It is longer than the time limit of a
connection attempt, so that at least two attempts are made."""
_OK = {"op": "ok"}


class RankSession(threading.Thread):
    """A connection from a rank of this node, with the thread that serves it."""

    def __init__(self, sock: socket.socket, store: Store, persister: Persister) -> None:
        super().__init__(name="rank", daemon=True)
        self._sock = sock
        self._reader = FrameReader(sock)
        self._store = store
        self._persister = persister
        self._own: OwnRank | None = None
        self._settings: Settings | None = None
        self._rank_listens = True
        self._is_agent = False
        """Whether the other end is an agent, which takes the server over or ends it, and not a rank."""
        self._end_reason: str | None = None
        """Reason for which the server ends after the next answer; None if the server does not end."""

    def run(self) -> None:
        """Answer requests until the rank's process ends or another process replaces it."""
        try:
            closed = False
            while not closed:
                messages, closed = self._reader.pump()
                # Descriptors that no request expects would stay open as long as the connection.
                if self._reader.descriptors:
                    raise ControlError("a rank sent a file descriptor, which a snapshot server does not accept")
                for message in messages:
                    self._serve(message)
        except (ControlError, OSError) as error:
            self._store.report(f"the connection of a rank was closed: {error}")
        finally:
            with self._store.lock:
                # If a newer connection acts for the rank now, ``own.abort`` closes that one and must not be reset.
                if self._own is not None and self._own.abort == self.abort:
                    self._own.abort = None
                has_windows = self._store.has_windows
                self._reader.close()
            self._store.lifeline.release(self, has_windows=has_windows)

    def abort(self) -> None:
        """Shut the connection down. Other threads may call this."""
        abort(self._sock)

    def _serve(self, message: Message) -> None:
        descriptors: list[int] = []
        try:
            answer = self._answer(message, descriptors)
        except Refused as error:
            answer = error.to_json()
        except (ControlError, CheckpointError) as error:
            # Keep the connection: each request has one answer, so both ends know that another request comes next.
            answer = Refused(str(error)).to_json()
        try:
            self._send(answer, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if self._end_reason is not None:
            self._store.lifeline.end(self._end_reason)
        if self._own is None and not self._is_agent:
            raise ControlError(f"the first message of the connection was refused: {answer.get('reason')}")

    def _send(self, answer: Message, descriptors: list[int]) -> None:
        # A rank may die right after its last requests. They are still carried out, but not answered.
        if not self._rank_listens:
            return
        try:
            send(self._sock, answer, descriptors)
        except OSError as error:
            self._store.report(f"an answer could not be sent to a rank: {error}")
            self._rank_listens = False

    def _answer(self, message: Message, descriptors: list[int]) -> Message:
        operation = message.get("op")
        if self._is_agent:
            return self._end(message)
        if self._own is None or self._settings is None:
            return self._hello(message)
        with self._store.lock:
            # Another process may act for the rank now. Then requests of this connection must be refused.
            self._store.check_acting(self._own, self._settings)
        answers: dict[object, Callable[[OwnRank, Message, list[int]], Message]] = {
            "allocate": self._allocate,
            "begin": self._begin,
            "captured": self._captured,
            "committed": self._committed,
            "keep": self._keep,
            "abandon": self._abandon,
            "persist": self._persist,
            "flush": self._flush,
            "problems": self._problems,
            "inventory": self._inventory,
            "fetch": self._fetch,
        }
        if not isinstance(operation, str) or operation not in answers:
            raise ControlError(f"op={operation!r:.100}: must be one of {', '.join(map(str, answers))}")
        return answers[operation](self._own, message, descriptors)

    def _hello(self, message: Message) -> Message:
        # Check the token first, so that nothing else in a message without the token is read.
        if not is_token(message.get("token"), self._store.token):
            raise Refused("wrong or missing token")
        if message.get("op") == "adopt":
            return self._adopt(message)
        if message.get("op") == "end":
            return self._end(message)
        if message.get("op") != "hello":
            raise ControlError(f"op={message.get('op')!r:.100}: must be hello in the first message")
        settings = _read_settings(message)
        if fields.integer(message, "node", most=fields.MAX_RANK) != self._store.node:
            raise ControlError(f"node={message['node']}: must be {self._store.node}, the node of this server")
        if message.get("send_gradients") is True:
            load_torch()
        with self._store.lock:
            self._own, self._settings = self._store.register(settings, self.abort), settings
        return {"op": "welcome"}

    def _adopt(self, message: Message) -> Message:
        token = read_adoption(message)
        with self._store.lock:
            try:
                self._store.lifeline.take(self, message)
            except Unusable as error:
                self._end_reason = f"the next job cannot use its windows: {error}"
                raise
            self._store.on_adopted(token)
            self._is_agent = True
        return {"op": "adopted"}

    def _end(self, message: Message) -> Message:
        if message.get("op") != "end":
            raise ControlError(f"op={message.get('op')!r:.100}: an agent may only send op='end'")
        self._end_reason, self._is_agent = fields.text(message, "reason"), True
        return _OK

    def _allocate(self, own: OwnRank, message: Message, descriptors: list[int]) -> Message:
        window_bytes = align(fields.integer(message, "window_bytes", least=1, most=fields.MAX_BYTES))
        assert self._settings is not None, "greeted"
        is_new = message.get("new") is True
        segment, taken_bytes = self._store.take_arena(own, self._settings, window_bytes, new=is_new)
        # Duplicate the descriptor, because ``_serve`` closes it after sending.
        descriptors.append(os.dup(segment.descriptor))
        sizes = {"window_bytes": taken_bytes, "status_bytes": PAGE_BYTES, "num_buffers": NUM_BUFFERS}
        return {"op": "memory", **sizes}

    def _begin(self, own: OwnRank, message: Message, _: list[int]) -> Message:
        window = HeldWindow(
            **vars(own.settings.origin),
            start_iteration=fields.integer(message, "start_iteration"),
            num_slices=fields.integer(message, "num_slices", least=1, most=fields.MAX_SLICES),
            plan=fields.mapping(message, "plan"),
            buffer=fields.integer(message, "buffer", most=NUM_BUFFERS - 1),
        )
        with self._changing(own) as windows:
            windows.begin(window)
        return _OK

    def _captured(self, own: OwnRank, message: Message, _: list[int]) -> Message:
        buffer = fields.integer(message, "buffer", most=NUM_BUFFERS - 1)
        index = fields.integer(message, "slice", most=fields.MAX_SLICES)
        part = Slice.from_json(message.get("record"), hashed=False)
        if "update" in message:
            part.update = Update.from_json(message["update"])
        with self._changing(own) as windows:
            if part.update is not None:
                part.update.check(part, windows.window_bytes)
            windows.capture(buffer, index, part)
        return _OK

    def _committed(self, own: OwnRank, message: Message, _: list[int]) -> Message:
        generation, start = own.settings.origin.generation, fields.integer(message, "start_iteration")
        captured_in = fields.integer(message, "captured_in", most=generation) if "captured_in" in message else None
        stored = message.get("stored")
        level = None if stored is None else StoredLevel.from_json(stored)
        with self._changing(own) as windows:
            window = windows.find(start, generation if captured_in is None else captured_in)
            if level is not None and [len(part.pieces) for part in window.slices] != [len(level.captured_at)]:
                raise ControlError(f"stored.captured_at: must have one entry for each piece of window {start}")
            windows.commit(start, generation, captured_in)
            is_due = "stored" in message or windows.is_persist_due(own.settings.persist_every)
            if own.settings.persist_url is not None and is_due:
                self._persister.request(own, window, level)
            # Free older windows only after a commit, because until then a restart may need them.
            self._store.free_older(window.generation)
        return _OK

    def _keep(self, own: OwnRank, message: Message, _: list[int]) -> Message:
        origin = vars(own.settings.origin) | asdict(fields.window_key(message))
        with self._changing(own) as windows:
            # Only the key of this object is used. The other fields are placeholders: only peers have the window.
            windows.confirmed = HeldWindow(**origin, num_slices=1, plan={}, buffer=0)
        return _OK

    def _abandon(self, own: OwnRank, message: Message, _: list[int]) -> Message:
        with self._changing(own) as windows:
            window = windows.abandon(fields.integer(message, "start_iteration"), own.settings.origin.generation)
            # After the answer, the rank may write another window to the buffer, so the hasher must have left it.
            self._store.lock.wait_for(lambda: self._store.filling is not window)
        return _OK

    def _persist(self, own: OwnRank, message: Message, _: list[int]) -> Message:
        with self._changing(own) as windows:
            if own.settings.persist_url is None:
                raise ControlError("persist_url=null: must be a path or URL, so that windows can be written to storage")
            self._persister.request(own, windows.find(fields.integer(message, "start_iteration")))
        return _OK

    def _flush(self, own: OwnRank, _: Message, __: list[int]) -> Message:
        with self._store.lock:
            # ``wait_for`` releases the lock, which the persister needs to finish.
            done = self._store.lock.wait_for(lambda: not self._persister.is_due(own), FLUSH_SECONDS)
        return {"op": "flushed", "done": done}

    def _problems(self, own: OwnRank, _: Message, __: list[int]) -> Message:
        assert self._settings is not None, "greeted"
        with self._store.lock:
            self._store.check_acting(own, self._settings)
            found = list(own.problems)
            own.problems.clear()
        return {"op": "problems", "problems": found}

    def _inventory(self, own: OwnRank, message: Message, _: list[int]) -> Message:
        rank = fields.integer(message, "rank", most=fields.MAX_RANK)
        with self._store.lock:
            windows = [asdict(window) for window in self._store.inventory(rank)]
        others = {node: address for node, address in own.settings.peers.items() if node != self._store.node}
        unreachable: list[str] = []
        if message.get("ask_peers") is True and others:
            # All ranks ask at the same moment. Each node begins with the node after it, so that not all ask one node.
            order = sorted(others.items(), key=lambda peer: (peer[0] < self._store.node, peer))
            # Ask all nodes at the same time, because each node that is gone costs the time limit of a connection
            # attempt.
            with ThreadPoolExecutor(min(_MAX_INQUIRIES, len(others))) as pool:
                answers = pool.map(lambda peer: self._ask_inventory(own, *peer, rank, unreachable), order)
                windows += [window for found in answers for window in found]
        return {"op": "inventory", "windows": windows, "unreachable": unreachable}

    def _ask_inventory(
        self, own: OwnRank, node: int, address: str, rank: int, unreachable: list[str]
    ) -> list[dict[str, Any]]:
        assert self._settings is not None, "greeted"
        seconds, deadline = _RETRY_SECONDS, time.monotonic() + _ASKING_SECONDS
        while True:
            try:
                wire, _ = connect(address, self._greeting(own))
                try:
                    found = fields.items(wire.call({"op": "inventory", "rank": rank}), "windows")
                    return [asdict(fields.stored_window(entry)) for entry in found]
                finally:
                    wire.close()
            except (ControlError, OSError) as error:
                # A server listens until it ends, so it has ended if it refuses the connection. A server that gets many
                # connections at the same time may reset one, or not accept it in time.
                is_lost = isinstance(error, (ControlError, ConnectionRefusedError))
                if is_lost or time.monotonic() + seconds > deadline:
                    # A lost peer has no windows any more, so the restart uses windows of other nodes.
                    unreachable.append(f"node {node} did not list its windows: {error}")
                    self._store.report(f"for rank {rank}, {unreachable[-1]}")
                    return []
            with self._store.lock:
                self._store.lock.wait_for(lambda: own.settings is not self._settings, seconds)
                self._store.check_acting(own, self._settings)
            seconds *= 2

    def _fetch(self, own: OwnRank, message: Message, descriptors: list[int]) -> Message:
        rank, key = fields.integer(message, "rank", most=fields.MAX_RANK), fields.window_key(message)
        node = fields.integer(message, "node", most=fields.MAX_RANK)
        if node == self._store.node:
            with self._store.lock:
                # The rank reads the bytes later without the lock. If they change before that, their hashes differ.
                segment, offset, window = self._store.find(rank, key)
            description, num_bytes = window.to_json(), window.num_bytes
        elif node not in own.settings.peers:
            raise ControlError(f"node={node}: must be one of {sorted(own.settings.peers)}")
        else:
            request = {"op": "fetch", "rank": rank, **asdict(key)}
            try:
                address = own.settings.peers[node]
                segment, description = _fetch_window(address, self._greeting(own), request, self._store.memory)
            except OSError as error:
                what = f"the window of iteration {key.start_iteration} of rank {rank}"
                raise ControlError(f"node={node}: the transfer of {what} failed: {error}") from error
            offset, num_bytes = 0, segment.num_bytes
        descriptors.append(segment.read_only_descriptor())
        return {"op": "window", "window": description, "offset": offset, "num_bytes": num_bytes}

    def _changing(self, own: OwnRank) -> AbstractContextManager[OwnWindows]:
        # ``changing`` checks again that no other process has replaced this one since the request arrived.
        assert self._settings is not None, "greeted"
        return self._store.changing(own, self._settings)

    def _greeting(self, own: OwnRank) -> Message:
        origin = own.settings.origin
        # If ``replicates`` were true, the peer would end the connection of this node's sender.
        about = {"run_id": origin.run_id, "generation": origin.generation, "replicates": False}
        return {"token": self._store.token, "node": self._store.node, **about}


def _fetch_window(address: str, greeting: Message, request: Message, memory: Memory) -> tuple[Segment, dict[str, Any]]:
    """Fetch a window from another server into newly allocated memory. The requesting rank checks the hashes later.

    Raises:
        ControlError, OSError: the server does not have the window, or the transfer failed.
    """
    wire, _ = connect(address, greeting)
    try:
        answer = wire.call(request)
        num_bytes = fields.integer(answer, "num_bytes", most=fields.MAX_BYTES)
        segment = memory.allocate("fetched", max(1, num_bytes))
        wire.send({"op": "go"})
        wire.receive_into(segment.view[:num_bytes])
        return segment, fields.mapping(answer, "window")
    finally:
        wire.close()


def _read_settings(message: Message) -> Settings:
    """Read and check the first message of a rank.

    Raises:
        ControlError, CheckpointError: a field is missing or invalid.
    """
    world_size = fields.integer(message, "world_size", least=1, most=fields.MAX_RANK)
    origin = Origin(
        run_id=fields.text(message, "run_id", most=255),
        generation=fields.integer(message, "generation"),
        rank=fields.integer(message, "rank", most=world_size - 1),
        world_size=world_size,
        topology=fields.mapping(message, "topology"),
    )
    origin.validate()
    peers = {_node(name): str(address) for name, address in fields.mapping(message, "peers").items()}
    for address in peers.values():
        fields.host_and_port(address)
    peer_nodes = tuple(dict.fromkeys(_node(node) for node in fields.items(message, "peer_nodes")))
    own_node = fields.integer(message, "node", most=fields.MAX_RANK)
    if unknown := [node for node in peer_nodes if node not in peers or node == own_node]:
        allowed = sorted(peers.keys() - {own_node})
        raise ControlError(f"peer_nodes={list(peer_nodes)}: node {unknown[0]} must be one of {allowed}")
    url = message.get("persist_url")
    return Settings(
        origin=origin,
        peers=peers,
        peer_nodes=peer_nodes,
        persist_every=fields.integer(message, "persist_every"),
        persist_url=None if url is None else fields.text(message, "persist_url"),
        num_persisted=fields.integer(message, "num_persisted"),
    )


def _node(name: object) -> int:
    number = int(name) if isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 10 else name
    return fields.integer({"node": number}, "node", most=fields.MAX_RANK)
