"""Runs the stages of ``tools/gpu_day.py``, a series of tests on a GPU, within a time budget. All stages are forked from
one process that has imported all packages."""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ft.testing import leftovers
from tools.gpu.day import GPU_DAY, Day, read_report
from tools.gpu.stages import Stage

ROOT = Path(__file__).resolve().parents[2]
RESERVE_SECONDS = 5.0
"""Part of the time budget that is reserved for writing results and the table."""
LEAST_SECONDS = 5.0
"""Smallest remaining time budget with which another stage is started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of one stage of ``tools/gpu_day.py``: its status, duration, figures, problems and log."""

    stage: str
    about: str
    status: str
    """``passed``, ``failed`` (the stage reported a problem or raised an exception), ``timed out``, ``died`` (a
    signal or an exit ended the process) or ``no time`` (not started)."""
    seconds: float
    device_type: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    """Parts of the stage that cannot run on this machine, each with the reason."""
    log: str = ""

    @property
    def failed(self) -> bool:
        """Return whether the stage did not pass. Then the whole call of ``tools/gpu_day.py`` fails."""
        return self.status != "passed"


def run_stages(stages: Sequence[Stage], *, budget_seconds: float) -> Iterator[Outcome]:
    """Run stages one after the other, and yield the outcome of each as soon as it is known.

    Processes that a stage leaves behind are killed. Logs are in a folder that is removed after the last outcome.
    """
    ends = time.monotonic() + budget_seconds - RESERVE_SECONDS
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
        _prepare_environment()
        is_warm = False
        for stage in stages:
            if not is_warm and ends - time.monotonic() >= LEAST_SECONDS:
                _start(_do_nothing, ()).join()  # so imports do not count towards the time limit of the first stage
                is_warm = True
            left = ends - time.monotonic()
            if left < LEAST_SECONDS:
                yield Outcome(stage=stage.name, about=stage.about, status="no time", seconds=0.0)
            else:
                yield _run_stage(stage, min(stage.seconds, left), Path(folder))


def _prepare_environment() -> None:
    """Set the environment that the fork server and all stages inherit."""
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*paths, str(ROOT)]))  # absolute: valid in any folder
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # a process with OpenMP's threads cannot be forked
    # Options of the user for pytest could select other tests, or make a stage fail although its tests have passed.
    os.environ.pop("PYTEST_ADDOPTS", None)


def _run_stage(stage: Stage, limit_seconds: float, work: Path) -> Outcome:
    folder = work / stage.name
    folder.mkdir()
    began = time.monotonic()
    mark, environment = leftovers.mark()
    arguments = (stage.entry, str(folder), str(work), began + limit_seconds, environment[leftovers.MARK])
    process = _start(_be_stage, arguments)
    process.join(max(0.0, began + limit_seconds - time.monotonic()))
    timed_out = process.exitcode is None
    process.kill()  # needed if the process has not created its process group yet
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the process group contains all processes that the stage has forked
    process.join()
    left = leftovers.outlive(mark, grace_seconds=0.0 if timed_out else 2.0)
    figures, problems, not_run = read_report(folder)
    device_type = figures.pop("device_type", "")
    problems += [f"the stage left a process behind: {line}" for line in left if not timed_out]
    return Outcome(
        stage=stage.name,
        about=stage.about,
        status=_status(timed_out, process.exitcode, problems),
        seconds=round(time.monotonic() - began, 1),
        device_type=device_type,
        figures=figures,
        problems=problems,
        not_run=not_run,
        log=_read_log(folder),
    )


def _do_nothing() -> None:
    """Do nothing. Running this function in a process makes the fork server start and import all packages first."""


def _start(function: Callable[..., None], arguments: tuple[Any, ...]) -> Any:
    """Start ``function`` in a process from the fork server. If the fork server cannot run, e.g. because an import kills
    it, start ``function`` in a new interpreter."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.gpu.warm"])
    try:
        process: Any = context.Process(target=function, args=arguments)
        process.start()
    except (OSError, EOFError):
        process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
        process.start()
    return process


def _status(timed_out: bool, exit_code: int | None, problems: Sequence[str]) -> str:
    if timed_out:
        return "timed out"
    if exit_code != 0:
        return "died"
    return "failed" if problems else "passed"


def _be_stage(entry: str, folder: str, shared: str, deadline: float, mark: str) -> None:
    """Run one stage in this process, which runs nothing else."""
    os.setsid()
    log = os.open(f"{folder}/log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ[leftovers.MARK] = mark
    from tools.gpu import warm

    if warm.device_type == "cuda":
        os.environ.setdefault(GPU_DAY, "1")
    day = Day(device_type=warm.device_type, folder=Path(folder), shared=Path(shared), deadline=deadline)
    day.record(device_type=day.device_type)
    module, _, function = entry.partition(":")
    with day.part("the stage"):
        getattr(importlib.import_module(module), function)(day)
    spent = os.times()
    day.record(cpu_seconds=round(spent.user + spent.system + spent.children_user + spent.children_system, 1))
    sys.stdout.flush()


def _read_log(folder: Path) -> str:
    path = folder / "log.txt"
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
