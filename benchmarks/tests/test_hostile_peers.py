"""Tests the outcomes that ``hostile-peers`` counts, and that it notices a listener that ends."""

import dataclasses
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.hostile_peers import Attacked, Bench, Listeners, Trace, outcome_of
from megatron_ft.control.rpc import RpcServer, new_token
from megatron_ft.errors import ControlError
from megatron_ft.framing import Message
from megatron_ft.testing.attacks import (
    ANSWERED,
    REFUSED,
    SILENT,
    Attack,
    Caller,
    controller_attacks,
    crowd,
    greetings,
    stream_attacks,
    throw,
)

Serve = Callable[[bytes], str]


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Serve]:
    """Yield a function that starts a server of one connection and returns its path. The server answers with the given
    bytes, or closes the connection if there are none."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "s"))
    listening.listen(8)
    held: list[socket.socket] = []

    def serve(answer: bytes | None) -> None:
        connection, _ = listening.accept()
        held.append(connection)
        connection.recv(100)
        connection.sendall(answer) if answer else connection.close() if answer == b"" else None

    def start(answer: bytes | None) -> str:
        threading.Thread(target=serve, args=(answer,), daemon=True).start()
        return str(tmp_path / "s")

    yield start  # type: ignore[misc]
    for sock in (*held, listening):
        sock.close()


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [(b"", REFUSED), (b'{"op":"error"}', REFUSED), (b'{"op":"hello"}', ANSWERED), (None, SILENT)],
)
def test_outcomes_are_distinguished(listener: Serve, answer: bytes, outcome: str) -> None:
    assert throw(listener(answer), b"x", wait_seconds=0.2) == outcome


def test_a_crowd_is_held_and_let_go(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen(8)
        with crowd(str(tmp_path / "s"), 5, b"x") as taken:
            assert taken == 5


def test_an_outcome_that_is_not_allowed_is_a_problem() -> None:
    attacked = Attacked()
    attacked.note(Attack("a", lambda: "", frozenset((REFUSED,))), REFUSED)
    attacked.note(Attack("b", lambda: "", frozenset((REFUSED,))), ANSWERED)
    assert attacked.num_trials == 2 and attacked.problems == ["b: answered, allowed ['refused']"]


def test_a_listener_that_is_gone_is_no_refusal(tmp_path: Path) -> None:
    (first, *_) = stream_attacks("agent", str(tmp_path / "gone"), greetings(0), random.Random(0))
    assert outcome_of(first) == "FileNotFoundError" and outcome_of(first) not in first.allowed


def test_a_controller_that_takes_everything_is_found_out() -> None:
    token = new_token()
    methods = dict.fromkeys(("join", "poll", "deliver", "status", "drain", "add"), lambda _: {"next": 0})
    server = RpcServer("Controller", methods, interface="127.0.0.1", token=token)
    server.start()
    caller = Caller(server.address)
    try:
        attacks = {a.name: a for a in controller_attacks(caller, token, random.Random(0), num_nodes=3)}
        open_to_all = ("controller: item: no op", "controller: a node that does not exist, poll")
        closed = ("controller: no token, poll", "controller: deep nesting, poll", "controller: oversized, no token")
        assert [outcome_of(attacks[name]) for name in open_to_all] == [ANSWERED] * 2
        assert [outcome_of(attacks[name]) for name in closed] == [REFUSED] * 3
    finally:
        caller.close()
        server.stop()


def test_a_method_that_falls_is_no_refusal() -> None:
    def fall(_: Message) -> Message:
        raise RuntimeError("fallen")

    token = new_token()
    server = RpcServer("Controller", {"poll": fall}, interface="127.0.0.1", token=token)
    server.start()
    caller = Caller(server.address)
    try:
        outcome = caller.call("/Controller/poll", b"{}", [("x-megatron-ft-token", token)])
        assert outcome == "no answer (UNKNOWN)"
    finally:
        caller.close()
        server.stop()


TRACE = Trace(exit_code=0, losses=[1.0], digests=["a"], events=[], decisions=[], seconds=10.0)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, []),
        ({"digests": ["b"]}, ["digests"]),
        ({"exit_code": 8, "decisions": [{}]}, ["exit_code", "decisions"]),
        ({"seconds": 31.0}, ["the attacked job took 31 s, the other one 10 s"]),
    ],
)
def test_what_differs_from_the_job_left_alone_is_named(change: dict[str, object], found: list[str]) -> None:
    assert dataclasses.replace(TRACE, **change).differences(TRACE) == found  # type: ignore[arg-type]


def test_a_process_that_ended_is_reported_with_the_attack_before(tmp_path: Path) -> None:
    alive = psutil.Process()
    gone = psutil.Popen(["true"])
    gone.wait()
    listeners = Listeners(controller="", agents=[], keepers=[], forkserver="", token="", processes=[alive, gone])
    attacked = Attacked()
    bench = Bench(tmp_path, "", quick=True)
    assert not bench._is_alive(listeners, "the blow", attacked)
    assert attacked.problems == ["1 processes ended before or at: the blow"]
    assert bench._is_alive(dataclasses.replace(listeners, processes=[alive]), "", attacked)


def test_refusals_of_the_product_count() -> None:
    def refuse(_: Message) -> Message:
        raise ControlError("no")

    token = new_token()
    server = RpcServer("Controller", {"poll": refuse}, interface="127.0.0.1", token=token)
    server.start()
    caller = Caller(server.address)
    try:
        assert caller.call("/Controller/poll", b"{}", [("x-megatron-ft-token", token)]) == REFUSED
    finally:
        caller.close()
        server.stop()
