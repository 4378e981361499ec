"""Calls between machines: gRPC with JSON bodies and a token on every call.

A service has a fixed table of methods; each is a function from a JSON object to a JSON object. The token is a random
256-bit number of the job, sent as metadata and compared in constant time before the body is read. A server binds to one
named address, never to all of them.

gRPC does not survive ``fork``: create servers and clients only in processes that do not fork afterwards (``subprocess``
is fine).
"""

import hmac
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc  # type: ignore[import-untyped]

from megatron_ft.control.certificates import Certificates
from megatron_ft.control.unauthenticated import UnauthenticatedConnections, max_connections
from megatron_ft.errors import ConfigError, ControlError
from megatron_ft.framing import Message, decode
from megatron_ft.reading import means_every_interface

Method = Callable[[Message], Message | bytes]
"""Function from a JSON object to a JSON object, or to the bytes of one."""

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
ACCEPT_SECONDS = 20.0
"""Limit of the time for which a busy controller holds a call that waits for an effect. The caller then tries again."""
HANDSHAKE_SECONDS = 10
"""Connections without an HTTP/2 handshake after this time are closed."""
_TOKEN_KEY = "x-megatron-ft-token"


def new_token() -> str:
    """Make a random 256-bit token, as 64 hexadecimal digits."""
    return secrets.token_hex(32)


def check_interface(interface: str) -> None:
    """Refuse addresses that mean every interface.

    Raises:
        ConfigError: ``control.interface`` is empty or a wildcard.
    """
    if means_every_interface(interface):
        raise ConfigError.of("control.interface", interface, "must be one address, not all interfaces")


def join_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


class RpcServer:
    """Serves one table of methods on one address."""

    def __init__(
        self,
        service: str,
        methods: Mapping[str, Method],
        *,
        interface: str,
        token: str,
        port: int = 0,
        num_threads: int = 8,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        certificates: Certificates | None = None,
    ) -> None:
        """Bind; ``start`` begins to serve.

        Args:
            certificates: encrypt the channel, and refuse callers without a certificate of the same authority; None does
                neither.

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
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
            ("grpc.max_allowed_incoming_connections", most := max_connections()),
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
        self._unauthenticated = handlers.unauthenticated = UnauthenticatedConnections(bound, max_connections=most)

    def start(self) -> None:
        """Serve, in threads of its own."""
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
        self.unauthenticated: UnauthenticatedConnections | None = None

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if not self._authentic(handler_call_details):
            return grpc.stream_unary_rpc_method_handler(_refuse)
        method = self._methods.get(handler_call_details.method)
        return None if method is None else grpc.unary_unary_rpc_method_handler(self._answer(method))

    def _authentic(self, details: grpc.HandlerCallDetails) -> bool:
        given = [value for key, value in details.invocation_metadata or () if key == _TOKEN_KEY]
        # ``compare_digest`` takes as long for every wrong token, so its time shows nothing of the right one.
        return len(given) == 1 and hmac.compare_digest(str(given[0]).encode(), self._token)

    def _answer(self, method: Method) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        def handle(request: bytes, context: grpc.ServicerContext) -> bytes:
            if self.unauthenticated is not None:
                self.unauthenticated.has_shown_token(context.peer())
            try:
                answer = method(decode(request))
                return answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            # Not among ``_REFUSALS``: the caller tries again.
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
    """A call without an answer. ``refused``: the peer answered with a refusal."""

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


_REFUSALS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    # The message is too large, and would be so again.
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


class RpcClient:
    """Calls the methods of one service."""

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
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
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
        """Call ``method`` and wait for its answer; with ``wait_for_peer`` also for a peer that does not listen yet.

        Raises:
            RpcError: no answer in time, peer gone, or refused.
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
