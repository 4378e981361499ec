"""Tests messages over local sockets."""

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from megatron_ft.errors import ControlError
from megatron_ft.framing import MAX_FRAME_BYTES, FrameReader, Message, send

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def read_all(sock: socket.socket) -> list[Message]:
    reader, found, closed = FrameReader(sock), [], False
    while not closed:
        messages, closed = reader.pump()
        found += messages
    return found


def test_messages_arrive_whole_and_in_order_whatever_the_pieces(pair: Pair) -> None:
    messages = [{"n": number, "text": "x" * (number * 7919 % 300_000)} for number in range(20)]

    def write() -> None:
        for message in messages:
            send(pair[0], message)
        pair[0].close()

    writer = threading.Thread(target=write)
    writer.start()
    assert read_all(pair[1]) == messages
    writer.join()


def test_half_a_message_at_the_end_is_none(pair: Pair) -> None:
    send(pair[0], {"a": 1})
    pair[0].sendall(b"\0\0\0\x10{half")
    pair[0].close()
    assert read_all(pair[1]) == [{"a": 1}]


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", (MAX_FRAME_BYTES + 1).to_bytes(4, "big"), b"\0\0\0\x02[]", b"\0\0\0\x02\xff\xff"],
)
def test_what_is_no_message_is_refused(pair: Pair, data: bytes) -> None:
    pair[0].sendall(data)
    with pytest.raises(ControlError):
        FrameReader(pair[1]).pump()


def test_a_message_that_is_too_large_is_not_sent(pair: Pair) -> None:
    with pytest.raises(ControlError, match="at most"):
        send(pair[0], {"text": "x" * MAX_FRAME_BYTES})


def test_descriptors_travel(pair: Pair) -> None:
    readable, writable = os.pipe()
    send(pair[0], {"a": 1}, [writable])
    os.close(writable)
    reader = FrameReader(pair[1])
    assert reader.pump() == ([{"a": 1}], False)
    received = reader.descriptors.popleft()
    assert not os.get_inheritable(received)
    os.write(received, b"through")
    os.close(received)
    assert os.read(readable, 100) == b"through"
    os.close(readable)
