"""Protocol and common code of launchers, which start, watch and stop the agents of a job."""

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Protocol

from megatron_ft.config.job import JobConfig
from megatron_ft.control.launchers.processes import Processes, kill
from megatron_ft.control.membership.machine import describe_returncode
from megatron_ft.control.node.agent import AgentSpec
from megatron_ft.control.node.ranks import last_line, size_of
from megatron_ft.errors import ConfigError

OnEnd = Callable[[str, int], None]
"""Function that is called in a separate thread when an agent has ended. Its arguments are a description of the end and
the agent's process id."""

_KEY = "launch.node_launcher"
_PATHS = {
    "local": "megatron_ft.control.launchers.local:LocalLauncher",
    "srun": "megatron_ft.control.launchers.slurm:SlurmLauncher",
    "none": "megatron_ft.control.launchers.slurm_array:SlurmArrayLauncher",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchContext:
    """Properties of the job that a launcher needs."""

    run_dir: Path
    processes: Processes
    preload: Sequence[str]
    """Modules that fork servers import."""
    most_nodes: int
    """Largest number of nodes of the job; node numbers begin at 0."""
    num_returns: int
    """Largest number of times that each lost node may return to the job."""


class NodeLauncher(Protocol):
    """Starts, watches and stops the agents of one job. Only the main thread of the launcher's process calls it.

    The constructor takes ``JobConfig`` and the environment variables. It starts nothing, and raises ConfigError if the
    launcher cannot be used on this machine.
    """

    starts_nodes: ClassVar[bool]
    """Whether this launcher starts agents. If not, nodes start by themselves, and ``publish`` writes data for them."""
    is_local: ClassVar[bool]
    """Whether agents run on this machine and share its fork server."""

    @property
    def interface(self) -> str:
        """Return the address of this machine that the controller binds to."""

    def publish(self, context: LaunchContext, spec: AgentSpec) -> None:
        """Prepare the launcher for a job that has claimed its run folder. If nodes start by themselves, publish the
        data with which they join.

        Args:
            spec: spec of node 0. The spec of each further node differs in the node number and in values that only
                the machine of that node knows.
        """

    def start(self, node: int, spec: AgentSpec, on_end: OnEnd) -> None:
        """Start the agent of a node. If the node has an earlier agent, first end that agent and call its ``on_end``.

        Raises:
            OSError: the agent cannot be started.
        """

    def stop(self, patience_seconds: float) -> None:
        """Wait for agents to end, end those that still run, and remove what ``publish`` has published."""

    def finish(self, exit_code: int, reason: str, *, is_complete: bool) -> None:
        """Handle the job's result, e.g. inform the scheduler. ``is_complete``: no later job continues the run."""


def launcher_class(name: str) -> type[NodeLauncher]:
    """Return the class that ``launch.node_launcher`` names. Launchers of this package have short names; other launchers
    are named by ``module:Class``.

    Raises:
        ConfigError: the class does not exist.
    """
    module, _, attribute = _PATHS.get(name, name).partition(":")
    try:
        found: type[NodeLauncher] = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        constraint = f"must be one of {', '.join(_PATHS)}, or module:Class of a launcher that can be imported: {error}"
        raise ConfigError.of(_KEY, name, constraint) from None
    return found


def open_launcher(config: JobConfig, variables: Mapping[str, str]) -> NodeLauncher:
    """Make the launcher of a job.

    Raises:
        ConfigError: the launcher does not exist, or cannot be used here.
    """
    make: Callable[[JobConfig, Mapping[str, str]], NodeLauncher] = launcher_class(config.launch.node_launcher)
    return make(config, variables)


@dataclass
class _Node:
    process: "subprocess.Popen[bytes]"
    watcher: threading.Thread = field(default_factory=threading.Thread)


class ProcessLauncher:
    """Base of launchers that start processes on this machine: agents, or commands that run agents elsewhere."""

    starts_nodes: ClassVar[bool] = True
    is_local: ClassVar[bool] = False
    term_seconds: ClassVar[float] = 0.0
    """Seconds between SIGTERM and SIGKILL when a process is ended; 0 sends SIGKILL at once."""

    def __init__(self, config: JobConfig, variables: Mapping[str, str]) -> None:
        self._interface = config.control.interface
        self._nodes: dict[int, _Node] = {}
        self._context: LaunchContext | None = None

    @property
    def interface(self) -> str:
        return self._interface

    @property
    def context(self) -> LaunchContext:
        """Properties of the job, as given to ``publish``."""
        assert self._context is not None, "the launcher has no context before publish()"
        return self._context

    def publish(self, context: LaunchContext, spec: AgentSpec) -> None:
        self._context = context

    def start(self, node: int, spec: AgentSpec, on_end: OnEnd) -> None:
        if node in self._nodes:
            # The earlier agent may still live: a node also counts as lost when its agent is only cut off.
            kill(self._nodes[node].process, term_seconds=self.term_seconds)
            self._nodes[node].watcher.join()  # so its end is reported before the new agent can register
        log = self.context.processes.log_dir / log_name(node)
        log_begin_bytes = size_of(log)
        process = self.start_process(node, spec)
        watcher = threading.Thread(target=_watch, args=(process, log, log_begin_bytes, on_end), daemon=True)
        self._nodes[node] = _Node(process, watcher)
        watcher.start()

    def start_process(self, node: int, spec: AgentSpec) -> "subprocess.Popen[bytes]":
        """Start the process of a node; its output is appended to the log ``log_name``."""
        raise NotImplementedError

    def stop(self, patience_seconds: float) -> None:
        deadline = time.monotonic() + patience_seconds
        processes = [node.process for node in self._nodes.values()]
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
        # All processes are ended at the same time: a scheduler would not wait long enough to end many one by one.
        kill(*processes, term_seconds=self.term_seconds)

    def finish(self, exit_code: int, reason: str, *, is_complete: bool) -> None:
        """Do nothing, because no scheduler has to be informed."""


def log_name(node: int) -> str:
    """Return the name of the log of a node's process."""
    return f"node-{node:03d}.log"


def _watch(process: "subprocess.Popen[bytes]", log: Path, log_begin_bytes: int, on_end: OnEnd) -> None:
    returncode = process.wait()
    detail = f"its process {describe_returncode(returncode)}" if returncode else "its process ended"
    # Only a process that was not killed has written its reason to the log.
    last = last_line(log, log_begin_bytes) if returncode > 0 else ""
    on_end(detail + (f": {last}" if last else ""), process.pid)
