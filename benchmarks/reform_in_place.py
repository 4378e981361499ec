"""Claim ``reform-in-place``: ranks of a job that keeps its layout need little memory to recover.

A running job with two pipeline stages, two data-parallel ranks and the distributed optimizer loses one rank after
another by kill -9. Survivors keep weights, gradient buffers, master weights and moments in place, and replace their
connections. Each rank reports the bytes of this state, and the bytes that it copied at one time while it restored a
window. The resident memory of the ranks that survive the first loss is also measured.

A fault counts only if the victim recorded it before it happened. Bits are compared by ``localized-bitwise``.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.elastic_jobs import Bench
from benchmarks.report import finish, parse_arguments
from megatron_ft.testing.jobs import REPOSITORY, forkserver

ID = "reform-in-place"
WARM = "megatron_ft.mcore.rank_main:warm"
JOB_TIMEOUT_SECONDS = 900.0
MOST_MEMORY = 1.05
MOST_ERROR = 0.1
MIN_STATE_BYTES = 500_000_000
THRESHOLD = (
    f"same layout, state >= {MIN_STATE_BYTES // 10**6} MB a rank: counted peak <= {MOST_MEMORY} of the steady state, "
    f"predicted by dry_run within {MOST_ERROR:.0%}; all survivors keep model and optimizer; healthy stages move "
    "nothing but their log"
)
FIRST_ITERATION, APART = 14, 10
VICTIMS = ((1, "forward"), (2, "backward"), (0, "grad_sync"), (3, "dispatch"))
"""Rank and phase of each fault, in order."""
BASE = (
    "model=moe_micro",
    "precision.params_dtype=bf16",
    "parallel.pipeline_model_parallel_size=2",
    "parallel.use_distributed_optimizer=true",
    "launch.num_nodes=4",
    "launch.ranks_per_node=1",
    "optimizer.lr_warmup_iterations=3",
    "training.micro_batch_size=1",
    "training.global_batch_size=4",
    "training.eval_interval_iterations=0",
    "checkpoint.save_at_end=false",
    "telemetry.wandb=disabled",
    "snapshot=sparse_window",
    "snapshot.num_peer_copies=0",
    "snapshot.iteration_seconds=1",
    "recovery.keep_layout=true",
    "recovery.strategies=[localized_replay]",
    "nodes.restart_lost_nodes=true",
    "nodes.max_node_restarts=100",
)
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
                for pid in pids.values():
                    Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets VmHWM, the maximum of VmRSS
            elif self._is_reset:
                self.steady = {rank: _largest_resident(pid) or self.steady.get(rank, 0) for rank, pid in pids.items()}
        if ready is not None and changed and not self.recovering:
            found = {rank: _largest_resident(pid) for rank, pid in enumerate(ready["process_ids"])}
            self.recovering = {rank: num_bytes for rank, num_bytes in found.items() if num_bytes is not None}
        return len(changed) >= self.num_faults


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


def _predicted_bytes(overrides: Sequence[str], folder: Path) -> int:
    """Return bytes that ``dry_run`` predicts for the largest rank: its state, and its copies to restore a window."""
    words = [*BASE, *overrides, "dry_run=true", "dry_run_format=json", f"data.cache_dir={folder / 'cache'}"]
    command = [sys.executable, str(REPOSITORY / "pretrain_moe.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=JOB_TIMEOUT_SECONDS, check=False)
    assert done.returncode == 0, f"dry_run failed: {done.stderr}"
    plan = json.loads(done.stdout)
    state = max(
        sum(size for name, size in stage["memory"].items() if name != "activations_bytes") for stage in plan["stages"]
    )
    return int(state + plan["snapshot"]["restore_bytes"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job, and judge memory and what the ranks kept."""
    arguments = parse_arguments(__doc__, argv)
    num_faults, size = (1, SMALL) if arguments.quick else (len(VICTIMS), LARGE)
    last = f"training.train_iterations={FIRST_ITERATION + APART * num_faults + 200}"
    watch = _Watch(num_faults)
    with tempfile.TemporaryDirectory(prefix=f"{ID}-") as folder, forkserver(WARM) as socket:
        predicted = _predicted_bytes(size, Path(folder))
        bench = Bench(Path(folder), socket, BASE, JOB_TIMEOUT_SECONDS)
        with bench.running([*size, last, _faults(num_faults)], until=watch) as run:
            events, hits = run.records(), run.records("failpoints.jsonl")
            output = run.output[-2000:]
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
    for problem in problems:
        print(problem)
    return finish(
        arguments.out,
        ID,
        passed=not problems and most <= MOST_MEMORY,
        figure=(
            f"{most:.3f}x of {state / 1e6:.0f} MB counted on {len(shares)} ranks in {num_faults} recoveries, "
            f"{abs(predicted / peak - 1) if peak else 1.0:.1%} from the prediction; resident memory of survivors at "
            f"most {max(rss, default=0.0):.2f}x of the largest before"
        ),
        threshold=THRESHOLD,
        counts={"recoveries": num_faults, "ranks": len(shares)},
        details={"shares": shares, "steady": watch.steady, "recovering": watch.recovering, "problems": problems},
    )


if __name__ == "__main__":
    sys.exit(main())
