"""Finds the processes of a job's nodes by the log files that they write, and sends signals only to these processes.

The agent of a node (its main process) and the ranks write their standard output to files in the run's folder ``logs``.
A sidecar (a helper process beside the ranks) writes its standard error there, as its output is a pipe to the agent. A
descriptor (``pidfd_open``) identifies each process, so a signal never reaches another process with the same process id.
"""

import contextlib
import os
import re
import select
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_NODE_LOG = re.compile(r"node-([0-9]{3,})(-[^/]+)?\.log")
CONTROLLER_LOG = "controller.log"
_RANK_LOG = re.compile(r"rank-([0-9]{5,})\.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldProcess:
    """A process that is identified by a pidfd, which never refers to another process."""

    process_id: int
    log: str
    """Name of the process's log file, e.g. ``rank-00003.log``."""
    _descriptor: int

    def send(self, number: signal.Signals) -> bool:
        """Send the process a signal. Return False if it has ended. Raise PermissionError if it is of another user."""
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            return False
        return True

    def has_ended(self, patience_seconds: float = 0.0) -> bool:
        """Wait up to ``patience_seconds`` for the end of the process. Return whether it has ended or is a zombie."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(patience_seconds * 1000))

    @property
    def state(self) -> str:
        """Return the letter of the process's state from ``/proc/<pid>/stat``: ``T`` for a process stopped by a signal.
        Return an empty string for a process that has ended."""
        try:
            stat = Path(f"/proc/{self.process_id}/stat").read_text()
        except OSError:
            return ""
        return "" if self.has_ended() else stat.rpartition(")")[2].split()[0]

    def close(self) -> None:
        """Close the pidfd of the process."""
        os.close(self._descriptor)


@contextlib.contextmanager
def processes_of(run_dir: Path, nodes: Iterable[int], ranks_per_node: int) -> Iterator[dict[int, list[HeldProcess]]]:
    """Find the living processes of each node in ``nodes``, in this order: its agent, other helper processes, ranks.
    A node without processes has an empty list."""
    found: dict[int, list[HeldProcess]] = {node: [] for node in nodes}
    with _held(run_dir, lambda log: _node_of(log, ranks_per_node) in found) as held:
        for process in held:
            node = _node_of(process.log, ranks_per_node)
            assert node is not None, "a log belongs to no node"
            found[node].append(process)
        for processes in found.values():
            # The agent comes first, because signals arrive in this order: an agent that outlives its ranks would report
            # their deaths.
            processes.sort(key=lambda process: (process.log.startswith("rank-"), len(process.log), process.process_id))
        yield found


@contextlib.contextmanager
def controllers_of(run_dir: Path) -> Iterator[list[HeldProcess]]:
    """Return a list with the living process of the job's controller; empty while a controller is being replaced."""
    with _held(run_dir, lambda log: log == CONTROLLER_LOG) as held:
        yield held


@contextlib.contextmanager
def all_processes_of(run_dir: Path) -> Iterator[list[HeldProcess]]:
    """Find all living processes that write to the run's logs: nodes, ranks, controller, fork server."""
    with _held(run_dir, lambda _log: True) as held:
        yield held


@contextlib.contextmanager
def _held(run_dir: Path, wanted: Callable[[str], bool]) -> Iterator[list[HeldProcess]]:
    # Yield the living processes whose logs ``wanted`` accepts, by ascending process id. Release them at the end.
    logs = str((run_dir / "logs").resolve())
    with contextlib.ExitStack() as stack:
        found = []
        for process_id in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
            log = _log_of(process_id, logs)
            held = _hold(process_id, log, logs) if log is not None and wanted(log) else None
            if held is not None:
                stack.callback(held.close)
                found.append(held)
        yield found


def _node_of(log: str, ranks_per_node: int) -> int | None:
    """Return the number of the node whose agent or ranks write to the log file ``log``; None for other logs."""
    if match := _NODE_LOG.fullmatch(log):
        return int(match.group(1))
    if match := _RANK_LOG.fullmatch(log):
        return int(match.group(1)) // ranks_per_node
    return None


def _hold(process_id: int, log: str, logs: str) -> HeldProcess | None:
    try:
        descriptor = os.pidfd_open(process_id)
    except OSError:
        return None  # it has ended
    # Another process may have got this process id before the descriptor was opened, so the log is checked again.
    if _log_of(process_id, logs) != log:
        os.close(descriptor)
        return None
    return HeldProcess(process_id=process_id, log=log, _descriptor=descriptor)


def _log_of(process_id: int, logs: str) -> str | None:
    # Return the name of the log that is the standard output or error of a process; None if there is none.
    for descriptor in (1, 2):
        try:
            folder, _, name = os.readlink(f"/proc/{process_id}/fd/{descriptor}").rpartition("/")
        except OSError:
            continue  # the process has ended or belongs to another user, or the descriptor is closed
        if folder == logs:
            return name
    return None
