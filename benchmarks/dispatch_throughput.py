"""Claim ``dispatch-throughput``: with more replicas for busy experts, the slowest rank of an MoE layer does less work.

One layer runs forward and backward on real gloo ranks of one process group. Megatron's ``MoELayer`` with its all-to-all
dispatcher and ``ReplicaMixtureLayer`` take turns, with the same tokens, weights and routing. The critical path is the
CPU time of the slowest rank, so that the figure holds on machines with fewer cores than ranks. On such machines, all
ranks run on one core. Otherwise a rank that computes while the others wait would need less CPU time for the same work
than ranks that compute at the same time, because cores share caches and execution units. Wall time is meaningful only
if every rank has a core.

Two settings of each rank exclude costs that a rank with its own core and a GPU's caching allocator does not have.
First, with SCHED_RR, ranks on one core take turns of 100 ms. In turns of a few milliseconds, ranks would evict each
other's data from caches, except Megatron's busiest rank, which computes while the others wait. Second, the allocator
keeps freed memory; otherwise the largest tensors of this rank would be mapped and cleared again in every call. SCHED_RR
needs root, or a limit of real-time priorities above 0 (``ulimit -r``).
"""

import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import recorded
from benchmarks.report import finish, parse_arguments
from megatron_ft.config.job import JobConfig
from megatron_ft.testing.ranks import Rank, compose, run_ranks

ID = "dispatch-throughput"
MAX_BALANCED, QUICK_MAX_BALANCED = 1.03, 1.25
MIN_GAIN, QUICK_MIN_GAIN = 2.0, 1.7
MIN_SHARE_OF_BOUND, QUICK_MIN_SHARE_OF_BOUND = 0.9, 0.8
MAX_BYTES = 1.05
PAIRS, QUICK_PAIRS, WARM_UP = 21, 7, 2
HIDDEN_SIZE, QUICK_HIDDEN_SIZE = 512, 256
NUM_TOKENS, QUICK_NUM_TOKENS = 2048, 1024
"""Tokens of each rank in a call."""
M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1
"""Numbers of two options of glibc's ``mallopt``."""
MAX_DEVIATION = 1e-4
MEGATRON = "megatron"
LAYERS = (MEGATRON, "cpp", "reference")
TIMED = LAYERS[:2]
"""Layers that are timed in pairs. The reference is slower; only its results are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Layer on some ranks."""

    name: str
    """Name that tables show."""
    num_ranks: int
    loads: tuple[float, ...]
    """Relative load of each expert."""
    num_slots: int
    """Number of slots of each rank."""
    min_replicas: int
    """Minimum number of copies of each expert. If it is 1 and there is one slot per expert, both layers have the same
    experts on each rank."""

    @property
    def bound(self) -> float:
        """Return the speed-up that perfect balance would give: the load of the busiest rank with contiguously placed
        experts, divided by the mean load."""
        share = len(self.loads) // self.num_ranks
        ranks = [sum(self.loads[rank * share : (rank + 1) * share]) for rank in range(self.num_ranks)]
        return max(ranks) * self.num_ranks / sum(ranks)


def case_of(num_ranks: int, num_experts: int, ratio: int, num_copies: int = 2) -> Case:
    """Make a case in which each of the first two experts has ``ratio`` times the tokens of any other expert, and each
    expert has ``num_copies`` copies."""
    return Case(
        name=f"{num_ranks} ranks, {ratio}:1" + (", one copy" if num_copies == 1 else ""),
        num_ranks=num_ranks,
        loads=(float(ratio),) * 2 + (1.0,) * (num_experts - 2),
        num_slots=num_copies * num_experts // num_ranks,
        min_replicas=num_copies,
    )


def recorded_case() -> Case:
    """Make a case with the loads of one layer of a recorded training run. With its placement, dividing the tokens of an
    expert evenly over the copies would lose a sixth of the gain."""
    tokens = recorded.read(recorded.SMARTMOE).tokens[:, :, RECORDED_LAYER].sum(axis=(0, 1, 2))
    return Case(name="8 ranks, recorded", num_ranks=8, loads=tuple(tokens.tolist()), num_slots=6, min_replicas=1)


PLAIN = case_of(4, 8, 1, num_copies=1)
FOUR = tuple(case_of(4, 8, ratio) for ratio in (1, 2, 4, 8))
TWO = tuple(case_of(2, 4, ratio) for ratio in (1, 8))
RECORDED_LAYER = 12


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and judge every case."""
    arguments = parse_arguments(__doc__, argv)
    last = recorded_case()
    cases = (PLAIN, FOUR[0], FOUR[2], TWO[1], last) if arguments.quick else (PLAIN, *FOUR, *TWO, last)
    pairs = QUICK_PAIRS if arguments.quick else PAIRS
    sizes = (QUICK_HIDDEN_SIZE, QUICK_NUM_TOKENS) if arguments.quick else (HIDDEN_SIZE, NUM_TOKENS)
    measured = {}
    with tempfile.TemporaryDirectory(prefix="dispatch-") as folder:
        for case in cases:
            config = _config(case, *sizes)
            ranks = run_ranks(_measure_case(case, pairs), config, world_size=case.num_ranks, run_dir=Path(folder))
            measured[case] = _summary(case, ranks)
            print(f"{case.name:22} {_in_words(measured[case])}", flush=True)
    return _judge(arguments.out, measured, pairs, quick=arguments.quick)


def _judge(out: Path | None, measured: dict[Case, dict[str, Any]], pairs: int, *, quick: bool) -> int:
    max_balanced = QUICK_MAX_BALANCED if quick else MAX_BALANCED
    min_gain = QUICK_MIN_GAIN if quick else MIN_GAIN
    min_share = QUICK_MIN_SHARE_OF_BOUND if quick else MIN_SHARE_OF_BOUND
    balanced = max(row["cpp"]["critical_path_ratio"] for case, row in measured.items() if case.bound == 1.0)
    gain = 1.0 / measured[FOUR[2]]["cpp"]["critical_path_ratio"]
    last = list(measured.values())[-1]
    share = 1.0 / last["cpp"]["critical_path_ratio"] / last["gain_bound"]
    most_bytes = max(row["cpp"]["sent_over_needed"] for row in measured.values())
    deviation = max(row[name]["deviation"] for row in measured.values() for name in LAYERS[1:])
    wall = measured[TWO[1]]
    schedule = max(row["cpp"]["schedule_share"] for row in measured.values())
    gains = gain >= min_gain and share >= min_share
    return finish(
        out,
        ID,
        passed=balanced <= max_balanced and gains and most_bytes <= MAX_BYTES and deviation <= MAX_DEVIATION,
        figure=f"balanced {balanced:.3f}x; 4:1 on 4 ranks {gain:.2f}x better of {FOUR[2].bound:.2f}x possible; "
        f"recorded loads on 8 ranks {share * last['gain_bound']:.2f}x of {last['gain_bound']:.2f}x; "
        f"8:1 on 2 ranks {1 / wall['cpp']['wall_ratio']:.2f}x in wall time of {TWO[1].bound:.2f}x; "
        f"schedule {schedule:.1%}; bytes {most_bytes:.3f}x",
        threshold=f"<= {max_balanced:g}x balanced, >= {min_gain:g}x better at 4:1, recorded >= {min_share:g} of the "
        f"bound, bytes <= {MAX_BYTES:g}x",
        counts={"cases": len(measured), "pairs_each": pairs, "backends": len(LAYERS) - 1},
        details={case.name: {**asdict(case), **row} for case, row in measured.items()},
    )


def _config(case: Case, hidden_size: int, num_tokens: int) -> JobConfig:
    config = compose(
        "model=moe_micro",
        "model.num_layers=1",
        f"model.hidden_size={hidden_size}",
        f"model.moe_ffn_hidden_size={2 * hidden_size}",
        f"model.seq_length={num_tokens}",
        f"model.num_moe_experts={len(case.loads)}",
    )
    return replace(config, parallel=replace(config.parallel, expert_model_parallel_size=case.num_ranks))


def _measure_case(case: Case, pairs: int) -> Callable[[JobConfig, Rank], dict[str, Any]]:
    def measure(config: JobConfig, rank: Rank) -> dict[str, Any]:
        return _Bench(config, case, rank).measure(pairs)

    return measure


class _Bench:
    """Rank of a case, which runs all layers on the same tokens."""

    def __init__(self, config: JobConfig, case: Case, rank: Rank) -> None:
        from benchmarks.mixtures import Mixtures
        from megatron_ft.testing.ranks import join_groups

        if case.num_ranks > (os.cpu_count() or 1):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        _take_long_turns()
        _keep_freed_memory()
        groups, _ = join_groups(config, rank)
        self.group = groups.pg_collection.ep
        self.mixtures = Mixtures(
            config,
            groups.pg_collection,
            loads=case.loads,
            names=LAYERS,
            num_slots=case.num_slots,
            min_replicas=case.min_replicas,
        )

    def measure(self, pairs: int) -> dict[str, Any]:
        """Return CPU and wall seconds of every call by layer, the layers' results and the bytes that each sent."""
        first = {name: self._timed(name) for name in TIMED}
        checked = self.mixtures.compare()
        rows: dict[str, list[tuple[float, float]]] = {name: [] for name in TIMED}
        for number in range(WARM_UP + pairs):
            for name in TIMED if number % 2 else reversed(TIMED):
                seconds = self._timed(name)
                if number >= WARM_UP:
                    rows[name].append(seconds)
        return {
            "first": first,
            "rows": rows,
            **checked,
            "schedule_seconds": {name: self._schedule_seconds(name) for name in TIMED[1:]},
            "copies_seconds": statistics.median(self._seconds(self.mixtures.sum_copies)[0] for _ in range(5)),
        }

    def _timed(self, name: str) -> tuple[float, float]:
        return self._seconds(lambda: self.mixtures.run(name))

    def _seconds(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Return (CPU seconds of this process, wall seconds) of a call that all ranks begin together."""
        import torch.distributed as dist

        dist.barrier(group=self.group)
        began, cpu = time.perf_counter(), time.process_time()
        call()
        return time.process_time() - cpu, time.perf_counter() - began

    def _schedule_seconds(self, name: str) -> float:
        """Return the time of schedule and plan in one call."""
        with _stopwatch(self.mixtures.backends[name], ("schedule", "plan")) as spent:
            for _ in range(5):
                self.mixtures.run(name)
        return spent[0] / 5


def _take_long_turns() -> None:
    """Let this process, and threads that it starts, run for up to 100 ms before others of its kind."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError as error:
        raise PermissionError("SCHED_RR needs root, or a limit of real-time priorities above 0 (ulimit -r)") from error


def _keep_freed_memory() -> None:
    """Make the C library keep all freed memory in this process, and take none by ``mmap``."""
    library = ctypes.CDLL(None)
    if not (library.mallopt(M_MMAP_MAX, 0) and library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)):
        raise OSError("mallopt refused an option: the claim needs glibc")


@contextmanager
def _stopwatch(backend: Any, methods: Sequence[str]) -> Iterator[list[float]]:
    """Yield a list to which the block adds the CPU seconds that this thread spends in some methods of ``backend``."""
    spent = [0.0]

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.thread_time()
            result = method(*args)
            spent[0] += time.thread_time() - began
            return result

        return call

    for name in methods:
        setattr(backend, name, timed(getattr(backend, name)))
    try:
        yield spent
    finally:
        for name in methods:
            delattr(backend, name)


def _summary(case: Case, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return for each timed layer its critical path relative to Megatron's, pair by pair, and the share of the
    schedule; for each backend the bytes sent and the deviation from Megatron's results."""
    paths = {name: _slowest(ranks, name, 0) for name in TIMED}
    walls = {name: _slowest(ranks, name, 1) for name in TIMED}
    summary: dict[str, Any] = {name: ranks[0][name] for name in ("imbalance", "gain_bound")}
    summary["bound"] = case.bound
    for name in TIMED:
        schedule = max((rank["schedule_seconds"].get(name, 0.0) for rank in ranks), default=0.0)
        path = statistics.median(paths[name])
        summary[name] = {
            "critical_path_seconds": path,
            "critical_path_ratio": _ratio(paths[name], paths[MEGATRON]),
            "wall_seconds": statistics.median(walls[name]),
            "wall_ratio": _ratio(walls[name], walls[MEGATRON]),
            "first_call_seconds": max(rank["first"][name][0] for rank in ranks),
            "schedule_share": schedule / path,
        }
    needed = sum(rank["needed_bytes"] for rank in ranks)
    for name in LAYERS[1:]:
        sent = sum(rank["sent_bytes"][name] for rank in ranks)
        found = {"sent_bytes": sent, "sent_over_needed": sent / needed if needed else 1.0}
        found["deviation"] = max(rank["deviation"][name] for rank in ranks)
        summary[name] = summary.get(name, {}) | found
    summary["copies_seconds_per_iteration"] = max(rank["copies_seconds"] for rank in ranks)
    return summary


def _slowest(ranks: list[dict[str, Any]], name: str, clock: int) -> list[float]:
    return [max(calls) for calls in zip(*([row[clock] for row in rank["rows"][name]] for rank in ranks), strict=True)]


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def _in_words(row: dict[str, Any]) -> str:
    layers = "  ".join(
        f"{name} {row[name]['critical_path_seconds'] * 1e3:.1f} ms ({row[name]['critical_path_ratio']:.3f}x, "
        f"wall {row[name]['wall_ratio']:.3f}x, schedule {row[name]['schedule_share']:.1%})"
        for name in TIMED
    )
    return f"bound {row['gain_bound']:.2f} of {row['bound']:.2f}  {layers}  bytes {row['cpp']['sent_over_needed']:.3f}x"


if __name__ == "__main__":
    raise SystemExit(main())
