"""Closes the connections between ranks at once, so that every collective of this process and its peers fails.

Gloo detects a dead peer by its closed connection, but a rank that waits for a healthy peer waits until its timeout.
When a rank that knows of the failure shuts its connections down, it and its neighbours wake within milliseconds. An
operation that gloo does not wake is abandoned shortly after: both classes also end their ``WaitLimit``.
"""

import os
import socket
import threading
from collections.abc import Iterable
from contextlib import closing, suppress

from megatron_ft.runtime.transport.waits import WaitLimit

_POLL_SECONDS = 0.02
"""Interval between polls for new connections."""
_SYN_SENT = 2
"""State of a connection attempt in ``tcp_info``. Source: ``netinet/tcp.h``."""

SocketId = tuple[int, int]
"""Descriptor and inode of a socket: a descriptor is used again after its socket is closed, an inode is not."""


def open_sockets() -> frozenset[SocketId]:
    """Return all open sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            kind, _, inode = os.readlink(f"/proc/self/fd/{name}").partition(":")
            if kind == "socket":
                found.add((int(name), int(inode.strip("[]"))))
    return frozenset(found)


class Transports:
    """Connected TCP sockets of this process, which any thread that learns of a failure can shut down."""

    def __init__(self, sockets: Iterable[SocketId]) -> None:
        self._sockets = sorted(sockets)
        self._lock = threading.Lock()
        self._is_down = False
        self.limit = WaitLimit()
        """Limit of the waits for operations that use these sockets."""

    @classmethod
    def among(cls, sockets: Iterable[SocketId], *, store_port: int | None) -> "Transports":
        """Keep those of ``sockets`` that are connected by TCP, except to the store, whose port is ``store_port``."""
        return cls(found for found in sockets if _connects_ranks(found, store_port))

    def __len__(self) -> int:
        return len(self._sockets)

    def include(self, sockets: Iterable[SocketId]) -> None:
        """Add those of ``sockets`` that have been connected by TCP since; shut them down if the others are shut
        down."""
        connected = [found for found in sockets if _connects_ranks(found, None)]
        with self._lock:
            self._sockets += connected
            # The failure was known before these connections existed, and nothing else would end their waits.
            for found in connected if self._is_down else ():
                _shut_down(found)

    def hang_up(self, reason: str = "") -> None:
        """Shut down all sockets that are still open, and end their ``limit``. A second call does nothing."""
        # First: a wait that begins while sockets are shut down must find the limit ended.
        self.limit.end(reason)
        with self._lock:
            if self._is_down:
                return
            self._is_down = True
            for found in self._sockets:
                _shut_down(found)


class Opening:
    """Connections that are being made: until ``close``, any thread that learns of a failure can break them, and the
    thread that makes them is notified."""

    def __init__(self) -> None:
        self._before = open_sockets()
        self._broken = threading.Event()
        self._closed = threading.Event()
        self._breaker: threading.Thread | None = None
        self._lock = threading.Lock()
        self.limit = WaitLimit()
        """Limit of the waits for these connections."""

    def hang_up(self, reason: str = "") -> None:
        """Shut down all TCP connections made since, and pending ones, also if the peer does not answer, because a dead
        machine does not refuse them. End the ``limit``."""
        self.limit.end(reason)
        with self._lock:
            if self._breaker is None and not self._closed.is_set():
                self._broken.set()
                # In a thread: gloo continues to connect, so sockets are shut down until the attempt has failed.
                self._breaker = threading.Thread(target=self._break, name="break new connections", daemon=True)
                self._breaker.start()

    def pause(self, seconds: float) -> bool:
        """Wait before another attempt; return at once, with true, if the connections are broken."""
        return self._broken.wait(seconds)

    def close(self) -> None:
        """Stop breaking connections."""
        with self._lock:
            self._closed.set()
        if self._breaker is not None:
            self._breaker.join()

    def _break(self) -> None:
        down: set[SocketId] = set()
        is_over = False
        while not is_over:
            for found in open_sockets() - self._before - down:
                if _connects_ranks(found, None):
                    _shut_down(found)
                    down.add(found)
            is_over = self._closed.wait(_POLL_SECONDS)


def _connects_ranks(found: SocketId, store_port: int | None) -> bool:
    opened = _duplicate(found)
    if opened is None:
        return False
    with closing(opened):
        if opened.family not in (socket.AF_INET, socket.AF_INET6) or opened.type != socket.SOCK_STREAM:
            return False
        try:
            # The store has its own protocol and carries no collective.
            ports = {opened.getsockname()[1], opened.getpeername()[1]}
        except OSError:  # it listens, or the peer has not answered yet
            return opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _SYN_SENT
        return store_port not in ports


def _shut_down(found: SocketId) -> None:
    opened = _duplicate(found)
    if opened is not None:
        with closing(opened), suppress(OSError):  # the peer has closed it
            opened.shutdown(socket.SHUT_RDWR)


def _duplicate(found: SocketId) -> socket.socket | None:
    # The socket under another descriptor; None where it is closed and its descriptor is perhaps another's.
    descriptor, inode = found
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    # Checked on the copy: another thread may close the descriptor, and open another file under it, at any moment.
    if os.fstat(copy).st_ino != inode:
        os.close(copy)
        return None
    return socket.socket(fileno=copy)
