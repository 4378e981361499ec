"""CPU use of threads and processes, read from ``/proc``: load from others does not change it."""

import os
import threading
from pathlib import Path

_MINOR_FAULTS = 7
"""Place of ``minflt`` after the command's closing bracket, in proc_pid_stat(5)."""


def process_cpu_seconds(process_id: int) -> float:
    """Measure the CPU time of the living threads of a process so far, in nanoseconds' resolution (``schedstat``)."""
    total = 0
    for task in os.listdir(f"/proc/{process_id}/task"):
        try:
            total += _run_nanoseconds(Path(f"/proc/{process_id}/task/{task}/schedstat"))
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended since it was listed
    return total / 1e9


def thread_cpu_seconds(thread: threading.Thread) -> float:
    """CPU time of a living thread of this process so far."""
    return _run_nanoseconds(Path(f"/proc/self/task/{thread.native_id}/schedstat")) / 1e9


def thread_minor_faults(thread: threading.Thread) -> int:
    """Pages that a living thread of this process was the first to touch, so far: memory that was not there before."""
    text = Path(f"/proc/self/task/{thread.native_id}/stat").read_text(encoding="ascii", errors="replace")
    return int(text.rpartition(")")[2].split()[_MINOR_FAULTS])


def thread_named(name: str) -> threading.Thread:
    """The living thread of this process with that name.

    Raises:
        LookupError: there is none, or more than one.
    """
    found = [thread for thread in threading.enumerate() if thread.name == name]
    if len(found) != 1:
        raise LookupError(f"{len(found)} threads are named {name!r}")
    return found[0]


def _run_nanoseconds(schedstat: Path) -> int:
    return int(schedstat.read_text(encoding="ascii").split()[0])
