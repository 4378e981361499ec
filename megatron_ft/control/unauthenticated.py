"""Limits of number and time for connections to a gRPC server that have not presented the token.

A gRPC server accepts every connection and keeps it, whether or not a call with the token ever comes. Each connection
uses a descriptor, so they could use up all descriptors of the process. gRPC limits the number of its connections, but
does not know which are authenticated. This module does: a call with the right token identifies its connection by the
peer's address; all other connections of the server's port are unauthenticated. If there are too many of these, or their
time is over, the oldest are shut down; gRPC then closes them as if the peer had.
"""

import contextlib
import ipaddress
import os
import resource
import socket
import stat
import threading
import time
import urllib.parse
from typing import NamedTuple

from megatron_ft.errors import ControlError

MAX_UNAUTHENTICATED = 1024
MIN_UNAUTHENTICATED = 8
AUTHENTICATION_SECONDS = 10.0
"""Connections that have not presented the token after this time are closed."""
LOOK_SECONDS = 0.25
PRESSED_LOOK_SECONDS = 0.02
"""Interval of checks while there are too many of them, so that the free descriptors are not used up before the next
check."""
RESERVED_DESCRIPTORS = 64
"""Descriptors that are kept free for other files and sockets of the process."""
_LEAST_CONNECTIONS = 16
_DESCRIPTORS = "/proc/self/fd"

Peer = tuple[str, int]
"""Address and port."""


def raise_descriptor_limit() -> int:
    """Raise this process's limit of descriptors to the hard limit; return the number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def max_connections() -> int:
    """Return the limit of a server's connections that leaves enough descriptors for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Counted now: sockets and pipes that the process has already are not available to the server.
    return max(_LEAST_CONNECTIONS, soft - len(os.listdir(_DESCRIPTORS)) - RESERVED_DESCRIPTORS)


def check_descriptors(num_nodes: int) -> None:
    """Refuse a job with more agents than could be connected.

    Raises:
        ControlError: the limit of descriptors is too low for so many nodes.
    """
    most = max_connections()
    if num_nodes + MIN_UNAUTHENTICATED > most:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = soft - most + num_nodes + MIN_UNAUTHENTICATED
        raise ControlError(
            f"the controller may open {soft} files and needs {needed}, because {num_nodes} nodes can belong to "
            "the job (launch.num_nodes, nodes.max_nodes): raise the hard limit of open files (ulimit -Hn)"
        )


class _Connection(NamedTuple):
    """A connection to the port."""

    descriptor: int
    inode: int
    peer: Peer


class UnauthenticatedConnections:
    """Watches one port that this process listens on."""

    def __init__(
        self, port: int, *, max_connections: int, authentication_seconds: float = AUTHENTICATION_SECONDS
    ) -> None:
        """``start`` begins to watch.

        Args:
            max_connections: limit of the server. Half of what authenticated agents leave may be unauthenticated: a new
                agent can connect, and has time to present the token before its connection is the oldest of them.
            authentication_seconds: longest time that a connection may be unauthenticated.
        """
        self._port, self._max_connections, self._seconds = port, max_connections, authentication_seconds
        self._is_pressed = False
        self._named: set[str] = set()
        """Peers, as gRPC writes them, that have sent a call with the token."""
        self._authenticated: set[_Connection] = set()
        self._since: dict[_Connection, float] = {}
        """Unauthenticated connections, in the order in which they were first seen."""
        self._others: set[tuple[int, int]] = set()
        """Descriptors with their inodes that are not connections to the port."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="unauthenticated", daemon=True)

    def start(self) -> None:
        """Watch in a separate thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def has_shown_token(self, peer: str) -> None:
        """Record that ``peer``, as gRPC writes it, has sent a call with the right token; safe in any thread."""
        self._named.add(peer)

    def _watch(self) -> None:
        while not self._over.wait(PRESSED_LOOK_SECONDS if self._is_pressed else LOOK_SECONDS):
            # Without a free descriptor nothing can be seen now: connections that end give some back.
            with contextlib.suppress(OSError):
                self.look(time.monotonic())

    def look(self, now: float) -> int:
        """Shut down unauthenticated connections that are too many or too old; return the number that is left."""
        # A copy: calls add to it in other threads.
        named = {peer_of(text): text for text in list(self._named)}
        connections = set(self._connections())
        self._authenticated = {one for one in connections if one in self._authenticated or one.peer in named}
        # They are authenticated now, or had gone before connections were listed. A later peer may have the same port.
        self._named.difference_update(named.values())
        others = connections - self._authenticated
        self._since = {one: since for one, since in self._since.items() if one in others}
        for one in sorted(others - self._since.keys(), key=lambda one: one.inode):  # inodes rise with time
            self._since[one] = now
        num_more = len(self._since) - self.most(len(self._authenticated))
        self._is_pressed = num_more > 0
        for number, (one, since) in enumerate(list(self._since.items())):
            if number < num_more or now - since >= self._seconds:
                _shut_down(one)
                del self._since[one]
        return len(self._since)

    def most(self, num_authenticated: int) -> int:
        """Return the limit of unauthenticated connections beside authenticated ones."""
        return min(MAX_UNAUTHENTICATED, max(MIN_UNAUTHENTICATED, (self._max_connections - num_authenticated) // 2))

    def _connections(self) -> list[_Connection]:
        found, others = [], set()
        known = {(one.descriptor, one.inode): one for one in (*self._authenticated, *self._since)}
        for name in os.listdir(_DESCRIPTORS):
            descriptor = int(name)
            with contextlib.suppress(OSError):  # it was closed meanwhile
                about = os.fstat(descriptor)
                # Numbers of descriptors are used again, inodes of sockets rise: the pair identifies a socket.
                key = (descriptor, about.st_ino)
                connection = known.get(key)
                if connection is None and stat.S_ISSOCK(about.st_mode) and key not in self._others:
                    connection = self._examine(*key)
                if connection is None:
                    others.add(key)
                else:
                    found.append(connection)
        self._others = others
        return found

    def _examine(self, descriptor: int, inode: int) -> _Connection | None:
        # Return a socket as a connection to the port; None for another socket.
        with _own_copy(descriptor) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.getsockname()[1] != self._port:
                return None
            try:
                host, port = sock.getpeername()[:2]
            except OSError:
                return None  # it listens, or its peer has gone
        return _Connection(descriptor, inode, (_plain(host), port))


def _own_copy(descriptor: int) -> socket.socket:
    return socket.socket(fileno=os.dup(descriptor))


def _shut_down(connection: _Connection) -> None:
    # Shut a connection of gRPC's down, so that gRPC sees the end of the peer and closes it.
    with contextlib.suppress(OSError), _own_copy(connection.descriptor) as sock:
        if os.fstat(sock.fileno()).st_ino == connection.inode:
            # Not closed: its number could then name another file while gRPC still uses it.
            sock.shutdown(socket.SHUT_RDWR)


def peer_of(text: str) -> Peer | None:
    """Parse address and port of a peer as gRPC writes it: ``ipv4:127.0.0.1:50000`` or ``ipv6:%5B::1%5D:50000``."""
    kind, _, rest = urllib.parse.unquote(text).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return _plain(host.strip("[]")), int(port)


def _plain(host: str) -> str:
    # Return an address in one form; an IPv4 address also if it came through a socket for both protocols.
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
