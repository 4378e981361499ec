"""Runs many short cases in forked processes, which need no imports because their parent process has done them.

If a case hangs or ends its process, its name is reported, and only the remaining cases of the same job are lost.
"""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

CASE_SECONDS = 120
"""Time for one case, on a machine that is busy with other work."""
Begin = Callable[[str], None]
"""Called with the name of each case before it begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Several cases that one process runs after each other."""

    name: str
    run: Callable[[Path, Begin], Any]
    """Runs the cases in an empty directory. The result must be JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Result of a job, or the reason why it has none."""

    result: Any = None
    problem: str | None = None


def run_forked(jobs: Sequence[Job], root: Path, *, case_seconds: int = CASE_SECONDS) -> list[Done]:
    """Run jobs in forked processes, as many at a time as there are cores, and return their results in order.

    Args:
        root: existing directory, in which each job gets a directory of its own.
        case_seconds: time after which a case is ended together with its job.
    """
    context = multiprocessing.get_context("fork")
    found, running = dict[int, Done](), dict[int, BaseProcess]()
    left = list(enumerate(jobs))
    try:
        while left or running:
            while left and len(running) < len(os.sched_getaffinity(0)):
                number, job = left.pop(0)
                (root / f"job-{number}").mkdir()
                process = context.Process(target=_run, args=(job, root / f"job-{number}", case_seconds))
                process.start()
                running[number] = process
            ended = wait([process.sentinel for process in running.values()])
            for number in [number for number, process in running.items() if process.sentinel in ended]:
                process = running.pop(number)
                process.join()
                found[number] = _done(jobs[number], root / f"job-{number}", process.exitcode)
    finally:
        for process in running.values():
            process.kill()
            process.join()
    return [found[number] for number in range(len(jobs))]


def _run(job: Job, folder: Path, case_seconds: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends this process, wherever it waits

    def begin(name: str) -> None:
        signal.alarm(case_seconds)
        (folder / "case.txt").write_text(name)

    work = folder / "work"
    work.mkdir()
    result = job.run(work, begin)
    signal.alarm(0)
    (folder / "result.json").write_text(json.dumps(result))


def _done(job: Job, folder: Path, exit_code: int | None) -> Done:
    path, case = folder / "result.json", folder / "case.txt"
    if exit_code == 0 and path.exists():
        return Done(result=json.loads(path.read_text()))
    where = case.read_text() if case.exists() else "before its first case"
    why = "took too long" if exit_code == -signal.SIGALRM else f"ended its process with {exit_code}"
    return Done(problem=f"{job.name}: {where}: {why}")
