"""Tests the launcher's connection to the controller: nothing that a controller sent before it died is lost."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.control.controller.link import ControllerLink
from megatron_ft.control.membership.events import StopRequested
from megatron_ft.control.membership.state import Outcome
from megatron_ft.control.report import JobResult
from megatron_ft.errors import ControlError
from megatron_ft.testing.jobs import REPOSITORY

_PROGRAM = """
import subprocess, sys
from pathlib import Path
from megatron_ft.control.controller import link
link.LEAST_SILENCE_SECONDS = float(sys.argv[3])
link._PING_SECONDS = 0.1

def start(launcher):
    command = [sys.executable, "-c", sys.argv[1], str(launcher.fileno()), sys.argv[2]]
    return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[launcher.fileno()])

made = link.ControllerLink(start, access_path=Path(sys.argv[2]) / "access", access={}, silence_seconds=0.0)
made.begin()
made.run(lambda record: print("record", flush=True), lambda event: print(event["event"], flush=True))
made.close()
print("ended", flush=True)
"""
"""Program that acts as a launcher and prints what it receives from the controller."""

_ANSWERS = """
import json, pathlib, socket, sys
from megatron_ft.framing import FrameReader, send
sock, end = socket.socket(fileno=int(sys.argv[1])), pathlib.Path(sys.argv[2]) / "end"
send(sock, {"op": "record", "record": {}, "origin": [0, 0, 0]})
reader, closed = FrameReader(sock), False
while not closed:
    messages, closed = reader.pump()
    for message in messages:
        send(sock, {"op": "pong"})
        if end.exists():
            send(sock, json.loads(end.read_text()))
"""
"""Program that acts as a controller: it answers pings, and ends the job with the message in a file when the file
exists."""

END = JobResult(Outcome.FINISHED, "all ranks have finished", None)
_SAYS = """
import json, os, socket, sys
from megatron_ft.framing import send
sock = socket.socket(fileno=int(sys.argv[1]))
for message in json.loads(sys.argv[2]):
    send(sock, message)
if sys.argv[3] == "dies":
    os.kill(os.getpid(), 9)
sys.stdin.read()
"""


class Console:
    """Connection to controllers that send what the test specifies. The first of them dies."""

    def __init__(self, folder: Path, *lives: list[dict[str, Any]], all_die: bool = False) -> None:
        self.lives, self.all_die, self.started = list(lives), all_die, 0
        self.records: list[Any] = []
        self.events: list[Any] = []
        self.link = ControllerLink(
            self._start, access_path=folder / "controller.json", access={"token": "t"}, silence_seconds=30.0
        )

    def _start(self, launcher: Any) -> "subprocess.Popen[bytes]":
        output = self.lives[min(self.started, len(self.lives) - 1)]
        manner = "dies" if self.all_die or self.started < len(self.lives) - 1 else "stays"
        self.started += 1
        command = [sys.executable, "-c", _SAYS, str(launcher.fileno()), json.dumps(output), manner]
        return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[launcher.fileno()])

    def run(self) -> JobResult:
        try:
            return self.link.run(self.records.append, self.events.append)
        finally:
            self.link.close()


def record(number: int, session: int = 0) -> dict[str, Any]:
    return {"op": "record", "record": {"n": number}, "origin": [0, session, number]}


def ended(number: int) -> dict[str, Any]:
    return {"op": "event", "number": number, "event": "ended", "end": END.to_json()}


def test_what_a_dead_controller_has_said_is_read_also_where_there_is_something_to_tell_it(tmp_path: Path) -> None:
    first = [record(number) for number in range(200)]
    launcher = Console(tmp_path, first, [record(199), record(200), ended(0)])
    launcher.link.begin()
    dead = launcher.link._process
    assert dead is not None and dead.wait(timeout=20) == -9
    launcher.link.post(StopRequested())  # telling it fails before anything is read
    assert launcher.run() == END
    assert [found["n"] for found in launcher.records] == list(range(201)), "each once, in order"
    assert [event["event"] for event in launcher.events] == ["replaced"]


def test_an_end_that_a_dead_controller_has_reported_is_the_end(tmp_path: Path) -> None:
    launcher = Console(tmp_path, [record(0), ended(0)], all_die=True)
    launcher.link.begin()
    dead = launcher.link._process
    assert dead is not None and dead.wait(timeout=20) == -9
    launcher.link.post(StopRequested())
    assert launcher.run() == END
    assert (launcher.started, launcher.records) == (1, [{"n": 0}])


def test_controllers_that_say_nothing_are_not_replaced_for_ever(tmp_path: Path) -> None:
    launcher = Console(tmp_path, [], all_die=True)
    launcher.link.begin()
    with pytest.raises(
        ControlError, match="failed 5 times in a row; last failure: the controller was killed by SIGKILL"
    ):
        launcher.run()
    assert launcher.started == 5


def test_a_session_that_follows_counts_from_the_beginning(tmp_path: Path) -> None:
    launcher = Console(tmp_path, [record(5), record(0, session=1), record(0, session=1), ended(0)])
    launcher.link.begin()
    assert launcher.run() == END
    assert [found["n"] for found in launcher.records] == [5, 0]


def test_a_launcher_that_was_stopped_does_not_kill_its_controller(tmp_path: Path) -> None:
    silence_seconds = 3.0
    command = [sys.executable, "-c", _PROGRAM, _ANSWERS, str(tmp_path), str(silence_seconds)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "record\n", "the controller is there"
        os.kill(launcher.pid, signal.SIGSTOP)
        wakes_at = time.monotonic() + silence_seconds + 0.5
        while time.monotonic() < wakes_at:
            threading.Event().wait(wakes_at - time.monotonic())
        os.kill(launcher.pid, signal.SIGCONT)
        (tmp_path / "message").write_text(json.dumps(ended(0)))
        (tmp_path / "message").rename(tmp_path / "end")
        assert launcher.stdout.read() == "ended\n", "by the controller that there was"
        assert launcher.wait(timeout=20) == 0
