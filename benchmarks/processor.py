"""Measures CPU use of threads and processes through ``/proc``. Other processes on the machine do not change these
figures."""

import os
import threading
from pathlib import Path

_MINOR_FAULTS = 7
"""Position of ``minflt`` after the closing bracket of the command, in proc_pid_stat(5)."""


def process_cpu_seconds(process_id: int) -> float:
    """Return the CPU time that the living threads of a process have used, with a resolution of nanoseconds
    (``schedstat``)."""
    total = 0
    for task in os.listdir(f"/proc/{process_id}/task"):
        try:
            total += _run_nanoseconds(Path(f"/proc/{process_id}/task/{task}/schedstat"))
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended since it was listed
    return total / 1e9


def thread_cpu_seconds(thread: threading.Thread) -> float:
    """Return the CPU time that a living thread of this process has used."""
    return _run_nanoseconds(Path(f"/proc/self/task/{thread.native_id}/schedstat")) / 1e9


def thread_minor_faults(thread: threading.Thread) -> int:
    """Return the number of pages that a living thread of this process was the first to touch: newly allocated
    memory."""
    text = Path(f"/proc/self/task/{thread.native_id}/stat").read_text(encoding="ascii", errors="replace")
    return int(text.rpartition(")")[2].split()[_MINOR_FAULTS])


def thread_named(name: str) -> threading.Thread:
    """Return the living thread of this process that has this name.

    Raises:
        LookupError: no thread or several threads have this name.
    """
    found = [thread for thread in threading.enumerate() if thread.name == name]
    if len(found) != 1:
        raise LookupError(f"{len(found)} threads are named {name!r}")
    return found[0]


def _run_nanoseconds(schedstat: Path) -> int:
    return int(schedstat.read_text(encoding="ascii").split()[0])
