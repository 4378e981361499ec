"""The console's side of the controller: nothing that one has said before it died is lost."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.control.controller.job_result import JobEnd
from megatron_ft.control.controller.link import ControllerLink
from megatron_ft.control.membership.events import StopRequested
from megatron_ft.control.membership.state import Outcome
from megatron_ft.errors import ControlError

END = JobEnd(Outcome.FINISHED, "all ranks have finished", None)
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
    """A link to controllers that say what the test wants; the first of them dies."""

    def __init__(self, folder: Path, *lives: list[dict[str, Any]], all_die: bool = False) -> None:
        self.lives, self.all_die, self.started = list(lives), all_die, 0
        self.records: list[Any] = []
        self.events: list[Any] = []
        self.link = ControllerLink(
            self._start, access_path=folder / "controller.json", access={"token": "t"}, silence_seconds=30.0
        )

    def _start(self, console: Any) -> "subprocess.Popen[bytes]":
        said = self.lives[min(self.started, len(self.lives) - 1)]
        manner = "dies" if self.all_die or self.started < len(self.lives) - 1 else "stays"
        self.started += 1
        command = [sys.executable, "-c", _SAYS, str(console.fileno()), json.dumps(said), manner]
        return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[console.fileno()])

    def run(self) -> JobEnd:
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
    console = Console(tmp_path, first, [record(199), record(200), ended(0)])
    console.link.begin()
    dead = console.link._process
    assert dead is not None and dead.wait(timeout=20) == -9
    console.link.post(StopRequested())  # telling it fails before anything is read
    assert console.run() == END
    assert [found["n"] for found in console.records] == list(range(201)), "each once, in order"
    assert [event["event"] for event in console.events] == ["replaced"]


def test_an_end_that_a_dead_controller_has_told_is_the_end(tmp_path: Path) -> None:
    console = Console(tmp_path, [record(0), ended(0)], all_die=True)
    console.link.begin()
    dead = console.link._process
    assert dead is not None and dead.wait(timeout=20) == -9
    console.link.post(StopRequested())
    assert console.run() == END
    assert (console.started, console.records) == (1, [{"n": 0}])


def test_controllers_that_say_nothing_are_not_replaced_for_ever(tmp_path: Path) -> None:
    console = Console(tmp_path, [], all_die=True)
    console.link.begin()
    with pytest.raises(ControlError, match="ended 5 times in a row; the last time it was killed by SIGKILL"):
        console.run()
    assert console.started == 5


def test_a_session_that_follows_counts_from_the_beginning(tmp_path: Path) -> None:
    console = Console(tmp_path, [record(5), record(0, session=1), record(0, session=1), ended(0)])
    console.link.begin()
    assert console.run() == END
    assert [found["n"] for found in console.records] == [5, 0]
