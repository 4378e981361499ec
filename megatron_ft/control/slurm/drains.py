"""Nodes that Slurm's administrators want back leave a running job well, where the job can let them go."""

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ft.control.operating import JobNotRunning, Operator
from megatron_ft.control.slurm import calls
from megatron_ft.errors import ControlError


@contextlib.contextmanager
def watch_drains(run_dir: Path, hosts: Sequence[str], *, poll_seconds: float) -> Iterator[None]:
    """Within the block, a thread asks Slurm which nodes are being drained, and the job's controller to let each go.

    A node that the controller refuses to let go is asked for again while it is drained; why not is told once. While
    Slurm does not answer nothing follows from it. A question that is under way at the end of the block has as long as a
    call of Slurm may take; a thread that has not ended by then is left behind, and that is told.

    Args:
        hosts: of the job, by node.
    """
    is_over = threading.Event()
    thread = threading.Thread(target=_watch, args=(run_dir, hosts, poll_seconds, is_over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(calls.CALL_SECONDS)
        if thread.is_alive():
            _say(f"the question which nodes are drained did not end within {calls.CALL_SECONDS:g} s: it is left behind")


def _watch(run_dir: Path, hosts: Sequence[str], poll_seconds: float, is_over: threading.Event) -> None:
    leaving: set[str] = set()
    refused: dict[str, str] = {}
    is_silent = False
    while not is_over.wait(poll_seconds):
        try:
            drained = calls.drained_hosts(hosts)
            is_silent = False
        except calls.SlurmError as error:
            if not is_silent:
                _say(f"which nodes are drained is unknown for now: {error}")
            is_silent = True
            continue
        leaving.intersection_update(drained)
        for host in [host for host in drained if host not in leaving]:
            node = list(hosts).index(host)
            try:
                _drain(run_dir, node)
            except JobNotRunning:  # it begins, or ends
                continue
            except ControlError as error:
                if refused.get(host) != str(error):
                    refused[host] = str(error)
                    _say(f"{host} is drained, but node {node} does not leave: {error}")
                continue
            leaving.add(host)
            _say(f"{host} is drained: node {node} leaves at the next iteration boundary")


def _drain(run_dir: Path, node: int) -> None:
    with Operator(run_dir) as operator:
        operator.drain(node)


def _say(text: str) -> None:
    print(f"slurm: {text}", file=sys.stderr, flush=True)
