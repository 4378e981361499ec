"""Claim ``bubble-transfers``: time that is saved by copying snapshots while a pipeline stage waits for messages.

Two stages of one real job have one thread and one core each. They capture after every iteration. Captures with and
without ``snapshot.copy_in_bubbles`` alternate, in pairs whose order changes. Snapshot servers hash the windows between
iterations. Iteration times are those of the slower stage and include the wait before the update. Each time is the
shortest of several iterations, because other load on the machine only prolongs iterations.

For more stages, times of passes are measured on the real engine, and the virtual clock of
``planning/cost/pipeline_clock.py`` simulates an iteration in which each stage copies on its only core.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.recovery_costs import kind_of
from benchmarks.report import finish, parse_arguments
from benchmarks.stage_times import KINDS, NOTHING, TOKENIZER_VOCAB_SIZE, Times
from benchmarks.stage_times import SIZES as STAGE_SIZES
from benchmarks.stage_times import measure as measure_stages
from megatron_ft.config.job import JobConfig, SnapshotConfig
from megatron_ft.config.serialize import build_policy
from megatron_ft.corpus.samples import check_data
from megatron_ft.operators import moe_layers
from megatron_ft.planning.cost.pipeline_clock import (
    CopiedIteration,
    IterationSeconds,
    StageCopy,
    StageSeconds,
    receive_waits,
)
from megatron_ft.planning.pipeline import PipelineShape
from megatron_ft.planning.snapshot.bubbles import IdleProfile
from megatron_ft.planning.snapshot.lost_tokens import TokenLedger
from megatron_ft.planning.snapshot.partial_experts import ExpertBytes
from megatron_ft.planning.snapshot.policy import SnapshotContext
from megatron_ft.planning.snapshot.report import estimate_demand
from megatron_ft.snapshot.capture.capture import capture_bandwidth, open_copier
from megatron_ft.testing.ranks import Rank, compose, run_ranks
from megatron_ft.testing.snapshot_servers import Cluster, cluster
from megatron_ft.topology import Topology

ID = "bubble-transfers"
NUM_STAGES, NUM_NODES = 2, 2
PAIRS, QUICK_PAIRS = 7, 1
NUM_WARM, NUM_SAVES = 3, 8
"""Number of captures before and during a measurement. The first ones show how long the waits are."""
JOB_SECONDS, QUICK_JOB_SECONDS = 3000.0, 400.0
MIN_IDLE_SHARE = 0.9
MAX_SLOWDOWN = 1.02
MAX_BLOCKED_SHARE = 0.01
_JOB = (
    "model=moe_tiny",
    "model.hidden_size=256",
    "model.moe_ffn_hidden_size=512",
    "model.seq_length=32",
    "precision.params_dtype=bf16",
    f"parallel.pipeline_model_parallel_size={NUM_STAGES}",
    "training.micro_batch_size=1",
    "training.global_batch_size=4",
    f"launch.num_nodes={NUM_NODES}",
    "training.eval_interval_iterations=0",
    "training.train_iterations=100000",
    "checkpoint.save_at_end=false",
)
BUDGET_BYTES = 40e6
"""Bytes that a rank may capture in one iteration, according to the configuration."""
_MEASURED = (
    "snapshot.num_peer_copies=0",
    "snapshot.iteration_seconds=1.0",
    "snapshot.replan_interval_windows=0",
    f"snapshot.bandwidth_bytes_per_second={BUDGET_BYTES}",
)
_KINDS = {
    "dense": ("snapshot=dense", "snapshot.policy.interval_iterations=1"),
    "sparse window": ("snapshot=sparse_window", "snapshot.policy.min_window_iterations=4"),
    "partial": ("snapshot=partial_experts", "snapshot.policy.max_lost_share=null"),
    "selective": ("snapshot=selective_experts",),
}
CLOCK_STAGES = (4, 8)
MICROBATCHES_PER_STAGE = 2
FILLS = (0.5, 1.0, 2.0)
"""Durations of the copies on the virtual clock, as multiples of the shortest waits of any stage."""
STAGE_REPEATS, QUICK_STAGE_REPEATS = 9, 2
STAGE_SECONDS = 600.0
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure pairs of two stages, simulate more stages, and judge the claim."""
    arguments = parse_arguments(__doc__, argv)
    config = compose(*_JOB)
    check_data(config)
    pairs = QUICK_PAIRS if arguments.quick else PAIRS
    snapshots = {
        (name, in_bubbles): compose(
            *_JOB, *words, *_MEASURED, f"snapshot.copy_in_bubbles={str(in_bubbles).lower()}"
        ).snapshot
        for name, words in _KINDS.items()
        for in_bubbles in (False, True)
    }
    with cluster(NUM_NODES) as keepers, tempfile.TemporaryDirectory(prefix="bubbles-") as folder:
        seconds = QUICK_JOB_SECONDS if arguments.quick else JOB_SECONDS
        ranks = run_ranks(
            partial(_measure, keepers, snapshots, pairs),
            config,
            world_size=NUM_STAGES,
            run_dir=Path(folder),
            timeout_seconds=seconds,
        )
    measured = {name: _summary([rank[name] for rank in ranks]) for name in _KINDS}
    for name, row in measured.items():
        print(_line(name, row), flush=True)
    repeats = QUICK_STAGE_REPEATS if arguments.quick else STAGE_REPEATS
    times = measure_stages("wide", {(kind, NOTHING) for kind in KINDS}, repeats=repeats, timeout_seconds=STAGE_SECONDS)
    rate = _copy_rate()
    simulated = [one for num_stages in CLOCK_STAGES for one in simulate(num_stages, times, rate)]
    for one in simulated:
        print(one.line, flush=True)
    passed, figure = judge(measured, simulated, quick=arguments.quick)
    return finish(
        arguments.out,
        ID,
        passed=passed,
        figure=figure,
        threshold=f">= {MIN_IDLE_SHARE:.0%} of the bytes are copied during waits; an iteration takes "
        f"<= {MAX_SLOWDOWN:g}x of one without snapshot.copy_in_bubbles, and snapshots block "
        f"<= {MAX_BLOCKED_SHARE:.0%} of it; on the virtual clock, an iteration is never slower than without this key, "
        "and copies that fit into the waits do not delay it",
        counts={
            "pairs": pairs,
            "saves_each": NUM_SAVES,
            "kinds": len(_KINDS),
            "stages": NUM_STAGES,
            "simulated": len(simulated),
        },
        details={
            "measured": measured,
            "simulated": [asdict(one) for one in simulated],
            "copy_bytes_per_second": rate,
            "stage_times": {kind: asdict(times[kind, NOTHING]) for kind in KINDS},
        },
    )


def judge(measured: dict[str, Row], simulated: "Sequence[Simulated]", *, quick: bool) -> tuple[bool, str]:
    """Return whether the claim holds, and its figure. A quick run has too few pairs to judge times."""
    shares = [row["idle_copied_share"] for row in measured.values()]
    slowdowns = [row["against_off"] for row in measured.values()]
    blocked = max(row["blocked_share"] for row in measured.values())
    copies = [one for one in simulated if one.fits]
    figure = (
        f"PP={NUM_STAGES}: {min(shares):.0%} to {max(shares):.0%} of the bytes copied during waits, which are "
        f"{min(row['used_share'] for row in measured.values()):.1%} to "
        f"{max(row['used_share'] for row in measured.values()):.1%} used; iterations "
        f"{min(slowdowns):.3f} to {max(slowdowns):.3f} of those without the key, blocked {blocked:.2%}; virtual clock: "
        f"copies that fit delay an iteration by {max(one.delay_share for one in copies):.2%}, without the key by up to "
        f"{max(one.delay_without_share for one in copies):.2%}"
    )
    is_fast = max(slowdowns) <= MAX_SLOWDOWN and blocked <= MAX_BLOCKED_SHARE and min(shares) >= MIN_IDLE_SHARE
    holds = all(one.delay_share <= one.delay_without_share + 1e-9 for one in simulated)
    return (quick or is_fast) and min(shares) > 0 and holds and all(one.delay_share <= 1e-9 for one in copies), figure


def _line(name: str, row: Row) -> str:
    idle = " and ".join(f"{1e3 * seconds:.1f}" for seconds in row["idle_seconds"])
    return (
        f"{name:14} waits {idle} ms, used {row['used_share']:6.1%}, {row['idle_copied_share']:4.0%} of "
        f"{row['captured_bytes'] / 1e6:5.1f} MB copied in them; blocked {row['blocked_share']:6.2%} (without the key "
        f"{row['off_blocked_share']:6.2%}); iteration {row['against_off']:5.3f}x of that without the key, pairs "
        f"{', '.join(f'{ratio:.3f}' for ratio in row['ratios'])}"
    )


# -- measured: two stages ---------------------------------------------------------------------------------


def _measure(
    keepers: Cluster, snapshots: dict[tuple[str, bool], SnapshotConfig], pairs: int, config: JobConfig, rank: Rank
) -> dict[str, list[list[Row]]]:
    # Before torch and gloo start threads, because threads inherit the core of the thread that starts them.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank.rank % len(cores)]})
    bench = _Bench(keepers, config, rank)
    found: dict[str, list[list[Row]]] = {name: [] for name in _KINDS}
    for number in range(pairs):
        for name in _KINDS:
            order = (False, True) if number % 2 == 0 else (True, False)
            rows = {in_bubbles: bench.capture(snapshots[name, in_bubbles]) for in_bubbles in order}
            found[name].append([rows[False], rows[True]])
    return found


class _Bench:
    """Stage with a trainer that captures with one kind of snapshot after the other."""

    def __init__(self, keepers: Cluster, config: JobConfig, rank: Rank) -> None:
        from megatron_ft.testing.ranks import join

        self.trainer, self.groups = join(config, rank)
        self.engine = self.trainer.engine
        self.engine.wants_load = lambda _: True
        self.keepers, self.rank, self.generation = keepers, rank, 1

    def capture(self, snapshot: SnapshotConfig) -> Row:
        """Capture after some iterations, and return the costs of an iteration with a capture."""
        from benchmarks.savers import Windows

        self.generation += 1
        node = self.rank.rank
        client = self.keepers.client(node, node=node, peer_nodes=[], world_size=NUM_STAGES, generation=self.generation)
        windows = Windows(self.trainer, snapshot, client, node=node)
        took, blocked, idle = [], [], []
        self._iterate(windows)
        for index in range(NUM_WARM + NUM_SAVES):
            if index == NUM_WARM:
                before = windows.figures
            windows.save(self.result, 1.0)
            seconds, waited = self._iterate(windows)
            windows.await_hashes()
            if index >= NUM_WARM:
                took.append(seconds)
                blocked.append(waited)
                idle.append(self.engine.boundaries.idle.idle_seconds)
        figures = windows.figures
        windows.close()
        self._barrier()
        return {
            "iteration_seconds": min(took),
            "blocked_seconds": statistics.median(blocked),
            "idle_seconds": statistics.median(idle),
            "captured_bytes": (figures.num_bytes - before.num_bytes) / NUM_SAVES,
            "idle_bytes": (figures.idle_bytes - before.idle_bytes) / NUM_SAVES,
            "used_seconds": (figures.idle_seconds - before.idle_seconds) / NUM_SAVES,
        }

    def _iterate(self, windows: Any) -> tuple[float, float]:
        """Run one iteration. Return its seconds, and those of the wait before its update."""
        waited = [0.0]

        def before_update() -> None:
            began = time.perf_counter()
            windows.settle()
            waited[0] = time.perf_counter() - began

        self.engine.before_update = [before_update]
        self._barrier()
        began = time.perf_counter()
        self.result = self.engine.run_iteration(self.engine.iteration + 1)
        took = time.perf_counter() - began
        # The engine counts tokens only if the job's configured windows leave out experts, so they are counted here.
        loads = [self.result.expert_load[layer - 1].tolist() for layer in moe_layers(self.engine.config.model)]
        tokens = self.engine.history.tokens or TokenLedger.empty(loads)
        self.engine.history = replace(self.engine.history, tokens=tokens.after(loads))
        return took, waited[0]

    def _barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier(group=self.groups.vote)


def _summary(by_stage: Sequence[Sequence[Sequence[Row]]]) -> Row:
    """Return the figures of one kind of snapshot.

    Args:
        by_stage: for each stage and pair, the rows without the key and with it.
    """

    def slowest(pair: int, variant: int, key: str) -> float:
        return max(float(of_stage[pair][variant][key]) for of_stage in by_stage)

    def total(key: str) -> float:
        return sum(float(pair[1][key]) for of_stage in by_stage for pair in of_stage)

    pairs = range(len(by_stage[0]))
    off = [slowest(pair, 0, "iteration_seconds") for pair in pairs]
    on = [slowest(pair, 1, "iteration_seconds") for pair in pairs]
    ratios = [with_key / without for with_key, without in zip(on, off, strict=True)]
    return {
        "ratios": ratios,
        "against_off": statistics.median(ratios),
        "iteration_seconds": statistics.median(on),
        "blocked_share": statistics.median(slowest(pair, 1, "blocked_seconds") for pair in pairs)
        / statistics.median(on),
        "off_blocked_share": statistics.median(slowest(pair, 0, "blocked_seconds") for pair in pairs)
        / statistics.median(off),
        "captured_bytes": statistics.median(slowest(pair, 1, "captured_bytes") for pair in pairs),
        "idle_seconds": [statistics.median(pair[1]["idle_seconds"] for pair in of_stage) for of_stage in by_stage],
        "idle_copied_share": total("idle_bytes") / total("captured_bytes"),
        "used_share": total("used_seconds") / total("idle_seconds"),
    }


# -- simulated: more stages -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Iteration on the virtual clock in which every stage copies a slice."""

    num_stages: int
    num_chunks: int
    copies: str
    """Short description of the copied slices."""
    copy_seconds: float
    """Duration of the longest copy of a stage, if nothing else runs on its core."""
    fits: bool
    """Whether every copy fits into the waits of its stage."""
    used_share: float
    """Time in which copies ran while their stage waited, divided by the waits of an iteration without copies. It can
    exceed 1, because stages wait longer if copies delay other stages."""
    delay_share: float
    """Time by which the copies delay the iteration, divided by the time of an iteration without copies."""
    delay_without_share: float
    """The same share if every copy begins at the start of the iteration, without regard to waits."""

    @property
    def line(self) -> str:
        """Return the row of the table."""
        return (
            f"PP={self.num_stages} VPP={self.num_chunks} {self.copies:20} {1e3 * self.copy_seconds:7.1f} ms, "
            f"{'fits' if self.fits else 'too long':8} waits used {self.used_share:6.1%}, iteration "
            f"+{self.delay_share:.2%}, without the key +{self.delay_without_share:.2%}"
        )


def simulate(num_stages: int, times: Times, rate: float) -> Iterator[Simulated]:
    """Simulate slices of each kind of snapshot, and copies of other durations, with 1F1B and interleaved stages.

    Args:
        rate: bytes that a stage copies per second if nothing else runs on its core.
    """
    for num_chunks in (1, 2):
        num_microbatches = MICROBATCHES_PER_STAGE * num_stages
        shape = PipelineShape(num_stages=num_stages, num_chunks=num_chunks, num_microbatches=num_microbatches)
        stages = [_stage(shape, stage, times) for stage in range(num_stages)]
        waits = receive_waits(shape, stages)
        for name, sizes in slice_bytes(shape).items():
            yield _simulated(shape, stages, name, [num_bytes / rate for num_bytes in sizes])
        shortest = min(sum(end - start for start, end in of_stage) for of_stage in waits)
        for fill in FILLS:
            yield _simulated(shape, stages, f"{fill:g} of least waits", [fill * shortest] * num_stages)


def _simulated(shape: PipelineShape, stages: Sequence[StageSeconds], name: str, copies: Sequence[float]) -> Simulated:
    undisturbed = IterationSeconds.of(shape, stages).makespan_seconds
    waits = receive_waits(shape, stages)
    idle = [sum(end - start for start, end in of_stage) for of_stage in waits]
    in_bubbles, at_once = [], []
    for stage, seconds in enumerate(copies):
        # Count only the waits, not the time after the last wait. A copy that fits then never delays computation.
        profile = IdleProfile(
            idle_seconds=idle[stage], tail_seconds=0.0, idle_bytes_per_second=1e9, busy_bytes_per_second=1e9
        )
        early = profile.bytes_at_once(int(seconds * 1e9)) / 1e9
        in_bubbles.append(StageCopy(seconds=seconds, at_once_seconds=early))
        at_once.append(StageCopy(seconds=seconds, at_once_seconds=seconds))
    found = CopiedIteration.of(shape, stages, in_bubbles)
    without = CopiedIteration.of(shape, stages, at_once)
    return Simulated(
        num_stages=shape.num_stages,
        num_chunks=shape.num_chunks,
        copies=name,
        copy_seconds=max(copies),
        fits=all(seconds <= room for seconds, room in zip(copies, idle, strict=True)),
        used_share=sum(found.idle_copy_seconds) / sum(idle),
        delay_share=found.makespan_seconds / undisturbed - 1,
        delay_without_share=without.makespan_seconds / undisturbed - 1,
    )


def _stage(shape: PipelineShape, stage: int, times: Times) -> StageSeconds:
    places = [chunk * shape.num_stages + stage for chunk in range(shape.num_chunks)]
    of_chunks = [times[kind_of(place, shape.num_stages * shape.num_chunks), NOTHING] for place in places]
    return StageSeconds(
        chunks=tuple(one.passes for one in of_chunks), update_seconds=sum(one.rest_seconds for one in of_chunks)
    )


def slice_bytes(shape: PipelineShape) -> dict[str, list[int]]:
    """Return the largest slice of each stage, by kind of snapshot, for a model with one layer in each chunk."""
    virtual = "null" if shape.num_chunks == 1 else str(shape.num_chunks)
    job = (
        "model=moe_micro",
        *STAGE_SIZES["wide"],
        f"model.num_layers={shape.num_stages * shape.num_chunks}",
        f"parallel.pipeline_model_parallel_size={shape.num_stages}",
        f"parallel.virtual_pipeline_model_parallel_size={virtual}",
        f"launch.ranks_per_node={shape.num_stages}",
        f"training.global_batch_size={shape.num_microbatches}",
        "training.micro_batch_size=1",
    )
    found = {}
    for name, words in _KINDS.items():
        config = compose(*job, *words, "snapshot.num_peer_copies=0")
        demand = estimate_demand(config, Topology.of(config.parallel, shape.num_stages), TOKENIZER_VOCAB_SIZE)
        assert config.snapshot.policy is not None, f"{name} has no policy"
        whole = int(demand.slice_bytes(_plan(config, demand, 1e15)).max())
        plan = _plan(config, demand, whole / 3)
        if plan.partial is None:
            found[name] = [int(size) for size in demand.slice_bytes(plan).max(axis=0)]
        else:
            state = ExpertBytes.of(demand, plan.partial.components)
            largest = -torch.sort(-torch.from_numpy(state.left_out), dim=1).values[:, : plan.partial.num_experts]
            found[name] = [int(size) for size in torch.from_numpy(state.always) + largest.sum(dim=(0, 1))]
    return found


def _plan(config: JobConfig, demand: Any, budget_bytes: float) -> Any:
    context = SnapshotContext(bandwidth_bytes_per_second=budget_bytes, iteration_seconds=1.0)
    return build_policy("snapshot.policy", config.snapshot.policy or {}).plan(demand, context)


def _copy_rate() -> float:
    cpu = torch.device("cpu")
    copier = open_copier(cpu)
    try:
        return capture_bandwidth(cpu, copier)
    finally:
        copier.close()


if __name__ == "__main__":
    raise SystemExit(main())
