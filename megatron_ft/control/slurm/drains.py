"""Makes a running job release nodes that an administrator drains in Slurm, if the job can continue without them.

In an allocation, a thread of the batch script's process watches for drained nodes. In a job array, a separate process
beside the launcher watches until it is killed: ``python -m megatron_ft.control.slurm.drains RUN_DIR --array ID
--poll-seconds 60``.
"""

import argparse
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from megatron_ft.control.admin import AdminClient, JobNotRunning
from megatron_ft.control.slurm import calls
from megatron_ft.errors import MegatronFtError

_Hosts = Callable[[], Mapping[int, str]]
"""Function that returns the host of each node of the job; may raise SlurmError."""


@contextlib.contextmanager
def watch_drains(run_dir: Path, hosts: Sequence[str], *, poll_seconds: float) -> Iterator[None]:
    """Watch for drained nodes during the ``with`` block. A thread queries Slurm, and asks the controller to let each
    drained node leave.

    The end of the block waits up to ``CALL_SECONDS`` for a query in progress. If the thread has not ended by then, a
    message is printed, and the thread is left behind; it makes no further calls to the controller.

    Args:
        hosts: host of each node of the job, by node number.
    """
    is_over = threading.Event()
    known = dict(enumerate(hosts))
    thread = threading.Thread(target=_watch, args=(run_dir, lambda: known, poll_seconds, is_over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(calls.CALL_SECONDS)
        if thread.is_alive():
            _say(f"the query for drained nodes did not end within {calls.CALL_SECONDS:g} s and is abandoned")


def _watch(run_dir: Path, hosts: _Hosts, poll_seconds: float, is_over: threading.Event) -> None:
    """Ask the controller to release each drained node. If the controller refuses, report the reason once, and ask again
    at the next poll. If Slurm does not answer, report this once, and try again at the next poll."""
    leaving: set[int] = set()
    refused: dict[int, str] = {}
    is_silent = False
    while not is_over.wait(poll_seconds):
        try:
            drained = _drained(hosts())
            is_silent = False
        except calls.SlurmError as error:
            if not is_silent:
                _say(f"cannot query Slurm for drained nodes, trying again: {error}")
            is_silent = True
            continue
        # If a drain is cancelled and the node is drained again later, the controller is asked again.
        leaving.intersection_update(drained)
        for node, host in drained.items():
            if node in leaving:
                continue
            if is_over.is_set():  # the launcher with these node numbers has ended
                return
            try:
                _drain(run_dir, node)
            except JobNotRunning:  # the job has not started yet, or has ended
                continue
            except (MegatronFtError, OSError) as error:
                if refused.get(node) != str(error):
                    refused[node] = str(error)
                    _say(f"{host} is drained, but node {node} cannot leave: {error}")
                continue
            leaving.add(node)
            _say(f"{host} is drained: node {node} leaves at the next iteration boundary")


def _drained(hosts: Mapping[int, str]) -> Mapping[int, str]:
    drained = set(calls.drained_hosts(list(dict.fromkeys(hosts.values())))) if hosts else set()
    return {node: host for node, host in hosts.items() if host in drained}


def _drain(run_dir: Path, node: int) -> None:
    with AdminClient(run_dir) as operator:
        operator.drain(node)


def _say(text: str) -> None:
    print(f"slurm: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that watches the nodes of a job array until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run_dir", type=Path, help="the run's folder: run.dir/run.name")
    parser.add_argument("--array", required=True, help="id of the Slurm array whose tasks are the nodes")
    parser.add_argument("--poll-seconds", type=float, default=60.0, help="seconds between two queries of Slurm")
    chosen = parser.parse_args(arguments)
    if not 1.0 <= chosen.poll_seconds <= threading.TIMEOUT_MAX:
        parser.error(f"--poll-seconds={chosen.poll_seconds:g}: must be at least 1 (set by MFT_DRAIN_POLL_SECONDS)")
    _watch(chosen.run_dir, partial(calls.array_hosts, chosen.array), chosen.poll_seconds, threading.Event())
    return 0


if __name__ == "__main__":
    sys.exit(main())
