"""Shuts down the connections between ranks, so that the collectives that use them fail at once.

Gloo detects the loss of a peer when their connection closes. But a rank that waits for a healthy peer, which itself
waits for the lost one, stays blocked until its timeout. So each rank that learns of the failure shuts down all its
connections, which ends its own waits and those of its peers within milliseconds. ``Transports`` and ``Opening`` also
end their ``WaitLimit``, so that operations which stay blocked in gloo are abandoned.
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
"""TCP state of a socket whose peer has not answered yet. Source: ``netinet/tcp.h``."""

SocketId = tuple[int, int]
"""Descriptor and inode of a socket. The inode is needed because a descriptor is reused after its socket is closed."""


def open_sockets() -> frozenset[SocketId]:
    """Return the ids of all open sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            kind, _, inode = os.readlink(f"/proc/self/fd/{name}").partition(":")
            if kind == "socket":
                found.add((int(name), int(inode.strip("[]"))))
    return frozenset(found)


class Transports:
    """TCP connections between this process and other ranks. Any thread can shut all of them down after a failure."""

    def __init__(self, sockets: Iterable[SocketId]) -> None:
        self._sockets = sorted(sockets)
        self._lock = threading.Lock()
        self._is_down = False
        self.limit = WaitLimit()
        """Limit of the waits for operations that use these connections."""

    @classmethod
    def among(cls, sockets: Iterable[SocketId], *, store_port: int | None) -> "Transports":
        """Select the TCP connections in ``sockets``, except those to the store, which has port ``store_port``."""
        return cls(found for found in sockets if _connects_ranks(found, store_port))

    def __len__(self) -> int:
        return len(self._sockets)

    def include(self, sockets: Iterable[SocketId]) -> None:
        """Add the TCP connections in ``sockets``. Shut them down at once if ``hang_up`` has been called."""
        connected = [found for found in sockets if _connects_ranks(found, None)]
        with self._lock:
            self._sockets += connected
            # After an earlier ``hang_up``, no other call would shut these connections down and end their waits.
            for found in connected if self._is_down else ():
                _shut_down(found)

    def hang_up(self, reason: str = "") -> None:
        """Shut down all connections and end ``limit``. ``reason`` is part of the error of abandoned waits. A second
        call does nothing."""
        # The limit ends first, because it must also apply to a wait that begins while sockets are shut down.
        self.limit.end(reason)
        with self._lock:
            if self._is_down:
                return
            self._is_down = True
            for found in self._sockets:
                _shut_down(found)


class Opening:
    """Connections that one thread of this process is making. Until ``close``, any other thread can break them after a
    failure."""

    def __init__(self) -> None:
        self._before = open_sockets()
        self._broken = threading.Event()
        self._closed = threading.Event()
        self._breaker: threading.Thread | None = None
        self._lock = threading.Lock()
        self.limit = WaitLimit()
        """Limit of the waits for these connections."""

    def hang_up(self, reason: str = "") -> None:
        """Shut down all TCP connections made since ``__init__``, and all later ones until ``close``. End ``limit``.
        This includes attempts without an answer: a dead machine does not refuse a connection. ``reason`` is part of the
        error of abandoned waits."""
        self.limit.end(reason)
        with self._lock:
            if self._breaker is None and not self._closed.is_set():
                self._broken.set()
                # A thread repeats this until ``close``, because gloo opens new sockets when an attempt fails.
                self._breaker = threading.Thread(target=self._break, name="break new connections", daemon=True)
                self._breaker.start()

    def pause(self, seconds: float) -> bool:
        """Wait ``seconds`` before another attempt. Return true, without waiting longer, after ``hang_up``."""
        return self._broken.wait(seconds)

    def close(self) -> None:
        """End the effect of ``hang_up`` on new connections."""
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
            # The store's connection carries no collective, and must stay usable.
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
    # Returns the socket under a new descriptor, or None if it is closed. Its descriptor may now refer to another file.
    descriptor, inode = found
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    # The copy is checked, because another thread may close the original descriptor and reuse it at any moment.
    if os.fstat(copy).st_ino != inode:
        os.close(copy)
        return None
    return socket.socket(fileno=copy)
