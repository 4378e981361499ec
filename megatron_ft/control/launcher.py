"""The launcher of ``launch.mode=local``, which runs in the process of the user's command.

The launcher claims the run folder, starts the controller, a fork server and one agent per node, and passes records to
the sinks. When the job ends, the launcher ends all these processes. The ``NodeLauncher`` of ``launch.node_launcher``
decides where and how agents start.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from megatron_ft.config.findings import Check, Findings
from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import to_dict
from megatron_ft.control import report
from megatron_ft.control.admin import CONTROLLER_FILE
from megatron_ft.control.certificates import Certificates
from megatron_ft.control.controller.link import ControllerLink
from megatron_ft.control.controller.main import FOLDER, JOURNAL, ControllerSpec
from megatron_ft.control.detector import DetectorPolicy
from megatron_ft.control.launchers.base import LaunchContext, NodeLauncher, launcher_class, open_launcher
from megatron_ft.control.launchers.processes import Processes, kill, tell
from megatron_ft.control.membership import events
from megatron_ft.control.membership.state import MembershipPolicy, Outcome
from megatron_ft.control.node.agent import AgentSpec
from megatron_ft.control.node.fork_server import SINGLE_THREAD_ENVIRONMENT
from megatron_ft.control.node.kept import KeptServers
from megatron_ft.control.node.ranks import tail_of
from megatron_ft.control.node.sidecars import STOP_SECONDS
from megatron_ft.control.ports import free_port
from megatron_ft.control.report import JobResult
from megatron_ft.control.rpc import check_interface, join_address, new_token
from megatron_ft.control.rundir import RunDir, RunId, check_claim, has_complete_state
from megatron_ft.control.runtime_dir import make_runtime_dir
from megatron_ft.durable import replace_file
from megatron_ft.errors import EXIT_INTERRUPTED, EXIT_OK, FINAL_EXIT_CODES, ConfigError, ControlError, RankFailed
from megatron_ft.events import ControllerGoesOn, ControllerReplaced, ControllerWaits, RunFolderMissing, StopRequested
from megatron_ft.framing import Message

RANK_ENTRY = "megatron_ft.mcore.rank_main:run_rank"
SCHEDULED_RANK_ENTRY = "megatron_ft.testing.scheduled_ranks:run_rank"
"""Function that each rank runs instead of ``RANK_ENTRY`` if ``testing.membership_schedule`` is set."""
PRELOAD = ("megatron_ft.mcore.rank_main:warm",)
PRELOAD_ON_CUDA = ("megatron_ft.mcore.rank_main:warm_cuda",)
_CLEANUP_SECONDS = 5.0


class _Sinks(Protocol):
    """Protocol of a destination of records, such as ``megatron_ft.telemetry.SinkSet``."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one record to the destination."""

    def close(self, exit_code: int, reason: str, *, is_complete: bool) -> None:
        """Close the destination after the run's last record."""


class _OpenSinks(Protocol):
    """Protocol of functions that open the sinks of a run, such as ``megatron_ft.telemetry.open_sinks``."""

    def __call__(self, config: JobConfig, run_dir: Path, *, world_size: int) -> _Sinks:
        """Open the sinks."""


def launch(
    config: JobConfig,
    config_yaml: str,
    *,
    open_sinks: _OpenSinks,
    entry: str | None = None,
    preload: Sequence[str] | None = None,
    command: Sequence[str] | None = None,
    sidecars: Mapping[str, str] | None = None,
) -> int:
    """Run the job and return its exit code (``errors.EXIT_CODES``).

    Args:
        config_yaml: the resolved configuration, which is stored in the run folder.
        entry: ``package.module:function`` called in each rank with ``(JobConfig, RankContext)``; returns whether the
            run is complete. Default: the entry that trains the model.
        preload: modules to import, or ``module:function`` to call, before ranks are forked; default: depends on device.
        command: the user's command, shown in the advice on how to resume; default: the command of this process.
        sidecars: maps the name of each sidecar (a process that every node runs beside its ranks) to its module.

    Raises:
        ConfigError: the run folder, the interface or the launcher cannot be used. Nothing was started.
    """
    if entry is None:
        entry = SCHEDULED_RANK_ENTRY if config.testing.membership_schedule else RANK_ENTRY
    if preload is None:
        preload = PRELOAD_ON_CUDA if config.training.device == "cuda" else PRELOAD
    # The checks that can refuse the job come before the run has a folder.
    launcher = open_launcher(config, os.environ)
    config = dataclasses.replace(config, control=dataclasses.replace(config.control, interface=launcher.interface))
    for check in _PLACES:
        check(config)
    run_dir = RunDir.claim(
        config.run,
        model_name=config.model.name,
        config_yaml=config_yaml,
        may_be_in_memory=config.snapshot.outlive_job_seconds > 0,
        keeps_config=config.training.evaluate_only,
    )
    try:
        world_size = config.launch.num_nodes * config.launch.ranks_per_node
        sinks = open_sinks(config, run_dir.path, world_size=world_size)
        job = _Job(config, run_dir, sinks, preload, entry, dict(sidecars or {}), launcher)
        exit_code, reason, is_complete = ControlError.exit_code, "the launcher failed", False
        try:
            with run_dir.watched(lambda: sinks.write(RunFolderMissing(path=str(run_dir.path)).to_record())):
                result = job.run()
            exit_code, reason, is_complete = job.exit_code(result), result.reason, result.is_complete
        except (OSError, ControlError) as error:
            reason = f"the launcher failed: {error}"
            raise ControlError(reason) from error
        finally:
            # All records must be written before ``finish``, which may write the marker that ends the scheduler's tasks.
            sinks.close(exit_code, reason, is_complete=is_complete)
        launcher.finish(exit_code, reason, is_complete=is_complete)
        job.print_result(result, exit_code, [sys.executable, *sys.argv] if command is None else command)
        return exit_code
    finally:
        run_dir.release()


def check_start(config: JobConfig, found: Findings) -> None:
    """Check what ``launch`` needs on this machine. Nothing is created or started; errors are added to ``found``."""
    checks = _PLACES
    try:
        interface = open_launcher(config, os.environ).interface
        config = dataclasses.replace(config, control=dataclasses.replace(config.control, interface=interface))
    except ConfigError as error:
        found.add(error, at_fault=())
        checks = _PLACES[1:]  # only the launcher knows the address that the check of the interface needs
    for check in checks:
        with found.collecting(at_fault=()):
            check(config)
    with found.collecting(at_fault=()):
        check_claim(config.run, may_be_in_memory=config.snapshot.outlive_job_seconds > 0)


def _check_interface(config: JobConfig) -> None:
    check_interface(config.control.interface)
    free_port(config.control.interface)


def _check_socket(config: JobConfig) -> None:
    path, other = config.launch.forkserver_socket, config.launch.node_launcher
    if path is not None and not launcher_class(other).is_local:
        constraint = f"must be null with launch.node_launcher={other}: its nodes run on other machines"
        raise ConfigError.of("launch.forkserver_socket", path, constraint)
    if path is not None and not Path(path).is_socket():
        raise ConfigError.of("launch.forkserver_socket", path, "must be the socket of a running fork server")


_PLACES: tuple[Check, ...] = (
    _check_interface,
    lambda config: Certificates.read(config.control.tls_dir),
    _check_socket,
)
"""Functions that check the interface, the certificates and the fork server's socket, in this order. The first function
needs an address that only the ``NodeLauncher`` knows."""


class _Job:
    def __init__(
        self,
        config: JobConfig,
        run_dir: RunDir,
        sinks: _Sinks,
        preload: Sequence[str],
        entry: str,
        sidecars: dict[str, str],
        launcher: NodeLauncher,
    ) -> None:
        self._run_dir = run_dir
        self._sinks = sinks
        self._preload = preload
        self._entry, self._sidecars = entry, sidecars
        self._num_interrupts = 0
        self._interrupted_by = ""
        self._faults = report.InjectedFaults()
        self._has_ended = False
        self._policy = MembershipPolicy.of(config, starts_nodes=launcher.starts_nodes)
        self._detection = DetectorPolicy(**dataclasses.asdict(config.detector))
        self._token = new_token()
        self._port = free_port(config.control.interface)
        self._job = config
        self._kept_servers = _kept_servers(config, run_dir.path) if sidecars else None
        self._launcher = launcher
        self._fork_server: subprocess.Popen[bytes] | None = None

    def run(self) -> JobResult:
        """Start all processes, serve until the job ends, and end all processes."""
        with make_runtime_dir() as runtime_dir:
            processes = Processes(runtime_dir, self._run_dir.path / "logs")
            self._controller = self._link(processes)
            with self._signals(), self._clock():
                try:
                    return self._serve(processes)
                finally:
                    self._clean_up()

    def _serve(self, processes: Processes) -> JobResult:
        # Controller and fork server start at the same time, because the fork server needs seconds to import torch.
        self._controller.begin()
        self._start_fork_server(processes)
        policy = self._policy
        context = LaunchContext(
            run_dir=self._run_dir.path,
            processes=processes,
            preload=self._preload,
            most_nodes=policy.most_nodes,
            num_returns=policy.max_node_restarts if policy.restart_lost_nodes else 0,
        )
        # This precedes the first start: ``start`` needs the context, and nodes that start by themselves need the spec.
        self._launcher.publish(context, self._agent_spec(processes, 0))
        for node in range(policy.num_nodes + policy.num_spare_nodes):
            self._launcher.start(node, self._agent_spec(processes, node), self._on_end(node))
        result = self._controller.run(self._on_record, functools.partial(self._on_event, processes))
        self._has_ended = True
        return result

    def _link(self, processes: Processes) -> ControllerLink:
        run_dir, resume_from = self._run_dir.path, self._run_dir.resume_from
        # A journal belongs to one job. The file ``epoch`` stays, because epochs must rise over all jobs of the run.
        (run_dir / FOLDER / JOURNAL).unlink(missing_ok=True)

        def start(launcher: socket.socket) -> "subprocess.Popen[bytes]":
            spec = ControllerSpec(
                config=to_dict(self._job),
                run_dir=str(run_dir),
                resume_from=None if resume_from is None else str(resume_from),
                entry=self._entry,
                working_dir=os.getcwd(),
                token=self._token,
                launcher_descriptor=launcher.fileno(),
                port=self._port,
                runtime_dir=str(processes.runtime_dir),
            )
            module, kept = "megatron_ft.control.controller.main", (launcher.fileno(),)
            process: subprocess.Popen[bytes] = processes.start(module, [], "controller.log", {}, descriptors=kept)
            tell(process, spec.to_line())
            return process

        return ControllerLink(
            start,
            access_path=run_dir / CONTROLLER_FILE,
            access={"token": self._token, "tls_dir": self._job.control.tls_dir},
            silence_seconds=self._detection.heartbeat_timeout_seconds,
            log=processes.log_dir / "controller.log",
        )

    def _start_fork_server(self, processes: Processes) -> None:
        if self._launcher.is_local and self._job.launch.forkserver_socket is None:
            arguments = ["--socket", str(processes.forkserver_socket), "--preload", *self._preload]
            module = "megatron_ft.control.node.fork_server"
            self._fork_server = processes.start(module, arguments, "forkserver.log", SINGLE_THREAD_ENVIRONMENT)

    def _on_end(self, node: int) -> Callable[[str, int], None]:
        return lambda detail, process_id: self._controller.post(events.NodeLost(node, time.time(), detail, process_id))

    def _start_again(self, processes: Processes, node: int) -> None:
        # Start an agent while the job runs. If this fails, the node counts as lost, and the job continues.
        try:
            self._launcher.start(node, self._agent_spec(processes, node), self._on_end(node))
        except OSError as error:
            detail = f"its process could not be started: {error}"
            self._controller.post(events.NodeLost(node, time.time(), detail))

    def _agent_spec(self, processes: Processes, node: int) -> AgentSpec:
        return AgentSpec(
            controller_address=join_address(self._job.control.interface, self._port),
            token=self._token,
            node=node,
            runtime_dir=str(processes.runtime_dir),
            forkserver_socket=self._job.launch.forkserver_socket or str(processes.forkserver_socket),
            sidecars=self._sidecars,
            kept_servers=self._kept_servers,
            interface=self._job.control.interface,
            log_dir=str(processes.log_dir),
            tls_dir=self._job.control.tls_dir,
            heartbeat_interval_seconds=self._detection.heartbeat_interval_seconds,
            heartbeat_timeout_seconds=self._detection.heartbeat_timeout_seconds,
            lost_controller_seconds=self._detection.lost_controller_seconds,
            # Nodes on the controller's machine cannot vanish without the controller.
            answers_presence=not self._launcher.is_local and self._detection.vanished_seconds is not None,
        )

    def _on_record(self, record: Message) -> None:
        if self._faults.is_news(record):
            self._sinks.write(record)

    def _on_event(self, processes: Processes, event: Message) -> None:
        match event["event"]:
            case "stopping":
                self._sinks.write(StopRequested(source=self._interrupted_by).to_record())
            case "record":
                self._sinks.write(event["record"])
            case "start_agents":
                for node in event["nodes"]:
                    self._start_again(processes, node)
            case "waits":
                self._sinks.write(ControllerWaits(problem=event["problem"]).to_record())
            case "goes_on":
                self._sinks.write(ControllerGoesOn(seconds=event["seconds"]).to_record())
            case "replaced":
                self._sinks.write(ControllerReplaced(reason=event["reason"]).to_record())

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        # The first Ctrl-C, SIGTERM or SIGHUP stops the job after the iteration; the second one ends it at once.
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._interrupt) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def _clock(self) -> Iterator[None]:
        # Stops the job as a signal does when ``training.exit_after_minutes`` have passed.
        minutes = self._job.training.exit_after_minutes
        if minutes is None:
            yield
            return
        timer = threading.Timer(minutes * 60, self._exit_after, [f"training.exit_after_minutes={minutes:g}"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _exit_after(self, source: str) -> None:
        # A signal after this request ends the job at once. A signal during this method may only repeat the request.
        if self._num_interrupts == 0:
            self._num_interrupts, self._interrupted_by = 1, source
            self._controller.post(events.StopRequested())

    def _interrupt(self, number: int, _frame: FrameType | None) -> None:
        # The handler only posts an event, because it may interrupt the main loop at any instruction.
        self._num_interrupts += 1
        self._interrupted_by = signal.Signals(number).name
        self._controller.post(events.StopRequested() if self._num_interrupts == 1 else events.KillRequested())

    def _clean_up(self) -> None:
        # End every process: first the agents, which obey the controller's order to end, then the fork server and ranks.
        patience_seconds = _CLEANUP_SECONDS + (STOP_SECONDS if self._sidecars else 0.0)
        # Without the controller's order to end, no agent ends by itself soon, so a long wait would be useless.
        patience_seconds = patience_seconds if self._has_ended else 0.5
        self._launcher.stop(patience_seconds)
        self._controller.close()
        if self._fork_server is not None:
            self._fork_server.stdin.close()  # type: ignore[union-attr]
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._fork_server.wait(timeout=patience_seconds)
            kill(self._fork_server)

    def exit_code(self, result: JobResult) -> int:
        """Return the job's exit code, and write records of failed ranks to the sinks."""
        if result.outcome is Outcome.FAILED:
            for event in report.end_records(result, self._policy):
                self._sinks.write(event.to_record())
        return _exit_code_of(result)

    def print_result(self, result: JobResult, exit_code: int, command: Sequence[str]) -> None:
        """Print the result for the user on standard error."""
        if exit_code == EXIT_OK:
            return
        run_dir = self._run_dir.path
        has_checkpoint = has_complete_state(run_dir)
        fails_again = result.outcome is Outcome.FAILED and exit_code in FINAL_EXIT_CODES
        resume = report.resume_advice(command, run_dir, has_checkpoint=has_checkpoint, fails_again=fails_again)
        if result.outcome is Outcome.FAILED:
            print(report.failure_screen(result, run_dir, resume, self._node_log(result)), file=sys.stderr, flush=True)
        else:
            print(f"Stopped by {self._interrupted_by}.\n{resume}", file=sys.stderr, flush=True)

    def _node_log(self, result: JobResult) -> str:
        logs = self._run_dir.path / "logs"
        node = result.first_failure.node if result.first_failure else None
        names = ["forkserver.log"]
        if node is not None:
            own = f"node-{node:03d}"
            names = [f"{own}.log", *(f"{own}-{service}.log" for service in self._sidecars), *names]
        return "\n".join(f"{name}:\n{tail_of(logs / name)}" for name in names if (logs / name).exists())


_GENERATIONS_FILE = "window_generations"
_GENERATIONS_OF_JOB = 1_000_000
"""Distance between the first generation numbers of successive jobs of a run. No job has more generations than this."""


def _kept_servers(config: JobConfig, run_dir: Path) -> KeptServers:
    """Return how long snapshot servers outlive this job, and which servers of earlier jobs this job can take over."""
    seconds, first_generation = config.snapshot.outlive_job_seconds, 0
    if seconds:
        path = run_dir / FOLDER / _GENERATIONS_FILE
        path.parent.mkdir(mode=0o700, exist_ok=True)
        # The number in the file rises with each job of the run. It is written before this job captures a window.
        first_generation = int(path.read_text()) + _GENERATIONS_OF_JOB if path.exists() else 0
        replace_file(path, b"%d\n" % first_generation)
    content = to_dict(config)
    same = {name: content[name] for name in ("model", "parallel", "precision", "optimizer")}
    same["layout"] = {"num_nodes": config.launch.num_nodes, "ranks_per_node": config.launch.ranks_per_node}
    return KeptServers(
        seconds=seconds,
        run_id=RunId.read(run_dir).run_id,
        fingerprint=hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest(),
        first_generation=first_generation,
    )


def _exit_code_of(result: JobResult) -> int:
    """Return the exit code of a job.

    If the first failed rank raised an error of this project, the result is the exit code of the error's class. A stop
    request that arrived after the run had reached its end changes nothing.
    """
    if result.outcome is Outcome.FINISHED or result.is_complete:
        return EXIT_OK
    if result.outcome is Outcome.INTERRUPTED:
        return EXIT_INTERRUPTED
    first = result.first_failure
    if first is None or first.rank is None:
        return ControlError.exit_code
    own_code = result.details.get(first.rank, {}).get("exit_code")
    return RankFailed.exit_code if own_code is None else int(own_code)
