"""Claim ``reform-in-place``: surviving ranks need little additional memory to recover.

A running job with two pipeline stages, two data-parallel ranks and the distributed optimizer loses one rank after
another by kill -9, and keeps its layout. Survivors keep weights, gradient buffers, master weights and moments in place,
and replace their connections. Each rank reports the bytes of this state, and the bytes that it copied at one time while
it restored a window. The resident memory of the ranks that survive the first loss is also measured.

Two jobs with four data-parallel ranks, expert replicas and copies of optimizer shards lose one rank, and continue with
three. In one of them each rank has all experts before and after the loss; in the other, ranks get other experts. All
tensors of a rank are counted at the start of each iteration and at each step of the recovery: weights, gradient
buffers, optimizer state, its copies, and what the recovery holds in addition. Activations do not exist at these times.
The largest count from the loss to the next committed iteration is compared with the larger of the counts in training
before and after, and in the first job with the state that ``dry_run`` predicts. Resident memory is only reported.

A fault counts only if the victim recorded it before it happened. Bits are compared by ``localized-bitwise`` and
``elastic-bitwise``.
"""

import contextlib
import functools
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.elastic_jobs import Bench
from benchmarks.kill_peers import records_of
from benchmarks.report import finish, parse_arguments
from megatron_ft.testing.jobs import REPOSITORY, forkserver

ID = "reform-in-place"
WARM = "megatron_ft.mcore.rank_main:warm"
WARM_COUNTING = "benchmarks.reform_in_place:warm_counting"
_COUNTS = "REFORM_IN_PLACE_COUNTS"
"""Environment variable that names the folder of the counts."""
JOB_TIMEOUT_SECONDS = 900.0
MOST_MEMORY = 1.05
MOST_ERROR = 0.1
MIN_STATE_BYTES = 500_000_000
MOST_SMALLER = {"fewer_lanes": 1.15, "expert_sets": 1.3}
"""Largest allowed memory of a recovery with fewer ranks, as a multiple of the larger state, by kind of job."""
THRESHOLD = (
    f"same layout, state >= {MIN_STATE_BYTES // 10**6} MB a rank: counted peak <= {MOST_MEMORY} of the steady state, "
    f"predicted by dry_run within {MOST_ERROR:.0%}; all survivors keep model and optimizer; healthy stages move "
    f"nothing but their log; fewer ranks: counted peak <= {MOST_SMALLER['fewer_lanes']} of the larger state, and <= "
    f"{MOST_SMALLER['expert_sets']} if ranks get other experts; without other experts predicted by dry_run within "
    f"{MOST_ERROR:.0%}"
)
FIRST_ITERATION, APART = 14, 10
VICTIMS = ((1, "forward"), (2, "backward"), (0, "grad_sync"), (3, "dispatch"))
"""Rank and phase of each fault, in order."""
_COMMON = (
    "model=moe_micro",
    "precision.params_dtype=bf16",
    "parallel.use_distributed_optimizer=true",
    "launch.ranks_per_node=1",
    "optimizer.lr_warmup_iterations=3",
    "training.micro_batch_size=1",
    "training.eval_interval_iterations=0",
    "checkpoint.save_at_end=false",
    "telemetry.wandb=disabled",
)
BASE = (
    *_COMMON,
    "parallel.pipeline_model_parallel_size=2",
    "launch.num_nodes=4",
    "training.global_batch_size=4",
    "snapshot=sparse_window",
    "snapshot.num_peer_copies=0",
    "snapshot.iteration_seconds=1",
    "recovery.keep_layout=true",
    "recovery.strategies=[localized_replay]",
    "nodes.restart_lost_nodes=true",
    "nodes.max_node_restarts=100",
)
SMALLER = (
    *_COMMON,
    "training.global_batch_size=12",
    "placement=overlap_search",
    "placement.min_replicas=2",
    "placement.state_copies=2",
)
"""Overrides of the jobs that continue with fewer ranks."""
SMALLER_RANKS = 4
NUM_SLOTS = {"fewer_lanes": 8, "expert_sets": 4}
"""Number of replica slots of a rank, by kind of job. The model has 8 experts, so 8 slots have room for all of them."""
LARGE = ("model.hidden_size=512", "model.moe_ffn_hidden_size=1792", "snapshot.bandwidth_bytes_per_second=1.2e8")
SMALL = ("model.hidden_size=128", "model.moe_ffn_hidden_size=512", "snapshot.bandwidth_bytes_per_second=6e6")


@dataclass(slots=True)
class _Watch:
    """Callable that receives the job's events so far, and measures resident memory before and after the first loss."""

    num_faults: int
    steady: dict[int, int] = field(default_factory=dict)
    """Largest resident bytes in the iterations before the first loss, by rank."""
    recovering: dict[int, int] = field(default_factory=dict)
    """Largest resident bytes from then until the job trains again, by rank."""
    _is_reset: bool = False

    def __call__(self, events: Sequence[Mapping[str, Any]]) -> bool:
        """Measure if it is time. Return whether the job may end."""
        ready = next((event for event in events if event["kind"] == "ranks_ready"), None)
        changed = [event for event in events if event["kind"] == "membership_changed"]
        if ready is not None and not changed:
            pids = dict(enumerate(ready["process_ids"]))
            committed = [event["iteration"] for event in events if event["kind"] == "window_committed"]
            if not self._is_reset and committed:
                self._is_reset = True
                _reset_largest(pids)
            elif self._is_reset:
                self.steady = {rank: _largest_resident(pid) or self.steady.get(rank, 0) for rank, pid in pids.items()}
        if ready is not None and changed and not self.recovering:
            self.recovering = _residents(dict(enumerate(ready["process_ids"])))
        return len(changed) >= self.num_faults


@dataclass(slots=True)
class _WatchSmaller:
    """Callable that receives a job's events so far, and measures the memory of the ranks, by rank."""

    metrics: Path
    """File to which the job writes a line for each committed iteration."""
    counts: Path
    """Folder to which ranks write the bytes of their tensors, see ``warm_counting``."""
    before: dict[int, int] = field(default_factory=dict)
    """Largest resident bytes of each rank in the iterations before the loss."""
    during: dict[int, int] = field(default_factory=dict)
    """Largest resident bytes from the loss to the next committed iteration."""
    counted: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Counted bytes of each surviving rank: the larger of the values in training before and after the loss, and the
    largest value from the loss to the next committed iteration."""
    _is_reset: bool = False

    def __call__(self, events: Sequence[Mapping[str, Any]]) -> bool:
        """Measure if it is time. Return whether the job may end."""
        ready = next((event for event in events if event["kind"] == "ranks_ready"), None)
        committed = max((record["iteration"] for record in records_of(self.metrics)), default=0)
        if ready is None or committed < FIRST_ITERATION - 5:
            return False
        pids = dict(enumerate(ready["process_ids"]))
        if not self._is_reset:
            self._is_reset = True
            _reset_largest(pids)
        elif committed < FIRST_ITERATION - 1:  # the lost rank has not begun its last iteration
            self.before = _residents(pids)
        elif not self.during:
            has_changed = any(event["kind"] == "membership_changed" for event in events)
            if has_changed and committed >= FIRST_ITERATION:
                self.during = _residents(pids)
        if committed < FIRST_ITERATION + APART:
            return False
        self.counted = {
            rank: _counted(self.counts / f"{pid}.jsonl") for rank, pid in pids.items() if rank in self.during
        }
        return True


def _counted(path: Path) -> tuple[int, int]:
    records = records_of(path)
    steady = [record["bytes"] for record in records if record["is_steady"]]
    first = next((number for number, record in enumerate(records) if record["is_steady"]), len(records))
    recovering = [record["bytes"] for record in records[first:] if not record["is_steady"]]
    return max(steady, default=0), max(recovering, default=0)


_recovering: list[bool] = []
"""Not empty while this rank forms another membership."""


def warm_counting() -> None:
    """Import what ranks need, and make ranks write the bytes of their tensors to files in the folder ``_COUNTS``: at
    the start of each iteration, and at each step of a recovery that creates or drops tensors of the state."""
    from megatron_ft.mcore import rank_main
    from megatron_ft.mcore.model import build
    from megatron_ft.mcore.optimizer import adamw, state_copies
    from megatron_ft.mcore.recovery import replicas
    from megatron_ft.mcore.state import carried, optimizer_shards, tensors
    from megatron_ft.mcore.training import engine
    from megatron_ft.mcore.training.trainer import Trainer

    rank_main.warm()
    for owner, name in (
        (replicas.ElasticTrainer, "carry"),
        (replicas.ElasticTrainer, "_release_groups"),
        (build, "_build_chunk"),
        (build._ReleasableDataParallel, "__init__"),
        (adamw, "get_megatron_optimizer"),
        (engine.TrainingEngine, "_assemble"),
        (replicas, "hand_over"),
        (replicas, "move_experts"),
        (replicas, "put_state"),
        (replicas.ShardMove, "restore"),
        (replicas.ElasticTrainer, "keep_copies"),
    ):
        _count_after(owner, name)
    for module in (tensors, optimizer_shards, carried, state_copies):
        _count_exchange(module)
    iterate, reconfigure = Trainer.iterate, replicas.ElasticTrainer.reconfigure

    def recovering(*arguments: Any, **named: Any) -> None:
        _recovering.append(True)
        try:
            reconfigure(*arguments, **named)
        finally:
            _recovering.pop()

    def counting(trainer: Trainer, iteration: int) -> None:
        _write_count("iteration", is_steady=trainer.membership_start is None)
        iterate(trainer, iteration)

    Trainer.iterate = counting  # type: ignore[method-assign]
    replicas.ElasticTrainer.reconfigure = recovering  # type: ignore[method-assign]


def _count_after(owner: Any, name: str) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def counting(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        _write_count(name)
        return result

    setattr(owner, name, counting)


def _count_exchange(module: Any) -> None:
    """Count the tensors of ``exchange_tensors``, as used by ``module``, together with its buffers."""
    exchange = module.exchange_tensors

    def counting(outgoing: Any, incoming: Any, group: Any) -> None:
        if _recovering:  # training exchanges tensors, too
            tensors = [tensor for of_rank in (*outgoing, *incoming) for tensor in of_rank]
            _write_count("exchange", more_bytes=sum(tensor.nbytes for tensor in tensors))
        exchange(outgoing, incoming, group)

    module.exchange_tensors = counting


def _write_count(step: str, *, is_steady: bool = False, more_bytes: int = 0) -> None:
    """Write the bytes of all tensors of this process, and ``more_bytes``, at the end of ``step``. Each storage counts
    once."""
    import torch

    storages = (found.untyped_storage() for found in gc.get_objects() if isinstance(found, torch.Tensor))
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    with (Path(os.environ[_COUNTS]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "is_steady": is_steady, "bytes": sum(sizes.values()) + more_bytes}) + "\n")


def _reset_largest(pids: Mapping[int, int]) -> None:
    """Reset VmHWM, the maximum of VmRSS, of each process that has not ended."""
    for pid in pids.values():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def _residents(pids: Mapping[int, int]) -> dict[int, int]:
    found = {rank: _largest_resident(pid) for rank, pid in pids.items()}
    return {rank: num_bytes for rank, num_bytes in found.items() if num_bytes is not None}


def _largest_resident(pid: int) -> int | None:
    """Return VmHWM of a process in bytes; None if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def _faults(num_faults: int) -> str:
    kills = [
        f'kill(rank={rank}, at_iteration={FIRST_ITERATION + APART * number}, phase="{phase}", generation={number})'
        for number, (rank, phase) in enumerate(VICTIMS[:num_faults])
    ]
    return "testing.failpoints=[" + ",".join(f"'{kill}'" for kill in kills) + "]"


def judge(shares: Sequence[Mapping[str, Any]], *, least_state_bytes: int) -> tuple[float, list[str]]:
    """Return the largest reported memory during the recoveries, as a multiple of the state, and all problems.

    Args:
        shares: events ``stage_recovery``.
    """
    problems = []
    for share in shares:
        who = f"rank {share['rank']} in generation {share['generation']}"
        is_new = share["rank"] == VICTIMS[share["generation"] - 1][0]
        if share["is_kept"] == is_new:
            problems.append(f"{who}: {'kept' if is_new else 'built'} its model")
        if share["role"] != "replays" and share["staged_bytes"]:
            problems.append(f"{who}: a rank of a healthy stage restored {share['staged_bytes']} bytes")
        if share["state_bytes"] < least_state_bytes:
            problems.append(f"{who}: the state has {share['state_bytes']} bytes")
    most = max((1 + share["staged_bytes"] / share["state_bytes"] for share in shares), default=0.0)
    return most, problems


def _plan(overrides: Sequence[str], folder: Path) -> tuple[dict[str, Any], int]:
    """Return the plan that ``dry_run`` prints, and the bytes of the largest rank's state in it."""
    words = [*overrides, "dry_run=true", "dry_run_format=json", f"data.cache_dir={folder / 'cache'}"]
    command = [sys.executable, str(REPOSITORY / "pretrain_moe.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=JOB_TIMEOUT_SECONDS, check=False)
    assert done.returncode == 0, f"dry_run failed: {done.stderr}"
    plan = json.loads(done.stdout)
    state = max(
        sum(size for name, size in stage["memory"].items() if name != "activations_bytes") for stage in plan["stages"]
    )
    return plan, int(state)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Smaller:
    """Memory of a recovery with fewer ranks."""

    counted: Mapping[int, tuple[int, int]]
    """Counted bytes by rank, see ``_WatchSmaller.counted``."""
    predicted_bytes: int
    """Bytes of the largest rank in training, before or after the loss, as ``dry_run`` predicts them."""
    resident: Mapping[int, tuple[int, int]]
    """Largest resident bytes by rank: before the loss, and from the loss to the next committed iteration."""
    problems: Sequence[str]

    @property
    def state_bytes(self) -> int:
        """Counted bytes of the largest rank in training."""
        return max((steady for steady, _ in self.counted.values()), default=0)

    @property
    def most(self) -> float:
        """Largest memory of the recovery as a multiple of the memory in training."""
        return max((peak / steady for steady, peak in self.counted.values() if steady), default=math.inf)

    @property
    def error(self) -> float:
        """Share by which the largest counted memory of the recovery differs from the prediction."""
        return abs(max((peak for _, peak in self.counted.values()), default=0) / self.predicted_bytes - 1)

    @property
    def most_resident(self) -> float:
        """Largest resident memory of the recovery as a multiple of the largest before."""
        return max((peak / before for before, peak in self.resident.values() if before), default=0.0)


def _smaller(kind: str, size: Sequence[str], folder: Path) -> _Smaller:
    """Run a job that loses one of ``SMALLER_RANKS`` ranks and continues without it, and measure its recovery."""
    words = [*SMALLER, *size, f"placement.num_slots_per_rank={NUM_SLOTS[kind]}"]
    nodes = (f"launch.num_nodes={SMALLER_RANKS}", f"recovery.min_nodes={SMALLER_RANKS - 1}")
    fewer = (f"launch.num_nodes={SMALLER_RANKS - 1}", f"recovery.min_nodes={SMALLER_RANKS - 2}")
    predicted = max(_plan([*words, *of_size], folder)[1] for of_size in (nodes, fewer))
    kill = f'kill(rank={SMALLER_RANKS - 1}, at_iteration={FIRST_ITERATION}, phase="forward", generation=0)'
    overrides = [*nodes, "training.train_iterations=400", f"testing.failpoints=['{kill}']"]
    counts = folder / f"counts-{kind}"
    counts.mkdir()
    os.environ[_COUNTS] = str(counts)  # the fork server, and so the ranks, inherit it
    with forkserver(WARM_COUNTING) as socket:
        bench = Bench(folder / kind, socket, words, JOB_TIMEOUT_SECONDS)
        watch = _WatchSmaller(bench.next_run_dir / "metrics.jsonl", counts)
        with bench.running(overrides, until=watch) as run:
            hits, output = run.records("failpoints.jsonl"), run.output[-2000:]
    problems = []
    if len(hits) != 1 or len(watch.counted) != SMALLER_RANKS - 1 or not all(map(all, watch.counted.values())):
        problems.append(
            f"{kind}: {len(hits)} of 1 faults, counted bytes by rank (training, recovery) {watch.counted}: {output}"
        )
    resident = {rank: (watch.before[rank], peak) for rank, peak in watch.during.items() if rank in watch.before}
    found = _Smaller(counted=watch.counted, predicted_bytes=predicted, resident=resident, problems=problems)
    if kind == "fewer_lanes" and found.error > MOST_ERROR:
        problems.append(f"{kind}: dry_run predicted {predicted} bytes, {found.error:.0%} off")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job, and judge memory and what the ranks kept."""
    arguments = parse_arguments(__doc__, argv)
    num_faults, size = (1, SMALL) if arguments.quick else (len(VICTIMS), LARGE)
    last = f"training.train_iterations={FIRST_ITERATION + APART * num_faults + 200}"
    watch = _Watch(num_faults)
    with tempfile.TemporaryDirectory(prefix=f"{ID}-") as folder, forkserver(WARM) as socket:
        plan, predicted = _plan([*BASE, *size], Path(folder))
        predicted += int(plan["snapshot"]["restore_bytes"])
        bench = Bench(Path(folder), socket, BASE, JOB_TIMEOUT_SECONDS)
        with bench.running([*size, last, _faults(num_faults)], until=watch) as run:
            events, hits = run.records(), run.records("failpoints.jsonl")
            output = run.output[-2000:]
        smaller = {kind: _smaller(kind, size[:2], Path(folder)) for kind in MOST_SMALLER}
    shares = [event for event in events if event["kind"] == "stage_recovery"]
    most, problems = judge(shares, least_state_bytes=0 if arguments.quick else MIN_STATE_BYTES)
    if len(hits) != num_faults or len(shares) != 4 * num_faults:
        problems.append(f"{len(hits)} of {num_faults} faults, {len(shares)} reports of recoveries: {output}")
    rss = [watch.recovering[rank] / watch.steady[rank] for rank in watch.recovering if watch.steady.get(rank)]
    if len(rss) != 3:
        problems.append(f"the resident memory of {len(rss)} survivors was measured, not of 3")
    peak = max((share["state_bytes"] + share["staged_bytes"] for share in shares), default=0)
    if abs(predicted - peak) > MOST_ERROR * predicted:
        problems.append(f"dry_run predicted {predicted} bytes, but the largest rank had {peak}")
    state = min((share["state_bytes"] for share in shares), default=0)
    problems += [problem for each in smaller.values() for problem in each.problems]
    for problem in problems:
        print(problem)
    fewer = "; ".join(
        f"{kind} {each.most:.2f}x of {each.state_bytes / 1e6:.0f} MB counted ({each.error:.1%} from the "
        f"prediction), resident {each.most_resident:.2f}x of that before the loss"
        for kind, each in smaller.items()
    )
    return finish(
        arguments.out,
        ID,
        passed=not problems
        and most <= MOST_MEMORY
        and (arguments.quick or all(each.most <= MOST_SMALLER[kind] for kind, each in smaller.items())),
        figure=(
            f"{most:.3f}x of {state / 1e6:.0f} MB counted on {len(shares)} ranks in {num_faults} recoveries, "
            f"{abs(predicted / peak - 1) if peak else 1.0:.1%} from the prediction; resident memory of survivors at "
            f"most {max(rss, default=0.0):.2f}x of the largest before; {fewer}"
        ),
        threshold=THRESHOLD,
        counts={"recoveries": num_faults + len(smaller), "ranks": len(shares)},
        details={
            "shares": shares,
            "steady": watch.steady,
            "recovering": watch.recovering,
            "smaller": {kind: asdict(each) for kind, each in smaller.items()},
            "problems": problems,
        },
    )


if __name__ == "__main__":
    sys.exit(main())
