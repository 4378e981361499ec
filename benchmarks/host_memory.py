"""Claim ``host-memory``: memory for snapshots is predicted before a job starts, refused above a limit, and does not
grow.

The claim has three parts. (1) ``dry_run`` and the current plan predict the memory of the node with the largest need.
The prediction is compared with the size and the resident part of the node's memory files, with no, one and two copies
at peers. (2) A job whose limit is just below its need must be refused before anything starts. (3) A long run of three
ranks with two copies each, sampled from ``/proc``, must not grow in memory, threads, descriptors and memory files.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.footprint import AGENT, KEEPER, RANK, footprint, growth, mapped_bytes, memory_files, processes_of
from benchmarks.report import finish, parse_arguments
from megatron_ft.testing.jobs import REPOSITORY, JobResult, start, wait

ID = "host-memory"
MAX_ERROR = 0.05
MIN_WINDOW_ITERATIONS = 3
SOAK_ITERATIONS, QUICK_SOAK_ITERATIONS = 2000, 100
SAMPLE_SECONDS = 1.0
SKIPPED_ITERATIONS = 20
"""First iteration whose samples count: by then, windows are planned and all buffers are allocated."""
RSS_SHARE, RSS_BYTES, QUICK_RSS_BYTES = 0.01, 1 << 20, 8 << 20
"""Allowed growth of a process's resident memory over half of the run: a share of its memory or a number of bytes,
whichever is larger. The last number replaces the second one in the quick variant."""
START_SECONDS, JOB_SECONDS, SOAK_SECONDS = 120.0, 240.0, 1500.0
KEY = "snapshot.host_memory_limit_bytes"
_BASE = (
    "model=moe_micro",
    "training.micro_batch_size=1",
    "training.eval_interval_iterations=0",
    "checkpoint.save_at_end=false",
    "telemetry.wandb=disabled",
    "telemetry.expert_load_interval_iterations=0",
    "snapshot=sparse_window",
    "snapshot.iteration_seconds=1.0",
)
NO_HEADROOM = "snapshot.replan_interval_windows=0"
"""Override that keeps a job from reserving memory for larger later plans. Reserved memory is predicted but not
resident, because nothing is written to it."""
_LARGER = ("model.hidden_size=128", "model.moe_ffn_hidden_size=256", "training.train_iterations=400")
CASES: dict[str, tuple[str, ...]] = {
    "r=0, 1 node x 2 ranks, EP 2": (
        *_LARGER,
        "launch.ranks_per_node=2",
        "parallel.expert_model_parallel_size=2",
        "training.global_batch_size=2",
        "snapshot.num_peer_copies=0",
        NO_HEADROOM,
        "snapshot.bandwidth_bytes_per_second=8e6",
    ),
    "r=1, 2 nodes x 1 rank, PP 2": (
        *_LARGER,
        "launch.num_nodes=2",
        "parallel.pipeline_model_parallel_size=2",
        "parallel.use_distributed_optimizer=false",
        "training.global_batch_size=2",
        "snapshot.num_peer_copies=1",
        "snapshot.bandwidth_bytes_per_second=8e6",
    ),
    "r=2, 3 nodes x 1 rank, bf16": (
        *_LARGER,
        "launch.num_nodes=3",
        "precision.params_dtype=bf16",
        "training.global_batch_size=3",
        "snapshot.num_peer_copies=2",
        NO_HEADROOM,
        "snapshot.bandwidth_bytes_per_second=4e6",
    ),
}
QUICK_CASE = "r=1, 2 nodes x 1 rank, PP 2"
SOAK = (
    "model.num_layers=2",
    "launch.num_nodes=3",
    "training.global_batch_size=3",
    "telemetry.log_interval_iterations=10",
    "snapshot.num_peer_copies=2",
    "snapshot.bandwidth_bytes_per_second=2.5e5",
)


@dataclass(frozen=True, slots=True)
class Job:
    """Running job of a case."""

    process: "subprocess.Popen[str]"
    run_dir: Path

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the job's events of a kind so far."""
        return [event for event in lines_of(self.run_dir / "events.jsonl") if event["kind"] == kind]

    @property
    def iteration(self) -> int:
        """Return the newest iteration that the job reported."""
        return max((line.get("iteration", 0) for line in lines_of(self.run_dir / "metrics.jsonl")), default=0)

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        """Wait until ``condition`` is true.

        Raises:
            RuntimeError: the job ended, or the condition was not true in time.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no {what} within {seconds} s:\n{self.stop()[-3000:]}")
            time.sleep(0.1)

    def stop(self) -> str:
        """Request the job to stop after the current iteration. Return its output."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
        return wait(self.process, JOB_SECONDS)


def predicted_and_measured(name: str, folder: Path) -> dict[str, Any]:
    """Run one case until all nodes use their buffers, and measure the node with the largest need."""
    predicted = predicted_bytes(name, folder)
    job = started("case", [*_BASE, *CASES[name]], folder)
    try:
        job.wait_until(lambda: len(job.events("window_committed")) >= 3, "third committed window", JOB_SECONDS)
        processes = processes_of(job.process.pid)
        held = [sum(memory_files(keeper.pid).values()) for keeper in processes[KEEPER]]
        largest = max(range(len(held)), key=held.__getitem__)
        keeper = processes[KEEPER][largest].pid
        planned = job.events("snapshot_planned")[-1]
        everyone = [process.pid for role in (KEEPER, RANK) for process in processes[role]]
        row = {
            "predicted_bytes": predicted,
            "planned_bytes": planned["host_bytes"],
            "held_bytes": held[largest],
            "resident_bytes": mapped_bytes(keeper, "Rss"),
            "all_nodes_held_bytes": sum(held),
            "all_nodes_proportional_bytes": sum(mapped_bytes(pid, "Pss") for pid in everyone),
            "keeper_bytes_besides": footprint_of(keeper)["rss_bytes"] - mapped_bytes(keeper, "Rss"),
            "window_iterations": planned["window_iterations"],
        }
    finally:
        job.stop()
    seen = ["held_bytes", "resident_bytes"] if NO_HEADROOM in CASES[name] else ["held_bytes"]
    told = ("predicted_bytes", "planned_bytes")
    row["error"] = max(abs(row[prediction] / row[measured] - 1) for prediction in told for measured in seen)
    return row | {"limit": refused(name, predicted * 9 // 10, folder)}


def predicted_bytes(name: str, folder: Path) -> int:
    """Return the prediction of ``dry_run`` for the node with the largest need."""
    words = [*_BASE, *CASES[name], "dry_run=true", "dry_run_format=json", f"data.cache_dir={folder / 'cache'}"]
    command = [sys.executable, str(REPOSITORY / "pretrain_moe.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    assert done.returncode == 0, f"dry_run failed: {done.stderr}"
    return int(json.loads(done.stdout)["snapshot"]["host_bytes"])


def refused(name: str, limit_bytes: int, folder: Path) -> dict[str, Any]:
    """Start the case with a limit below its need. Return its message and the files that it left."""
    words = [*_BASE, *CASES[name], f"{KEY}={limit_bytes}"]
    job = started("refused", words, folder)
    output = wait(job.process, START_SECONDS)
    return {
        "limit_bytes": limit_bytes,
        "exit_code": job.process.returncode,
        "names_key": KEY in output,
        "left": sorted(path.name for path in job.run_dir.iterdir()) if job.run_dir.exists() else [],
        "message": output.strip()[-500:],
    }


def soak(folder: Path, *, num_iterations: int) -> dict[str, Any]:
    """Run a long job and sample all its processes."""
    began = time.monotonic()
    job = started("soak", [*_BASE, *SOAK, f"training.train_iterations={num_iterations}"], folder)
    samples: dict[str, list[dict[str, int]]] = {}
    try:
        job.wait_until(lambda: job.iteration >= SKIPPED_ITERATIONS, f"iteration {SKIPPED_ITERATIONS}", START_SECONDS)
        everyone = processes_of(job.process.pid)
        while job.process.poll() is None and job.iteration < num_iterations:
            sample(everyone, samples)
            time.sleep(SAMPLE_SECONDS)
        output = wait(job.process, SOAK_SECONDS)
    finally:
        job.stop()
    result = JobResult(job.process.returncode, job.run_dir, output)
    planned = job.events("snapshot_planned")
    return {
        "iterations": job.iteration,
        "exit_code": result.exit_code,
        "output": "" if result.exit_code == 0 else output[-2000:],
        "seconds": time.monotonic() - began,
        "windows_committed": len(job.events("window_committed")),
        "windows_delayed": len(job.events("window_delayed")),
        "problems": [event["error"] for event in job.events("snapshot_problem")][:5],
        "window_iterations": planned[-1]["window_iterations"] if planned else 0,
        "samples": min(map(len, samples.values()), default=0),
        "processes": {name: len(all_of) for name, all_of in everyone.items()},
        "first": {name: own[0] for name, own in samples.items()},
        "last": {name: own[-1] for name, own in samples.items()},
        "growth": {name: growth(own) for name, own in samples.items() if len(own) >= 4},
    }


def sample(everyone: dict[str, list[Any]], samples: dict[str, list[dict[str, int]]]) -> None:
    """Add one sample of each process that still runs."""
    for role, processes in everyone.items():
        for number, process in enumerate(processes):
            found = footprint(process.pid)
            if found is not None:
                samples.setdefault(f"{role} {number}", []).append(found.to_json())


def soak_problems(result: dict[str, Any], *, num_iterations: int, rss_bytes: int) -> list[str]:
    """Return evidence that memory grew; empty if there is none."""
    checks = [
        (result["exit_code"] == 0, f"exit code {result['exit_code']}"),
        (result["iterations"] == num_iterations, f"{result['iterations']} iterations"),
        (
            result["window_iterations"] >= MIN_WINDOW_ITERATIONS,
            f"windows have only {result['window_iterations']} iterations",
        ),
        (
            result["windows_committed"] >= num_iterations // 20,
            f"only {result['windows_committed']} windows were committed",
        ),
        (not result["problems"], f"problems: {result['problems']}"),
        (result["processes"] == {RANK: 3, KEEPER: 3, AGENT: 3}, f"the sampled processes are {result['processes']}"),
        (len(result["growth"]) == 9, f"only {len(result['growth'])} of 9 processes have enough samples"),
    ]
    found = [text for holds, text in checks if not holds]
    for name, grown in result["growth"].items():
        allowed = {"rss_bytes": max(rss_bytes, RSS_SHARE * result["last"][name]["rss_bytes"])}
        found += [
            f"{name}: {figure} grew by {value:.1f}"
            for figure, value in grown.items()
            if value > allowed.get(figure, 0.5)
        ]
    return found


def case_problems(name: str, row: dict[str, Any]) -> list[str]:
    """Return violations of the claim in one case."""
    limit = row["limit"]
    checks = [
        (row["error"] <= MAX_ERROR, f"{row['predicted_bytes']} bytes were predicted, but {row['held_bytes']} measured"),
        (row["window_iterations"] >= MIN_WINDOW_ITERATIONS, f"windows have only {row['window_iterations']} iterations"),
        (
            limit["exit_code"] == 2 and limit["names_key"],
            f"the job above the limit ended with {limit['exit_code']}: {limit['message']}",
        ),
        (not limit["left"], f"a refused job left {limit['left']}"),
    ]
    return [f"{name}: {text}" for holds, text in checks if not holds]


def started(name: str, overrides: Sequence[str], folder: Path) -> Job:
    """Start a job with its own processes."""
    number = sum(1 for path in folder.iterdir() if path.name.startswith(name))
    run = f"{name}-{number:03d}"
    places = [f"run.name={run}", f"run.dir={folder}", f"data.cache_dir={folder / 'cache'}"]
    process = start([sys.executable, str(REPOSITORY / "pretrain_moe.py"), *overrides, *places])
    return Job(process, folder / run)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file that is still being written."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def footprint_of(process_id: int) -> dict[str, int]:
    """Measure a running process."""
    found = footprint(process_id)
    assert found is not None, f"process {process_id} has ended"
    return found.to_json()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all three parts and report the result."""
    arguments = parse_arguments(__doc__, argv)
    num_iterations = QUICK_SOAK_ITERATIONS if arguments.quick else SOAK_ITERATIONS
    rss_bytes = QUICK_RSS_BYTES if arguments.quick else RSS_BYTES
    with tempfile.TemporaryDirectory(prefix="host-memory-") as folder:
        cases = {}
        for name in [QUICK_CASE] if arguments.quick else CASES:
            cases[name] = predicted_and_measured(name, Path(folder))
            print(name, cases[name], flush=True)
        run = soak(Path(folder), num_iterations=num_iterations)
    problems = [text for name, row in cases.items() for text in case_problems(name, row)]
    problems += soak_problems(run, num_iterations=num_iterations, rss_bytes=rss_bytes)
    worst = max(row["error"] for row in cases.values())
    most = max((grown["rss_bytes"] for grown in run["growth"].values()), default=float("nan"))
    figure = (
        f"prediction off by at most {100 * worst:.2f} % over {len(cases)} configurations, limits below refused; "
        f"{run['iterations']} iterations, {run['windows_committed']} windows: resident memory of a process grew by at "
        f"most {most / 1024:.0f} KiB over the second half, threads, descriptors and memory files by none"
    )
    return finish(
        arguments.out,
        ID,
        passed=not problems,
        figure="; ".join(problems) if problems else figure,
        threshold="within 5 %; exit code 2 naming the key; no growth (resident: 1 % or 1 MiB over 1,000 iterations)",
        counts={
            "configurations": len(cases),
            "soak_iterations": run["iterations"],
            "soak_windows": run["windows_committed"],
            "soak_samples": run["samples"],
            "processes_sampled": sum(run["processes"].values()),
        },
        details={"cases": cases, "soak": run, "problems": problems},
    )


if __name__ == "__main__":
    sys.exit(main())
