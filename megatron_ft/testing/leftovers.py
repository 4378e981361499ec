"""Processes that outlive what started them, found by a mark in the environment they inherit."""

import os
import uuid
from collections.abc import Mapping

import psutil

MARK = "MEGATRON_FT_MARK"


def mark(environment: Mapping[str, str] | None = None) -> tuple[str, dict[str, str]]:
    """A fresh mark, and the environment with which to start a process that carries it beside older marks."""
    value = uuid.uuid4().hex
    inherited = dict(os.environ if environment is None else environment)
    return value, {**inherited, MARK: ",".join([*filter(None, [inherited.get(MARK)]), value])}


def marked(value: str) -> list[psutil.Process]:
    """Living processes, this one left out, that were started under the mark, at any depth, orphans included."""
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and _carries(process, value)]


def _carries(process: psutil.Process, value: str) -> bool:
    """Whether a process carries the mark. Other users' processes cannot be read and are not ours.

    This process's own resource tracker (module multiprocessing) ends with it and is left out.
    """
    try:
        if process.ppid() == os.getpid() and any("multiprocessing.resource_tracker" in w for w in process.cmdline()):
            return False
        return process.status() != psutil.STATUS_ZOMBIE and value in process.environ().get(MARK, "").split(",")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def outlive(value: str, *, grace_seconds: float) -> list[str]:
    """Command lines of marked processes that still live after the grace; they are ended."""
    _, alive = psutil.wait_procs(marked(value), timeout=grace_seconds)
    lines = [line for line in map(_describe, alive) if line]
    end(alive)
    return lines


def end(processes: list[psutil.Process]) -> None:
    """Kill these processes, by their own ids."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=10)


def _describe(process: psutil.Process) -> str:
    """Process id and command line; empty when it is gone by now."""
    try:
        return f"{process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return ""
