"""Stage ``recovery`` of ``tools/gpu_day.py``, a series of tests on a GPU: recovers jobs of the real program.

In one run, a rank is killed and continues from a window of snapshots in the node's memory. Another run is stopped and
continues from its checkpoint. Both runs must give the same bits as a run without kills or stops.
"""

import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.generations import Generation, generations_of, missing
from megatron_ft.control.launcher import PRELOAD, PRELOAD_ON_CUDA
from megatron_ft.control.node import fork_server
from megatron_ft.testing.jobs import JobResult, run_job
from tools.gpu.day import Day

NUM_ITERATIONS, SHORT_ITERATIONS = 12, 8
STOPPED_AT = 5
KILLS = (("backward", 8), ("update", 9), ("forward", 10), ("vote_after", 11))
SHORT_KILLS = (("backward", 6), ("forward", 7))
MIN_WINDOW_ITERATIONS = 3
_POLICY = "{_target_:megatron_ft.planning.snapshot.sparse_window.SparseWindow}"
SLICE_BYTES = 700_000
"""Bytes of state that are captured in each iteration. The number is so small that capturing the whole state of
``moe_micro`` takes several iterations."""
_JOB = (
    "model=moe_micro",
    "model.num_layers=2",
    "precision.params_dtype=bf16",
    "optimizer.lr_warmup_iterations=3",
    "training.micro_batch_size=1",
    "training.global_batch_size=2",
    "training.eval_interval_iterations=0",
    "training.digest_interval_iterations=1",
    "training.transformer_impl=local",
    "telemetry.wandb=disabled",
    "launch.num_nodes=1",
    "launch.ranks_per_node=1",
)
Kills = Sequence[tuple[str, int]]
"""Sequence of (phase, iteration): the moments at which the rank is killed."""


def run(day: Day) -> None:
    """Run a job without failures, a job with kills and a job that is stopped. Compare their losses and states."""
    kills, num_iterations = (KILLS, NUM_ITERATIONS) if day.has_gpu else (SHORT_KILLS, SHORT_ITERATIONS)
    run_kills(day, kills, num_iterations=num_iterations, also_stops=True)


def run_kills(day: Day, kills: Kills, *, num_iterations: int, also_stops: bool = False) -> None:
    """Run a job whose rank is killed, and a reference job without kills. Check that the results are bit-identical. If
    ``also_stops`` is true, also compare a job that is stopped and resumed."""
    with rank_server(day.device_type) as socket, ThreadPoolExecutor(2) as pool:
        jobs = Jobs(day, socket, num_iterations)
        left_alone = pool.submit(jobs.run, "left-alone", [])
        restarts = f"recovery.max_restarts={len(kills)}"
        killed = pool.submit(jobs.run, "killed", [*windows(SLICE_BYTES), restarts, failpoints(kills)])
        stopped = pool.submit(jobs.stop_and_resume) if also_stops else None
        reference = generations_of(left_alone.result())[0]
        for problem in missing([reference], num_iterations):
            day.check(False, f"left alone: {problem}")
        with day.part("killed"):
            judge_kills(day, killed.result(), kills, reference)
        if stopped is not None:
            with day.part("stopped"):
                judge_resumed(day, stopped.result(), reference)


@contextlib.contextmanager
def rank_server(device_type: str) -> Iterator[str]:
    """Start the project's fork server for ranks on a device, and yield its socket.

    The server is forked from this process, which has already imported all modules that ranks need.
    """
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        path = f"{folder}/ranks.sock"
        held, ends = os.pipe()  # the server ends when its standard input is closed
        ready, says = fork.Pipe(duplex=False)
        server = fork.Process(target=_serve, args=(path, device_type, held, ends, says))
        server.start()
        os.close(held)
        says.close()
        try:
            with os.fdopen(os.dup(ready.fileno()), encoding="utf-8") as lines:
                if not lines.readline():
                    raise RuntimeError("the fork server for ranks did not start")
            yield path
        finally:
            os.close(ends)
            server.join()


def _serve(path: str, device_type: str, held: int, ends: int, says: Any) -> None:
    os.close(ends)
    sys.stdin = os.fdopen(held)
    sys.stdout = os.fdopen(says.fileno(), "w", encoding="utf-8", closefd=False)
    os.environ.update(fork_server.SINGLE_THREAD_ENVIRONMENT)
    fork_server.main(["--socket", path, "--preload", *(PRELOAD_ON_CUDA if device_type == "cuda" else PRELOAD)])


def job_words(device_type: str, num_iterations: int) -> list[str]:
    """Return the overrides that all jobs of this stage have in common."""
    return [*_JOB, f"training.device={device_type}", f"training.train_iterations={num_iterations}"]


def windows(slice_bytes: int) -> list[str]:
    """Return overrides for sparse windows that capture ``slice_bytes`` per iteration and have no peer copies."""
    return [
        "snapshot=sparse_window",
        f"snapshot.policy={_POLICY}",
        "snapshot.num_peer_copies=0",
        f"snapshot.bandwidth_bytes_per_second={slice_bytes}",
        "snapshot.iteration_seconds=1.0",
    ]


class Jobs:
    """Starts the jobs of a stage. The fork server at ``socket`` forks the ranks of all these jobs."""

    def __init__(self, day: Day, socket: str, num_iterations: int) -> None:
        self._day, self._socket, self._num_iterations = day, socket, num_iterations

    def run(self, name: str, more: Sequence[str]) -> JobResult:
        """Run a job until it ends, with any exit code."""
        words = [*job_words(self._day.device_type, self._num_iterations), f"run.name={name}"]
        words.append(f"data.cache_dir={self._day.shared / 'data'}")
        if not any(word.startswith("checkpoint.") for word in more):
            words.append("checkpoint.save_at_end=false")
        seconds = max(1.0, self._day.remaining_seconds - 5)
        result = run_job(
            [*words, *more], forkserver=self._socket, runs=self._day.folder / "runs", timeout_seconds=seconds
        )
        print(f"--- {name}: exit code {result.exit_code}\n{result.output[-3000:]}", flush=True)
        self._day.check(result.exit_code == 0, f"{name}: exit code {result.exit_code}: {result.output[-300:]}")
        return result

    def stop_and_resume(self) -> JobResult:
        """Stop a job after iteration ``STOPPED_AT``, which saves a checkpoint. Then resume the job."""
        saves = ["checkpoint.save_at_end=true"]
        self.run("stopped", [*saves, f"training.exit_at_iteration={STOPPED_AT}"])
        return self.run("stopped", [*saves, "run.resume=auto"])


def failpoints(kills: Kills) -> str:
    """Return an override that kills the rank in generation n at the phase and iteration ``kills[n]``, for each n."""
    texts = [
        f"'kill(at_iteration={at},phase=\"{phase}\",generation={number})'" for number, (phase, at) in enumerate(kills)
    ]
    return f"testing.failpoints=[{','.join(texts)}]"


def judge_kills(day: Day, run: JobResult, kills: Kills, reference: Generation) -> None:
    """Check that every kill happened, that the job continued from a window in memory after each kill, and that all
    its losses and digests of state equal those of ``reference``."""
    generations = generations_of(run)
    day.check(
        len(generations) == len(kills) + 1, f"the job restarted {len(generations) - 1} times after {len(kills)} kills"
    )
    hits = [(hit["phase"], hit["iteration"]) for generation in generations for hit in generation.hits]
    day.check(hits == list(kills), f"ranks were killed at {hits}, not at {list(kills)}")
    chosen = [generation.newest("recovery_started") or {"source": None} for generation in generations[1:]]
    sources = [choice["source"] for choice in chosen]
    day.check(set(sources) == {"memory"}, f"the job continued from {sources}, not only from memory")
    planned = [
        event for generation in generations for event in generation.events if event["kind"] == "snapshot_planned"
    ]
    windows = sorted({event["window_iterations"] for event in planned})
    day.check(
        min(windows, default=0) >= MIN_WINDOW_ITERATIONS,
        f"windows have {windows} iterations, but need at least {MIN_WINDOW_ITERATIONS}",
    )
    differences = _differences(generations, reference)
    day.check(not differences, f"killed: {differences[:3]}")
    day.record(kills=len(hits), continued_from=[choice.get("iteration") for choice in chosen], windows=windows)
    day.record(seconds_per_iteration=iteration_seconds(run), digests_compared=sum(len(g.digests) for g in generations))


def judge_resumed(day: Day, run: JobResult, reference: Generation) -> None:
    """Check that the resumed run has all iterations, and that its losses and digests equal those of ``reference``."""
    found = generations_of(run)
    differences = _differences(found, reference)
    day.check(not differences, f"stopped: {differences[:3]}")
    saved = sorted(path.name for path in (Path(run.run_dir) / "checkpoints").glob("iter_*"))
    day.check(bool(saved), "the stopped run has no checkpoint")
    day.record(resumed_at=STOPPED_AT, seconds_per_iteration_resumed=iteration_seconds(run))


def _differences(generations: Sequence[Generation], reference: Generation) -> list[str]:
    different = [text for generation in generations for text in generation.differences(reference)]
    return [*different, *missing(generations, max(at for at, _ in reference.losses))]


def iteration_seconds(run: JobResult) -> Any:
    """Return the median of the iteration times that the run reported."""
    rows = [record["iteration_seconds"] for record in run.records("metrics.jsonl") if "iteration_seconds" in record]
    return statistics.median(rows) if rows else None
