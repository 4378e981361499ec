"""Tests jobs that train a real model, lose ranks and whole nodes, and start all ranks again on spare or restarted nodes
(``recovery.keep_processes=false``)."""

import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.control.admin import AdminClient
from megatron_ft.errors import CheckpointError, ControlError
from megatron_ft.failpoints import ITERATION_PHASES
from megatron_ft.failures.injecting import Injector
from megatron_ft.testing.jobs import JobResult, run_job, start, wait
from tests.distributed.test_inject_failures import read
from tests.helpers.sharing import chosen

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_ITERATIONS = 26
PATIENCE_SECONDS = 300.0
MODEL = (
    "model=moe_micro",
    f"training.train_iterations={NUM_ITERATIONS}",
    "training.micro_batch_size=1",
    "training.global_batch_size=4",
    "training.eval_interval_iterations=0",
    "training.digest_interval_iterations=1",
    "optimizer.lr_warmup_iterations=1",
    "checkpoint.save_at_end=false",
    "telemetry.wandb=disabled",
    "recovery.keep_layout=true",
    "recovery.keep_processes=false",
    "recovery.max_restarts=2",
    "snapshot=sparse_window",
    "snapshot.num_peer_copies=1",
    "snapshot.iteration_seconds=1",
)
LAYOUTS = {
    "pp1": (
        "launch.num_nodes=2",
        "parallel.use_distributed_optimizer=false",
        "snapshot.bandwidth_bytes_per_second=4e5",
    ),
    "pp2 sharded": (
        "launch.num_nodes=4",
        "parallel.pipeline_model_parallel_size=2",
        "parallel.expert_model_parallel_size=2",
        "parallel.use_distributed_optimizer=true",
        "precision=bf16",
        "snapshot.bandwidth_bytes_per_second=2e5",
    ),
}
LAYOUTS["replica slots"] = (*LAYOUTS["pp1"], "placement=spread", "placement.num_slots_per_rank=8")
SPARE, AGAIN = "nodes.num_spare_nodes=1", "nodes.restart_lost_nodes=true"


def words(layout: str, *overrides: str, faults: Sequence[str] = ()) -> list[str]:
    quoted = ", ".join(f"'{fault}'" for fault in faults)
    return [*MODEL, *LAYOUTS[layout], f"testing.failpoints=[{quoted}]", "run.name=job", *overrides]


def run_killing_nodes(overrides: Sequence[str], *, forkserver: str | None = None, runs: Path) -> JobResult:
    """Run a job. The node of each rank that a failpoint stops is killed: agent, snapshot server and ranks at once."""
    shared = [] if forkserver is None else [f"launch.forkserver_socket={forkserver}"]
    command = [sys.executable, "pretrain_moe.py", *overrides, f"run.dir={runs}", *shared]
    console, run_dir = start(command), runs / "job"
    injector = Injector(run_dir=run_dir, ranks_per_node=1, connect=lambda: AdminClient(run_dir))
    try:
        deadline, killed = time.monotonic() + PATIENCE_SECONDS, 0
        while console.poll() is None and time.monotonic() < deadline:
            path = run_dir / "failpoints.jsonl"
            stopped = [hit for hit in (read(path) if path.exists() else []) if hit["action"] == "stop"]
            for hit in stopped[killed:]:
                injector.kill([hit["node"]])
            killed = len(stopped)
            time.sleep(0.05)
    finally:
        output = wait(console, 10)
    return JobResult(console.returncode, run_dir, output)


def of_kind(job: JobResult, kind: str) -> list[dict[str, Any]]:
    return [event for event in job.records() if event["kind"] == kind]


def digests(job: JobResult) -> set[tuple[int, tuple[str, ...]]]:
    """Return the digests of all ranks' states after each iteration, from whichever generation reported them."""
    return {(event["iteration"], tuple(event["digests"])) for event in of_kind(job, "state_digest")}


def losses(job: JobResult) -> set[tuple[int, float]]:
    return {(record["iteration"], record["loss"]) for record in job.records("metrics.jsonl") if "loss" in record}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm_forkserver: str) -> Callable[[str], JobResult]:
    """Return a function that runs the undisturbed job of a layout once."""

    @cache
    def job_of(layout: str) -> JobResult:
        folder = tmp_path_factory.mktemp("undisturbed")
        job = run_job(words(layout, SPARE), forkserver=warm_forkserver, runs=folder)
        assert job.exit_code == 0, job.output
        assert len(digests(job)) == NUM_ITERATIONS
        return job

    return job_of


def stop(rank: int, iteration: int, phase: str, generation: int = 0) -> str:
    """Return a failpoint after which the rank's node is killed while the other ranks wait for the rank."""
    return f'stop(rank={rank},at_iteration={iteration},phase="{phase}",generation={generation})'


def kill(rank: int, iteration: int, phase: str, generation: int = 0) -> str:
    return f'kill(rank={rank},at_iteration={iteration},phase="{phase}",generation={generation})'


CASES: dict[str, tuple[str, list[str], list[str], list[tuple[int, ...]]]] = {
    "a rank": ("pp1", [SPARE], [kill(1, 17, "dispatch")], [(0, 1)]),
    "a node, a spare": ("pp1", [SPARE], [stop(0, 17, "grad_sync")], [(2, 1)]),
    "a node that returns": ("pp2 sharded", [AGAIN], [stop(2, 18, "backward")], [(0, 1, 2, 3)]),
    "a node between vote and update": ("pp2 sharded", [SPARE], [stop(3, 19, "vote_after")], [(0, 1, 2, 4)]),
    "a spare, then the node that it replaced": (
        "pp2 sharded",
        [SPARE, AGAIN],
        [stop(1, 18, "gather"), stop(0, 22, "forward", 1)],
        [(0, 4, 2, 3), (1, 4, 2, 3)],
    ),
    "a node of a job with replica slots": ("replica slots", [SPARE], [stop(1, 17, "update")], [(0, 2)]),
    "a second node while ranks are built": (
        "pp2 sharded",
        [SPARE, AGAIN, "recovery.max_restarts=3"],
        [stop(1, 18, "forward"), 'stop(rank=3,phase="build",generation=1)'],
        [(0, 4, 2, 3), (0, 4, 2, 1)],
    ),
    "a second node while windows are replayed": (
        "pp1",
        [SPARE, AGAIN],
        [stop(1, 18, "capture"), 'stop(rank=1,phase="replay",passes=2,generation=1)'],
        [(0, 2), (0, 1)],
    ),
}
"""Layout, overrides, faults, and the node at each place after each restart, by name."""
EXTENDED = (
    "a rank",
    "a node, a spare",
    "a node that returns",
    "a node between vote and update",
    "a node of a job with replica slots",
    "a second node while ranks are built",
    "a second node while windows are replayed",
)
"""Faults whose path another fault also takes."""


@pytest.mark.parametrize("name", chosen(CASES, EXTENDED))
def test_undisturbed_bits(
    tmp_path: Path, warm_forkserver: str, undisturbed: Callable[[str], JobResult], name: str
) -> None:
    layout, overrides, faults, memberships = CASES[name]
    job = run_killing_nodes(words(layout, *overrides, faults=faults), forkserver=warm_forkserver, runs=tmp_path)
    assert job.exit_code == 0, job.output
    assert len(job.records("failpoints.jsonl")) == len(faults)
    started = of_kind(job, "recovery_started")
    assert {(event["strategy"], event["source"]) for event in started} == {("rollback", "memory")}, job.output
    assert [tuple(event["nodes"]) for event in of_kind(job, "ranks_restarted")] == memberships
    assert digests(job) == digests(undisturbed(layout)) and losses(job) == losses(undisturbed(layout))
    assert max(iterations_again(job)) <= bound_of(job)


def iterations_again(job: JobResult) -> list[int]:
    """Return the number of committed iterations that ran again after each restart that completed its replay."""
    found, committed = [], 0
    for event in job.records():
        if event["kind"] == "ranks_restarted":
            committed = max(committed, event["iteration"] - 1)
        elif event["kind"] == "window_replayed":
            found.append(committed - event["start_iteration"])
    return found


def bound_of(job: JobResult) -> int:
    """Return the planned bound of this number: two windows and the usual lag of a commit."""
    window_iterations = of_kind(job, "snapshot_planned")[0]["window_iterations"]
    return int(2 * window_iterations + JobConfig().upstream_log.commit_lag_iterations)


@pytest.mark.extended
def test_a_job_without_a_replacement_ends_and_names_it(tmp_path: Path, warm_forkserver: str) -> None:
    faults = [stop(0, 17, "forward"), stop(1, 19, "forward", 1)]
    job = run_killing_nodes(words("pp1", SPARE, faults=faults), forkserver=warm_forkserver, runs=tmp_path)
    assert job.exit_code == ControlError.exit_code
    assert "node 1 is lost and has no replacement: no spare is left" in job.output


def test_a_job_whose_windows_are_lost_with_their_nodes_does_not_start_at_iteration_0(
    tmp_path: Path, warm_forkserver: str
) -> None:
    faults = [stop(0, 17, "forward"), stop(1, 17, "forward")]
    job = run_killing_nodes(words("pp1", AGAIN, faults=faults), forkserver=warm_forkserver, runs=tmp_path)
    assert job.exit_code == CheckpointError.exit_code, job.output
    assert [tuple(event["nodes"]) for event in of_kind(job, "ranks_restarted")] == [(0, 1)]
    assert "it was committed, but no node has it in its memory any more" in job.output


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_undisturbed_bits_after_faults_at_random(
    tmp_path: Path, warm_forkserver: str, undisturbed: Callable[[str], JobResult], layout: str, seed: int
) -> None:
    """Ranks and nodes are lost in random phases of six generations. While ranks build or replay, only ranks are lost:
    the loss of a second node before the next commit can take the last copy of a window."""
    chance = random.Random(f"{layout} {seed}")
    num_ranks = 4 if layout == "pp2 sharded" else 2
    faults = []
    for generation in range(6):
        place = f"rank={chance.randrange(num_ranks)},generation={generation}"
        # Only the first restart certainly replays: later ones may find the whole state in one slice.
        rare = chance.choice(("build", "capture", "replay") if generation == 1 else ("build", "capture"))
        usual = chance.choice([phase for phase in ITERATION_PHASES if phase not in ("capture", "replicate")])
        if generation and chance.random() < 0.3:
            faults.append(f'kill({place},phase="{rare}")')
        else:
            action = chance.choice(("kill", "stop"))
            faults.append(f'{action}({place},phase="{usual}",at_iteration={16 + 2 * generation})')
    limits = "recovery.max_restarts=8"
    overrides = words(layout, SPARE, AGAIN, limits, faults=faults)
    job = run_killing_nodes(overrides, forkserver=warm_forkserver, runs=tmp_path)
    assert job.exit_code == 0, f"{faults}: {job.output}"
    num_hits = len(job.records("failpoints.jsonl"))
    assert num_hits == len(faults), f"{faults}: not all faults happened"
    assert {event["strategy"] for event in of_kind(job, "recovery_started")} == {"rollback"}, f"{faults}: {job.output}"
    assert len(of_kind(job, "ranks_restarted")) == num_hits
    assert digests(job) == digests(undisturbed(layout)) and losses(job) == losses(undisturbed(layout))
