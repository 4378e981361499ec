"""Finds machines that have vanished (no power, no network) within about two seconds, also under heavy load.

On a loaded machine, a process that sends heartbeats can be late. The machine's kernel, however, acknowledges received
bytes by itself, also for a suspended process. The controller keeps a TCP connection to each agent's machine, sends
single bytes, and reads from its own kernel (``TCP_INFO``) whether the bytes were acknowledged. If not, the controller
opens new connections, which a living kernel accepts or refuses by itself. A refused or closed connection thus also
shows that the machine is alive.

TCP's own timeouts are not used. Keepalive packets are at least one second apart, so a single lost packet could make a
node count as lost. The intervals between retransmissions grow, so it may take long until a packet is sent after the
network works again.
"""

import contextlib
import errno
import queue
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from megatron_ft.serde import Between, Length

PROBE_SECONDS = 0.25
"""Seconds between two probes (a byte, or an attempt to connect). A living kernel answers within this time."""
DOUBT_SECONDS = 0.5
"""Time without an acknowledgement of a byte after which the controller tries new connections. Each attempt to connect
sends a packet at once, whereas TCP may delay another byte."""
_CLOSED_SECONDS = 1.0
"""Pause before the next attempt to connect, after the other machine has closed or refused a connection."""
_REPORT_SECONDS = 10.0
"""A message is printed if a machine gives no answer for this time after its agent has registered."""
_BACKLOG = 128
_MAX_CONNECTIONS = 8
# Offset of ``tcpi_unacked`` in ``struct tcp_info`` of Linux: 8 bytes, then 32-bit numbers.
_UNACKED = struct.Struct("=24xI")


@dataclass(frozen=True, slots=True, kw_only=True)
class PresenceEndpoint:
    """Address and port of a ``PresencePort``."""

    address: Annotated[str, Length(1, 255)]
    port: Annotated[int, Between(1, 65535)]


class PresencePort:
    """Port of an agent, at which the kernel of the agent's machine answers the controller. The agent discards all data
    that arrives there, so no token is needed. Connections from hosts other than the controller's host are closed at
    once."""

    def __init__(self, interface: str, controller_address: str) -> None:
        """Listen at an address of this machine.

        Raises:
            OSError: the address cannot be bound.
        """
        self._controller = controller_address.rpartition(":")[0].strip("[]")
        self._listener = socket.create_server((interface, 0), family=_family(interface), backlog=_BACKLOG)
        self._listener.setblocking(False)
        self._connections: deque[socket.socket] = deque()
        self._selector: selectors.BaseSelector | None = None
        host, port = self._listener.getsockname()[:2]
        self.endpoint = PresenceEndpoint(address=host, port=port)

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Register the port's sockets in ``selector``. Its owner must call ``key.data()`` for each ready key."""
        self._selector = selector
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Close the port and its connections."""
        for sock in (self._listener, *self._connections):
            sock.close()

    def _accept(self) -> None:
        assert self._selector is not None, "watched"
        try:
            connection, peer = self._listener.accept()
        except OSError:
            return  # the peer has closed the connection meanwhile
        if peer[0] != self._controller:
            connection.close()
            return
        connection.setblocking(False)
        # The oldest connection is closed first: a controller that has been replaced may have left it open.
        if len(self._connections) == _MAX_CONNECTIONS:
            self._drop(self._connections[0])
        self._connections.append(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._discard(connection))

    def _discard(self, connection: socket.socket) -> None:
        try:
            is_open = bool(connection.recv(4096))
        except BlockingIOError:
            return
        except OSError:
            is_open = False
        if not is_open:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        assert self._selector is not None, "watched"
        # ``select`` may have found this connection readable before it was dropped to make room for another one.
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection)
            connection.close()


@dataclass(slots=True)
class _Machine:
    """Facts that the controller knows about the machine of one node's agent. Times are on the monotonic clock."""

    node: int
    process_id: int
    """Process id of the agent. A report that the machine has vanished contains it, so that such a report has no effect
    if another agent of this node has registered meanwhile."""
    endpoint: PresenceEndpoint
    sock: socket.socket | None = None
    is_open: bool = False
    asked_at: float | None = None
    """Time of the oldest probe without an answer; None if all probes were answered."""
    attempt_at: float = 0.0
    """Time at which the present attempt to connect began."""
    next_attempt_at: float = 0.0
    has_answered: bool = False
    open_since: float = 0.0
    """Time at which the present connection began. The connection closes after ``DOUBT_SECONDS`` without an answer."""
    is_reported: bool = False
    """Whether the log already says that this machine has never answered."""

    def has_answered_since(self, past: float) -> bool:
        """Whether the connection has stayed open since the time ``past``. Unanswered probes would close it."""
        return self.is_open and self.open_since <= past


OnVanished = Callable[[int, int, str], None]
"""Function that is called for a vanished machine, with the node, the process id of its agent, and the reason."""


class PresenceWatch:
    """Probes the machines of a job's agents in a separate thread, and reports each machine that has vanished."""

    def __init__(self, interface: str, vanished_seconds: float, on_vanished: OnVanished) -> None:
        """Store the limits; ``start`` begins to probe.

        Args:
            interface: address from which the controller's machine probes other machines. Nodes with this address are
                not watched, because they cannot vanish without the controller.
            vanished_seconds: value of ``detector.vanished_seconds``.
            on_vanished: called in the thread that probes, at most once for each call of ``watch``.
        """
        self._interface, self._vanished_seconds, self._on_vanished = interface, vanished_seconds, on_vanished
        self._changes: queue.SimpleQueue[tuple[int, _Machine | None]] = queue.SimpleQueue()
        self._machines: dict[int, _Machine] = {}
        self._selector = selectors.DefaultSelector()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)

    # --- any thread ------------------------------------------------------------------------------------------------

    def watch(self, node: int, process_id: int, endpoint: PresenceEndpoint) -> None:
        """Begin to probe the machine of a node's agent. An earlier machine of this node is probed no more."""
        if endpoint.address != self._interface:
            self._changes.put((node, _Machine(node, process_id, endpoint)))

    def forget(self, node: int) -> None:
        """Stop probing the machine of a node."""
        self._changes.put((node, None))

    def start(self) -> None:
        """Start the thread that probes."""
        self._thread.start()

    def stop(self) -> None:
        """Stop probing, and close all connections."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._selector.close()

    # --- the thread of this object -----------------------------------------------------------------------------------

    def _run(self) -> None:
        due = 0.0
        while not self._over.is_set():
            # Answers are read after the clock. So if this process was suspended, an answer that arrived before ``now``
            # is not late.
            now = time.monotonic()
            for key, _ in self._selector.select(max(0.0, due - now)):
                self._ready(key.data, now)
            self._apply_changes()
            if now >= due:
                due = now + PROBE_SECONDS
                self._look(now)
        for machine in self._machines.values():
            self._close(machine)

    def _apply_changes(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                node, machine = self._changes.get_nowait()
                if node in self._machines:
                    self._close(self._machines.pop(node))
                if machine is not None:
                    self._machines[node] = machine

    def _look(self, now: float) -> None:
        # The answers of all machines are read first, because the decision about one machine depends on the others.
        for machine in self._machines.values():
            if machine.is_open:
                self._ask(machine, now)
        for machine in list(self._machines.values()):
            if not machine.is_open and now >= machine.next_attempt_at:
                if self._has_vanished(machine):
                    self._close(self._machines.pop(machine.node))
                    limit = f"detector.vanished_seconds={self._vanished_seconds:g}"
                    self._on_vanished(
                        machine.node, machine.process_id, f"its machine vanished: its kernel does not answer ({limit})"
                    )
                else:
                    self._report(machine, now)
                    self._connect(machine, now)

    def _has_vanished(self, machine: _Machine) -> bool:
        # A network interruption shorter than ``vanished_seconds`` is no loss. So a machine has vanished only if a
        # second probe, sent at least this time after the first unanswered probe, has no answer, either.
        if machine.sock is None or machine.asked_at is None or not machine.has_answered:
            return False
        if machine.attempt_at - machine.asked_at < self._vanished_seconds:
            return False
        others = [other for other in self._machines.values() if other.endpoint.address != machine.endpoint.address]
        # If no other machine has answered all probes in this time, the likely cause is the controller's own network.
        # After such a failure, machines answer again at different times, and a late one must not count as vanished.
        # Missing heartbeats reveal machines that never answer again.
        return not others or any(other.has_answered_since(machine.asked_at) for other in others)

    def _report(self, machine: _Machine, now: float) -> None:
        if machine.has_answered or machine.is_reported or machine.asked_at is None:
            return
        if now - machine.asked_at >= _REPORT_SECONDS:
            machine.is_reported = True
            where = f"{machine.endpoint.address} port {machine.endpoint.port}"
            print(
                f"node {machine.node}: nothing answers at {where}. If this machine vanishes, it is detected only by "
                f"missing heartbeats. Permit connections from {self._interface}, or set detector.vanished_seconds=null",
                file=sys.stderr,
                flush=True,
            )

    def _ask(self, machine: _Machine, now: float) -> None:
        assert machine.sock is not None, "open"
        try:
            if _UNACKED.unpack(machine.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED.size))[0] == 0:
                machine.sock.send(b"\0")
                machine.asked_at = now
        except OSError as error:
            self._end(machine, error.errno, now)
            return
        if machine.asked_at is not None and now - machine.asked_at >= DOUBT_SECONDS:
            self._close(machine)
            machine.next_attempt_at = now

    def _connect(self, machine: _Machine, now: float) -> None:
        self._close(machine)
        machine.attempt_at, machine.next_attempt_at = now, now + PROBE_SECONDS
        machine.asked_at = now if machine.asked_at is None else machine.asked_at
        host, port = machine.endpoint.address, machine.endpoint.port
        sock = socket.socket(_family(host), socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.bind((self._interface, 0))
            code = sock.connect_ex((host, port))
        except OSError as error:
            code = error.errno or errno.EIO
        if code not in (0, errno.EINPROGRESS):
            # This machine could not send the probe, so the error shows nothing about the other machine.
            sock.close()
            return
        machine.sock = sock
        self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, machine)

    def _ready(self, machine: _Machine, now: float) -> None:
        # A socket has connected, was closed by the peer, or has an error.
        assert machine.sock is not None, "registered"
        if not machine.is_open:
            code = machine.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._end(machine, code, now)
                return
            machine.is_open = machine.has_answered = True
            machine.asked_at, machine.open_since = None, now
            self._selector.modify(machine.sock, selectors.EVENT_READ, machine)
            return
        try:
            if machine.sock.recv(4096):
                return
            code = None
        except OSError as error:
            code = error.errno
        self._end(machine, code, now)

    def _end(self, machine: _Machine, code: int | None, now: float) -> None:
        if code in _NO_ANSWER:
            if machine.is_open:
                machine.is_open, machine.next_attempt_at = False, now
            # ``machine.sock`` keeps the closed socket, so that the next ``_look`` counts this attempt as unanswered.
            if machine.sock is not None:
                self._selector.unregister(machine.sock)
                machine.sock.close()
            return
        self._close(machine)
        machine.asked_at, machine.next_attempt_at = None, now + _CLOSED_SECONDS

    def _close(self, machine: _Machine) -> None:
        machine.is_open = False
        if machine.sock is not None:
            if machine.sock.fileno() >= 0:
                self._selector.unregister(machine.sock)
            machine.sock.close()
            machine.sock = None


_NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN)
"""Errors by which the kernel of this machine reports that the other machine does not answer."""


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
