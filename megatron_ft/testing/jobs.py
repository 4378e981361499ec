"""Starts jobs through the entry point ``pretrain_moe.py``, and jobs whose ranks have no model."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import to_dict
from megatron_ft.control.node.fork_server import SINGLE_THREAD_ENVIRONMENT

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class JobResult:
    """Exit code, run folder and output of a job that has ended."""

    exit_code: int
    run_dir: Path
    output: str
    """Standard output and standard error of the job."""

    def records(self, file: str = "events.jsonl") -> list[dict[str, Any]]:
        """Return the records in ``events.jsonl`` or ``metrics.jsonl`` of the job's run, in order."""
        path = self.run_dir / file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def losses(self) -> list[float]:
        """Return the loss of each iteration that the job reported, in order."""
        return [record["loss"] for record in self.records("metrics.jsonl") if "loss" in record]


def run_job(
    overrides: Sequence[str],
    *,
    forkserver: str | None = None,
    runs: Path,
    timeout_seconds: float = 120.0,
    environment: Mapping[str, str] | None = None,
    python: Path | None = None,
) -> JobResult:
    """Run a job through ``pretrain_moe.py`` until it ends.

    Args:
        overrides: Hydra overrides. ``run.dir`` is set to ``runs``.
        forkserver: Socket of a fork server for the job's ranks, which has already imported their modules; the fixture
            ``warm_forkserver`` starts such a server.
        python: Interpreter of another environment; None for this process's interpreter.

    Raises:
        AssertionError: the job did not end in time. It has been killed, and the message contains its output.
    """
    words = [*overrides, f"run.dir={runs}"]
    if forkserver is not None:
        words.append(f"launch.forkserver_socket={forkserver}")
    known = set(runs.iterdir()) if runs.exists() else set()
    command = [str(python or sys.executable), str(REPOSITORY / "pretrain_moe.py"), *words]
    process = start(command, environment=environment)
    output = wait(process, timeout_seconds)
    return JobResult(process.returncode, _run_dir(runs, known, overrides), output)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[Path]:
    """Make ``folder`` the working directory of this process while the block runs."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)


def start(command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    """Start a command in the repository's folder and in a new process group. ``wait`` returns its output."""
    return subprocess.Popen(
        list(command),
        cwd=REPOSITORY,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait(process: "subprocess.Popen[str]", timeout_seconds: float) -> str:
    """Wait for the end of a command that ``start`` has started, and return its output.

    Raises:
        AssertionError: the command did not end in time and was killed.
    """
    try:
        return process.communicate(timeout=timeout_seconds)[0]
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0]
        raise AssertionError(f"the command did not end within {timeout_seconds} s; output so far:\n{output}") from None


def _run_dir(runs: Path, known: set[Path], overrides: Sequence[str]) -> Path:
    """Return the run folder that the job created in ``runs``. Return ``runs`` if the job created no folder."""
    for word in overrides:
        if match := re.fullmatch(r"run\.name=(.+)", word):
            return runs / match.group(1)
    new = sorted(set(runs.iterdir()) - known) if runs.exists() else []
    return new[-1] if new else runs


def start_dummy_job(
    runs: Path,
    entry: str = "run",
    *,
    overrides: Mapping[str, Any] | None = None,
    preload: Sequence[str] = ("megatron_ft.testing.dummy_rank",),
    sidecars: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    through: Sequence[str] = (),
) -> "subprocess.Popen[str]":
    """Start a job whose ranks have no model.

    Args:
        entry: Function of ``megatron_ft/testing/dummy_rank.py`` that each rank runs.
        overrides: Values by configuration key, e.g. ``{"launch.num_nodes": 2}``.
        sidecars: Maps the name of each sidecar (helper process of a node) to its module.
        through: Words before ``python`` in the command, e.g. to run the launcher in another network namespace.
    """
    config = JobConfig()
    for key, value in {"run.dir": str(runs), "run.name": "dummy", **(overrides or {})}.items():
        group, name = key.split(".")
        assert hasattr(getattr(config, group), name), key
        setattr(getattr(config, group), name, value)
    runs.mkdir(exist_ok=True)
    spec = runs / "spec.json"
    content = {"entry": entry, "preload": list(preload), "sidecars": dict(sidecars or {})}
    spec.write_text(json.dumps({"config": to_dict(config), **content}))
    command = [*through, sys.executable, "-m", "megatron_ft.testing.dummy_job", str(spec)]
    return start(command, environment=environment)


@contextlib.contextmanager
def forkserver(*modules: str, python: Path | None = None) -> Iterator[str]:
    """Start a fork server that imports ``modules``, and yield its socket. Imports may still be running; a job waits for
    their end. ``python`` is the interpreter of another environment; None for this process's interpreter."""
    directory = Path(tempfile.mkdtemp(prefix="megatron-ft-"))
    path = directory / "warm.sock"
    arguments = ["--socket", str(path), "--preload", *modules]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [str(python or sys.executable), "-m", "megatron_ft.control.node.fork_server", *arguments],
            cwd=REPOSITORY,
            env={**os.environ, **SINGLE_THREAD_ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        assert process.stdout is not None and process.stdin is not None
        try:
            ready = process.stdout.readline()
            log.seek(0)
            assert ready, f"the fork server did not start:\n{log.read().decode()}"
            yield str(path)
        finally:
            process.stdin.close()
            process.wait(timeout=20)
            process.stdout.close()
            shutil.rmtree(directory, ignore_errors=True)  # contains the socket if the server was killed
