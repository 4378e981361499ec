"""Tests what every launcher does with agents. Each launcher is one row; one of them is not part of the package."""

import os
import queue
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_ft.config.checks.launch import _check_launch
from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import from_dict
from megatron_ft.control.launcher import launch
from megatron_ft.control.launchers.base import LaunchContext, NodeLauncher, launcher_class, open_launcher
from megatron_ft.control.launchers.processes import Processes
from megatron_ft.control.node import join_file
from megatron_ft.control.node.agent import AgentSpec
from megatron_ft.control.node.fork_server import listen
from megatron_ft.errors import ConfigError
from tests.helpers.keys import grouped

OUTSIDE = Path(__file__).parents[1] / "helpers" / "wrapped_launcher.yaml"
SRUN = '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n'
ALLOCATION = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[0-1]"}
ARRAY = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_COUNT": "2"}
ARRAY |= {"SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_MAX": "1"}

ROWS: list[tuple[str, Mapping[str, str]]] = [
    ("local", {}),
    ("srun", ALLOCATION),
    ("none", ARRAY),
    (yaml.safe_load(OUTSIDE.read_text())["node_launcher"], {}),
]


class Job:
    """One launcher, the inputs that a job gives it, and the ends of agents that it has reported."""

    def __init__(self, name: str, variables: Mapping[str, str], folder: Path) -> None:
        config = from_dict(grouped(node_launcher=name, num_nodes=2, interface="10.0.0.7"))
        _check_launch(config)
        self.launcher: NodeLauncher = open_launcher(config, variables)
        (folder / "logs").mkdir()
        self.run_dir, self.socket = folder, folder / "forkserver.sock"
        self.listener = listen(self.socket)
        self.ends: queue.SimpleQueue[tuple[int, str, int]] = queue.SimpleQueue()
        context = LaunchContext(
            run_dir=folder, processes=Processes(folder, folder / "logs"), preload=[], most_nodes=2, num_returns=0
        )
        self.launcher.publish(context, self.spec(0))

    def spec(self, node: int) -> AgentSpec:
        """Return the spec of an agent that waits for a controller which never answers."""
        return AgentSpec(
            controller_address="127.0.0.1:9",
            token="secret",
            node=node,
            runtime_dir=str(self.run_dir),
            forkserver_socket=str(self.socket),
            log_dir=str(self.run_dir / "logs"),
        )

    def on_end(self, node: int) -> Callable[[str, int], None]:
        """Store the reported end of an agent."""
        return lambda detail, process_id: self.ends.put((node, detail, process_id))

    def start(self, node: int) -> None:
        """Start an agent."""
        self.launcher.start(node, self.spec(node), self.on_end(node))


@pytest.fixture(params=ROWS, ids=[name for name, _ in ROWS])
def job(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Yield a job with one launcher. A program on this machine replaces ``srun`` and runs its command."""
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    made = Job(*request.param, tmp_path)
    request.addfinalizer(lambda: made.launcher.stop(0.0))
    request.addfinalizer(made.listener.close)
    return made


def test_its_agents_are_started_watched_and_stopped(job: Job) -> None:
    before = set(psutil.Process().children())
    for node in (0, 1):
        job.start(node)
    started = set(psutil.Process().children()) - before
    if not job.launcher.starts_nodes:
        assert started == set()
        assert join_file.JoinFile.read(job.run_dir) is not None, "nodes that come by themselves find what they need"
        job.launcher.stop(0.0)
        assert join_file.JoinFile.read(job.run_dir) is None
        return
    assert len(started) == 2
    victim = next(iter(started))
    os.killpg(victim.pid, signal.SIGKILL)
    node, detail, process_id = job.ends.get(timeout=20)
    assert (detail, process_id) == ("its process was killed by SIGKILL", victim.pid)
    job.start(1 - node)
    assert job.ends.get(timeout=20)[0] == 1 - node, "the agent that the node had before has ended first"
    job.launcher.stop(0.0)
    assert set(psutil.Process().children()) - before == set(), "an agent is left behind"


def test_the_controller_binds_to_its_interface(job: Job) -> None:
    assert job.launcher.interface == "10.0.0.7"


@pytest.mark.parametrize("name", ["tests.helpers.wrapped_launcher:Other", "no.such.module:Launcher", "pathlib"])
def test_a_launcher_that_does_not_exist_is_refused_by_its_key(name: str) -> None:
    with pytest.raises(ConfigError, match="launch.node_launcher="):
        launcher_class(name)


def test_a_fork_server_of_this_machine_is_refused_where_nodes_are_elsewhere(tmp_path: Path) -> None:
    """A launcher that is not part of the package is checked at the start of the job, because only its class knows where
    nodes run."""
    config = JobConfig()
    config.run.dir = str(tmp_path / "runs")
    config.launch.node_launcher = "megatron_ft.control.launchers.base:ProcessLauncher"
    config.launch.forkserver_socket = str(tmp_path / "warm.sock")
    _check_launch(config)
    with pytest.raises(ConfigError, match=r"launch\.forkserver_socket=.*must be null .* other machines"):
        launch(config, "", open_sinks=lambda *_, **__: pytest.fail("the job was started"))
    assert not (tmp_path / "runs").exists()
