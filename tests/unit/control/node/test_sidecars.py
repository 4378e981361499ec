"""Tests sidecars of a node: their first line, their end, and the limit of the wait for them."""

import json
import os
import selectors
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_ft.control.node.sidecars import Sidecars
from megatron_ft.errors import ControlError
from megatron_ft.testing.jobs import REPOSITORY

MODULE = "megatron_ft.testing.dummy_sidecar"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Sidecars]]:
    """Yield a function that starts a dummy service with a given behaviour. The service is ended after the test."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    started: list[Sidecars] = []

    def start_one(manner: str = "", **more: float) -> Sidecars:
        monkeypatch.setenv("DUMMY_SERVICE", manner)
        places = {"runtime_dir": tmp_path, "log_dir": tmp_path}
        sidecars = Sidecars({"dummy": MODULE}, node=3, interface="127.0.0.1", token="t", **places, **more)  # type: ignore[arg-type]
        started.append(sidecars)
        return sidecars

    yield start_one
    for sidecars in started:
        sidecars.close()


def serve(sidecars: Sidecars, until: Callable[[], bool]) -> int:
    """Wait like an agent. Return the number of times that all sidecars became ready."""
    calls: list[None] = []
    with selectors.DefaultSelector() as selector:
        sidecars.watch(selector, lambda: calls.append(None))
        while not until():
            for key, _ in selector.select(sidecars.seconds_left()):
                key.data()
            sidecars.check_in_time()
    return len(calls)


def test_a_service_is_ready_when_it_has_said_its_address(start: Callable[..., Sidecars], tmp_path: Path) -> None:
    sidecars = start()
    assert not sidecars.ready
    assert serve(sidecars, lambda: sidecars.ready) == 1
    about = sidecars.addresses()["dummy"]
    assert about.socket == str(tmp_path / f"003-{os.getpid()}-dummy.sock")
    host, _, port = str(about.address).rpartition(":")
    socket.create_connection((host, int(port)), timeout=10).close()
    reported = sidecars.for_ranks({"dummy": {"3": "a:1", "4": "b:2"}})["dummy"]
    addresses = {"3": "a:1", "4": "b:2"}
    assert reported == {"socket": about.socket, "token": "t", "addresses": addresses, "first_generation": 0}
    json.dumps(reported)


def test_no_service_is_ready_at_once(tmp_path: Path) -> None:
    none = Sidecars({}, node=0, runtime_dir=tmp_path, log_dir=tmp_path, interface="127.0.0.1", token="t")
    assert serve(none, lambda: none.ready) == 1
    assert none.seconds_left() is None
    none.close()


def test_a_service_that_says_nothing_is_waited_for_in_bounds(start: Callable[..., Sidecars]) -> None:
    sidecars = start("mute", start_seconds=0.3)
    with pytest.raises(
        ControlError, match=r"did not report their addresses within 0.3 s: dummy \(log: .*node-003-dummy.log\)"
    ):
        serve(sidecars, lambda: sidecars.ready)


@pytest.mark.parametrize(
    ("manner", "words"),
    [
        ("fails", "sidecar dummy exited with code 3"),
        ("garbage", "must be an object"),
        ("homeless", "must print its address in the first line"),
        ("wordy", "exceeds 4096 bytes"),
    ],
)
def test_a_service_that_ends_or_says_something_else_is_refused(
    start: Callable[..., Sidecars], manner: str, words: str
) -> None:
    sidecars = start(manner)
    with pytest.raises(ControlError, match=words):
        serve(sidecars, lambda: False)


def test_closing_ends_it_and_removes_its_socket(start: Callable[..., Sidecars], tmp_path: Path) -> None:
    sidecars = start()
    serve(sidecars, lambda: sidecars.ready)
    (process_id,) = [service.process.pid for service in sidecars._all]
    sidecars.close()
    sidecars._all.clear()
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
    assert not list(tmp_path.glob("*.sock"))
