"""Tests connections that stop, end early or send invalid data."""

import socket
import threading
from collections.abc import Iterator

import pytest

from megatron_ft.errors import ControlError
from megatron_ft.snapshot.server.wire import Refused, Wire, host_and_port

LARGE = 64 << 20


@pytest.fixture
def pair() -> Iterator[tuple[Wire, socket.socket]]:
    """Return a connection whose one end times out after a second, and whose other end is a plain socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    yield Wire(one, stall_seconds=1), other
    one.close()
    other.close()


def test_a_peer_that_stands_still_is_left(pair: tuple[Wire, socket.socket]) -> None:
    wire, _ = pair
    with pytest.raises(TimeoutError, match="no bytes were transferred for 1 s"):
        wire.send_bytes(memoryview(bytearray(LARGE)))
    with pytest.raises(TimeoutError, match="no bytes were transferred"):
        wire.answer()


def test_waiting_for_the_next_frame_is_not_standing_still(pair: tuple[Wire, socket.socket]) -> None:
    wire, other = pair
    timer = threading.Timer(1.5, other.sendall, [b"\0\0\0\x02{}"])
    timer.start()
    assert wire.receive(patient=True) == {}
    timer.join()


def test_an_early_end_is_seen(pair: tuple[Wire, socket.socket]) -> None:
    wire, other = pair
    other.sendall(b"\0\0\0\x09{}")
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError):
        wire.receive(patient=True)


def test_a_frame_over_the_limit_is_not_read(pair: tuple[Wire, socket.socket]) -> None:
    wire, other = pair
    other.sendall(b"\0\0\x01\0")
    with pytest.raises(ControlError, match="256 bytes: must have at most 255"):
        wire.receive(most_bytes=255)


def test_a_refusal_carries_its_kind(pair: tuple[Wire, socket.socket]) -> None:
    wire, other = pair
    Wire(other).send(Refused("no", "stale").to_json())
    with pytest.raises(Refused, match="no") as refused:
        wire.answer()
    assert refused.value.kind == "stale"


@pytest.mark.parametrize("address", ["", "a", ":1", "a:", "a:0", "a:65536", "a:1x", "a:" + "1" * 5000, None])
def test_addresses_are_checked(address: str) -> None:
    with pytest.raises(ControlError, match="host:port"):
        host_and_port(address)
    assert host_and_port("[::1]:80") == ("::1", 80)
