"""Claim ``selective-stall``: time for which each kind of snapshot blocks training, in one run.

Two ranks of one job capture after every iteration, and send windows to real snapshot servers with a copy on another
node. In every round each kind of snapshot takes its turn, in an order that changes, between iterations without
snapshots. A snapshot blocks training while it starts, and while the next update waits for the copy; *blocking dense*
copies everything before the next iteration. Each round counts for its slowest rank; figures are medians over rounds
except the first.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import finish, parse_arguments
from megatron_ft.config.job import JobConfig, SnapshotConfig
from megatron_ft.corpus.samples import check_data
from megatron_ft.operators import moe_layers
from megatron_ft.planning.snapshot.lost_tokens import TokenLedger
from megatron_ft.testing.ranks import Rank, compose, run_ranks
from megatron_ft.testing.snapshot_servers import Cluster, cluster

ID = "selective-stall"
WORLD_SIZE, NUM_NODES = 2, 2
ROUNDS, QUICK_ROUNDS = 9, 2
NUM_WARM, NUM_SAVES = 2, 4
"""Number of captures before and during a measurement. The first capture captures all state and allocates memory."""
JOB_SECONDS, QUICK_JOB_SECONDS = 1800.0, 400.0
MAX_BLOCKED_SHARE = 0.01
_JOB = (
    "model=moe_tiny",
    "model.hidden_size=256",
    "model.moe_ffn_hidden_size=512",
    "precision.params_dtype=bf16",
    "training.global_batch_size=8",
    f"launch.num_nodes={NUM_NODES}",
    "training.eval_interval_iterations=0",
    "training.train_iterations=100000",
    "checkpoint.save_at_end=false",
)
_PARTIAL = ("snapshot=partial_experts", "snapshot.policy.max_lost_share=null")
BLOCKING, DENSE, SPARSE, PARTIAL, SELECTIVE = "blocking dense", "dense", "sparse window", "partial", "selective"
_SNAPSHOTS = {
    BLOCKING: ("snapshot=dense", "snapshot.policy.interval_iterations=1"),
    DENSE: ("snapshot=dense", "snapshot.policy.interval_iterations=1"),
    SPARSE: ("snapshot=sparse_window", "snapshot.policy.min_window_iterations=4"),
    PARTIAL: _PARTIAL,
    SELECTIVE: ("snapshot=selective_experts",),
}
BUDGET_BYTES = 40e6
"""Bytes that a rank may capture in one iteration, according to the configuration: about a third of its state."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all kinds of snapshots, and compare the policy's number of experts with every other number."""
    arguments = parse_arguments(__doc__, argv)
    config = compose(*_JOB)
    measured = ("snapshot.num_peer_copies=1", "snapshot.iteration_seconds=1.0")
    budget = f"snapshot.bandwidth_bytes_per_second={BUDGET_BYTES}"
    snapshots = {name: compose(*_JOB, *words, *measured, budget).snapshot for name, words in _SNAPSHOTS.items()}
    check_data(config)
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    with cluster(NUM_NODES) as keepers, tempfile.TemporaryDirectory(prefix="stall-") as folder:
        measure = partial(_measure, keepers, snapshots, rounds)
        seconds = QUICK_JOB_SECONDS if arguments.quick else JOB_SECONDS
        ranks = run_ranks(measure, config, world_size=WORLD_SIZE, run_dir=Path(folder), timeout_seconds=seconds)
    plain = statistics.median(max(pair) for pair in zip(*(rank["plain_seconds"][1:] for rank in ranks), strict=True))
    table = {name: _summary([rank["rows"][name][1:] for rank in ranks], plain) for name in _SNAPSHOTS}
    for name, row in table.items():
        print(
            f"{name:16} blocked {row['blocked_share']:7.2%} of an iteration, iteration {row['slowdown']:5.3f}x, "
            f"{row['captured_bytes'] / 1e6:6.1f} MB captured, {row['replicated_bytes'] / 1e6:6.1f} MB sent"
        )
    chosen = ranks[0]["adaptive"]
    dense = table[DENSE]["captured_bytes"]
    smaller = {name: table[name]["captured_bytes"] / dense for name in (SPARSE, PARTIAL, SELECTIVE)}
    is_adaptive = chosen["chosen"] == chosen["fitting"]
    blocked = max(table[name]["blocked_share"] for name in (SPARSE, PARTIAL, SELECTIVE))
    return finish(
        arguments.out,
        ID,
        passed=is_adaptive
        and max(smaller.values()) < 1
        and (arguments.quick or (blocked <= MAX_BLOCKED_SHARE < table[BLOCKING]["blocked_share"])),
        figure=", ".join(
            f"{name} {row['blocked_share']:.2%} (iteration {row['slowdown']:.2f}x, "
            f"{row['captured_bytes'] / dense:.2f} of the bytes)"
            for name, row in table.items()
        )
        + f"; adaptive K {chosen['chosen']} of {chosen['experts']}, the largest that fits",
        threshold="sparse, partial and selective block <= 1 % of an iteration, blocking dense more; fewer bytes than "
        "dense; adaptive K is the largest that fits",
        counts={"rounds": rounds, "saves_each": NUM_SAVES, "kinds": len(_SNAPSHOTS), "ranks": WORLD_SIZE},
        details={"table": table, "iteration_seconds": plain, "adaptive": chosen},
    )


def _summary(by_rank: Sequence[Sequence[dict[str, float]]], plain: float) -> dict[str, float]:
    rounds = list(zip(*by_rank, strict=True))

    def slowest(key: str) -> float:
        return statistics.median(max(row[key] for row in rows) for rows in rounds)

    return {
        "blocked_share": slowest("blocked_seconds") / plain,
        "slowdown": slowest("iteration_seconds") / plain,
        "captured_bytes": slowest("captured_bytes"),
        "replicated_bytes": slowest("replicated_bytes"),
    }


def _measure(
    keepers: Cluster, snapshots: dict[str, SnapshotConfig], rounds: int, config: JobConfig, rank: Rank
) -> dict[str, Any]:
    return _Bench(keepers, snapshots, config, rank).measure(rounds)


class _Bench:
    """Rank with a trainer that captures with one kind of snapshot after the other."""

    def __init__(self, keepers: Cluster, snapshots: dict[str, SnapshotConfig], config: JobConfig, rank: Rank) -> None:
        from megatron_ft.testing.ranks import join

        self.trainer, self.groups = join(config, rank)
        self.engine = self.trainer.engine
        self.engine.wants_load = lambda _: True
        self.keepers, self.snapshots, self.rank = keepers, snapshots, rank
        self.generation = 1
        self.adaptive: dict[str, int] = {}

    def measure(self, rounds: int) -> dict[str, Any]:
        """Return the figures of each kind of snapshot by round, and the seconds of iterations without snapshots."""
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in self.snapshots}
        plain = []
        names = list(self.snapshots)
        for number in range(rounds):
            plain.append(statistics.median(self._iterate()[0] for _ in range(NUM_SAVES)))
            for name in names[number % len(names) :] + names[: number % len(names)]:
                rows[name].append(self._block(name))
        return {"rows": rows, "plain_seconds": plain, "adaptive": self.adaptive}

    def _block(self, name: str) -> dict[str, float]:
        """Capture after some iterations, and return the mean cost of one capture."""
        from benchmarks.savers import Windows

        self.generation += 1
        node = self.rank.rank
        client = self.keepers.client(
            node, node=node, peer_nodes=[1 - node], world_size=WORLD_SIZE, generation=self.generation
        )
        windows = Windows(self.trainer, self.snapshots[name], client, node=node)
        blocked, seconds, num_bytes, sent = [], [], 0, 0.0
        for index in range(NUM_WARM + NUM_SAVES + 1):
            took, waited = self._iterate(windows.settle)
            if index > NUM_WARM:
                blocked[-1] += waited
                seconds.append(took + waited)
            if index == NUM_WARM + NUM_SAVES:
                break
            # Waits for copies between captures, because a capture of the next iteration needs a free buffer.
            windows.expect(self.engine.iteration - 1 if index else self.engine.iteration)
            began = time.perf_counter()
            windows.save(self.result, took)
            if name == BLOCKING:
                windows.settle()
            if index >= NUM_WARM:
                blocked.append(time.perf_counter() - began)
            if index == NUM_WARM - 1:
                windows.settle()
                num_bytes, sent = windows.num_bytes, windows.replicated_bytes
        self._note_adaptive(name, windows)
        windows.settle()
        captured = (windows.num_bytes - num_bytes) / NUM_SAVES
        replicated = (windows.replicated_bytes - sent) / NUM_SAVES
        windows.close()
        self._barrier()
        return {
            "blocked_seconds": statistics.mean(blocked),
            "iteration_seconds": statistics.median(seconds),
            "captured_bytes": captured,
            "replicated_bytes": replicated,
        }

    def _iterate(self, settle: Any = None) -> tuple[float, float]:
        """Run one iteration. Return its seconds without ``settle`` before the update, and those of ``settle``."""
        waited = [0.0]

        def before_update() -> None:
            began = time.perf_counter()
            if settle is not None:
                settle()
            waited[0] += time.perf_counter() - began

        self.engine.before_update = [before_update]
        began = time.perf_counter()
        self.result = self.engine.run_iteration(self.engine.iteration + 1)
        took = time.perf_counter() - began - waited[0]
        # The engine counts tokens only if the job's configured windows leave out experts, so they are counted here.
        loads = [self.result.expert_load[layer - 1].tolist() for layer in moe_layers(self.engine.config.model)]
        tokens = self.engine.history.tokens or TokenLedger.empty(loads)
        self.engine.history = replace(self.engine.history, tokens=tokens.after(loads))
        return took, waited[0]

    def _note_adaptive(self, name: str, windows: Any) -> None:
        """Record the plan's number of experts, and the largest number whose captures fit the budget on every rank."""
        if name != PARTIAL or self.adaptive:
            return
        import numpy as np

        from megatron_ft.mcore.state.operator_view import OperatorView
        from megatron_ft.planning.snapshot.demand import Demand
        from megatron_ft.planning.snapshot.expert_choice import Sequential
        from megatron_ft.planning.snapshot.partial_experts import ExpertBytes

        view = OperatorView(
            self.engine.model_chunks,
            self.engine.optimizer,
            groups=self.groups,
            num_layers=self.trainer.config.model.num_layers,
        )
        state = ExpertBytes.of(Demand(shards_by_rank=view.shards_by_rank), ("master", "exp_avg", "exp_avg_sq"))
        nothing = np.zeros(state.left_out.shape[:2], dtype=np.int64)
        peaks = {
            number: max(
                int(state.captured(Sequential().choose(turn, number, nothing, state.num_groups)).max())
                for turn in range(state.num_experts)
            )
            for number in range(1, state.num_experts + 1)
        }
        plan = windows.plan
        assert plan is not None and plan.partial is not None, "a window of the policy was captured"
        self.adaptive = {
            "chosen": plan.partial.num_experts,
            "fitting": max((number for number, peak in peaks.items() if peak <= BUDGET_BYTES), default=1),
            "experts": state.num_experts,
        }

    def _barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier(group=self.groups.vote)


if __name__ == "__main__":
    raise SystemExit(main())
