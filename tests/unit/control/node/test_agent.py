"""Tests the process of an agent with a controller that the test simulates."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_ft.control.node.agent import AgentSpec
from megatron_ft.control.rpc import RpcServer
from megatron_ft.errors import ControlError
from megatron_ft.testing.jobs import REPOSITORY, forkserver

TOKEN = "a" * 64
LIMIT_SECONDS = 60.0
LOST_SECONDS = 1.5


class Played:
    """Controller that admits every agent and gives no orders."""

    def __init__(self, port: int = 0) -> None:
        self.polled = threading.Event()
        methods = {"join": self._join, "poll": self._poll, "deliver": self._deliver}
        self.server = RpcServer("Controller", methods, interface="127.0.0.1", token=TOKEN, port=port)
        self.server.start()
        self.port = int(self.server.address.rpartition(":")[2])

    def _join(self, _request: dict[str, Any]) -> dict[str, Any]:
        return {"session": 0, "after": 0, "epoch": 1}

    def _poll(self, request: dict[str, Any]) -> dict[str, Any]:
        self.polled.set()
        threading.Event().wait(request["wait_seconds"])
        return {"node": 0, "orders": [], "epoch": 1}

    def _deliver(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"next": request["first"] + len(request["items"]), "epoch": 1}


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until ``condition`` is true."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[bytes]", Played]]:
    """Return an agent that has called for orders, and its controller."""
    controller = Played()
    (tmp_path / "sockets").mkdir(mode=0o700)
    with forkserver() as socket_path:
        spec = AgentSpec(
            controller_address=controller.server.address,
            token=TOKEN,
            node=0,
            runtime_dir=str(tmp_path / "sockets"),
            forkserver_socket=socket_path,
            heartbeat_interval_seconds=0.1,
            lost_controller_seconds=LOST_SECONDS,
        )
        command = [sys.executable, "-m", "megatron_ft.control.node.agent"]
        with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdin is not None
            process.stdin.write(spec.to_line())
            process.stdin.flush()
            try:
                assert controller.polled.wait(LIMIT_SECONDS)
                yield process, controller
            finally:
                process.kill()
    controller.server.stop()


def test_an_agent_that_was_stopped_asks_again_before_it_gives_its_controller_up(
    agent: tuple["subprocess.Popen[bytes]", Played],
) -> None:
    process, controller = agent
    os.kill(process.pid, signal.SIGSTOP)
    eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    wakes_at = time.monotonic() + LOST_SECONDS + 0.5
    controller.server.stop()
    following = Played(controller.port)  # another controller has taken over meanwhile
    eventually(lambda: time.monotonic() > wakes_at)
    os.kill(process.pid, signal.SIGCONT)
    try:
        assert following.polled.wait(LIMIT_SECONDS), "it asks the controller that there is"
        following.polled.clear()
        assert following.polled.wait(LIMIT_SECONDS) and process.poll() is None, "and stays"
    finally:
        following.server.stop()


def test_an_agent_whose_controller_stays_silent_ends(agent: tuple["subprocess.Popen[bytes]", Played]) -> None:
    process, controller = agent
    controller.server.stop()
    assert process.wait(LIMIT_SECONDS) == ControlError.exit_code
    assert process.stderr is not None and "the controller does not answer" in process.stderr.read().decode()
