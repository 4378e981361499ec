"""Tests nodes that start by themselves: which job they join, when they return, when they end."""

import dataclasses
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_ft.control.controller.controller import Controller
from megatron_ft.control.membership.events import KillRequested
from megatron_ft.control.membership.state import Phase
from megatron_ft.control.node import join as join_main
from megatron_ft.control.node.agent import AgentSpec
from megatron_ft.control.node.join_file import JoinFile
from megatron_ft.control.rpc import RpcClient, RpcServer, new_token
from megatron_ft.control.slurm.attempts import RunAttempts
from megatron_ft.errors import ControlError
from megatron_ft.testing.slurm_cluster import wait_until
from tests.unit.control.controller.test_controller import ONE_NODE_IS_ENOUGH, launch_spec

JOB = "17"


class Console:
    """Controller that reports which nodes live, and the file that its launcher published."""

    def __init__(self, run_dir: Path, *, num_returns: int = 0, job_id: str = JOB) -> None:
        self.nodes: list[int] = []
        token = new_token()
        methods = {"status": lambda _request: {"nodes": {str(node): {} for node in self.nodes}}}
        self.server = RpcServer("Controller", methods, interface="127.0.0.1", token=token)
        self.server.start()
        self.content = content(run_dir, self.server.address, token, num_returns=num_returns, job_id=job_id)
        self.content.publish(run_dir)


def content(run_dir: Path, address: str, token: str, *, num_returns: int = 0, job_id: str = JOB) -> JoinFile:
    """Return the content of the published file."""
    (run_dir / "logs").mkdir(exist_ok=True)
    about: dict[str, Any] = {"node": 0, "runtime_dir": "", "forkserver_socket": "", "log_dir": str(run_dir / "logs")}
    spec = AgentSpec(controller_address=address, token=token, **about)
    return JoinFile(agent=spec, preload=[], job_id=job_id, num_nodes=2, num_returns=num_returns)


@dataclasses.dataclass
class Node:
    """Node 1, whose stays in jobs are scripted."""

    run_dir: Path
    monkeypatch: pytest.MonkeyPatch
    tokens: list[str] = dataclasses.field(default_factory=list)

    def run(self, *stays: Any, patience_seconds: float = 0.05) -> int:
        """Run the node. Each scripted stay is called, and its result is the exit code of the node's process."""
        following = iter(stays)

        def stay(_node: object, found: JoinFile, _processes: object) -> int:
            self.tokens.append(found.agent.token)
            return int(next(following)())

        self.monkeypatch.setattr(join_main._Node, "_stay", stay)
        self.monkeypatch.setattr(join_main, "_CHECK_SECONDS", 0.01)
        return join_main._Node(self.run_dir, 1, JOB, patience_seconds).run()

    def is_over(self, code: int = 0) -> int:
        """Let the job end during a stay."""
        RunAttempts(self.run_dir).leave_marker(JOB, exit_code=7, reason="because", is_final=True)
        return code


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Console]:
    with_server = Console(tmp_path, num_returns=2)
    yield with_server
    with_server.server.stop()


def test_it_stays_until_the_job_is_over(node: Node, launcher: Console) -> None:
    assert node.run(node.is_over) == 0
    assert node.tokens == [launcher.content.agent.token]
    assert node.run() == 0, "a spare that comes late goes at once"


def test_nobody_publishes_in_time(node: Node) -> None:
    with pytest.raises(ControlError, match=r"waited 0\.05 s \(--patience-seconds\) and found no launcher"):
        node.run()


def test_a_console_that_died_is_not_joined(node: Node, launcher: Console) -> None:
    launcher.server.stop()
    node.monkeypatch.setattr(join_main, "_ANSWER_SECONDS", 0.2)
    with pytest.raises(ControlError, match="no launcher"):
        node.run()
    assert node.tokens == []


def test_another_job_of_the_run_is_not_joined(node: Node, launcher: Console) -> None:
    dataclasses.replace(launcher.content, job_id="18").publish(node.run_dir)
    with pytest.raises(ControlError, match="no launcher"):
        node.run()


def test_the_place_of_a_process_that_lives_is_not_taken(node: Node, launcher: Console) -> None:
    launcher.nodes = [0, 1]
    with pytest.raises(ControlError, match="no launcher"):
        node.run()
    launcher.nodes = [0]
    assert node.run(node.is_over) == 0


def test_a_lost_node_comes_back_as_often_as_the_job_lets_it(node: Node, launcher: Console) -> None:
    def lost() -> int:
        return ControlError.exit_code

    with pytest.raises(
        ControlError, match=r"node 1 has returned as often as allowed \(2\) and does not join .*restart_lost_nodes"
    ):
        node.run(lost, lost, lost, lost)
    assert node.tokens == [launcher.content.agent.token] * 3


def test_another_console_counts_from_zero(node: Node, launcher: Console) -> None:
    following: list[Console] = []

    def lost() -> int:
        following.append(Console(node.run_dir))
        return ControlError.exit_code

    try:
        assert node.run(lost, node.is_over) == 0
    finally:
        following[0].server.stop()
    assert node.tokens == [launcher.content.agent.token, following[0].content.agent.token]


def test_a_console_that_has_ended_the_job_is_not_joined_again(node: Node, launcher: Console) -> None:
    with pytest.raises(ControlError, match="no launcher"):
        node.run(lambda: 0)
    assert node.tokens == [launcher.content.agent.token], "its marker is still to come"


def test_the_command_says_what_is_wrong_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "control").mkdir()
    path = tmp_path / "control" / "join.json"
    path.write_text("{")
    path.chmod(0o600)
    assert join_main.main([str(tmp_path), "--node=1", f"--job={JOB}"]) == ControlError.exit_code
    output = capsys.readouterr().err
    assert output.startswith(f"node 1: {path}: damaged: ") and output.count("\n") == 1


def test_what_cannot_be_read_ends_no_node_that_has_its_console(
    node: Node, launcher: Console, capsys: pytest.CaptureFixture[str]
) -> None:
    stays = join_main._Node(node.run_dir, 1, JOB, 0.0)
    path = node.run_dir / "control" / "join.json"
    path.chmod(0o644)
    assert [stays._check(launcher.content) for _ in range(3)] == [None] * 3
    assert capsys.readouterr().err.count("stays with its present launcher") == 1
    path.chmod(0o600)
    assert stays._check(launcher.content) is None
    dataclasses.replace(
        launcher.content, job_id="18", agent=dataclasses.replace(launcher.content.agent, token="t")
    ).publish(node.run_dir)
    assert stays._check(launcher.content) is None, "another job's"
    dataclasses.replace(launcher.content, agent=dataclasses.replace(launcher.content.agent, token="t")).publish(
        node.run_dir
    )
    assert stays._check(launcher.content) == "followed"
    node.is_over()
    assert stays._check(launcher.content) == "over"


def serve(token: str) -> tuple[Controller, threading.Thread]:
    """Serve as the controller of two nodes that start by themselves, in a thread."""
    policy = dataclasses.replace(ONE_NODE_IS_ENOUGH, num_nodes=2, min_nodes=2, ranks_per_node=1, starts_nodes=False)
    controller = Controller(
        policy, interface="127.0.0.1", token=token, launch_spec=launch_spec, record_decision=lambda _decision: None
    )
    thread = threading.Thread(target=controller.run, args=(lambda *_: None, lambda _step: None), daemon=True)
    thread.start()
    return controller, thread


def test_the_controller_goes_when_nodes_have_heard_the_end() -> None:
    token = new_token()
    controller, thread = serve(token)
    client = RpcClient(controller.address, "Controller", token=token)
    session = client.call("join", {"node": 1, "process_id": 5}, timeout_seconds=10)["session"]
    controller.post(KillRequested())
    wait_until("the job has ended", lambda: controller.state.phase is Phase.ENDED)
    thread.join(timeout=0.5)
    assert thread.is_alive()
    request = {"node": 1, "session": session, "after": 0, "wait_seconds": 1.0}
    assert [order["op"] for order in client.call("poll", request, timeout_seconds=10)["orders"]] == ["end"]
    thread.join(timeout=2.0)
    assert not thread.is_alive()
    client.close()
    controller.close()


@pytest.mark.timeout(120)
def test_its_processes_end_with_it_and_show_no_token(tmp_path: Path) -> None:
    token = new_token()
    controller, _ = serve(token)
    content(tmp_path, controller.address, token).publish(tmp_path)
    words = [sys.executable, "-m", "megatron_ft.control.node.join", str(tmp_path), "--node=1", f"--job={JOB}"]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL)
    started: list[psutil.Process] = []
    try:
        wait_until("the node has joined", lambda: controller.state.nodes.registered == {1})
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) == 2, "the agent and its fork server"
        for about in (psutil.Process(process.pid), *started):
            assert token not in " ".join([*about.cmdline(), *about.environ().values()])
        process.send_signal(signal.SIGKILL)
        process.wait()
        _, alive = psutil.wait_procs(started, timeout=30)
        assert alive == []
    finally:
        process.kill()
        process.wait()
        for left in started:
            if left.is_running():
                left.kill()
        controller.close()
