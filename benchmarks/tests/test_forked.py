"""Tests that jobs in forked processes return their results, and that a case that ends or blocks one is named."""

import os
import signal
import time
from pathlib import Path

from benchmarks.forked import Begin, Done, Job, run_forked


def _count(folder: Path, begin: Begin) -> list[str]:
    for name in ("one", "two"):
        begin(name)
        (folder / name).touch()
    return sorted(path.name for path in folder.iterdir())


def _kill(folder: Path, begin: Begin) -> None:
    begin("harmless")
    begin("deadly")
    os.kill(os.getpid(), signal.SIGKILL)


def _block(folder: Path, begin: Begin) -> None:
    os.mkfifo(folder / "pipe")
    begin("a pipe")
    (folder / "pipe").read_bytes()


def test_results_are_in_order_and_lost_cases_are_named(tmp_path: Path) -> None:
    jobs = [Job(name=run.__name__, run=run) for run in (_count, _kill, _block, _count)]
    began = time.monotonic()
    done = run_forked(jobs, tmp_path, case_seconds=1)
    assert done[0] == done[3] == Done(result=["one", "two"])
    assert done[1].problem == "_kill: deadly: ended its process with -9"
    assert done[2].problem == "_block: a pipe: took too long"
    assert time.monotonic() - began < 30


def test_an_exception_is_a_problem(tmp_path: Path) -> None:
    (done,) = run_forked([Job(name="x", run=lambda folder, begin: 1 // 0)], tmp_path)
    assert done.problem == "x: before its first case: ended its process with 1"
