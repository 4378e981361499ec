"""TCP connections between snapshot servers, for JSON messages and bytes of windows, and checks of message fields.

``Lifeline`` tracks the connection to the agent: standard input, or a socket if an agent of a later job has taken the
server over. When this connection closes, the server ends, at once or after ``Outlive.seconds``. Bytes on standard
input, or a message ``end`` on the socket, end it at once.
"""

import contextlib
import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_ft.errors import ControlError
from megatron_ft.framing import MAX_FRAME_BYTES, Message, decode, encode
from megatron_ft.planning.recovery.sources import StoredWindow
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.snapshot.server import wire as fields

# No real job reaches these bounds. They prevent huge allocations and loops for a damaged or hostile message.
MAX_RANK = 1 << 20
MAX_SLICES = 1 << 16
# Ballots contain iterations as float64, which is exact up to this value.
MAX_ITERATION = 1 << 53
MAX_BYTES = 1 << 46
MAX_TEXT = 4096


def integer(message: Mapping[str, Any], name: str, *, least: int = 0, most: int = MAX_ITERATION) -> int:
    """Return ``message[name]``. Raises ControlError unless it is an integer from ``least`` to ``most``."""
    value = message.get(name)
    if type(value) is not int or not least <= value <= most:
        raise ControlError(f"{name}={value!r}: must be a whole number from {least} to {most}")
    return value


def text(message: Mapping[str, Any], name: str, *, most: int = MAX_TEXT) -> str:
    """Return ``message[name]``. Raises ControlError unless it is printable text of 1 to ``most`` characters."""
    value = message.get(name)
    # Texts become parts of log lines and paths, where control characters could forge other lines or paths.
    if not isinstance(value, str) or not 0 < len(value) <= most or not value.isprintable():
        raise ControlError(f"{name}={value!r:.100}: must be text of 1 to {most} printable characters")
    return value


def mapping(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return ``message[name]``. Raises ControlError unless it is a JSON object."""
    value = message.get(name)
    if not isinstance(value, dict):
        raise ControlError(f"{name}={value!r:.100}: must be an object")
    return value


def items(message: Mapping[str, Any], name: str) -> list[Any]:
    """Return ``message[name]``. Raises ControlError unless it is a list."""
    value = message.get(name)
    if not isinstance(value, list):
        raise ControlError(f"{name}={value!r:.100}: must be a list")
    return value


def host_and_port(address: object) -> tuple[str, int]:
    """Split an address ``host:port``; IPv6 hosts are in brackets. Raises ControlError for anything else."""
    host, _, port = str(address).rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536
    if not host.strip("[]") or not is_port:
        raise ControlError(f"address {address!r:.100}: must be host:port")
    return host.strip("[]"), int(port)


def window_key(message: Mapping[str, Any]) -> WindowKey:
    """Read the key of the window to which a message refers. Raises ControlError if the key is missing or invalid."""
    return WindowKey(start_iteration=integer(message, "start_iteration"), generation=integer(message, "generation"))


def stored_window(content: object) -> StoredWindow:
    """Read a window's entry in a server's list of windows. Raises ControlError if the entry is invalid."""
    try:
        window = StoredWindow.from_json(content)
    except ValueError as error:
        raise ControlError(f"window {error}") from None
    if not 0 <= window.num_held <= window.num_slices:
        raise ControlError(f"num_held={window.num_held}: must be from 0 to num_slices={window.num_slices}")
    return window


CONNECT_SECONDS = 5.0
STALL_SECONDS = 30
"""Seconds without progress, in a message or before an answer, after which a connection counts as broken."""
GREETING_BYTES = 16 * 1024
"""Largest size in bytes of the first message, which is received before the token is checked."""

_HEADER_BYTES = 4
_CALL_BYTES = 1 << 20
"""Largest number of bytes that one system call sends or receives. Transfers with larger calls are slower by a third,
because the kernel handles acknowledgements between calls."""


class Refused(ControlError):
    """Raised if the other side refused a request. ``kind`` is ``stale`` for an old generation, ``hash`` for a damaged
    slice, ``carry`` if the other side cannot copy a piece that was not sent, and otherwise ``refused``."""

    def __init__(self, reason: str, kind: str = "refused") -> None:
        super().__init__(reason)
        self.kind = kind

    def to_json(self) -> Message:
        return {"op": "error", "kind": self.kind, "reason": str(self)}


class Wire:
    """A blocking TCP connection. Other threads may call only ``abort``."""

    def __init__(self, sock: socket.socket, *, stall_seconds: int = STALL_SECONDS) -> None:
        # The kernel restarts these time limits whenever a call makes progress. Python's limit is for all bytes of
        # ``sendall`` together, so a large message on a slow network would exceed it.
        timeout = struct.pack("ll", stall_seconds, 0)
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        # A failed machine does not close its connections: keepalive ends a wait for its next message.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Acknowledgements are small frames, which Nagle's algorithm would delay.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._stall_seconds = stall_seconds

    def send(self, message: Message, *, goes_on: bool = False) -> None:
        """Send one message. With ``goes_on``, further data follow, and the kernel may send them in the same packet.

        Raises OSError if the connection is broken or makes no progress.
        """
        with self._moving():
            self._sock.sendall(encode(message), socket.MSG_MORE if goes_on else 0)

    def receive(self, *, most_bytes: int = MAX_FRAME_BYTES, patient: bool = False) -> Message:
        """Receive a message. With ``patient``, wait without a time limit for its first byte.

        Raises:
            ControlError: the message is too long, or is not a JSON object.
            OSError: the connection is broken or makes no progress.
        """
        header = bytearray(_HEADER_BYTES)
        while True:
            try:
                begun = self._sock.recv_into(header)
                break
            except BlockingIOError:
                # A peer may be idle between messages, but after the first byte of a message it must make progress.
                if not patient:
                    raise TimeoutError(f"no bytes were transferred for {self._stall_seconds} s") from None
        if begun == 0:
            raise ConnectionResetError("the peer has closed the connection")
        self.receive_into(memoryview(header)[begun:])
        size = int.from_bytes(header, "big")
        # Check this before memory is allocated, because the peer may not have presented the token yet.
        if size > most_bytes:
            raise ControlError(f"a peer announced a message of {size} bytes: must have at most {most_bytes}")
        payload = bytearray(size)
        self.receive_into(memoryview(payload))
        return decode(bytes(payload))

    def call(self, message: Message) -> Message:
        """Send a message and wait for the answer.

        Raises:
            Refused: the peer refused the request.
            ControlError, OSError: the same cases as ``send`` and ``receive``.
        """
        self.send(message)
        return self.answer()

    def answer(self) -> Message:
        """Wait for an answer. Messages ``wait``, which the peer sends while it allocates memory, are skipped.

        Raises the same errors as ``call``.
        """
        while (answer := self.receive()).get("op") == "wait":
            pass
        if answer.get("op") == "error":
            raise Refused(str(answer.get("reason")), str(answer.get("kind", "refused")))
        return answer

    def has_arrived(self) -> bool:
        """Return whether a read would return at once: bytes have arrived or the peer has closed the connection."""
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def send_bytes(self, view: memoryview, *, goes_on: bool = False) -> None:
        """Send raw bytes. ``goes_on`` and errors are as in ``send``. For mapped memory, ``sendfile`` is not faster."""
        flags = socket.MSG_MORE if goes_on else 0
        while view.nbytes:
            with self._moving():
                view = view[self._sock.send(view[:_CALL_BYTES], flags) :]

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view`` with received bytes. Raises OSError if the connection is broken or makes no progress."""
        while view.nbytes:
            with self._moving():
                received = self._sock.recv_into(view[:_CALL_BYTES])
            if received == 0:
                raise ConnectionResetError("the peer has closed the connection")
            view = view[received:]

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:
            raise TimeoutError(f"no bytes were transferred for {self._stall_seconds} s") from None

    def abort(self) -> None:
        """Shut the connection down, so that every call on it fails, in any thread."""
        abort(self._sock)

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


def connect(address: str, greeting: Message) -> tuple[Wire, Message]:
    """Connect to a snapshot server and present the token. Return the connection and the server's answer.

    Raises:
        Refused: the token is wrong, or the server is of another run or a newer generation.
        ControlError, OSError: the connection failed, or the other end is not a snapshot server.
    """
    # A failed machine does not refuse connections, and without a limit the kernel would try for minutes.
    sock = socket.create_connection(host_and_port(address), timeout=CONNECT_SECONDS)
    try:
        wire = Wire(sock)
        return wire, wire.call({"op": "hello", **greeting})
    except BaseException:
        sock.close()
        raise


def abort(sock: socket.socket) -> None:
    """Shut a connection down; other threads may call this. Nothing happens if the connection has already ended."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def is_token(given: Any, token: str) -> bool:
    """Return whether ``given`` equals ``token``. The duration does not depend on where they differ."""
    return hmac.compare_digest(str(given).encode(errors="replace"), token.encode())


MIN_TOKEN_LENGTH = 32
_MAX_SECONDS = 7 * 24 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlive:
    """Settings of a server that outlives its agent: which later jobs may use its windows, and how long it waits."""

    seconds: int
    run_id: str
    fingerprint: str
    """Hash of layout and settings of the job that captured the windows. Only a job with an equal hash can use them."""
    interface: str
    record_path: str
    """File with which agents find the server; the server removes it when it ends."""

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Outlive":
        """Read and check the settings. Raises ControlError for a missing or invalid value."""
        names = ("run_id", "fingerprint", "interface", "record_path")
        return cls(seconds=_seconds(content), **{name: fields.text(content, name) for name in names})


def _seconds(content: Mapping[str, Any]) -> int:
    return fields.integer(content, "seconds", least=1, most=_MAX_SECONDS)


class Unusable(Refused):
    """Raised if an agent tries to take the server over, but the agent's job cannot use the server's windows. The
    server then ends."""


class Lifeline:
    """Tracks the connection of the agent and, after it has closed, the time until the server ends. Thread-safe."""

    def __init__(
        self, outlive: Outlive | None, report: Callable[[str], None], *, wake: Callable[[], None] = lambda: None
    ) -> None:
        """Take the standard input of this process as the connection of the agent that has started the server.

        Args:
            outlive: how long, and for which jobs, the server waits after its agent has ended; None to end at once.
            report: writes a line to the server's log.
            wake: called when the result of ``seconds_left`` may have changed.
        """
        self.outlive = outlive
        self._report, self._wake = report, wake
        self._lock = threading.Lock()
        self._holder: object = self
        self._deadline: float | None = None
        self._is_over = False

    @property
    def initial_holder(self) -> object:
        """Object that stands for the first agent's connection. Pass it to ``release`` when standard input closes."""
        return self

    def seconds_left(self) -> float | None:
        """Return the seconds until the server ends; None while it has an agent."""
        with self._lock:
            if self._is_over:
                return 0.0
            return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def take(self, holder: object, message: Message) -> None:
        """Let the agent of another job take the server over. ``holder`` represents this agent's connection. When the
        connection closes, the server waits for the ``seconds`` in ``message`` before it ends.

        Raises:
            Unusable: the server is of another run, or its job had another layout or other settings.
            Refused: the server is configured to end with its agent.
            ControlError: a value is missing or invalid.
        """
        outlive = self.outlive
        if outlive is None:
            raise Refused("this server ends when its agent ends, so no other agent can take it over")
        for name in ("run_id", "fingerprint", "interface"):
            if (given := fields.text(message, name)) != getattr(outlive, name):
                raise Unusable(
                    f"{name}={given}: must be {getattr(outlive, name)}, the value when the windows were captured"
                )
        seconds = _seconds(message)
        with self._lock:
            self.outlive = replace(outlive, seconds=seconds)
            self._holder, self._deadline = holder, None
        self._report("the agent of the next job has taken this server over")

    def release(self, holder: object, *, has_windows: bool) -> None:
        """Record that the connection ``holder`` has closed. If it was the agent's connection, the server ends after
        ``Outlive.seconds``, or at once if the server has no windows or ``outlive`` is None."""
        with self._lock:
            if holder is not self._holder or self._deadline is not None:
                return
            if self.outlive is not None and has_windows and not self._is_over:
                self._deadline = time.monotonic() + self.outlive.seconds
                self._report(f"the agent has ended; the next job may use this server for {self.outlive.seconds} s")
            else:
                self._is_over = True
        self._wake()

    def end(self, reason: str) -> None:
        """Make the snapshot server's process end, and report ``reason``."""
        with self._lock:
            self._is_over = True
        self._report(f"this server ends: {reason}")
        self._wake()


def read_adoption(message: Message) -> str:
    """Return the new job's token from its agent's takeover message. Raises ControlError if it is missing or invalid."""
    token = fields.text(message, "new_token")
    if len(token) < MIN_TOKEN_LENGTH:
        raise ControlError(f"new_token: must have at least {MIN_TOKEN_LENGTH} characters")
    return token
