"""The processes of a job's nodes, found by the logs they write, and signals that cannot hit others.

A node's process and its ranks write their standard output to files of the run's ``logs``, whoever started or forked
them; a service its standard error, for its standard output is a pipe to the node's process. Each is held by a
descriptor (``pidfd_open``), so its number cannot pass to another process between the look and the signal.
"""

import contextlib
import os
import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_NODE_LOG = re.compile(r"node-([0-9]{3,})(-[^/]+)?\.log")
_RANK_LOG = re.compile(r"rank-([0-9]{5,})\.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldProcess:
    """A process that was there when it was looked at."""

    process_id: int
    log: str
    """Name of the file it writes to: what it is."""
    _descriptor: int

    def send(self, number: signal.Signals) -> bool:
        """Send it a signal; False if it has ended. Raises PermissionError: it is another user's."""
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Let go of it."""
        os.close(self._descriptor)


@contextlib.contextmanager
def processes_of(run_dir: Path, nodes: Iterable[int], ranks_per_node: int) -> Iterator[dict[int, list[HeldProcess]]]:
    """The living processes of each of ``nodes``: the node's own first, then its services, then its ranks.

    A node without any has an empty list.
    """
    logs = str((run_dir / "logs").resolve())
    found: dict[int, list[HeldProcess]] = {node: [] for node in nodes}
    with contextlib.ExitStack() as stack:
        for process_id in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
            log = _log_of(process_id, logs)
            node = None if log is None else node_of(log, ranks_per_node)
            if log is None or node not in found:
                continue
            held = _hold(process_id, log, logs)
            if held is not None:
                stack.callback(held.close)
                found[node].append(held)
        for processes in found.values():
            processes.sort(key=lambda process: (process.log.startswith("rank-"), len(process.log), process.process_id))
        yield found


def node_of(log: str, ranks_per_node: int) -> int | None:
    """The node whose process writes to the file of that name; None for files of others."""
    if match := _NODE_LOG.fullmatch(log):
        return int(match.group(1))
    if match := _RANK_LOG.fullmatch(log):
        return int(match.group(1)) // ranks_per_node
    return None


def _hold(process_id: int, log: str, logs: str) -> HeldProcess | None:
    """The process, if it still is the one that writes to ``log``, and lives."""
    try:
        descriptor = os.pidfd_open(process_id)
    except OSError:
        return None  # it has ended
    if _log_of(process_id, logs) != log:
        os.close(descriptor)
        return None
    return HeldProcess(process_id=process_id, log=log, _descriptor=descriptor)


def _log_of(process_id: int, logs: str) -> str | None:
    """Name of the file below ``logs`` that is the standard output or error of a process; None if there is none."""
    for descriptor in (1, 2):
        try:
            folder, _, name = os.readlink(f"/proc/{process_id}/fd/{descriptor}").rpartition("/")
        except OSError:
            continue  # ended, a zombie, another user's, or closed
        if folder == logs:
            return name
    return None
