"""JSON messages over local stream sockets. A frame is the message's length in four bytes (big endian), then UTF-8 JSON.

The ranks, the agent and the fork server of a node exchange such messages. File descriptors can be sent with a message.
The receiver queues these descriptors in the order of arrival.
"""

import array
import json
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

from megatron_ft.errors import ControlError
from megatron_ft.serde import parse_json

Message = dict[str, Any]

# This limit is checked before memory is allocated, because a length of four bytes can announce 4 GiB.
MAX_FRAME_BYTES = 16 * 1024 * 1024
_HEADER_BYTES = 4
_READ_BYTES = 256 * 1024
_MAX_DESCRIPTORS = 16


def encode(message: Message) -> bytes:
    """Convert a message to a frame: its length, then its JSON.

    Raises:
        ControlError: the message is larger than ``MAX_FRAME_BYTES``.
    """
    payload = json.dumps(message, separators=(",", ":")).encode()
    if len(payload) > MAX_FRAME_BYTES:
        raise ControlError(f"message of {len(payload)} bytes: must have at most {MAX_FRAME_BYTES}")
    return len(payload).to_bytes(_HEADER_BYTES, "big") + payload


def send(sock: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send one message. The call blocks while the peer's receive buffer is full.

    Raises:
        ControlError: the message is larger than ``MAX_FRAME_BYTES``.
        OSError: the connection is closed or broken.
    """
    data = encode(message)
    # Descriptors are sent with the first byte; bytes that did not fit are sent afterwards without descriptors.
    sent = socket.send_fds(sock, [data], list(descriptors)) if descriptors else 0
    sock.sendall(memoryview(data)[sent:])


class FrameReader:
    """Receives messages from one socket."""

    def __init__(self, sock: socket.socket, *, first_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        """Create a reader of ``sock``. ``first_frame_bytes`` limits the first message, which identifies the peer."""
        self.sock = sock
        self._most_bytes = first_frame_bytes
        self.descriptors: deque[int] = deque()
        self._buffer = bytearray()

    def pump(self) -> tuple[list[Message], bool]:
        """Read from the socket once. Return the messages that are now complete, and whether the peer has closed it.

        If no data has arrived, the call blocks on a blocking socket and returns ``([], False)`` on a non-blocking one.

        Raises:
            ControlError: a frame is too large or is not a JSON object.
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
        # The kernel has dropped descriptors, so the others can no longer be assigned to their messages.
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
        # Only the first message is limited to fewer bytes, because it comes from a peer that is not identified yet.
        self._most_bytes = MAX_FRAME_BYTES
        return decode(payload)

    def close(self) -> None:
        """Close the socket, and all received file descriptors that are still in the queue."""
        while self.descriptors:
            os.close(self.descriptors.popleft())
        self.sock.close()


def read_line(descriptor: int, *, most: int = MAX_FRAME_BYTES) -> bytes:
    """Read one line from a descriptor. Bytes after the line stay unread, for a later reader.

    The result ends without a newline if the stream ended first, or if the line is longer than ``most`` bytes.
    """
    line = bytearray()
    # Read byte by byte: a buffer would also read the following bytes, and a later reader would miss them.
    while not line.endswith(b"\n") and len(line) <= most and (byte := os.read(descriptor, 1)):
        line += byte
    return bytes(line)


def decode(payload: bytes) -> Message:
    """Parse the bytes of a JSON object.

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
