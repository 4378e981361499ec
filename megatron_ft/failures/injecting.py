"""Injects faults into a running job: kills, stops, network partitions, disk errors, drains and joins of nodes.

``<run>/injected.jsonl`` has a line for each fault, which is written and synced before the fault. If a fault could not
be injected, another line gives the reason.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_ft.durable import fsync_folder
from megatron_ft.errors import ControlError
from megatron_ft.failures.processes import HeldProcess, processes_of
from megatron_ft.failures.schedule import FailureSchedule

# A node is reached through pairs of virtual links, see veth(4): one end is in the node's namespace, the other end is in
# the namespace of this process. Taking the ends in this namespace down is like pulling a cable: the node's links have
# no carrier, and packets of open and of new connections vanish without an answer. Processes that share this process's
# namespace cannot be disconnected this way.

_COMMAND_SECONDS = 10.0


class CannotCut(ControlError):
    """Raised if this process cannot disconnect a node's network. The message gives the reason."""


def _links_to(process_ids: Iterable[int]) -> list[str]:
    """Return the names of the veth links that connect this network namespace with the namespaces of the processes.

    Raises:
        CannotCut: a process has ended or is in this network namespace; a link of its namespace ends in a third
            namespace; or the programs ``ip`` and ``nsenter`` are missing or not allowed.
    """
    here = os.readlink("/proc/self/ns/net")
    far: set[int] = set()
    for process_id in process_ids:
        try:
            there = os.readlink(f"/proc/{process_id}/ns/net")
        except OSError as error:
            raise CannotCut(f"process {process_id}: its network namespace cannot be read: {error.strerror}") from None
        # Cutting this process's own network would disconnect the injector and all nodes that share the network.
        if there == here:
            raise CannotCut(
                f"process {process_id} is in the same network namespace as this process, so it cannot be disconnected "
                "alone: start its node in a network namespace of its own"
            )
        inside = ["nsenter", f"--net=/proc/{process_id}/ns/net"]
        found = {link["link_index"] for link in _links(inside) if "link_index" in link}
        if not found:
            raise CannotCut(f"process {process_id}: no veth link leads to its network namespace")
        far |= found
    names = [link["ifname"] for link in _links() if link["ifindex"] in far]
    # A link whose other end is in a third namespace would stay up, so a node would not be cut off completely.
    if len(names) < len(far):
        raise CannotCut(
            f"only {len(names)} of the nodes' {len(far)} veth links end in this network namespace: this process cannot "
            "disconnect the other links"
        )
    return sorted(names)


def _switch(links: Sequence[str], *, on: bool) -> None:
    """Set all network ``links`` up or down. If one fails, still set the others, and raise CannotCut at the end."""
    failed = []
    for name in links:
        try:
            _run(["ip", "link", "set", name, "up" if on else "down"])
        except CannotCut as error:
            failed.append(str(error))
    if failed:
        raise CannotCut("; ".join(failed))


def _links(inside: Sequence[str] = ()) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(_run([*inside, "ip", "-json", "link", "show", "type", "veth"]) or "[]")
    return [link for link in found if link]


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCut(f"{' '.join(command)}: {error}") from None
    if done.returncode:
        raise CannotCut(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


INJECTED_FILE = "injected.jsonl"
PATIENCE_SECONDS = 30.0
"""Longest wait in seconds until a node has processes, or until the controller lets a lost node join again."""
_PAUSE_SECONDS = 0.05


class NotInjected(ControlError):
    """Raised if a fault could not be injected. The message gives the reason."""


class _Operator(Protocol):
    """Client of a job's controller, e.g. ``megatron_ft.control.admin.AdminClient``."""

    def drain(self, node: int) -> None:
        """Make a node leave the job. Raise a ControlError if the controller refuses."""

    def add(self, node: int) -> None:
        """Start a node, so that it joins the job. Raise a ControlError if the controller refuses."""


@dataclass(slots=True, kw_only=True)
class Injector:
    """Injects faults into one running job. The record of a fault includes the keyword arguments of the call."""

    run_dir: Path
    ranks_per_node: int
    connect: Callable[[], contextlib.AbstractContextManager[_Operator]]
    """Opens a connection to the job's current controller. It is called for each request, as controllers may change."""
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep
    patience_seconds: float = PATIENCE_SECONDS

    def kill(self, nodes: Sequence[int], **about: Any) -> None:
        """Send SIGKILL to every process of the nodes at once. This simulates a failure of the nodes' machines.

        Raises:
            NotInjected: a node has no process, or all processes ended before the signal.
        """
        with self._held("kill", nodes, about) as processes:
            # If no process was left to kill, the fault did not happen and must not count as injected.
            if len(_send(processes, signal.SIGKILL)) == len(processes):
                raise self._refused("kill", nodes, "all processes of these nodes had ended before the kill")

    def stop(self, nodes: Sequence[int], seconds: float | None, **about: Any) -> list[str]:
        """Stop every process of the nodes with SIGSTOP. After ``seconds``, send SIGCONT; never if ``seconds`` is None.

        Returns:
            Names of the logs of stopped processes that ended before SIGCONT.

        Raises:
            NotInjected: a node has no process.
        """
        with self._held("stop", nodes, {**about, "seconds": seconds}) as processes:
            try:
                _send(processes, signal.SIGSTOP)
                if seconds is not None:
                    self.pause(seconds)
            finally:
                # This also happens after an error: a process that stays stopped would look like a failure of the job.
                ended = [] if seconds is None else _send(processes, signal.SIGCONT)
        return ended

    def partition(self, nodes: Sequence[int], seconds: float, **about: Any) -> None:
        """Disconnect the network of the nodes for ``seconds``. The processes of the nodes stay alive.

        Each node must be in a network namespace of its own, for example in a container.

        Raises:
            NotInjected: a node has no process, or this process cannot disconnect its network.
        """
        with self._held("partition", nodes, {**about, "seconds": seconds}) as processes:
            try:
                links = _links_to(process.process_id for process in processes)
            except ControlError as error:
                raise self._refused("partition", nodes, str(error)) from None
            try:
                _switch(links, on=False)
                self.pause(seconds)
            except ControlError as error:
                raise self._refused("partition", nodes, str(error)) from None
            finally:
                # Links are set up also after an error, because some of them may already be down.
                _switch(links, on=True)

    def fail_disk(self, nodes: Sequence[int], seconds: float, **about: Any) -> None:
        """Let all writes of the nodes' processes to files fail with the error EFBIG for ``seconds``.

        During this time, the processes' limit on file sizes (RLIMIT_FSIZE, see setrlimit(2)) is 0. It also applies to
        files in memory, but not to reads, sockets and pipes. Child processes that start meanwhile keep the limit 0.

        Raises:
            NotInjected: a node has no process, or the processes belong to another user.
        """
        with self._held("disk_error", nodes, {**about, "seconds": seconds}) as processes:
            before: list[tuple[HeldProcess, tuple[int, int]]] = []
            try:
                for process in processes:
                    with contextlib.suppress(ProcessLookupError):  # it has ended
                        soft, hard = resource.prlimit(process.process_id, resource.RLIMIT_FSIZE)
                        # The hard limit stays, so that the soft one can be raised to its old value without a privilege.
                        resource.prlimit(process.process_id, resource.RLIMIT_FSIZE, (0, hard))
                        before.append((process, (soft, hard)))
                self.pause(seconds)
            except PermissionError as error:
                raise self._refused("disk_error", nodes, str(error)) from None
            finally:
                for process, limits in before:
                    with contextlib.suppress(ProcessLookupError):
                        # ``prlimit`` takes a process id, which may belong to another process now.
                        if not process.has_ended():
                            resource.prlimit(process.process_id, resource.RLIMIT_FSIZE, limits)

    def drain(self, node: int, **about: Any) -> None:
        """Make the node leave after the current iteration. Raise NotInjected if the controller refuses."""
        self._write({"action": "drain", "nodes": [node], **about})
        try:
            with self.connect() as operator:
                operator.drain(node)
        except ControlError as error:
            raise self._refused("drain", [node], str(error)) from None

    def add(self, node: int, **about: Any) -> None:
        """Start the node. If the controller has not detected yet that this node was lost, try again until it has.

        Raises:
            NotInjected: the controller still refuses after ``patience_seconds``.
        """
        self._write({"action": "add", "nodes": [node], **about})
        deadline = self.clock() + self.patience_seconds
        while True:
            try:
                with self.connect() as operator:
                    return operator.add(node)
            # The controller refuses the node until it has detected the loss, so the request is repeated.
            except ControlError as error:
                if self.clock() >= deadline:
                    raise self._refused("add", [node], str(error)) from None
            self.pause(_PAUSE_SECONDS)

    def replay(self, schedule: FailureSchedule, *, until: Callable[[], bool] | None = None) -> list[str]:
        """Kill and start nodes as ``schedule`` demands. The schedule begins now; return when its duration has passed.

        Args:
            until: ends the replay when it returns true, e.g. because the job has ended.

        Returns:
            Messages about events that could not be injected; empty if all events were injected.
        """
        began, problems = self.clock(), []

        def wait_until(seconds: float) -> bool:
            """Wait until ``seconds`` of the schedule have passed. Return False if ``until`` ended the replay."""
            while (left := began + seconds - self.clock()) > 0:
                if until is not None and until():
                    return False
                self.pause(min(left, _PAUSE_SECONDS))
            return until is None or not until()

        for number, event in enumerate(schedule.events):
            if not wait_until(event.seconds):
                problems.append(f"events {number} to {len(schedule.events) - 1} were not injected: the job had ended")
                return problems
            about = {"event": number, "planned_seconds": event.seconds, "at_seconds": self.clock() - began}
            if event.leaves:
                problems += self._try(self.kill, event.leaves, about)
            for node in event.joins:
                problems += self._try(self.add, node, about)
        if not wait_until(schedule.duration_seconds):
            problems.append("the job ended before the schedule ended")
        return problems

    @staticmethod
    def _try(fault: Callable[..., None], nodes: Any, about: dict[str, Any]) -> list[str]:
        try:
            fault(nodes, **about)
        except NotInjected as error:
            return [f"event {about['event']}: {error}"]
        return []

    @contextlib.contextmanager
    def _held(self, action: str, nodes: Sequence[int], about: dict[str, Any]) -> Iterator[list[HeldProcess]]:
        """Record the fault, then yield all processes of the nodes. Raise NotInjected if a node has no process."""
        nodes, deadline = list(dict.fromkeys(nodes)), self.clock() + self.patience_seconds
        while True:
            # Processes are searched repeatedly, because a node that is starting has none yet.
            with processes_of(self.run_dir, nodes, self.ranks_per_node) as found:
                missing = [node for node, processes in found.items() if not processes]
                if not missing:
                    processes = [process for node in nodes for process in found[node]]
                    named = {process.log: process.process_id for process in processes}
                    # The record is on disk before the fault; without it, the fault would count as a failure of the job.
                    self._write({"action": action, "nodes": nodes, "processes": named, **about})
                    yield processes
                    return
            if self.clock() >= deadline:
                raise self._refused(action, nodes, f"the logs of the run name no running process of nodes {missing}")
            self.pause(_PAUSE_SECONDS)

    def _refused(self, action: str, nodes: Sequence[int], reason: str) -> NotInjected:
        self._write({"action": f"{action}_not_injected", "nodes": list(nodes), "reason": reason})
        return NotInjected(f"{action} of nodes {list(nodes)}: {reason}")

    def _write(self, record: dict[str, Any]) -> None:
        line = json.dumps({"time_unix_seconds": time.time(), **record}).encode() + b"\n"
        with (self.run_dir / INJECTED_FILE).open("ab", buffering=0) as file:
            # Unbuffered, so one ``write`` appends the line, and lines of two injectors do not mix.
            if file.write(line) != len(line):
                raise OSError(f"{INJECTED_FILE}: a line could not be written completely")
            os.fsync(file.fileno())
        fsync_folder(self.run_dir)


def _send(processes: Sequence[HeldProcess], number: signal.Signals) -> list[str]:
    # Send a signal to each process; return the logs of those that had ended.
    return [process.log for process in processes if not process.send(number)]
