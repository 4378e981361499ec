"""Connections to a gRPC server that have not shown the token: few at a time, and none for long.

A gRPC server takes every connection and keeps it, whether or not a call with the token ever comes on it. Each one holds
a descriptor, so they could use up all that the process may have. gRPC limits the number of its connections, but
does not know which are authenticated. This module does: a call with the right token names its connection by the address
of its peer, all other connections of the server's port are unauthenticated. The oldest of them are shut down when there
are too many or when their time is over; gRPC then closes them as if the peer had.
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
"""A connection that has not shown the token by then is closed."""
LOOK_SECONDS = 0.25
PRESSED_LOOK_SECONDS = 0.02
"""While there are too many of them: none may fill up what was left free before the next check."""
RESERVED_DESCRIPTORS = 64
"""Kept free for the files and sockets that the process needs besides."""
_LEAST_CONNECTIONS = 16
_DESCRIPTORS = "/proc/self/fd"

Peer = tuple[str, int]
"""Address and port."""


def raise_descriptor_limit() -> int:
    """Allow this process as many descriptors as its hard limit permits; the number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def max_connections() -> int:
    """Limit of connections of a server of this process, so that descriptors are left for all else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Counted now: sockets and pipes that the process has already are not available to the server.
    return max(_LEAST_CONNECTIONS, soft - len(os.listdir(_DESCRIPTORS)) - RESERVED_DESCRIPTORS)


def check_descriptors(num_nodes: int) -> None:
    """Refuse a job whose agents could not all be connected.

    Raises:
        ControlError: the limit of descriptors is too low for so many nodes.
    """
    most = max_connections()
    if num_nodes + MIN_UNAUTHENTICATED > most:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = soft - most + num_nodes + MIN_UNAUTHENTICATED
        raise ControlError(
            f"{num_nodes} nodes can belong to the job (launch.num_nodes, launch.max_nodes), and the controller may "
            f"open {soft} files: it needs {needed}, raise the hard limit of open files (ulimit -Hn)"
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
            max_connections: of the server. Half of those that agents leave free may be unauthenticated: a new agent
                finds room, and it has the time to show the token before it is the oldest of them.
            authentication_seconds: longest time that a connection stays one.
        """
        self._port, self._max_connections, self._seconds = port, max_connections, authentication_seconds
        self._is_pressed = False
        self._named: set[str] = set()
        """Peers as gRPC writes them, from which a call with the token has come."""
        self._authenticated: set[_Connection] = set()
        self._since: dict[_Connection, float] = {}
        """Unauthenticated connections in the order in which they were seen first."""
        self._others: set[tuple[int, int]] = set()
        """Descriptors with their inodes that are no connections to the port."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="unauthenticated", daemon=True)

    def start(self) -> None:
        """Watch, in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def has_shown_token(self, peer: str) -> None:
        """A call with the right token has come from ``peer``, as gRPC writes it; safe in any thread."""
        self._named.add(peer)

    def _watch(self) -> None:
        while not self._over.wait(PRESSED_LOOK_SECONDS if self._is_pressed else LOOK_SECONDS):
            # Without a free descriptor nothing can be seen now: connections that end give some back.
            with contextlib.suppress(OSError):
                self.look(time.monotonic())

    def look(self, now: float) -> int:
        """Shut down unauthenticated connections that are too many or too old; how many are left."""
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
        """Limit of unauthenticated connections beside authenticated ones."""
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
        """A socket as a connection to the port; None where it is another socket."""
        with _own_copy(descriptor) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.getsockname()[1] != self._port:
                return None
            try:
                host, port = sock.getpeername()[:2]
            except OSError:
                return None  # it listens, or its peer has gone
        return _Connection(descriptor, inode, (_plain(host), port))


def _own_copy(descriptor: int) -> socket.socket:
    """A socket of its own on the same connection, which stays that one whatever becomes of ``descriptor``."""
    return socket.socket(fileno=os.dup(descriptor))


def _shut_down(connection: _Connection) -> None:
    """End a connection whose descriptor is gRPC's: it sees that the peer has gone, and closes it."""
    with contextlib.suppress(OSError), _own_copy(connection.descriptor) as sock:
        if os.fstat(sock.fileno()).st_ino == connection.inode:
            # Not closed: its number could then name another file while gRPC still uses it.
            sock.shutdown(socket.SHUT_RDWR)


def peer_of(text: str) -> Peer | None:
    """Address and port of a peer as gRPC writes it: ``ipv4:127.0.0.1:50000`` or ``ipv6:%5B::1%5D:50000``."""
    kind, _, rest = urllib.parse.unquote(text).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return _plain(host.strip("[]")), int(port)


def _plain(host: str) -> str:
    """An address as it is always written: that of IPv4 also where it came through a socket for both."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
