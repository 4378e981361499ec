"""Process of a node's snapshot server, which serves ranks of its node and snapshot servers of other nodes.

The main thread only accepts connections. Each connection, each peer, hashing, and writing to storage have threads of
their own. ``Lifeline`` in ``wire.py`` decides when the process ends.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import selectors
import shutil
import signal
import socket
import stat
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ft.errors import ConfigError, ControlError, MegatronFtError
from megatron_ft.framing import read_line
from megatron_ft.serde import means_every_interface
from megatron_ft.snapshot.server.peer_session import PeerSessions
from megatron_ft.snapshot.server.rank_session import RankSession
from megatron_ft.snapshot.server.store import Memory, Store
from megatron_ft.snapshot.server.wire import (
    MAX_BYTES,
    MAX_RANK,
    MIN_TOKEN_LENGTH,
    Lifeline,
    Outlive,
    integer,
    mapping,
    text,
)
from megatron_ft.snapshot.server.workers import Hasher, Persister, Sender

MAX_LINE_BYTES = 64 * 1024
_PR_SET_PDEATHSIG = 1
_BACKLOG = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeeperSpec:
    """Settings of a snapshot server. The server reads them from standard input, as one line of JSON."""

    socket_path: str
    """Path of the Unix socket for ranks of the node. The directory must have mode 0700."""
    interface: str
    """Address on which this server listens for servers of other nodes."""
    token: str
    """Secret of the job, which every connection must present in its first message."""
    node: int
    memory_limit_bytes: int | None = None
    """Limit of the memory for windows of this node's ranks and for copies of other nodes' windows. If None, each
    allocation is limited only by the memory that is available at that time."""
    outlive: Outlive | None = None
    """Whether and how long the server outlives its agent."""
    lock_descriptor: int | None = None
    """File descriptor with a shared lock on the socket's directory, which the last holder of a lock removes."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "_KeeperSpec":
        """Read and check the settings. Raises MegatronFtError for a missing or invalid value."""
        token, limit = text(content, "token"), content.get("memory_limit_bytes")
        if len(token) < MIN_TOKEN_LENGTH:
            raise ControlError(f"token: must have at least {MIN_TOKEN_LENGTH} characters")
        if unknown := sorted(content.keys() - set(cls.__slots__)):
            raise ControlError(f"{unknown[0]}: is not a field of a snapshot server's settings")
        return cls(
            # ``sockaddr_un`` has 108 bytes, one of them for the closing zero (unix(7)).
            socket_path=text(content, "socket_path", most=107),
            interface=_check_interface(text(content, "interface")),
            token=token,
            node=integer(content, "node", most=MAX_RANK),
            memory_limit_bytes=None if limit is None else integer(content, "memory_limit_bytes", most=MAX_BYTES),
            outlive=None if content.get("outlive") is None else Outlive.from_json(mapping(content, "outlive")),
            lock_descriptor=None if content.get("lock_descriptor") is None else integer(content, "lock_descriptor"),
        )


class _Keeper:
    """The snapshot server: accepts connections and starts one sender for each peer."""

    def __init__(self, spec: _KeeperSpec) -> None:
        """Listen for ranks and peers. Raises ControlError if an address or the socket's directory cannot be used."""
        self._spec = spec
        self._store = Store(spec.node, spec.token, Memory(spec.memory_limit_bytes))
        self._store.on_peers = self._set_peers
        self._store.on_adopted = self._adopted
        self._woken, waker = os.pipe()
        self._lifeline = self._store.lifeline = Lifeline(
            spec.outlive, self._store.report, wake=lambda: _write_byte(waker)
        )
        self._senders: dict[int, Sender] = {}
        self._sessions = PeerSessions()
        self._persister = Persister(self._store)
        self._ranks = _listen_for_ranks(Path(spec.socket_path))
        self._peers = _listen_for_peers(spec.interface)
        host, port = self._peers.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def serve(self) -> None:
        """Accept connections until the server has to end, see ``Lifeline``."""
        for worker in (Hasher(self._store), self._persister):
            worker.start()
        with selectors.DefaultSelector() as selector:
            selector.register(self._ranks, selectors.EVENT_READ)
            selector.register(self._peers, selectors.EVENT_READ)
            selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while (left := self._lifeline.seconds_left()) != 0.0:
                limits = [seconds for seconds in (left, self._sessions.expire()) if seconds is not None]
                for key, _ in selector.select(min(limits, default=None)):
                    if isinstance(key.fileobj, socket.socket):
                        self._accept(key.fileobj)
                    elif key.fd == self._woken:
                        os.read(key.fd, 4096)
                    else:
                        self._read_input(selector)

    def _read_input(self, selector: selectors.BaseSelector) -> None:
        if os.read(sys.stdin.fileno(), 4096):
            self._lifeline.end("the job has finished")
            return
        # Standard input closes when the parent ends, even if it ended without a signal to this process.
        selector.unregister(sys.stdin.fileno())
        with self._store.lock:
            has_windows = self._store.has_windows
        self._lifeline.release(self._lifeline.initial_holder, has_windows=has_windows)

    def _accept(self, listener: socket.socket) -> None:
        # A connection that the peer has reset before it was accepted must not end the server.
        try:
            connection, _ = listener.accept()
        except OSError as error:
            self._store.report(f"a connection was lost before it was accepted: {error}")
            return
        if listener is self._ranks:
            RankSession(connection, self._store, self._persister).start()
        else:
            self._sessions.accept(connection, self._store)

    def close(self) -> None:
        """Stop listening and remove the socket. Remove its directory, too, if no other process uses it."""
        self._ranks.close()
        self._peers.close()
        path = Path(self._spec.socket_path)
        path.unlink(missing_ok=True)
        if self._spec.outlive is not None:
            Path(self._spec.outlive.record_path).unlink(missing_ok=True)
        if self._spec.lock_descriptor is not None:
            with contextlib.suppress(OSError):  # other processes of the node use the directory
                fcntl.flock(self._spec.lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)

    def _adopted(self, token: str) -> None:
        # The caller has locked the store. Close the connections of the earlier job; the next job opens its own.
        self._store.token = token
        for own in self._store.ranks.values():
            if own.abort is not None:
                own.abort()
        self._set_peers({})
        self._sessions.end_all()

    def _set_peers(self, peers: Mapping[int, str]) -> None:
        # The caller has locked the store.
        for node, sender in list(self._senders.items()):
            if peers.get(node) != sender.address:
                sender.stop()
                del self._senders[node]
        for node, address in peers.items():
            if node not in self._senders:
                self._senders[node] = Sender(node, address, self._store)
                self._senders[node].start()


def _write_byte(descriptor: int) -> None:
    os.write(descriptor, b"\0")


def _check_interface(interface: str) -> str:
    """Return ``interface`` without brackets. Raises ConfigError if it means all network interfaces."""
    # Windows contain the weights of the job, and connections are not encrypted, so listen on one chosen network only.
    if means_every_interface(interface):
        raise ConfigError.of("control.interface", interface, "must be one address, not all interfaces")
    return interface.strip("[]")


def _listen_for_ranks(path: Path) -> socket.socket:
    try:
        # The mode of the directory protects the socket: others could connect before the socket's own mode is set.
        about = path.parent.stat()
        if not stat.S_ISDIR(about.st_mode) or stat.S_IMODE(about.st_mode) != 0o700 or about.st_uid != os.getuid():
            raise ControlError(f"socket_path={path}: the directory must belong to this user and have mode 0700")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ControlError(f"socket_path={path}: cannot listen: {error}") from error
    return listener


def _listen_for_peers(interface: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(interface, 0, type=socket.SOCK_STREAM)[0]
        # Check again, because a host name can resolve to the address that means all interfaces.
        _check_interface(str(address[0]))
        listener = socket.socket(family, kind, protocol)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ControlError(f"control.interface={interface}: cannot listen: {error}") from error
    return listener


def _read_spec() -> _KeeperSpec:
    line = read_line(sys.stdin.fileno(), most=MAX_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise ControlError("snapshot server: standard input must contain a line with its settings")
    try:
        content = json.loads(line)
    except ValueError as error:
        raise ControlError(f"the snapshot server's settings are not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ControlError("the snapshot server's settings must be a JSON object")
    return _KeeperSpec.from_json(content)


def _die_with_parent() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    # If the parent died before this call, no signal is sent. Then ``serve`` finds that standard input is closed.
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise ControlError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")


def _end_with_traceback(arguments: threading.ExceptHookArgs) -> None:
    # An unexpected error in one thread ends the process, because ranks notice that a snapshot server has ended, but not
    # that one of its threads has ended.
    sys.excepthook(arguments.exc_type, arguments.exc_value or arguments.exc_type(), arguments.exc_traceback)
    os._exit(1)


def main() -> int:
    """Run the snapshot server and return its exit code."""
    # Ignore Ctrl-C, which reaches the whole process group: ranks still need this server to persist their newest window.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.excepthook = _end_with_traceback
    try:
        spec = _read_spec()
        if spec.outlive is None:
            _die_with_parent()
        else:
            # Slurm sends SIGTERM at the end of an allocation. The exception lets this thread remove the server's files.
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        keeper = _Keeper(spec)
    except MegatronFtError as error:
        print(f"snapshot server: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    # Print this last, because the parent then lets ranks and peers connect.
    print(json.dumps({"address": keeper.address}), flush=True)
    try:
        keeper.serve()
    finally:
        keeper.close()
    return 0
