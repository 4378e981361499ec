"""Finds processes that a test or another program left running, by a mark in the environment that they inherit."""

import os
import uuid
from collections.abc import Mapping

import psutil

MARK = "MEGATRON_FT_MARK"


def mark(environment: Mapping[str, str] | None = None) -> tuple[str, dict[str, str]]:
    """Return a new mark, and ``environment`` with this mark in a variable. A process that is started with this
    environment has the mark. Its child processes inherit the mark."""
    value = uuid.uuid4().hex
    inherited = dict(os.environ if environment is None else environment)
    return value, {**inherited, MARK: ",".join([*filter(None, [inherited.get(MARK)]), value])}


def marked(value: str) -> list[psutil.Process]:
    """Return all living processes, except this process, that have the mark ``value`` in their environment."""
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and _carries(process, value)]


def _carries(process: psutil.Process, value: str) -> bool:
    """Return whether a process has the mark ``value``. Return False for processes of other users, whose environment
    cannot be read.

    Also return False for the resource tracker of Python's ``multiprocessing``, which ends together with this process.
    """
    try:
        if process.ppid() == os.getpid() and any("multiprocessing.resource_tracker" in w for w in process.cmdline()):
            return False
        return process.status() != psutil.STATUS_ZOMBIE and value in process.environ().get(MARK, "").split(",")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def outlive(value: str, *, grace_seconds: float) -> list[str]:
    """Wait ``grace_seconds`` for the end of marked processes. Kill those left, and return their command lines."""
    _, alive = psutil.wait_procs(marked(value), timeout=grace_seconds)
    lines = [line for line in map(_describe, alive) if line]
    end(alive)
    return lines


def end(processes: list[psutil.Process]) -> None:
    """Kill ``processes`` and wait until they have ended."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=10)


def _describe(process: psutil.Process) -> str:
    """Return process id and command line of a process. Return an empty string if it has ended."""
    try:
        return f"{process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return ""
