"""Tests that shutting down the connections between ranks ends all waits on them, and affects no other socket."""

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from megatron_ft.runtime.transport.abort import Opening, Transports, open_sockets

Pair = tuple[socket.socket, socket.socket]


def connected(stack: ExitStack) -> tuple[Pair, int]:
    """Return two connected sockets, and the port of the listener."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    near = stack.enter_context(socket.create_connection(listener.getsockname()))
    far = stack.enter_context(listener.accept()[0])
    for end in (near, far):
        end.settimeout(20)
    return (near, far), listener.getsockname()[1]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def is_open(pair: Pair) -> bool:
    """Return whether a byte is transferred."""
    try:
        pair[0].sendall(b"x")
    except OSError:
        return False
    return pair[1].recv(1) == b"x"


def test_a_waiting_thread_wakes(stack: ExitStack) -> None:
    before = open_sockets()
    (near, far), _ = connected(stack)
    transports = Transports.among(open_sockets() - before, store_port=None)
    assert len(transports) == 2, "the listener is none of them"
    received: list[bytes] = []
    waiting = threading.Thread(target=lambda: received.append(far.recv(1)))
    waiting.start()
    transports.hang_up("rank 1 was killed")
    waiting.join(timeout=20)
    assert received == [b""]
    transports.hang_up()
    assert near.fileno() >= 0, "closing it is its owner's business"


def test_the_store_local_sockets_and_older_ones_stay(stack: ExitStack) -> None:
    older, _ = connected(stack)
    before = open_sockets()
    ranks, _ = connected(stack)
    store, store_port = connected(stack)
    local = socket.socketpair()
    stack.enter_context(local[0])
    stack.enter_context(local[1])
    transports = Transports.among(open_sockets() - before, store_port=store_port)
    assert len(transports) == 2
    transports.hang_up()
    assert [is_open(pair) for pair in (older, store, local, ranks)] == [True, True, True, False]


def test_a_descriptor_that_is_used_again_is_left_alone(stack: ExitStack) -> None:
    before = open_sockets()
    ranks, _ = connected(stack)
    transports = Transports.among(open_sockets() - before, store_port=None)
    other, _ = connected(stack)
    for gone, taken in zip(ranks, other, strict=True):
        os.dup2(taken.fileno(), gone.fileno())
    transports.hang_up()
    assert is_open(other)


def test_connections_that_are_being_made_break_whenever_they_are_made(stack: ExitStack) -> None:
    older, _ = connected(stack)
    opening = Opening()
    assert not opening.pause(0.0)
    early, _ = connected(stack)
    opening.hang_up("rank 1 was killed")
    late, _ = connected(stack)
    assert opening.pause(20)
    assert early[0].recv(1) == late[1].recv(1) == b""
    opening.close()
    after, _ = connected(stack)
    assert is_open(older) and is_open(after)


def test_connections_that_nobody_answers_break_too(stack: ExitStack) -> None:
    """The other machine may have died, so that it does not refuse connections."""
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    stack.enter_context(socket.create_connection(silent.getsockname()))  # no other is let in
    opening, errors = Opening(), []

    def connect() -> None:
        with socket.socket() as unanswered:
            errors.append(unanswered.connect_ex(silent.getsockname()))

    waiting = threading.Thread(target=connect)
    waiting.start()
    opening.hang_up("node 1 was lost")
    waiting.join(timeout=20)
    opening.close()
    assert errors == [errno.ECONNRESET]


def test_nothing_breaks_once_all_is_open(stack: ExitStack) -> None:
    opening = Opening()
    pair, _ = connected(stack)
    opening.close()
    opening.hang_up("later than that")
    assert is_open(pair) and not opening.pause(0.0)
