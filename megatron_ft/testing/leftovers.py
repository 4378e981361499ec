"""Finds processes that continue after their starter has ended, by a mark in the environment that they inherit."""

import os
import uuid
from collections.abc import Mapping

import psutil

MARK = "MEGATRON_FT_MARK"


def mark(environment: Mapping[str, str] | None = None) -> tuple[str, dict[str, str]]:
    """Return a new mark, and ``environment`` with this mark added. A process that starts with this environment has the
    mark, and so have the processes that it starts."""
    value = uuid.uuid4().hex
    inherited = dict(os.environ if environment is None else environment)
    return value, {**inherited, MARK: ",".join([*filter(None, [inherited.get(MARK)]), value])}


def marked(value: str) -> list[psutil.Process]:
    """Return all living processes that have the mark, except this process."""
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and _carries(process, value)]


def _carries(process: psutil.Process, value: str) -> bool:
    """Return whether a process has the mark. Processes of other users, whose environment cannot be read, count as
    unmarked.

    The resource tracker of Python's ``multiprocessing`` ends together with this process and does not count either.
    """
    try:
        if process.ppid() == os.getpid() and any("multiprocessing.resource_tracker" in w for w in process.cmdline()):
            return False
        return process.status() != psutil.STATUS_ZOMBIE and value in process.environ().get(MARK, "").split(",")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def outlive(value: str, *, grace_seconds: float) -> list[str]:
    """Wait for marked processes to end, then kill those that remain. Return the command lines of the killed ones."""
    _, alive = psutil.wait_procs(marked(value), timeout=grace_seconds)
    lines = [line for line in map(_describe, alive) if line]
    end(alive)
    return lines


def end(processes: list[psutil.Process]) -> None:
    """Kill these processes by their process ids."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=10)


def _describe(process: psutil.Process) -> str:
    """Return process id and command line; empty if the process has ended."""
    try:
        return f"{process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return ""
