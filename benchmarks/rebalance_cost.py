"""Claim ``rebalance-cost``: a rebalance copies only the experts that move, and training waits less than an iteration.

Four ranks train a model whose experts have at least 8 MB of state. Between iterations they rebalance for other loads,
with the code that a job uses. Each rank measures its iterations, the time for which it waits for each rebalance, the
bytes that it receives, and the growth of its resident memory above the value before the rebalance.
"""

import ctypes
import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.report import finish, parse_arguments
from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import JobInputs, derive_placement
from megatron_ft.corpus.samples import check_data
from megatron_ft.mcore.groups import exchange_one
from megatron_ft.planning.cost.memory import expert_state_bytes
from megatron_ft.planning.placement.report import PlacementReport
from megatron_ft.testing.ranks import Rank, compose, join, resident_growth, run_ranks

ID = "rebalance-cost"
WORLD_SIZE, NUM_SLOTS, MIN_REPLICAS = 4, 5, 2
REBALANCES, QUICK_REBALANCES = 15, 3
FIRST_ITERATIONS = 3
"""Iterations before the first rebalance. They allocate the memory of training, and are not measured."""
LINK_ATTEMPTS = 7
MIN_EXPERT_BYTES = 8_000_000
MAX_EXPERTS = 2.0
SEED = 20261123
THRESHOLD = (
    f"of experts of at least {MIN_EXPERT_BYTES // 10**6} MB: received bytes <= moved bytes; peak memory <= steady plus "
    f"{MAX_EXPERTS:g} experts; slowest rank waits less than one iteration"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Rebalance repeatedly on all ranks, and judge bytes, memory and waits."""
    arguments = parse_arguments(__doc__, argv)
    num_rebalances = QUICK_REBALANCES if arguments.quick else REBALANCES
    with tempfile.TemporaryDirectory(prefix="rebalance-cost-") as folder:
        config = _config(FIRST_ITERATIONS + num_rebalances)
        check_data(config)
        ranks = run_ranks(_rebalance, config, world_size=WORLD_SIZE, run_dir=Path(folder))
    expert_bytes = expert_state_bytes(config)
    # A job waits for its slowest rank.
    iteration = statistics.median(max(times) for times in zip(*(rank["iterations"] for rank in ranks), strict=True))
    rounds = list(zip(*(rank["rebalances"] for rank in ranks), strict=True))
    waits = [max(row["seconds"] for row in of_round) for of_round in rounds]
    received = sum(row["received_bytes"] for of_round in rounds for row in of_round)
    moved = sum(of_round[0]["moved_bytes"] for of_round in rounds)
    peak = max(row["peak_bytes"] for of_round in rounds for row in of_round)
    wait = statistics.median(waits)
    predicted = ranks[0]["most_received_bytes"] / min(rank["link_bytes_per_second"] for rank in ranks)
    passed = (
        expert_bytes >= MIN_EXPERT_BYTES
        and all(of_round[0]["moved_bytes"] > 0 and of_round[0]["is_in_place"] for of_round in rounds)
        and received <= moved
        and peak <= MAX_EXPERTS * expert_bytes
        and wait < iteration
    )
    for number, of_round in enumerate(rounds):
        grown = max(row["peak_bytes"] for row in of_round) / expert_bytes
        print(
            f"rebalance {number}: {of_round[0]['moved_bytes'] / 1e6:.0f} MB moved in {of_round[0]['num_steps']} steps, "
            f"{waits[number]:.3f} s, memory grew by {grown:.2f} experts"
        )
    return finish(
        arguments.out,
        ID,
        passed=passed,
        figure=(
            f"{received / moved:.2f}x of {moved / len(rounds) / 1e6:.0f} MB a rebalance received, peak memory steady "
            f"plus {peak / expert_bytes:.2f} experts of {expert_bytes / 1e6:.1f} MB, wait {wait:.2f} s "
            f"({wait / iteration:.2f} iterations; predicted {predicted:.2f} s)"
        ),
        threshold=THRESHOLD,
        counts={"rebalances": len(rounds), "ranks": WORLD_SIZE},
        details={"ranks": ranks, "expert_bytes": expert_bytes, "iteration_seconds": iteration},
    )


def _config(iterations: int) -> JobConfig:
    config = compose(
        "model=moe_micro",
        "model.hidden_size=256",
        "model.moe_ffn_hidden_size=1536",
        "precision.params_dtype=bf16",
        "training.global_batch_size=16",
        "training.micro_batch_size=1",
        f"training.train_iterations={iterations}",
        "training.eval_interval_iterations=0",
        "optimizer.lr_warmup_iterations=1",
    )
    placement = replace(
        config.placement,
        algorithm={"_target_": "megatron_ft.planning.placement.overlap_search.OverlapSearch"},
        num_slots_per_rank=NUM_SLOTS,
        min_replicas=MIN_REPLICAS,
    )
    launch = replace(config.launch, num_nodes=WORLD_SIZE, ranks_per_node=1)
    return derive_placement(replace(config, placement=placement, launch=launch))


def _rebalance(config: JobConfig, rank: Rank) -> dict[str, Any]:
    """Train, and rebalance before each of the last iterations. Return what this rank measured."""
    trainer, _ = join(config, rank)
    report = PlacementReport.of(config, JobInputs(), [0])
    draw = np.random.default_rng(SEED)
    for iteration in range(1, FIRST_ITERATIONS + 1):
        trainer.iterate(iteration)
    iterations, rebalances = [], []
    keeper = trainer.placement
    for iteration in range(FIRST_ITERATIONS + 1, config.training.train_iterations + 1):
        keeper.loads = [[(draw.pareto(1.0, 8) + 0.05).tolist() for _ in plan.layer_numbers] for plan in keeper.plans]
        change = keeper.propose()
        rebalances.append(_measure(trainer, change, iteration))
        keeper.adopt(change)
        iterations.append(_seconds(lambda: trainer.iterate(iteration)))  # noqa: B023
    return {
        "iterations": iterations,
        "rebalances": rebalances,
        "most_received_bytes": report.most_received_bytes,
        "link_bytes_per_second": _link_bytes_per_second(trainer.engine.pg.ep, expert_state_bytes(config)),
    }


def _link_bytes_per_second(group: dist.ProcessGroup, num_bytes: int) -> float:
    """Return the bytes per second that this rank sends to the next one while it receives as many from the previous."""
    sent, received = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    following, previous = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    times = [
        _seconds(lambda: exchange_one((following, sent), (previous, received), group)) for _ in range(LINK_ATTEMPTS)
    ]
    return num_bytes / statistics.median(times)


def _measure(trainer: Any, change: Any, iteration: int) -> dict[str, Any]:
    received = []
    replace_experts = trainer.engine.replace_experts

    def counted(steps: Any, replicas: Any, **others: Any) -> int:
        received.append((len(steps), replace_experts(steps, replicas, **others)))
        return received[-1][1]

    trainer.engine.replace_experts = counted
    # Memory that the process has freed but kept would hide what the rebalance allocates.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    trainer.collectives.any(False)  # a barrier, so that waits for slower iterations do not count
    seconds: list[float] = []
    grown = resident_growth(lambda: seconds.append(_seconds(partial(trainer.move, change, iteration))))
    del trainer.engine.replace_experts
    return {
        "seconds": seconds[0],
        "peak_bytes": grown,
        "moved_bytes": change.moved_bytes,
        "is_in_place": bool(received),
        "num_steps": received[0][0] if received else 0,
        "received_bytes": received[0][1] if received else 0,
    }


def _seconds(function: Any) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
