"""Claim ``log-overhead``: logging the tensors that are sent over pipeline boundaries hardly delays training.

A real pipeline of two stages trains pairs of iterations, one with the upstream log and one without; the order within a
pair changes. The log has space for two windows and twice the lag of their commits, and is trimmed when windows are
committed. The time that training waits for a copy is the time in ``UpstreamLog.append``, measured separately as wall
time and CPU time. Each iteration counts for its slowest rank. The memory of the log is compared with the prediction of
``dry_run``, which is computed from the configuration alone.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import finish, parse_arguments
from megatron_ft.config.job import JobConfig
from megatron_ft.corpus.samples import check_data
from megatron_ft.planning.snapshot.plan import WindowPlan
from megatron_ft.planning.upstream_log import iterations_kept, log_bytes
from megatron_ft.testing.ranks import Rank, compose, run_ranks

ID = "log-overhead"
WORLD_SIZE = 2
PAIRS, QUICK_PAIRS = 25, 7
WARM_UP = 2
WINDOW_ITERATIONS = 4
MAX_SHARE = 0.02
MAX_ERROR = 0.05
_JOB = (
    "model=moe_tiny",
    "model.hidden_size=256",
    "model.moe_ffn_hidden_size=512",
    "training.eval_interval_iterations=0",
    "training.train_iterations=100000",
    "training.global_batch_size=8",
    "training.micro_batch_size=1",
    "checkpoint.save_at_end=false",
    f"launch.ranks_per_node={WORLD_SIZE}",
    f"parallel.pipeline_model_parallel_size={WORLD_SIZE}",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and judge the claim."""
    arguments = parse_arguments(__doc__, argv)
    config = compose(*_JOB)
    check_data(config)
    pairs = QUICK_PAIRS if arguments.quick else PAIRS
    with tempfile.TemporaryDirectory(prefix="log-") as folder:
        ranks = run_ranks(partial(_measure, pairs), config, world_size=WORLD_SIZE, run_dir=Path(folder))
    share = _slowest(ranks, lambda row: row["blocked_seconds"] / row["seconds"])
    cpu_share = _slowest(ranks, lambda row: row["cpu_seconds"] / row["seconds"])
    ratio = statistics.median(
        max(rank["with"][pair]["seconds"] for rank in ranks) / max(rank["without"][pair]["seconds"] for rank in ranks)
        for pair in range(pairs)
    )
    error = max(abs(rank["log_bytes"] / rank["predicted_bytes"] - 1.0) for rank in ranks)
    sent = max(row["num_bytes"] for rank in ranks for row in rank["with"])
    figure = (
        f"training waits {share:.2%} of an iteration for the log, {cpu_share:.2%} of it in CPU time; with it an "
        f"iteration takes {ratio:.3f}x (median of {pairs} pairs); {max(r['log_bytes'] for r in ranks):,} bytes for "
        f"{ranks[0]['iterations_kept']} iterations of {sent:,} bytes, predicted within {error:.1%}"
    )
    return finish(
        arguments.out,
        ID,
        passed=share <= MAX_SHARE and error <= MAX_ERROR,
        figure=figure,
        threshold=f"waits <= {MAX_SHARE:.0%} of an iteration; bytes predicted within {MAX_ERROR:.0%}",
        counts={"pairs": pairs, "ranks": WORLD_SIZE},
        details={"ranks": ranks},
    )


def _slowest(ranks: Sequence[dict[str, Any]], value: Any) -> float:
    """Return the median over iterations of the largest value over ranks."""
    return statistics.median(max(map(value, rows)) for rows in zip(*(rank["with"] for rank in ranks), strict=True))


def _measure(pairs: int, config: JobConfig, rank: Rank) -> dict[str, Any]:
    from megatron_ft.mcore.recovery.upstream_log import keep_room
    from megatron_ft.testing.ranks import join

    trainer, _ = join(config, rank)
    engine, stage = trainer.engine, trainer.engine.pg.pp.rank()
    plan = WindowPlan(slices=((),) * WINDOW_ITERATIONS, interval_iterations=WINDOW_ITERATIONS)
    keep_room(engine, plan, trainer.report)
    log, lag = engine.boundaries.log, config.upstream_log.commit_lag_iterations
    assert log is not None, "there is room"
    found: dict[str, list[dict[str, float]]] = {"with": [], "without": []}
    for number in range(WARM_UP + pairs):
        order = ("with", "without") if number % 2 else ("without", "with")
        for kind in order:
            engine.boundaries.log = log if kind == "with" else None
            row = _iterate(engine, log)
            if number >= WARM_UP:
                found[kind].append(row)
    return {
        **found,
        "stage": stage,
        "iterations_kept": log.num_iterations,
        "log_bytes": log.num_bytes,
        "predicted_bytes": log_bytes(config, stage, iterations_kept(WINDOW_ITERATIONS, lag)),
    }


def _iterate(engine: Any, log: Any) -> dict[str, float]:
    figures = log.figures
    before = (figures.blocked_seconds, figures.cpu_seconds, figures.num_bytes)
    log.trim(engine.iteration - log.num_iterations + 1)
    began = time.perf_counter()
    engine.run_iteration(engine.iteration + 1)
    return {
        "seconds": time.perf_counter() - began,
        "blocked_seconds": figures.blocked_seconds - before[0],
        "cpu_seconds": figures.cpu_seconds - before[1],
        "num_bytes": figures.num_bytes - before[2],
    }


if __name__ == "__main__":
    sys.exit(main())
