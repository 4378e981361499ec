"""Tests the file that a launcher publishes for nodes that start by themselves."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.control.node import join_file
from megatron_ft.control.node.agent import AgentSpec
from megatron_ft.control.node.join_file import JoinFile
from megatron_ft.control.secret_file import MAX_BYTES
from megatron_ft.errors import ControlError

SPEC = AgentSpec(
    controller_address="10.0.0.7:20000",
    token="secret",
    node=0,
    runtime_dir="sockets",
    forkserver_socket="sockets/forkserver.sock",
    sidecars={"keeper": "package.keeper"},
    log_dir="/runs/first/logs",
    process_id=17,
)
CONTENT = JoinFile(agent=SPEC, preload=["a", "b:c"], job_id="17", num_nodes=4, num_returns=3)


def publish(run_dir: Path, **changes: Any) -> Path:
    """Publish the file, and change fields in it. Keys with a dot are fields of the agent's spec."""
    CONTENT.publish(run_dir)
    path = run_dir / "control" / "join.json"
    values = json.loads(path.read_text())
    for name, value in changes.items():
        within, _, key = name.rpartition("__")
        (values[within] if within else values)[key] = value
    path.write_text(json.dumps(values))
    return path


def test_a_node_receives_all_but_its_own_values(tmp_path: Path) -> None:
    assert join_file.JoinFile.read(tmp_path) is None
    CONTENT.publish(tmp_path)
    found = join_file.JoinFile.read(tmp_path)
    assert found is not None and found == CONTENT
    own = {"node": 3, "process_id": 99, "runtime_dir": "", "forkserver_socket": ""}
    assert found.spec_of(3, 99) == dataclasses.replace(SPEC, **own)
    join_file.JoinFile.withdraw(tmp_path)
    join_file.JoinFile.withdraw(tmp_path)
    assert join_file.JoinFile.read(tmp_path) is None


def test_it_is_the_users_alone(tmp_path: Path) -> None:
    path = publish(tmp_path)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    path.chmod(0o640)
    with pytest.raises(ControlError, match="has mode 0640"):
        join_file.JoinFile.read(tmp_path)


def test_a_later_launcher_takes_the_place_of_one_that_died(tmp_path: Path) -> None:
    publish(tmp_path)
    dataclasses.replace(CONTENT, agent=dataclasses.replace(SPEC, token="another")).publish(tmp_path)
    found = join_file.JoinFile.read(tmp_path)
    assert found is not None and found.agent.token == "another"


@pytest.mark.parametrize("node", [-1, 4])
def test_a_number_that_the_job_does_not_have_is_refused(node: int) -> None:
    with pytest.raises(ControlError, match=f"node {node}: must be from 0 to 3, the numbers of the job's nodes"):
        CONTENT.spec_of(node, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nodes": "4"}, "num_nodes='4'"),
        ({"num_nodes": True}, "num_nodes=True"),
        ({"preload": "a"}, "preload='a'"),
        ({"preload": [1]}, r"preload\[0\]=1"),
        ({"more": 1}, "more: is not a field of JoinFile"),
        ({"agent": []}, r"agent=\[\]"),
        ({"agent__token": None}, "token=None"),
        ({"agent__more": 3}, "agent.more: is not a field of AgentSpec"),
        ({"agent__sidecars": {"keeper": 1}}, "agent.sidecars.keeper=1"),
        ({"agent__heartbeat_timeout_seconds": "10"}, "heartbeat_timeout_seconds='10'"),
        ({"agent__tls_dir": 1}, "tls_dir=1"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    publish(tmp_path, **changes)
    with pytest.raises(ControlError, match=f"join.json: damaged: .*{message}"):
        join_file.JoinFile.read(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[" * 5000, "\x00", '{"agent": {}}'])
def test_what_is_no_such_file_is_said_to_be_damaged(tmp_path: Path, content: str) -> None:
    publish(tmp_path).write_text(content)
    with pytest.raises(ControlError, match="join.json: damaged: "):
        join_file.JoinFile.read(tmp_path)


def test_no_more_is_read_than_it_may_have(tmp_path: Path) -> None:
    publish(tmp_path).write_text(" " * (MAX_BYTES + 1))
    with pytest.raises(ControlError, match=f"at most {MAX_BYTES} bytes"):
        join_file.JoinFile.read(tmp_path)
