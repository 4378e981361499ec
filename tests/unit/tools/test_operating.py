"""Tests status, drain and add_node with a replacement for the controller: their calls, their output, their refusals."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.control import admin as operating
from megatron_ft.control.rpc import ACCEPT_SECONDS, RpcServer, new_token
from megatron_ft.errors import ControlError
from megatron_ft.framing import Message
from tools import add_node, drain, status

STATUS = {
    "generation": 3,
    "phase": "running",
    "members": [0, 1],
    "waiting": [3],
    "lost": [2],
    "draining": [1],
    "nodes": {
        "0": {"iteration": 17, "phase": "backward", "seconds_since_word": 0.25},
        "1": {"iteration": 17, "phase": "forward", "seconds_since_word": 0.5},
        "3": {"iteration": None, "phase": None, "seconds_since_word": None},
    },
    "num_reforms": 3,
    "epoch": 1,
}


class FakeJob:
    """Folder with a controller's address, and the calls that were made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, Message]] = []
        self.token = new_token()
        self.seconds_to_answer = 0.0
        methods = {"status": self._status, "drain": self._drain, "add": self._add}
        self.server = RpcServer("Controller", methods, interface="127.0.0.1", token=self.token)
        self.server.start()
        self.write(address=self.server.address, token=self.token, epoch=1)

    @property
    def path(self) -> Path:
        return self.folder / "controller.json"

    def write(self, *, mode: int = 0o600, **content: Any) -> None:
        self.path.write_text(json.dumps(content))
        self.path.chmod(mode)

    def _status(self, request: Message) -> Message:
        self.asked.append(("status", request))
        return STATUS

    def _drain(self, request: Message) -> Message:
        self.asked.append(("drain", request))
        if request["node"] == 0:
            raise ControlError("node 0: 1 nodes would be left of recovery.min_nodes=2")
        threading.Event().wait(self.seconds_to_answer)
        return {}

    def _add(self, request: Message) -> Message:
        self.asked.append(("add", request))
        return {}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FakeJob]:
    made = FakeJob(tmp_path)
    yield made
    made.server.stop()


def test_status_lists_every_node(job: FakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main([str(job.folder)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("generation 3, running")
    rows = [line.split() for line in lines[1:]]
    assert rows == [
        ["0", "trains", "17", "backward", "0.2"],
        ["1", "leaves", "17", "forward", "0.5"],
        ["2", "lost", "-", "-", "-"],
        ["3", "waits", "to", "join", "-", "-", "-"],
    ]


def test_status_as_json_is_what_the_controller_said(job: FakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main([str(job.folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


def test_an_answer_that_is_none_is_said_to_be(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ControlError, match="status cannot be read: KeyError"):
        status.render({})


def test_drain_and_add_name_the_node(job: FakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    assert drain.main([str(job.folder), "1"]) == 0 and add_node.main([str(job.folder), "2"]) == 0
    assert job.asked == [("drain", {"node": 1}), ("add", {"node": 2})]
    assert "node 1 will leave" in capsys.readouterr().out


def test_a_refusal_says_why(job: FakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    assert drain.main([str(job.folder), "0"]) == ControlError.exit_code
    assert "1 nodes would be left of recovery.min_nodes=2" in capsys.readouterr().err


def refusal(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert status.main([str(folder)]) == ControlError.exit_code
    return capsys.readouterr().err


def test_a_folder_without_a_job_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no job runs there: the folder has no controller.json" in refusal(tmp_path, capsys)
    assert "there is no such folder" in refusal(tmp_path / "none", capsys)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o602])
def test_an_address_that_others_can_open_is_not_used(
    job: FakeJob, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    job.path.chmod(mode)
    assert f"has mode {mode:04o}" in refusal(job.folder, capsys)
    assert not job.asked


def test_a_link_is_not_followed(job: FakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = job.path.rename(job.folder / "elsewhere.json")
    os.symlink(elsewhere, job.path)
    assert "cannot be read" in refusal(job.folder, capsys)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"address":"a"}', '{"address":1,"token":"t","epoch":1}', "[" * 9999]
)
def test_a_damaged_address_is_named(job: FakeJob, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    job.path.write_text(content)
    assert "controller.json: damaged" in refusal(job.folder, capsys)


def test_a_wrong_token_is_refused(job: FakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    job.write(address=job.server.address, token=new_token(), epoch=1)
    assert "UNAUTHENTICATED" in refusal(job.folder, capsys)


def test_a_controller_that_is_gone_is_reported(
    job: FakeJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job.server.stop()
    monkeypatch.setattr(operating, "STATUS_SECONDS", 0.5)
    monkeypatch.setattr(operating, "REQUEST_SECONDS", 0.5)
    assert "does not answer" in refusal(job.folder, capsys)
    assert drain.main([str(job.folder), "1"]) == ControlError.exit_code
    assert "the request may still take effect" in capsys.readouterr().err


def test_a_request_waits_as_long_as_a_busy_controller_may_take(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    assert operating.REQUEST_SECONDS > ACCEPT_SECONDS
    monkeypatch.setattr(operating, "STATUS_SECONDS", 0.1)
    job.seconds_to_answer = 0.5
    assert drain.main([str(job.folder), "1"]) == 0
