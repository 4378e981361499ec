"""JSON messages over local stream sockets: four bytes of length (big endian), then UTF-8 JSON.

Used between processes of one node (rank and agent, agent and fork server). File descriptors may be sent with a message;
they are queued in the order of arrival.
"""

import array
import json
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

from megatron_ft.errors import ControlError
from megatron_ft.strict_json import parse_json

Message = dict[str, Any]

# Checked before a buffer of that size is filled: a length of four bytes can announce 4 GiB.
MAX_FRAME_BYTES = 16 * 1024 * 1024
_HEADER_BYTES = 4
_READ_BYTES = 256 * 1024
_MAX_DESCRIPTORS = 16


def encode(message: Message) -> bytes:
    """Convert a message to a frame.

    Raises:
        ControlError: the message is larger than ``MAX_FRAME_BYTES``.
    """
    payload = json.dumps(message, separators=(",", ":")).encode()
    if len(payload) > MAX_FRAME_BYTES:
        raise ControlError(f"message of {len(payload)} bytes: must have at most {MAX_FRAME_BYTES}")
    return len(payload).to_bytes(_HEADER_BYTES, "big") + payload


def send(sock: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send one message, blocking while the peer's buffer is full.

    Raises:
        ControlError: the message is larger than ``MAX_FRAME_BYTES``.
        OSError: the peer is gone.
    """
    data = encode(message)
    # Descriptors travel with the first byte; what did not fit follows without them.
    sent = socket.send_fds(sock, [data], list(descriptors)) if descriptors else 0
    sock.sendall(memoryview(data)[sent:])


class FrameReader:
    """Splits the bytes of one socket into messages."""

    def __init__(self, sock: socket.socket, *, first_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        """``first_frame_bytes``: largest first message, from a peer that has not identified itself yet."""
        self.sock = sock
        self._most_bytes = first_frame_bytes
        self.descriptors: deque[int] = deque()
        self._buffer = bytearray()

    def pump(self) -> tuple[list[Message], bool]:
        """Read once; return the messages that are complete now, and whether the peer has closed the connection.

        Without data a blocking socket blocks, and a non-blocking one returns ``([], False)``.

        Raises:
            ControlError: a frame that is too large or not a JSON object.
        """
        try:
            data = self._receive()
        except BlockingIOError:
            return [], False
        except ConnectionError:
            # A reset means the same as a close: the peer is gone.
            return [], True
        self._buffer += data
        return list(iter(self._next_message, None)), not data

    def _receive(self) -> bytes:
        ancillary_bytes = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
        data, ancillary, flags, _ = self.sock.recvmsg(_READ_BYTES, ancillary_bytes, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self.descriptors.extend(received)
        # The kernel has dropped descriptors, so the rest cannot be matched with messages any more.
        if flags & socket.MSG_CTRUNC:
            raise ControlError(f"a peer sent too many file descriptors: must be at most {_MAX_DESCRIPTORS} per message")
        return data

    def _next_message(self) -> Message | None:
        if len(self._buffer) < _HEADER_BYTES:
            return None
        size = int.from_bytes(self._buffer[:_HEADER_BYTES], "big")
        if size > self._most_bytes:
            raise ControlError(f"a peer announced a message of {size} bytes: must be at most {self._most_bytes}")
        if len(self._buffer) < _HEADER_BYTES + size:
            return None
        payload = bytes(self._buffer[_HEADER_BYTES : _HEADER_BYTES + size])
        del self._buffer[: _HEADER_BYTES + size]
        # The first message has identified the peer or will have it refused; later ones may be large.
        self._most_bytes = MAX_FRAME_BYTES
        return decode(payload)

    def close(self) -> None:
        """Close the socket and all descriptors that are still queued."""
        while self.descriptors:
            os.close(self.descriptors.popleft())
        self.sock.close()


def read_line(descriptor: int, *, most: int = MAX_FRAME_BYTES) -> bytes:
    """Read one line and no byte more, so that other code can wait for the end of the stream.

    The newline is missing if the peer closed the stream before it, or if the line is longer than ``most`` bytes.
    """
    line = bytearray()
    # Byte by byte: a buffer would take what follows, and a later wait for the end would not see it.
    while not line.endswith(b"\n") and len(line) <= most and (byte := os.read(descriptor, 1)):
        line += byte
    return bytes(line)


def decode(payload: bytes) -> Message:
    """Parse a JSON object.

    Raises:
        ControlError: the bytes are not a JSON object.
    """
    try:
        message = parse_json(payload)
    except ValueError as error:
        raise ControlError(f"a peer sent bytes that are not JSON: {error}") from None
    if not isinstance(message, dict):
        raise ControlError(f"a peer sent a JSON {type(message).__name__}: must be an object")
    return message
