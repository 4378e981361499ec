"""Claim ``loop-overhead``: CPU time that the project adds to a hand-written Megatron loop.

Both loops train the same model in one process, in alternating iterations; the order within a pair changes from pair to
pair. The project's loop includes all work of a rank: vote, rollback record, progress, metrics, expert loads. The work
of the launcher, its sinks and the node processes is not included.
"""

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import finish, parse_arguments
from megatron_ft.config.job import JobConfig
from megatron_ft.corpus.samples import check_data
from megatron_ft.testing.ranks import Rank, compose, join, run_ranks

ID = "loop-overhead"
MAX_RATIO = 1.03
QUICK_MAX_RATIO = 1.25
WARM_UP, PAIRS, QUICK_PAIRS = 2, 40, 7
WORLD_SIZES = (1, 2)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on one rank and on two ranks, and report the larger ratio."""
    arguments = parse_arguments(__doc__, argv)
    pairs, limit = (QUICK_PAIRS, QUICK_MAX_RATIO) if arguments.quick else (PAIRS, MAX_RATIO)
    config = compose(f"training.train_iterations={WARM_UP + pairs + 11}", "training.eval_interval_iterations=0")
    check_data(config)
    measured = {}
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        for world_size in WORLD_SIZES[: 1 if arguments.quick else None]:
            ranks = run_ranks(_pairs_of(pairs), config, world_size=world_size, run_dir=Path(folder) / str(world_size))
            measured[world_size] = max(ranks, key=lambda row: row["ratio"])
            print(f"{world_size} ranks, slowest: {measured[world_size]}", flush=True)
    ratio = max(row["ratio"] for row in measured.values())
    return finish(
        arguments.out,
        ID,
        passed=ratio <= limit,
        figure=" ".join(f"{row['ratio']:.3f}x on {size} rank{'s'[: size > 1]}" for size, row in measured.items()),
        threshold=f"<= {limit:g}x CPU seconds of bare Megatron",
        counts={"pairs": pairs, "world_sizes": len(measured)},
        details={str(size): row for size, row in measured.items()},
    )


def _pairs_of(pairs: int) -> Callable[[JobConfig, Rank], dict[str, Any]]:
    def measure(config: JobConfig, rank: Rank) -> dict[str, Any]:
        return _measure(config, rank, pairs)

    return measure


def _measure(config: JobConfig, rank: Rank, pairs: int) -> dict[str, Any]:
    trainer, groups = join(config, rank)
    from benchmarks.bare_megatron import BareLoop

    bare = BareLoop(
        config,
        vocab_size=trainer.engine.vocab_size,
        samples=trainer.samples["train"],
        pg_collection=groups.pg_collection,
    )
    bare.copy_weights(trainer.engine.model_chunks[0])
    gc.collect()
    gc.freeze()
    loops: tuple[Callable[[int], Any], Callable[[int], Any]] = (trainer.iterate, bare.run_iteration)
    first = [_cpu_seconds(loop, 1) for loop in loops]
    rows = []
    for iteration in range(2, WARM_UP + pairs + 1):
        order = (0, 1) if iteration % 2 else (1, 0)
        seconds = {number: _cpu_seconds(loops[number], iteration) for number in order}
        rows.append((seconds[0], seconds[1]))
    rows = rows[WARM_UP - 1 :]
    return {
        "ratio": statistics.median(ours / theirs for ours, theirs in rows),
        "ours_seconds": statistics.median(ours for ours, _ in rows),
        "bare_seconds": statistics.median(theirs for _, theirs in rows),
        "first_call_ratio": first[0] / first[1],
        "pairs": len(rows),
    }


def _cpu_seconds(loop: Callable[[int], Any], iteration: int) -> float:
    began = time.process_time()
    loop(iteration)
    return time.process_time() - began


if __name__ == "__main__":
    raise SystemExit(main())
