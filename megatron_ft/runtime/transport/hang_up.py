"""Breaks the connections between ranks at once: every collective of this process fails, and those of its peers.

Gloo notices a peer that is gone by its closed connection; a rank that waits for a healthy peer waits for its timeout.
Closing down the connections of a rank that knows of the failure wakes it and its neighbours within milliseconds. An
operation that gloo does not wake is abandoned shortly after: both classes end their ``WaitLimit`` as well.
"""

import os
import socket
import threading
from collections.abc import Iterable
from contextlib import closing, suppress

from megatron_ft.runtime.transport.waits import WaitLimit

_LOOK_SECONDS = 0.02
"""How often one looks for connections that have been made since."""
_SYN_SENT = 2
"""State of a connection that has been asked for, in ``tcp_info``. Source: ``netinet/tcp.h``."""

SocketId = tuple[int, int]
"""Descriptor and inode: a descriptor is used again once its socket is closed, its inode is not."""


def open_sockets() -> frozenset[SocketId]:
    """All sockets that this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            kind, _, inode = os.readlink(f"/proc/self/fd/{name}").partition(":")
            if kind == "socket":
                found.add((int(name), int(inode.strip("[]"))))
    return frozenset(found)


class Transports:
    """Connected TCP sockets of this process, to be shut down from whatever thread learns of a failure."""

    def __init__(self, sockets: Iterable[SocketId]) -> None:
        self._sockets = sorted(sockets)
        self._lock = threading.Lock()
        self._is_down = False
        self.limit = WaitLimit()
        """Of waits for the operations that use these sockets."""

    @classmethod
    def among(cls, sockets: Iterable[SocketId], *, store_port: int | None) -> "Transports":
        """Those of ``sockets`` that are connected by TCP, but not to the store, whose port is ``store_port``."""
        return cls(found for found in sockets if _connects_ranks(found, store_port))

    def __len__(self) -> int:
        return len(self._sockets)

    def include(self, sockets: Iterable[SocketId]) -> None:
        """Those of ``sockets`` that are connected by TCP, made since; shut down at once where the others are."""
        connected = [found for found in sockets if _connects_ranks(found, None)]
        with self._lock:
            self._sockets += connected
            for found in connected if self._is_down else ():
                _shut_down(found)

    def hang_up(self, reason: str = "") -> None:
        """Shut down all that are still open, and end their ``limit``. A second call does nothing."""
        self.limit.end(reason)
        with self._lock:
            if self._is_down:
                return
            self._is_down = True
            for found in self._sockets:
                _shut_down(found)


class Opening:
    """Connections that are being made: from whatever thread learns of a failure they can be broken, and their maker be
    told, until ``close``."""

    def __init__(self) -> None:
        self._before = open_sockets()
        self._broken = threading.Event()
        self._closed = threading.Event()
        self._breaker: threading.Thread | None = None
        self._lock = threading.Lock()
        self.limit = WaitLimit()
        """Of waits for these connections."""

    def hang_up(self, reason: str = "") -> None:
        """Shut down all TCP connections that have been made since, and those that are still made, also while nobody
        answers: a machine that has died does not refuse them. And end the ``limit``."""
        self.limit.end(reason)
        with self._lock:
            if self._breaker is None and not self._closed.is_set():
                self._broken.set()
                self._breaker = threading.Thread(target=self._break, name="break what opens", daemon=True)
                self._breaker.start()

    def pause(self, seconds: float) -> bool:
        """Wait before another try; at once whether they have been broken."""
        return self._broken.wait(seconds)

    def close(self) -> None:
        """Break nothing from now on."""
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
            is_over = self._closed.wait(_LOOK_SECONDS)


def _connects_ranks(found: SocketId, store_port: int | None) -> bool:
    opened = _duplicate(found)
    if opened is None:
        return False
    with closing(opened):
        if opened.family not in (socket.AF_INET, socket.AF_INET6) or opened.type != socket.SOCK_STREAM:
            return False
        try:
            ports = {opened.getsockname()[1], opened.getpeername()[1]}
        except OSError:  # it listens, or nobody has answered it
            return opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _SYN_SENT
        return store_port not in ports


def _shut_down(found: SocketId) -> None:
    opened = _duplicate(found)
    if opened is not None:
        with closing(opened), suppress(OSError):  # the peer has hung up
            opened.shutdown(socket.SHUT_RDWR)


def _duplicate(found: SocketId) -> socket.socket | None:
    """The socket under another descriptor; None where it is closed and its descriptor is perhaps another's."""
    descriptor, inode = found
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    if os.fstat(copy).st_ino != inode:
        os.close(copy)
        return None
    return socket.socket(fileno=copy)
