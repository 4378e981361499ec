"""Calls between machines: gRPC with JSON bodies and a token on every call.

A service has a fixed table of methods; each is a function from a JSON object to a JSON object. The token is a random
256-bit number of the job, sent as metadata and compared in constant time before the body is read. A server binds to one
named address, never to all addresses of the machine.

gRPC does not survive ``fork``: create servers and clients only in processes that do not fork afterwards (``subprocess``
is fine).
"""

import contextlib
import hmac
import ipaddress
import json
import os
import resource
import secrets
import socket
import stat
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc  # type: ignore[import-untyped]

from megatron_ft.control.certificates import Certificates
from megatron_ft.errors import ConfigError, ControlError
from megatron_ft.framing import Message, decode
from megatron_ft.serde import means_every_interface

Method = Callable[[Message], Message | bytes]
"""Function that takes a JSON object, and returns a JSON object or its encoded bytes."""

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
ACCEPT_SECONDS = 20.0
"""Longest time that a call waits for a busy controller to process it. After this time, the caller repeats the call."""
HANDSHAKE_SECONDS = 10
"""Time after which a connection without an HTTP/2 handshake is closed."""
_PING_SECONDS = 3
"""Time without data after which a client pings its connection. If the ping has no answer for this time, too, the client
replaces the connection."""
_TOKEN_KEY = "x-megatron-ft-token"


def new_token() -> str:
    """Make a random 256-bit token, as 64 hexadecimal digits."""
    return secrets.token_hex(32)


def check_interface(interface: str) -> None:
    """Refuse an address that stands for all network interfaces.

    Raises:
        ConfigError: ``interface``, the value of ``control.interface``, is empty or a wildcard.
    """
    if means_every_interface(interface):
        raise ConfigError.of("control.interface", interface, "must be one address, not all interfaces")


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


class RpcServer:
    """A gRPC server that offers one table of methods on one address."""

    def __init__(
        self,
        service: str,
        methods: Mapping[str, Method],
        *,
        interface: str,
        token: str,
        port: int = 0,
        num_threads: int = 8,
        num_reserved_descriptors: int = 0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        certificates: Certificates | None = None,
    ) -> None:
        """Bind the address; ``start`` begins to serve.

        Args:
            num_reserved_descriptors: descriptors that the process needs for other purposes than this server.
            certificates: certificates of this process. The channel is then encrypted, and callers without a certificate
                of the same authority are refused. With None, the channel is not encrypted.

        Raises:
            ConfigError: ``interface`` is a wildcard.
            ControlError: the address cannot be bound.
        """
        check_interface(interface)
        options = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            # gRPC shares its port by default: a second controller could bind it and take a part of the calls.
            ("grpc.so_reuseport", 0),
            # By default, gRPC treats the pings of agents that wait for a busy controller as an attack.
            ("grpc.http2.min_ping_interval_without_data_ms", _PING_SECONDS * 500),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", _PING_SECONDS * 500),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
            ("grpc.max_allowed_incoming_connections", most := max_connections(num_reserved_descriptors)),
        ]
        handlers = _Handlers(service, methods, token)
        self._server = grpc.server(
            ThreadPoolExecutor(num_threads, thread_name_prefix="rpc"),
            handlers=[handlers],
            options=options,
        )
        try:
            where = join_address(interface, port)
            if certificates is None:
                bound = self._server.add_insecure_port(where)
            else:
                bound = self._server.add_secure_port(where, certificates.of_server())
        except RuntimeError as error:
            raise ControlError(f"cannot listen on control.interface={interface} port {port}: {error}") from error
        self.address = join_address(interface, bound)
        self._unauthenticated = handlers.unauthenticated = _UnauthenticatedConnections(bound, max_connections=most)

    def start(self) -> None:
        """Begin to serve, in separate threads."""
        self._server.start()
        self._unauthenticated.start()

    def stop(self) -> None:
        """Stop serving; calls in progress are cancelled."""
        self._unauthenticated.stop()
        self._server.stop(grace=None).wait()


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, service: str, methods: Mapping[str, Method], token: str) -> None:
        self._methods = {f"/{service}/{name}": method for name, method in methods.items()}
        self._token = token.encode()
        self.unauthenticated: _UnauthenticatedConnections | None = None

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if not self._authentic(handler_call_details):
            return grpc.stream_unary_rpc_method_handler(_refuse)
        method = self._methods.get(handler_call_details.method)
        return None if method is None else grpc.unary_unary_rpc_method_handler(self._answer(method))

    def _authentic(self, details: grpc.HandlerCallDetails) -> bool:
        given = [value for key, value in details.invocation_metadata or () if key == _TOKEN_KEY]
        # ``compare_digest`` takes equally long for every wrong token, so its duration does not reveal the right one.
        return len(given) == 1 and hmac.compare_digest(str(given[0]).encode(), self._token)

    def _answer(self, method: Method) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        def handle(request: bytes, context: grpc.ServicerContext) -> bytes:
            if self.unauthenticated is not None:
                self.unauthenticated.has_shown_token(context.peer())
            try:
                answer = method(decode(request))
                return answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            # UNAVAILABLE is not among ``_REFUSALS``, so the caller tries again.
            except TimeoutError as error:
                context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            except ControlError as error:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"malformed request: {error!r}")
            raise AssertionError("context.abort() always raises")

        return handle


def _refuse(_requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    # Refuse a call without waiting for the body: an unauthenticated peer must not block a thread.
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing token")
    raise AssertionError("context.abort() always raises")


class RpcError(ControlError):
    """Raised if a call fails. ``refused`` is true if the peer refused the call, and false if it gave no answer."""

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


_REFUSALS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    # The message is too large, so another try would fail, too.
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


class RpcClient:
    """A gRPC client that calls the methods of one service."""

    def __init__(
        self,
        address: str,
        service: str,
        *,
        token: str,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        certificates: Certificates | None = None,
    ) -> None:
        options = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            # gRPC follows ``http_proxy`` by default; the job's token must not pass through a proxy.
            ("grpc.enable_http_proxy", 0),
            # gRPC waits up to two minutes between tries by default: longer than agents wait for the next controller.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            # In fact the timeout of one connection attempt: a busy machine answers late, a vanished one never does.
            ("grpc.min_reconnect_backoff_ms", 2000),
            # Pings soon detect a connection that is dead because a machine vanished or the network was interrupted. TCP
            # alone would repeat its packets for minutes, with longer and longer pauses.
            ("grpc.keepalive_time_ms", _PING_SECONDS * 1000),
            ("grpc.keepalive_timeout_ms", _PING_SECONDS * 1000),
        ]
        self.address = address
        self._service = service
        self._metadata = ((_TOKEN_KEY, token),)
        if certificates is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(address, certificates.of_client(), options=options)

    def call(
        self, method: str, body: Mapping[str, Any], *, timeout_seconds: float, wait_for_peer: bool = False
    ) -> Message:
        """Call ``method`` and wait for its answer. With ``wait_for_peer``, also wait for a peer that does not listen
        yet.

        Raises:
            RpcError: the peer did not answer in time, has ended, or refused the call.
        """
        stub = self._channel.unary_unary(f"/{self._service}/{method}")
        try:
            answer = stub(
                json.dumps(body).encode(),
                timeout=timeout_seconds,
                metadata=self._metadata,
                wait_for_ready=wait_for_peer,
            )
        except grpc.RpcError as error:
            message = f"{self._service}.{method} at {self.address}: {error.code().name}: {error.details()}"
            raise RpcError(message, refused=error.code() in _REFUSALS) from None
        return decode(answer)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


_PAUSE_SECONDS = 0.2


class ControllerClient:
    """Calls the controller for one node's agent. Safe in several threads."""

    def __init__(self, address: str, *, token: str, certificates: Certificates | None = None) -> None:
        self._client = RpcClient(address, "Controller", token=token, certificates=certificates)
        # The lock covers the comparison and assignment of epochs: threads can process answers in any order.
        self._fence = threading.Lock()
        self._epoch = 0

    def call(
        self, method: str, body: Mapping[str, Any], *, timeout_seconds: float, wait_for_peer: bool = False
    ) -> Message:
        """Call the controller, see ``RpcClient.call``. An answer from a controller that was replaced is rejected.

        Raises:
            RpcError: the controller did not answer in time, has ended, refused the call, or has a stale epoch.
        """
        answer = self._client.call(method, body, timeout_seconds=timeout_seconds, wait_for_peer=wait_for_peer)
        epoch = int(answer["epoch"])
        with self._fence:
            newest = self._epoch = max(self._epoch, epoch)
        # This is no refusal: the controller in charge serves the same address, and the next call reaches it.
        if epoch < newest:
            message = (
                f"Controller.{method} at {self._client.address}: answered by the controller of epoch {epoch}, "
                f"which the controller of epoch {newest} has replaced"
            )
            raise RpcError(message, refused=False)
        return answer

    def insist(self, method: str, body: Mapping[str, Any], *, timeout_seconds: float) -> Message:
        """Repeat a call until the controller or its replacement answers.

        Raises:
            RpcError: the controller refused the call, or did not answer in time.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            left_seconds = deadline - time.monotonic()
            try:
                return self.call(method, body, timeout_seconds=left_seconds, wait_for_peer=True)
            except RpcError as error:
                if error.refused or time.monotonic() + _PAUSE_SECONDS > deadline:
                    raise
            threading.Event().wait(_PAUSE_SECONDS)


# A gRPC server keeps every connection, also if no call with the token ever arrives over it. Each connection uses a
# descriptor, so unauthenticated peers could use up all descriptors of the process. gRPC limits the number of its
# connections, but does not know which are authenticated. This module knows: a call with the right token authenticates
# the connection from the caller's address; all other connections to the server's port are unauthenticated. They are
# shut down if they are too old. If they are too many, the oldest are shut down. gRPC then closes these connections.
MAX_UNAUTHENTICATED = 1024


MIN_UNAUTHENTICATED = 8


AUTHENTICATION_SECONDS = 10.0
"""Time after which a connection that has not presented the token is closed."""


LOOK_SECONDS = 0.25


PRESSED_LOOK_SECONDS = 0.02
"""Seconds between two checks while there are too many unauthenticated connections. Short, so that these connections do
not use up all descriptors between two checks."""


RESERVED_DESCRIPTORS = 64
"""Descriptors that are kept free for other files and sockets of the process."""


_LEAST_CONNECTIONS = 16


_DESCRIPTORS = "/proc/self/fd"


Peer = tuple[str, int]
"""Address and port of a peer."""


def raise_descriptor_limit() -> int:
    """Raise this process's limit of descriptors to the hard limit, and return that limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def max_connections(num_reserved_descriptors: int = 0) -> int:
    """Return how many connections a server may have, so that enough descriptors stay free for all other uses.

    Args:
        num_reserved_descriptors: descriptors to keep free in addition to ``RESERVED_DESCRIPTORS``.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_LEAST_CONNECTIONS, soft - _unavailable_descriptors() - num_reserved_descriptors)


def _unavailable_descriptors() -> int:
    # Descriptors that this process already has open are not available to the server.
    return len(os.listdir(_DESCRIPTORS)) + RESERVED_DESCRIPTORS


def check_descriptors(num_nodes: int) -> None:
    """Refuse a job that has so many nodes that this process cannot have connections to all of them.

    Raises:
        ControlError: the limit of descriptors is too low for so many nodes.
    """
    # Two connections for each node: one from its agent, and one to its machine, see ``presence``.
    needed = _unavailable_descriptors() + 2 * num_nodes + MIN_UNAUTHENTICATED
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if needed > soft:
        raise ControlError(
            f"the controller may open {soft} files and needs {needed}, because {num_nodes} nodes can belong to "
            "the job (launch.num_nodes, nodes.max_nodes): raise the hard limit of open files (ulimit -Hn)"
        )


class _Connection(NamedTuple):
    """A connection to the port of an ``RpcServer``."""

    descriptor: int
    inode: int
    peer: Peer


class _UnauthenticatedConnections:
    """Shuts down unauthenticated connections to one port of this process if they are too old or too many."""

    def __init__(
        self, port: int, *, max_connections: int, authentication_seconds: float = AUTHENTICATION_SECONDS
    ) -> None:
        """Store the limits; ``start`` begins to watch.

        Args:
            max_connections: largest number of connections of the server, authenticated or not.
            authentication_seconds: longest time that a connection may be unauthenticated.
        """
        self._port, self._max_connections, self._seconds = port, max_connections, authentication_seconds
        self._is_pressed = False
        self._named: set[str] = set()
        """Peers that have sent a call with the token, as text in gRPC's format."""
        self._authenticated: set[_Connection] = set()
        self._since: dict[_Connection, float] = {}
        """Unauthenticated connections, in the order in which they were first seen."""
        self._others: set[tuple[int, int]] = set()
        """Pairs of a descriptor and its inode that are known not to be connections to the port."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="unauthenticated", daemon=True)

    def start(self) -> None:
        """Start the thread that watches the connections."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread that watches the connections."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def has_shown_token(self, peer: str) -> None:
        """Record that ``peer`` (text in gRPC's format) has sent a call with the right token; safe in any thread."""
        self._named.add(peer)

    def _watch(self) -> None:
        while not self._over.wait(PRESSED_LOOK_SECONDS if self._is_pressed else LOOK_SECONDS):
            # Without a free descriptor, connections cannot be listed. The next check tries again.
            with contextlib.suppress(OSError):
                self.look(time.monotonic())

    def look(self, now: float) -> int:
        """Shut down unauthenticated connections that are too old or too many. Return the number that remain."""
        # The list is a copy, because calls in other threads add to the set.
        named = {_peer_of(text): text for text in list(self._named)}
        connections = set(self._connections())
        self._authenticated = {one for one in connections if one in self._authenticated or one.peer in named}
        # These peers are in ``_authenticated`` or have ended. They are removed, because addresses can be used again.
        self._named.difference_update(named.values())
        others = connections - self._authenticated
        self._since = {one: since for one, since in self._since.items() if one in others}
        # New connections are ordered by inode. This is the order of time only for connections from the same CPU,
        # because each CPU takes inode numbers from a range of its own.
        for one in sorted(others - self._since.keys(), key=lambda one: one.inode):
            self._since[one] = now
        num_more = len(self._since) - self.most(len(self._authenticated))
        self._is_pressed = num_more > 0
        for number, (one, since) in enumerate(list(self._since.items())):
            if number < num_more or now - since >= self._seconds:
                _shut_down(one)
                del self._since[one]
        return len(self._since)

    def most(self, num_authenticated: int) -> int:
        """Return how many unauthenticated connections may exist if ``num_authenticated`` connections are authenticated.

        It is half of ``max_connections - num_authenticated``, within fixed bounds, so that an agent has time to present
        the token before its connection becomes the oldest unauthenticated one and is shut down.
        """
        return min(MAX_UNAUTHENTICATED, max(MIN_UNAUTHENTICATED, (self._max_connections - num_authenticated) // 2))

    def _connections(self) -> list[_Connection]:
        found, others = [], set()
        known = {(one.descriptor, one.inode): one for one in (*self._authenticated, *self._since)}
        for name in os.listdir(_DESCRIPTORS):
            descriptor = int(name)
            with contextlib.suppress(OSError):  # it was closed meanwhile
                about = os.fstat(descriptor)
                # The number of a closed descriptor is used again, but with another inode: the pair identifies a socket.
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
        # Return the connection of a descriptor, or None if its socket is not a connection to the port.
        with _own_copy(descriptor) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.getsockname()[1] != self._port:
                return None
            try:
                host, port = sock.getpeername()[:2]
            except OSError:
                return None  # the socket listens, or its peer has closed the connection
        return _Connection(descriptor, inode, (_plain(host), port))


def _own_copy(descriptor: int) -> socket.socket:
    return socket.socket(fileno=os.dup(descriptor))


def _shut_down(connection: _Connection) -> None:
    # Shut down a connection of gRPC. To gRPC, it looks as if the peer has closed the connection, so gRPC closes it.
    with contextlib.suppress(OSError), _own_copy(connection.descriptor) as sock:
        if os.fstat(sock.fileno()).st_ino == connection.inode:
            # gRPC must close the descriptor: closed here, its number could name another file while gRPC still uses it.
            sock.shutdown(socket.SHUT_RDWR)


def _peer_of(text: str) -> Peer | None:
    """Parse address and port of a peer as gRPC writes it: ``ipv4:127.0.0.1:50000`` or ``ipv6:%5B::1%5D:50000``."""
    kind, _, rest = urllib.parse.unquote(text).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return _plain(host.strip("[]")), int(port)


def _plain(host: str) -> str:
    # Return the canonical form of an address. An IPv4 address that a dual-stack socket reports as IPv6 becomes IPv4.
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
