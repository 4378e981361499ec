"""Starts jobs on this machine whose nodes have separate networks, so that a node can be disconnected while it lives.

Each node, and the imaginary machine of the launcher, is a network namespace. A bridge connects all namespaces. As in a
loss of power, other nodes receive no notice of a disconnected node. This module needs root and the program ``ip``.
"""

import contextlib
import dataclasses
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ft.config.job import JobConfig
from megatron_ft.control.launchers.base import ProcessLauncher, log_name
from megatron_ft.control.launchers.processes import tell
from megatron_ft.control.node.agent import AgentSpec
from megatron_ft.control.node.main import NodeSpec
from megatron_ft.testing.jobs import start, start_dummy_job

LAUNCHER = "megatron_ft.testing.network_nodes:NamespaceLauncher"
_NETWORK = "MFT_NETWORK"
_CABLE = "eth0"


def why_impossible() -> str | None:
    """Return why this machine cannot create network namespaces. Return None if it can."""
    if os.geteuid() != 0:
        return "needs root, to create network namespaces"
    return None if shutil.which("ip") else "needs the program ip; Debian: iproute2"


@dataclass(frozen=True, slots=True)
class Network:
    """Imaginary machines in one network: ``head``, on which the launcher runs, and the nodes, numbered from 0."""

    name: str
    number: int
    """Third number of all IP addresses of the network. Networks with different numbers can exist at the same time."""

    def address(self, machine: int | str) -> str:
        """Return the IP address of ``machine``: the number of a node, or ``head``."""
        return f"10.79.{self.number}.{1 if machine == 'head' else 10 + int(machine)}"

    def through(self, machine: int | str) -> list[str]:
        """Return the words to put before a command, so that it runs on ``machine`` (in its network namespace)."""
        return ["ip", "netns", "exec", f"{self.name}-{machine}"]

    def cut(self, machine: int | str) -> None:
        """Drop all packets to and from ``machine`` from now on."""
        _ip("link", "set", self._port(machine), "down")

    def mend(self, machine: int | str) -> None:
        """Connect ``machine`` again after ``cut``."""
        _ip("link", "set", self._port(machine), "up")

    def start_job(self, runs: Path, entry: str, overrides: Mapping[str, Any]) -> "subprocess.Popen[str]":
        """Start a job whose ranks have no model, as ``start_dummy_job`` does. The job's launcher runs on ``head``."""
        through, environment = self.through("head"), {_NETWORK: self.name}
        return start_dummy_job(
            runs, entry, overrides={**self._places, **overrides}, environment=environment, through=through
        )

    def start_training(self, runs: Path, overrides: Sequence[str]) -> "subprocess.Popen[str]":
        """Start a job through ``pretrain_moe.py``. The job's launcher runs on ``head``."""
        places = [f"{key}={value}" for key, value in self._places.items()]
        command = [*self.through("head"), sys.executable, "pretrain_moe.py", *overrides, *places, f"run.dir={runs}"]
        return start(command, environment={_NETWORK: self.name, "GLOO_SOCKET_IFNAME": _CABLE})

    @property
    def _places(self) -> dict[str, str]:
        return {"launch.node_launcher": LAUNCHER, "control.interface": self.address("head")}

    def _port(self, machine: int | str) -> str:
        return f"{self.name}{str(machine)[0]}"

    def _plug_in(self, machine: int | str) -> None:
        there = f"{self.name}-{machine}"
        _ip("netns", "add", there)
        _ip("link", "add", self._port(machine), "type", "veth", "peer", "name", _CABLE, "netns", there)
        _ip("link", "set", self._port(machine), "master", self.name, "up")
        _ip("-n", there, "link", "set", "lo", "up")
        _ip("-n", there, "addr", "add", f"{self.address(machine)}/24", "dev", _CABLE)
        _ip("-n", there, "link", "set", _CABLE, "up")

    def _remove(self, machine: int | str) -> None:
        there = f"{self.name}-{machine}"
        found = subprocess.run(["ip", "netns", "pids", there], capture_output=True, text=True, timeout=10, check=False)
        for process_id in found.stdout.split():
            # As long as a process is in the namespace, the namespace and its network interface remain.
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process_id), signal.SIGKILL)
        # Delete the interface first: ``netns del`` would also delete it, but only some time later.
        _ip("link", "del", self._port(machine))
        _ip("netns", "del", there)


@contextlib.contextmanager
def network(num_nodes: int) -> Iterator[Network]:
    """Create a network of ``head`` and ``num_nodes`` (at most 10) nodes. Remove the network after the block."""
    made = Network(f"mft{secrets.token_hex(3)}", secrets.randbelow(256))
    with contextlib.ExitStack() as ending:
        _ip("link", "add", made.name, "type", "bridge")
        ending.callback(_ip, "link", "del", made.name)
        _ip("link", "set", made.name, "up")
        for machine in ("head", *range(num_nodes)):
            ending.callback(made._remove, machine)
            made._plug_in(machine)
        yield made


class NamespaceLauncher(ProcessLauncher):
    """Starts each agent in the network namespace of its node."""

    def __init__(self, config: JobConfig, variables: Mapping[str, str]) -> None:
        super().__init__(config, variables)
        self._network = Network(variables[_NETWORK], 0)

    def start_process(self, node: int, spec: AgentSpec) -> "subprocess.Popen[bytes]":
        through, processes = self._network.through(node), self.context.processes
        started = processes.start("megatron_ft.control.node.main", [], log_name(node), {}, through=through)
        process: subprocess.Popen[bytes] = started
        agent = dataclasses.replace(spec, process_id=process.pid)
        tell(process, NodeSpec(agent=agent, preload=list(self.context.preload)).to_line())
        return process


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=10)
