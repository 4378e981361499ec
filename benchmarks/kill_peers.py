"""Measures the alternatives for the comparison in ``kill_to_commit``: a restart by torchrun, and torchft."""

import contextlib
import functools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.source import ROOT
from megatron_ft.control.node.fork_server import SINGLE_THREAD_ENVIRONMENT
from megatron_ft.testing.jobs import start, wait

NUM_RANKS, MIN_RANKS = 4, 2
SETTLED = 6
"""Number of iterations that are committed before the first fault and between two faults."""
LONGEST_SECONDS = 120.0
TORCHFT = "0.2.0"
TORCHFT_NEEDS = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
JOIN_TIMEOUT_MS, HEARTBEAT_TIMEOUT_MS, TRANSFER_SECONDS = 100, 5000, 5
"""Time limits of torchft. Its lighthouse (coordinator) waits for late replicas for ``JOIN_TIMEOUT_MS`` (the default of
60,000 would be added to every fault), and for heartbeats for ``HEARTBEAT_TIMEOUT_MS`` (the default). Its process group
waits for a transfer for ``TRANSFER_SECONDS``."""
_INSTALL_SECONDS = 600
_LIGHTHOUSE = """
import sys
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="127.0.0.1:0", min_replicas={least}, join_timeout_ms={join}, heartbeat_timeout_ms={beat})
print(server.address(), flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Cost of one fault."""

    seconds: float
    """Time from the signal until the next committed iteration is reported."""
    iterations_lost: int
    """Number of committed iterations that were run again."""
    iteration_seconds: float
    """Median duration of iterations before the fault."""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Measured:
    """All faults of one measured system."""

    faults: list[Fault] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def figure(self) -> str:
        """Return the figure, e.g. ``p50 1.2 s, p95 1.4 s, max 1.5 s of 50, 0 iterations lost``, or the problem if
        nothing was measured."""
        if not self.faults:
            return f"not measured ({self.problems[0] if self.problems else 'no fault'})"
        values = [fault.seconds for fault in self.faults]
        lost = sum(fault.iterations_lost for fault in self.faults)
        failed = f", {len(self.problems)} failed" if self.problems else ""
        return (
            f"p50 {percentile(values, 50):.2f} s, p95 {percentile(values, 95):.2f} s, max {max(values):.2f} s "
            f"of {len(values)}{failed}, {lost} iterations lost"
        )


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest value that is not exceeded by ``percent`` of all values."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def records_of(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of JSON lines; an empty list if the file does not exist yet."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wait_for(condition: Callable[[], Any], alive: Callable[[], bool], what: str) -> Any:
    """Wait until ``condition`` returns a true value, and return that value.

    Raises:
        TimeoutError: ``LONGEST_SECONDS`` have passed, or ``alive`` has become false.
    """
    deadline = time.monotonic() + LONGEST_SECONDS
    while not (found := condition()):
        if time.monotonic() > deadline or not alive():
            raise TimeoutError(f"{what}: {'took too long' if alive() else 'everything has ended'}")
        time.sleep(0.005)
    return found


def random_moment(rng: random.Random, iteration_seconds: float) -> None:
    """Wait for a random part of an iteration, so that the fault does not always hit the same place."""
    time.sleep(rng.uniform(0.0, iteration_seconds))


# --- torchrun ----------------------------------------------------------------------------------------------------


def measure_torchrun(words: Sequence[str], folder: Path, num_faults: int, rng: random.Random) -> Measured:
    """Run ranks under ``torchrun --max-restarts`` with a dense checkpoint after every iteration, and kill one at a
    time.

    All faults hit one job. If it does not continue, that counts as one failed fault, and another job gets the remaining
    faults.
    """
    measured = Measured()
    while (done := len(measured.faults) + len(measured.problems)) < num_faults:
        _torchrun_job(words, folder / f"torchrun-{done}", num_faults - done, rng, measured)
    return measured


def _torchrun_job(words: Sequence[str], run_dir: Path, num_faults: int, rng: random.Random, measured: Measured) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={NUM_RANKS}", "--standalone"]
    command += [f"--max-restarts={num_faults + 1}", "pretrain_moe.py", *words, "training.train_iterations=100000"]
    command += ["checkpoint.save_interval_iterations=1", f"run.dir={run_dir.parent}", f"run.name={run_dir.name}"]
    command.append("placement.min_replicas=1")  # all its ranks are on one node
    console = start(command, environment=SINGLE_THREAD_ENVIRONMENT)
    process, problem = psutil.Process(console.pid), ""
    try:
        for _ in range(num_faults):
            measured.faults.append(_torchrun_fault(process, run_dir, rng))
    except (TimeoutError, psutil.Error) as error:
        problem = str(error)
    finally:
        end_tree(process)
        output = wait(console, 30)
        if problem:
            measured.problems.append(f"{problem}; output: {output[-2000:]}")
        shutil.rmtree(run_dir, ignore_errors=True)


def _torchrun_fault(console: psutil.Process, run_dir: Path, rng: random.Random) -> Fault:
    alive, metrics = console.is_running, run_dir / "metrics.jsonl"
    first = len(records_of(metrics)) + SETTLED
    wait_for(lambda: len(records_of(metrics)) > first, alive, "iterations before the fault")
    pace = statistics.median(record["iteration_seconds"] for record in records_of(metrics)[-SETTLED:])
    random_moment(rng, pace)
    ranks = [child for child in console.children(recursive=True) if "pretrain_moe.py" in " ".join(child.cmdline())]
    victim = rng.choice(ranks)
    killed_at = time.time()
    victim.kill()
    before = max(r["iteration"] for r in records_of(metrics) if r["time_unix_seconds"] <= killed_at)
    count = len(records_of(metrics))
    restarted = functools.partial(_restarted, metrics, count, killed_at + pace)
    wait_for(lambda: any(record["iteration"] > before for record in restarted()), alive, "an iteration after a restart")
    found = restarted()
    first = next(record for record in found if record["iteration"] > before)
    return Fault(
        seconds=first["time_unix_seconds"] - killed_at,
        iterations_lost=before - found[0]["iteration"] + 1,
        iteration_seconds=pace,
    )


def _restarted(metrics: Path, count: int, since: float) -> list[dict[str, Any]]:
    """Return the records after the first ``count``, without those of ranks that are ending."""
    return [record for record in records_of(metrics)[count:] if record["time_unix_seconds"] > since]


def end_tree(process: psutil.Process) -> None:
    """Kill a process and all processes that it has started, by their process ids."""
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = [process, *process.children(recursive=True)]
        for each in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(tree[1:], timeout=10)


# --- torchft -----------------------------------------------------------------------------------------------------


def torchft_python() -> str:
    """Return the interpreter of a separate environment that contains torchft and this environment's packages. Creates
    the environment if it does not exist.

    Raises:
        RuntimeError: torchft cannot be installed on this machine.
    """
    home = ROOT / ".cache" / "benchmarks" / f"torchft-{TORCHFT}"
    python, ready = home / "bin" / "python", home / "ready"
    if ready.exists():
        return str(python)
    shutil.rmtree(home, ignore_errors=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    try:
        _run([sys.executable, "-m", "venv", str(home)])
        purelib = next(home.glob("lib/python*/site-packages"))
        (purelib / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
        _run([*pip, "--no-deps", f"torchft=={TORCHFT}"])
        _run([*pip, *TORCHFT_NEEDS])
        _run([str(python), "-c", "import torchft"])
    except (OSError, StopIteration, subprocess.SubprocessError) as error:
        raise RuntimeError(f"torchft {TORCHFT} cannot be installed on this machine: {error}") from None
    ready.touch()
    return str(python)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS)
    if done.returncode:
        raise OSError(f"{' '.join(command[1:4])}: {done.stderr.strip()[-200:]}")


def measure_torchft(folder: Path, num_faults: int, rng: random.Random) -> Measured:
    """Run torchft jobs, and kill two replicas of each job, one after the other."""
    measured = Measured()
    try:
        python = torchft_python()
    except RuntimeError as error:
        measured.problems.append(str(error))
        return measured
    while len(measured.faults) + len(measured.problems) < num_faults:
        number = len(measured.faults) + len(measured.problems)
        try:
            with torchft_job(python, folder / f"torchft-{number}") as job:
                for _ in range(min(NUM_RANKS - MIN_RANKS, num_faults - number)):
                    measured.faults.append(job.fault(rng))
        except (TimeoutError, OSError) as error:
            measured.problems.append(str(error))
    return measured


@dataclass(slots=True)
class TorchftJob:
    """Running replicas, and the files in which each reports its committed steps."""

    replicas: dict[int, "subprocess.Popen[bytes]"]
    outputs: dict[int, Path]

    def fault(self, rng: random.Random) -> Fault:
        """Kill one replica at a random moment. Raises TimeoutError if the other replicas do not continue."""
        living = sorted(self.replicas)
        wait_for(lambda: all(self._settled(number, len(living)) for number in living), self._alive, "settled replicas")
        steps = records_of(self.outputs[living[0]])[-SETTLED:]
        pace = (steps[-1]["time"] - steps[0]["time"]) / (len(steps) - 1)
        random_moment(rng, pace)
        victim = rng.choice(living)
        killed_at = time.time()
        self.replicas[victim].kill()
        self.replicas.pop(victim).wait()
        found = wait_for(
            lambda: [r for r in self._committed(killed_at) if r["replicas"] < len(living)], self._alive, "a next step"
        )
        return Fault(
            seconds=min(record["time"] for record in found) - killed_at,
            iterations_lost=0,
            iteration_seconds=pace,
        )

    def _settled(self, number: int, num_replicas: int) -> bool:
        newest = records_of(self.outputs[number])[-SETTLED:]
        return len(newest) == SETTLED and all(record["replicas"] == num_replicas for record in newest)

    def _committed(self, after: float) -> Iterator[dict[str, Any]]:
        """Yield steps that survivors committed without the victim. A step that was agreed before the victim died does
        not count."""
        for number in self.replicas:
            yield from (record for record in records_of(self.outputs[number]) if record["time"] > after)

    def _alive(self) -> bool:
        return sum(process.poll() is None for process in self.replicas.values()) >= MIN_RANKS


@contextlib.contextmanager
def torchft_job(python: str, folder: Path) -> Iterator[TorchftJob]:
    """Start a lighthouse and replicas, and end them after the block."""
    folder.mkdir(parents=True)
    environment = {**os.environ, **SINGLE_THREAD_ENVIRONMENT}
    replica = str(ROOT / "benchmarks" / "torchft_replica.py")
    code = _LIGHTHOUSE.format(least=MIN_RANKS, join=JOIN_TIMEOUT_MS, beat=HEARTBEAT_TIMEOUT_MS)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("wb"))

        def begin(arguments: Sequence[str], output: Any) -> "subprocess.Popen[bytes]":
            process = subprocess.Popen(
                [python, *arguments], stdin=subprocess.PIPE, stdout=output, stderr=log, env=environment
            )
            stack.callback(_end, process)
            return process

        lighthouse = begin(["-c", code], subprocess.PIPE)
        assert lighthouse.stdout is not None, "its address comes through a pipe"
        address = lighthouse.stdout.readline().decode().strip()
        replicas, outputs = {}, {}
        for number in range(NUM_RANKS):
            outputs[number] = folder / f"{number}.jsonl"
            output = stack.enter_context(outputs[number].open("wb"))
            words = [replica, address, str(number), str(MIN_RANKS), str(TRANSFER_SECONDS)]
            replicas[number] = begin(words, output)
        yield TorchftJob(replicas=replicas, outputs=outputs)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
