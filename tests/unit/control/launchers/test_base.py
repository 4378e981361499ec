"""Tests how processes of a launcher are started and stopped."""

import queue
import subprocess
import sys
from pathlib import Path

from megatron_ft.config.job import JobConfig
from megatron_ft.control.launchers.base import LaunchContext, ProcessLauncher
from megatron_ft.control.launchers.processes import Processes
from megatron_ft.control.node.agent import AgentSpec

NUM_NODES = 3
_WAITS_FOR_OTHERS = """
import pathlib, signal, sys, time
folder, node, most = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
print("ready", flush=True)
while not asked:
    time.sleep(0.01)
(folder / f"asked-{node}").touch()
while len(list(folder.glob("asked-*"))) < most:
    time.sleep(0.01)
"""
"""Program that ends after SIGTERM only when all other processes have received the signal too."""


class Launcher(ProcessLauncher):
    term_seconds = 5.0

    def start_process(self, node: int, spec: AgentSpec) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", _WAITS_FOR_OTHERS, str(self.context.run_dir), str(node), str(NUM_NODES)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.stdout.close()
        return process


def test_nodes_are_stopped_together(tmp_path: Path) -> None:
    launcher = Launcher(JobConfig(), {})
    (tmp_path / "logs").mkdir()
    processes = Processes(tmp_path, tmp_path / "logs")
    spec = AgentSpec(controller_address="", token="", node=0, runtime_dir="", forkserver_socket="")
    launcher.publish(
        LaunchContext(run_dir=tmp_path, processes=processes, preload=[], most_nodes=NUM_NODES, num_returns=0), spec
    )
    ends: queue.SimpleQueue[str] = queue.SimpleQueue()
    for node in range(NUM_NODES):
        launcher.start(node, spec, lambda detail, _process_id: ends.put(detail))
    launcher.stop(0.0)
    assert [ends.get(timeout=20) for _ in range(NUM_NODES)] == ["its process ended"] * NUM_NODES, "none was killed"
