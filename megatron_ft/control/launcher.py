"""``launch.mode=local``: the command a user typed becomes the job's console.

It claims the run folder, starts a fork server and one process per node, runs the controller, feeds the sinks, and
cleans up whatever happens. With ``launch.node_launcher=srun`` nodes are other machines, each with a fork server of its
own; with ``none`` they come by themselves, by what is published for them (``join_file``).
"""

import contextlib
import dataclasses
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from megatron_ft.config.job import JobConfig
from megatron_ft.config.launch import LaunchConfig
from megatron_ft.config.serialize import to_dict
from megatron_ft.control import report
from megatron_ft.control.admin import CONTROLLER_FILE
from megatron_ft.control.certificates import read_certificates
from megatron_ft.control.controller.job_result import JobEnd
from megatron_ft.control.controller.link import ControllerLink
from megatron_ft.control.controller.main import FOLDER, JOURNAL, ControllerSpec
from megatron_ft.control.launchers.processes import Processes, kill, tell
from megatron_ft.control.membership.machine import describe_returncode
from megatron_ft.control.membership import events as facts
from megatron_ft.control.membership.state import Outcome
from megatron_ft.control.node import join_file
from megatron_ft.control.node.agent import AgentSpec
from megatron_ft.control.node.fork_server import SINGLE_THREAD_ENVIRONMENT
from megatron_ft.control.node.join_file import JoinFile
from megatron_ft.control.node.main import NodeSpec
from megatron_ft.control.node.ranks import last_line, size_of, tail_of
from megatron_ft.control.node.sidecars import STOP_SECONDS
from megatron_ft.control.policies import detector_policy, membership_policy
from megatron_ft.control.ports import free_port
from megatron_ft.control.rpc import check_interface, join_address, new_token
from megatron_ft.control.rundir import RunDir, claim, has_complete_state
from megatron_ft.control.runtime_dir import make_runtime_dir
from megatron_ft.control.slurm.array import read_array
from megatron_ft.control.slurm.attempts import leave_marker
from megatron_ft.control.slurm.nodes import TERM_SECONDS, Allocation, address_of, read_allocation
from megatron_ft.errors import EXIT_INTERRUPTED, EXIT_OK, FINAL_EXIT_CODES, ConfigError, ControlError, RankFailed
from megatron_ft.events import ControllerGoesOn, ControllerReplaced, ControllerWaits, RunFolderMissing, StopRequested
from megatron_ft.framing import Message

RANK_ENTRY = "megatron_ft.mcore.loop.main:run_rank"
PRELOAD = ("megatron_ft.mcore.loop.main:warm",)
PRELOAD_ON_CUDA = ("megatron_ft.mcore.loop.main:warm_cuda",)
_CLEANUP_SECONDS = 5.0


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


def launch(
    config: JobConfig,
    config_yaml: str,
    *,
    open_sinks: OpenSinks,
    entry: str = RANK_ENTRY,
    preload: Sequence[str] | None = None,
    command: Sequence[str] | None = None,
    services: Mapping[str, str] | None = None,
) -> int:
    """Run the job on this machine; its exit code (``errors.EXIT_CODES``).

    Args:
        config_yaml: the resolved configuration, kept in the run folder.
        entry: ``package.module:function`` called in each rank with ``(JobConfig, RankContext)``.
        preload: modules imported (``module:function``: called) before ranks are forked; default: those of the device.
        command: how the user started the job, for the advice how to resume; default: as this process was.
        services: name to module of processes that every node has beside its ranks, see ``control/node/sidecars.py``.

    Raises:
        ConfigError: the run folder, the interface or the allocation cannot be used. Nothing was started.
    """
    allocation = None
    if preload is None:
        preload = PRELOAD_ON_CUDA if config.training.device == "cuda" else PRELOAD
    if config.launch.node_launcher != "local":
        read = read_array if config.launch.node_launcher == "none" else read_allocation
        allocation = read(os.environ, most_nodes=config.launch.most_nodes)
        here = dataclasses.replace(config.launch, interface=address_of(config.launch.interface))
        config = dataclasses.replace(config, launch=here)
    _check_places(config.launch)
    run_dir = claim(config.run, model_name=config.model.name, config_yaml=config_yaml)
    try:
        if allocation is not None:
            allocation.keep_script(run_dir.path, os.environ.get("MFT_SCRIPT"))
        world_size = config.launch.num_nodes * config.launch.ranks_per_node
        sinks = open_sinks(config, run_dir.path, world_size=world_size)
        job = _Job(config, run_dir, sinks, preload, entry, dict(services or {}), allocation)
        exit_code, reason = ControlError.exit_code, "the launcher failed"
        try:
            with run_dir.watched(lambda: sinks.write(RunFolderMissing(path=str(run_dir.path)).to_record())):
                end = job.run()
            exit_code, reason = job.exit_code(end), end.reason
        except (OSError, ControlError) as error:
            reason = f"the launcher failed: {error}"
            raise ControlError(reason) from error
        finally:
            sinks.close(exit_code, reason)
        if config.launch.node_launcher == "none":
            assert allocation is not None, "an array's"
            is_final = exit_code in {EXIT_OK, *FINAL_EXIT_CODES}
            leave_marker(run_dir.path, allocation.job_id, exit_code=exit_code, reason=reason, is_final=is_final)
        job.tell(end, exit_code, [sys.executable, *sys.argv] if command is None else command)
        return exit_code
    finally:
        run_dir.release()


def _check_places(config: LaunchConfig) -> None:
    """Refuse addresses and sockets that cannot work."""
    check_interface(config.interface)
    read_certificates(config.tls_dir)
    free_port(config.interface)
    path = config.forkserver_socket
    if path is not None and not Path(path).is_socket():
        raise ConfigError.of("launch.forkserver_socket", path, "must be the socket of a running fork server")


class _Job:
    def __init__(
        self,
        config: JobConfig,
        run_dir: RunDir,
        sinks: Sinks,
        preload: Sequence[str],
        entry: str,
        services: dict[str, str],
        allocation: Allocation | None,
    ) -> None:
        self._config = config.launch
        self._run_dir = run_dir
        self._sinks = sinks
        self._preload = preload
        self._entry, self._services = entry, services
        self._num_interrupts = 0
        self._interrupted_by = ""
        self._run_finished = False
        self._faults = report.InjectedFaults()
        self._has_ended = False
        self._policy = membership_policy(config)
        self._detection = detector_policy(config)
        self._token = new_token()
        self._port = free_port(config.launch.interface)
        self._job = config
        self._allocation = allocation
        self._starts_nodes = config.launch.node_launcher != "none"
        self._term_seconds = 0.0 if allocation is None else TERM_SECONDS

    def run(self) -> JobEnd:
        """Start everything, serve until the job ends, leave nothing behind."""
        with make_runtime_dir() as runtime_dir:
            processes = Processes(runtime_dir, self._run_dir.path / "logs")
            self._controller = self._link(processes)
            with self._signals():
                try:
                    return self._serve(processes)
                finally:
                    self._clean_up(processes)

    def _serve(self, processes: Processes) -> JobEnd:
        self._controller.begin()
        self._start_forkserver(processes)
        if self._starts_nodes:
            for node in range(self._policy.num_nodes + self._policy.num_spare_nodes):
                self._start_agent(processes, node)
        else:
            self._publish(processes)
        end = self._controller.run(self._on_record, functools.partial(self._on_event, processes))
        self._has_ended = True
        return end

    def _link(self, processes: Processes) -> ControllerLink:
        """The way to the controller of this job, which begins with an empty journal."""
        run_dir, resume_from = self._run_dir.path, self._run_dir.resume_from
        (run_dir / FOLDER / JOURNAL).unlink(missing_ok=True)

        def start(console: socket.socket) -> "subprocess.Popen[bytes]":
            spec = ControllerSpec(
                config=to_dict(self._job),
                run_dir=str(run_dir),
                resume_from=None if resume_from is None else str(resume_from),
                entry=self._entry,
                working_dir=os.getcwd(),
                token=self._token,
                console_descriptor=console.fileno(),
                port=self._port,
                runtime_dir=str(processes.runtime_dir),
            )
            module, kept = "megatron_ft.control.controller.main", (console.fileno(),)
            process: subprocess.Popen[bytes] = processes.start(module, [], "controller.log", {}, descriptors=kept)
            tell(process, spec.to_line())
            return process

        return ControllerLink(
            start,
            access_path=run_dir / CONTROLLER_FILE,
            access={"token": self._token, "tls_dir": self._config.tls_dir},
            silence_seconds=self._detection.heartbeat_timeout_seconds,
            log=processes.log_dir / "controller.log",
        )

    def _start_forkserver(self, processes: Processes) -> None:
        if self._config.forkserver_socket is None and self._allocation is None:
            arguments = ["--socket", str(processes.forkserver_socket), "--preload", *self._preload]
            environment = SINGLE_THREAD_ENVIRONMENT
            processes.forkserver = processes.start(
                "megatron_ft.control.node.fork_server", arguments, "forkserver.log", environment
            )

    def _start_agent(self, processes: Processes, node: int) -> None:
        """Start a node's process; one that it had before ends first, and its ranks with it."""
        if node in processes.nodes:
            kill(processes.nodes[node], term_seconds=self._term_seconds)
            processes.watchers[node].join()  # its end is told before the new process can register
        log, spec = f"node-{node:03d}.log", self._agent_spec(processes, node)
        log_begin_bytes = size_of(processes.log_dir / log)
        if self._allocation is None:
            process = processes.start("megatron_ft.control.node.agent", [], log, {})
            tell(process, spec.to_line())
        else:
            through = self._allocation.srun(node)
            process = processes.start("megatron_ft.control.node.main", [], log, {}, through=through)
            spec = dataclasses.replace(spec, process_id=process.pid)
            told = NodeSpec(agent=spec, preload=list(self._preload), batch_job=self._allocation.job_id)
            tell(process, told.to_line())
        processes.nodes[node] = process
        watched = (node, process, processes.log_dir / log, log_begin_bytes)
        processes.watchers[node] = threading.Thread(target=self._watch, args=watched, daemon=True)
        processes.watchers[node].start()

    def _start_agent_again(self, processes: Processes, node: int) -> None:
        """As ``_start_agent``, in a job that runs: what stands against it fails this start and nothing else."""
        try:
            self._start_agent(processes, node)
        except OSError as error:
            detail = f"its process could not be started: {error}"
            self._controller.post(facts.NodeLost(node, time.time(), detail))

    def _publish(self, processes: Processes) -> None:
        """Let nodes come that start by themselves. One that is lost comes back so, too, or does not."""
        assert self._allocation is not None, "the array that it runs in"
        content = JoinFile.of(
            self._agent_spec(processes, 0),
            preload=list(self._preload),
            job_id=self._allocation.job_id,
            num_nodes=self._policy.most_nodes,
            num_returns=self._policy.max_node_restarts if self._policy.restart_lost_nodes else 0,
        )
        join_file.publish(self._run_dir.path, content)

    def _agent_spec(self, processes: Processes, node: int) -> AgentSpec:
        return AgentSpec(
            controller_address=join_address(self._config.interface, self._port),
            token=self._token,
            node=node,
            runtime_dir=str(processes.runtime_dir),
            forkserver_socket=self._config.forkserver_socket or str(processes.forkserver_socket),
            services=self._services,
            interface=self._config.interface,
            log_dir=str(processes.log_dir),
            tls_dir=self._config.tls_dir,
            heartbeat_interval_seconds=self._detection.heartbeat_interval_seconds,
            heartbeat_timeout_seconds=self._detection.heartbeat_timeout_seconds,
            lost_controller_seconds=self._detection.lost_controller_seconds,
        )

    def _watch(self, node: int, process: "subprocess.Popen[bytes]", log: Path, log_begin_bytes: int) -> None:
        """Thread: a node's process ends."""
        returncode = process.wait()
        detail = f"its process {describe_returncode(returncode)}" if returncode else "its process ended"
        words = last_line(log, log_begin_bytes) if returncode > 0 else ""
        detail += f": {words}" if words else ""
        self._controller.post(facts.NodeLost(node, time.time(), detail, process.pid))

    def _on_record(self, record: Message) -> None:
        self._run_finished = self._run_finished or record.get("kind") == "run_finished"
        if self._faults.is_news(record):
            self._sinks.write(record)

    def _on_event(self, processes: Processes, event: Message) -> None:
        """What follows from a decision."""
        match event["event"]:
            case "stopping":
                self._sinks.write(StopRequested(source=self._interrupted_by).to_record())
            case "record":
                self._sinks.write(event["record"])
            case "start_agents" if self._starts_nodes:
                for node in event["nodes"]:
                    self._start_agent_again(processes, node)
            case "waits":
                self._sinks.write(ControllerWaits(problem=event["problem"]).to_record())
            case "goes_on":
                self._sinks.write(ControllerGoesOn(seconds=event["seconds"]).to_record())
            case "replaced":
                self._sinks.write(ControllerReplaced(reason=event["reason"]).to_record())

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
        self._controller.post(facts.StopRequested() if self._num_interrupts == 1 else facts.KillRequested())

    def _clean_up(self, processes: Processes) -> None:
        """End every process: nodes first (they have been told), then the fork server and ranks with it."""
        if not self._starts_nodes:
            join_file.withdraw(self._run_dir.path)
        self._wait_orkill(list(processes.nodes.values()))
        self._controller.close()
        if processes.forkserver is not None:
            processes.forkserver.stdin.close()  # type: ignore[union-attr]
            self._wait_orkill([processes.forkserver])

    def _wait_orkill(self, started: Sequence["subprocess.Popen[bytes]"]) -> None:
        ended_normally = self._has_ended
        patience_seconds = _CLEANUP_SECONDS + (STOP_SECONDS if self._services else 0.0)
        deadline = time.monotonic() + (patience_seconds if ended_normally else 0.5)
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            kill(process, term_seconds=self._term_seconds)

    def exit_code(self, end: JobEnd) -> int:
        """The job's exit code; records of failed ranks go to the sinks."""
        if end.outcome is Outcome.FAILED:
            for event in report.end_records(end, self._policy):
                self._sinks.write(event.to_record())
        return exit_code_of(end, run_finished=self._run_finished)

    def tell(self, end: JobEnd, exit_code: int, command: Sequence[str]) -> None:
        """Print what the user has to know, on standard error."""
        if exit_code == EXIT_OK:
            return
        run_dir = self._run_dir.path
        has_checkpoint = has_complete_state(run_dir)
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
