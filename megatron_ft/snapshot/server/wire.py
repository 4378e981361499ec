"""TCP connections between snapshot servers, for JSON messages and bytes of windows, and checks of message fields."""

import contextlib
import hmac
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ft.errors import ControlError
from megatron_ft.framing import MAX_FRAME_BYTES, Message, decode, encode
from megatron_ft.planning.recovery.sources import StoredWindow
from megatron_ft.planning.snapshot.plan import WindowKey

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
