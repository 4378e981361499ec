"""``launch.mode=local``: the command a user typed becomes the job's console.

It claims the run folder, starts a fork server and one process per node, runs the controller, feeds the sinks, and
cleans up whatever happens.
"""

import contextlib
import functools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import megatron_ft
from megatron_ft import failpoints
from megatron_ft.config.job import JobConfig
from megatron_ft.config.launch import LaunchConfig
from megatron_ft.config.serialize import to_dict
from megatron_ft.control import facts, report
from megatron_ft.control.agent import AgentSpec
from megatron_ft.control.controller import Controller, JobEnd
from megatron_ft.control.forkserver import SINGLE_THREAD_ENVIRONMENT
from megatron_ft.control.membership import describe_returncode
from megatron_ft.control.membership_state import Decision, MembershipPolicy, Outcome, Phase, Step
from megatron_ft.control.ranks import tail_of
from megatron_ft.control.rpc import check_interface, new_token
from megatron_ft.control.rundir import RunDir, claim, has_state
from megatron_ft.control.services import STOP_SECONDS
from megatron_ft.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, ControlError, RankFailed
from megatron_ft.events import StopRequested
from megatron_ft.framing import Message

RANK_ENTRY = "megatron_ft.mcore.loop.main:run_rank"
PRELOAD = ("megatron_ft.mcore.loop.main:warm",)
_CLEANUP_SECONDS = 5.0
_PORTS = range(20000, 32000)
_PORT_TRIES = 100


class Sinks(Protocol):
    """What takes records; ``megatron_ft.telemetry.SinkSet`` is one."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record."""

    def close(self, exit_code: int, reason: str) -> None:
        """The run has ended."""


class OpenSinks(Protocol):
    """Opens the sinks of a run; ``megatron_ft.telemetry.open_sinks`` is one."""

    def __call__(self, config: JobConfig, run_dir: Path, *, world_size: int) -> Sinks:
        """Open them."""


@dataclass
class _Processes:
    """What the console started."""

    runtime_dir: Path
    log_dir: Path
    nodes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    forkserver: subprocess.Popen[bytes] | None = None

    def start(self, module: str, arguments: Sequence[str], log: str, environment: Mapping[str, str]) -> Any:
        """Start ``python -m module`` in a session of its own; its standard input is its lifeline."""
        with (self.log_dir / log).open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=_environment(environment),
                start_new_session=True,
            )


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, with this project importable."""
    root = str(Path(megatron_ft.__file__).resolve().parent.parent)
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, **extra, "PYTHONPATH": path}


def launch(
    config: JobConfig,
    config_yaml: str,
    *,
    open_sinks: OpenSinks,
    entry: str = RANK_ENTRY,
    preload: Sequence[str] = PRELOAD,
    command: Sequence[str] | None = None,
    services: Mapping[str, str] | None = None,
) -> int:
    """Run the job on this machine; its exit code (``errors.EXIT_CODES``).

    Args:
        config_yaml: the resolved configuration, kept in the run folder.
        entry: ``package.module:function`` called in each rank with ``(JobConfig, RankContext)``.
        preload: modules imported (``module:function``: called) before ranks are forked.
        command: how the user started the job, for the advice how to resume; default: as this process was.
        services: name to module of processes that every node has beside its ranks, see ``control/services.py``.

    Raises:
        ConfigError: the run folder or the interface cannot be used. Nothing was started.
    """
    _check_places(config.launch)
    run_dir = claim(config.run, model_name=config.model.name, config_yaml=config_yaml)
    try:
        world_size = config.launch.num_nodes * config.launch.ranks_per_node
        sinks = open_sinks(config, run_dir.path, world_size=world_size)
        job = _Job(config, run_dir, sinks, preload, entry, dict(services or {}))
        exit_code, reason = ControlError.exit_code, "the launcher failed"
        try:
            end = job.run()
            exit_code, reason = job.exit_code(end), end.reason
        finally:
            sinks.close(exit_code, reason)
        job.tell(end, exit_code, [sys.executable, *sys.argv] if command is None else command)
        return exit_code
    finally:
        run_dir.release()


def _check_places(config: LaunchConfig) -> None:
    """Refuse addresses and sockets that cannot work."""
    check_interface(config.interface)
    free_port(config.interface)
    path = config.forkserver_socket
    if path is not None and not Path(path).is_socket():
        raise ConfigError.of("launch.forkserver_socket", path, "must be the socket of a running fork server")


def start_order(config: JobConfig, run_dir: RunDir, entry: str, generation: int) -> Message:
    """What every rank that starts in a generation is told. Ranks started again continue the run."""
    resume_from = run_dir.resume_from if generation == 0 else run_dir.path / "checkpoints"
    return {
        "entry": entry,
        "config": to_dict(config),
        "run_dir": str(run_dir.path),
        "resume_from": None if resume_from is None else str(resume_from),
        "working_dir": os.getcwd(),
        "world_size": config.launch.num_nodes * config.launch.ranks_per_node,
        "num_nodes": config.launch.num_nodes,
        "can_survive": config.launch.may_lose_nodes,
        "master_addr": config.launch.interface,
        "master_port": config.launch.master_port or free_port(config.launch.interface),
    }


class _Job:
    def __init__(
        self,
        config: JobConfig,
        run_dir: RunDir,
        sinks: Sinks,
        preload: Sequence[str],
        entry: str,
        services: dict[str, str],
    ) -> None:
        self._config = config.launch
        self._run_dir = run_dir
        self._sinks = sinks
        self._preload = preload
        self._services = services
        self._num_interrupts = 0
        self._interrupted_by = ""
        self._run_finished = False
        self._policy = MembershipPolicy(
            num_nodes=config.launch.num_nodes,
            ranks_per_node=config.launch.ranks_per_node,
            start_timeout_seconds=config.launch.start_timeout_seconds,
            stop_timeout_seconds=config.launch.stop_timeout_seconds,
            max_restarts=config.launch.max_restarts,
            min_nodes=config.launch.min_nodes,
            reform_timeout_seconds=config.launch.reform_timeout_seconds,
        )
        self._token = new_token()
        self._controller = Controller(
            self._policy,
            interface=config.launch.interface,
            token=self._token,
            start_order=functools.partial(start_order, config, run_dir, entry),
            record_decision=failpoints.append_to(run_dir.path / "decisions.jsonl"),
        )

    def run(self) -> JobEnd:
        """Start everything, serve until the job ends, leave nothing behind."""
        with _runtime_dir() as runtime_dir, self._signals():
            processes = _Processes(runtime_dir, self._run_dir.path / "logs")
            try:
                self._start_processes(processes)
                return self._controller.run(self._on_record, self._on_step)
            finally:
                self._clean_up(processes)

    def _start_processes(self, processes: _Processes) -> None:
        socket_path = self._config.forkserver_socket
        if socket_path is None:
            socket_path = str(processes.runtime_dir / "forkserver.sock")
            arguments = ["--socket", socket_path, "--preload", *self._preload]
            environment = SINGLE_THREAD_ENVIRONMENT
            processes.forkserver = processes.start(
                "megatron_ft.control.forkserver", arguments, "forkserver.log", environment
            )
        for node in range(self._policy.num_nodes):
            process = processes.start("megatron_ft.control.agent", [], f"node-{node:03d}.log", {})
            processes.nodes[node] = process
            spec = AgentSpec(
                controller_address=self._controller.address,
                token=self._token,
                node=node,
                runtime_dir=str(processes.runtime_dir),
                forkserver_socket=socket_path,
                services=self._services,
                interface=self._config.interface,
                log_dir=str(processes.log_dir),
            )
            with contextlib.suppress(BrokenPipeError):  # it has died; its watcher says so
                process.stdin.write(spec.to_line())
                process.stdin.flush()
            threading.Thread(target=self._watch, args=(node, process), daemon=True).start()

    def _watch(self, node: int, process: "subprocess.Popen[bytes]") -> None:
        """Thread: a node's process ends."""
        returncode = process.wait()
        detail = f"its process {describe_returncode(returncode)}" if returncode else "its process ended"
        self._controller.post(facts.NodeLost(node, time.time(), detail))

    def _on_record(self, record: Message) -> None:
        self._run_finished = self._run_finished or record.get("kind") == "run_finished"
        self._sinks.write(record)

    def _on_step(self, step: Step) -> None:
        if step.decision is Decision.STOP and not step.state.failures:
            self._sinks.write(StopRequested(source=self._interrupted_by).to_record())
        if step.decision is Decision.RESTART:
            for event in report.restart_records(step, self._controller.details, self._policy):
                self._sinks.write(event.to_record())
        if step.decision is Decision.REFORM:
            for event in report.lost_records(step, self._controller.details, self._policy):
                self._sinks.write(event.to_record())

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """First Ctrl-C, SIGTERM or SIGHUP: stop after the iteration; second: end at once."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._interrupt) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _interrupt(self, number: int, _frame: FrameType | None) -> None:
        self._num_interrupts += 1
        self._interrupted_by = signal.Signals(number).name
        first = self._num_interrupts == 1
        self._controller.post(facts.StopRequested() if first else facts.KillRequested())

    def _clean_up(self, processes: _Processes) -> None:
        """End every process: nodes first (they have been told), then the fork server and ranks with it."""
        self._wait_or_kill(list(processes.nodes.values()))
        self._controller.close()
        if processes.forkserver is not None:
            processes.forkserver.stdin.close()  # type: ignore[union-attr]
            self._wait_or_kill([processes.forkserver])

    def _wait_or_kill(self, started: Sequence["subprocess.Popen[bytes]"]) -> None:
        ended_normally = self._controller.state.phase is Phase.ENDED
        patience_seconds = _CLEANUP_SECONDS + (STOP_SECONDS if self._services else 0.0)
        deadline = time.monotonic() + (patience_seconds if ended_normally else 0.5)
        for process in started:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()

    def exit_code(self, end: JobEnd) -> int:
        """The job's exit code; records of failed ranks go to the sinks."""
        if end.outcome is Outcome.FAILED:
            for event in report.failed_records(end, self._policy):
                self._sinks.write(event.to_record())
        return exit_code_of(end, run_finished=self._run_finished)

    def tell(self, end: JobEnd, exit_code: int, command: Sequence[str]) -> None:
        """Print what the user has to know, on standard error."""
        if exit_code == EXIT_OK:
            return
        run_dir = self._run_dir.path
        has_checkpoint = has_state(run_dir)
        resume = report.resume_advice(command, run_dir, has_checkpoint=has_checkpoint)
        if end.outcome is Outcome.FAILED:
            print(report.failure_screen(end, run_dir, resume, self._node_log(end)), file=sys.stderr, flush=True)
        else:
            print(f"Stopped by {self._interrupted_by}.\n{resume}", file=sys.stderr, flush=True)

    def _node_log(self, end: JobEnd) -> str:
        logs = self._run_dir.path / "logs"
        node = end.first_failure.node if end.first_failure else None
        names = ["forkserver.log"]
        if node is not None:
            own = f"node-{node:03d}"
            names = [f"{own}.log", *(f"{own}-{service}.log" for service in self._services), *names]
        return "\n".join(f"{name}:\n{tail_of(logs / name)}" for name in names if (logs / name).exists())


def exit_code_of(end: JobEnd, *, run_finished: bool) -> int:
    """Exit code for the end of a job.

    The code of the first failure is passed on when it is an error of this project's own. A stop request that came
    when the run had finished changes nothing.
    """
    if end.outcome is Outcome.FINISHED or (end.outcome is Outcome.INTERRUPTED and run_finished):
        return EXIT_OK
    if end.outcome is Outcome.INTERRUPTED:
        return EXIT_INTERRUPTED
    first = end.first_failure
    if first is None or first.rank is None:
        return ControlError.exit_code
    own_code = end.details.get(first.rank, {}).get("exit_code")
    return RankFailed.exit_code if own_code is None else int(own_code)


def free_port(interface: str) -> int:
    """A port nobody uses on ``interface`` right now, from a range that systems do not hand out by themselves.

    The port is bound again later by whoever serves it; outside the ephemeral range no outgoing connection takes it
    in between.

    Raises:
        ConfigError: the address is none of this machine.
    """
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((interface.strip("[]"), 0))
        except OSError as error:
            raise ConfigError.of(
                "launch.interface", interface, f"must be an address of this machine: {error}"
            ) from None
    for port in random.SystemRandom().sample(_PORTS, _PORT_TRIES):
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((interface.strip("[]"), port))
            return port
    raise ControlError(f"no free port on {interface} after {_PORT_TRIES} tries between {_PORTS[0]} and {_PORTS[-1]}")


@contextlib.contextmanager
def _runtime_dir() -> Iterator[Path]:
    """A directory of mode 0700 for sockets, short enough for their 108 bytes."""
    path = Path(tempfile.mkdtemp(prefix="megatron-ft-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
