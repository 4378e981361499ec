"""Connections between snapshot servers: JSON messages, and raw bytes that never pass through Python objects."""

import contextlib
import hmac
import socket
import struct
from collections.abc import Iterator
from typing import Any

from megatron_ft.errors import ControlError
from megatron_ft.framing import MAX_FRAME_BYTES, Message, decode, encode
from megatron_ft.snapshot.server.fields import host_and_port

CONNECT_SECONDS = 5.0
STALL_SECONDS = 30
"""A connection without progress for this long, within a message or while an answer is due, is broken."""
GREETING_BYTES = 16 * 1024
"""Longest first message that is read, before the token is checked."""

_HEADER_BYTES = 4
_CALL_BYTES = 1 << 20
"""Bytes sent or received by one call: the kernel handles acknowledgements in between; larger calls are a third
slower."""


class Refused(ControlError):
    """The other side refused a request; ``kind`` is ``stale``, ``hash`` or ``refused``."""

    def __init__(self, reason: str, kind: str = "refused") -> None:
        super().__init__(reason)
        self.kind = kind

    def to_json(self) -> Message:
        return {"op": "error", "kind": self.kind, "reason": str(self)}


class Wire:
    """One blocking TCP connection. Only ``abort`` may be called from another thread."""

    def __init__(self, sock: socket.socket, *, stall_seconds: int = STALL_SECONDS) -> None:
        # Limits of the kernel, which count from the last progress of a call. With those of Python, ``sendall`` has one
        # limit for all of its bytes, which a large message over a slow network would exceed.
        timeout = struct.pack("ll", stall_seconds, 0)
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        # A machine that is gone closes nothing: keepalive ends a patient wait for its next message.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Acknowledgements are small frames, which Nagle's algorithm would delay.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._stall_seconds = stall_seconds

    def send(self, message: Message, *, goes_on: bool = False) -> None:
        """Send one message; ``goes_on``: more data follow at once, and the kernel may put both into one packet.

        Raises OSError when the peer is gone or makes no progress.
        """
        with self._moving():
            self._sock.sendall(encode(message), socket.MSG_MORE if goes_on else 0)

    def receive(self, *, most_bytes: int = MAX_FRAME_BYTES, patient: bool = False) -> Message:
        """Receive a message; ``patient`` waits for its beginning without a limit.

        Raises:
            ControlError: too long, or not a JSON object.
            OSError: the peer is gone, or makes no progress.
        """
        header = bytearray(_HEADER_BYTES)
        while True:
            try:
                begun = self._sock.recv_into(header)
                break
            except BlockingIOError:
                # Only the beginning of a frame may take long: a peer that has begun one must make progress.
                if not patient:
                    raise TimeoutError(f"no bytes were transferred for {self._stall_seconds} s") from None
        if begun == 0:
            raise ConnectionResetError("the peer has closed the connection")
        self.receive_into(memoryview(header)[begun:])
        size = int.from_bytes(header, "big")
        # Before memory is allocated: the peer may not have presented the token yet.
        if size > most_bytes:
            raise ControlError(f"a peer announced a message of {size} bytes: must have at most {most_bytes}")
        payload = bytearray(size)
        self.receive_into(memoryview(payload))
        return decode(bytes(payload))

    def call(self, message: Message) -> Message:
        """Send a message and wait for the answer.

        Raises:
            Refused: the peer refused the request.
            ControlError, OSError: as ``send`` and ``receive``.
        """
        self.send(message)
        return self.answer()

    def answer(self) -> Message:
        """Wait for an answer; the other side may send ``wait`` before. Raises as ``call``."""
        while (answer := self.receive()).get("op") == "wait":
            pass
        if answer.get("op") == "error":
            raise Refused(str(answer.get("reason")), str(answer.get("kind", "refused")))
        return answer

    def has_arrived(self) -> bool:
        """Whether a read would return at once, with bytes or because the peer has closed the connection."""
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def send_bytes(self, view: memoryview, *, goes_on: bool = False) -> None:
        """Send bytes unchanged; from a mapping as fast as ``sendfile``. ``goes_on`` and errors as for ``send``."""
        flags = socket.MSG_MORE if goes_on else 0
        while view.nbytes:
            with self._moving():
                view = view[self._sock.send(view[:_CALL_BYTES], flags) :]

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view``. Raises OSError when the peer is gone or makes no progress."""
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
        """Make every call on the connection fail, in any thread."""
        abort(self._sock)

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


def connect(address: str, greeting: Message) -> tuple[Wire, Message]:
    """Connect to a snapshot server and present the token; return the connection and the answer.

    Raises:
        Refused: wrong token, other run, or a stale generation.
        ControlError, OSError: no connection, or no snapshot server at the other end.
    """
    # A machine that is gone does not refuse connections: without a limit the kernel would try for minutes.
    sock = socket.create_connection(host_and_port(address), timeout=CONNECT_SECONDS)
    try:
        wire = Wire(sock)
        return wire, wire.call({"op": "hello", **greeting})
    except BaseException:
        sock.close()
        raise


def abort(sock: socket.socket) -> None:
    """Shut a connection down, from any thread; do nothing if it has ended."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def is_token(given: Any, token: str) -> bool:
    """Compare with the token in a time that does not depend on the position of the first difference."""
    return hmac.compare_digest(str(given).encode(errors="replace"), token.encode())
