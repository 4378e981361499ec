"""Whole jobs, from the console to the ranks: a node is lost and comes back, with the bits of the scripted history."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.jobs import JobResult, run_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # trains

MODEL = (
    "model=moe_micro",
    "placement=spread",
    "placement.num_slots_per_rank=6",
    "parallel.use_distributed_optimizer=false",
    "launch.num_nodes=3",
    "training.train_iterations=40",
    "training.micro_batch_size=1",
    "training.global_batch_size=4",
    "training.eval_interval_iterations=0",
    "training.digest_interval_iterations=1",
    "telemetry.log_interval_iterations=1",
    "telemetry.wandb=disabled",
)
SURVIVING = ("launch.min_nodes=2", "launch.restart_lost_nodes=true", "launch.join_window_seconds=0.5")
FAULTS = (
    'kill(rank=2,at_iteration=5,phase="backward",generation=0)',
    # Time for the node to come back.
    *(f'delay(rank=0,at_iteration={k},phase="forward",seconds=8.0)' for k in (10, 20, 30)),
)


def train(runs: Path, forkserver: str, *overrides: str) -> JobResult:
    job = run_job([*MODEL, "run.name=job", *overrides], forkserver=forkserver, runs=runs, timeout_seconds=180.0)
    assert job.exit_code == 0, job.output
    return job


def of_kind(job: JobResult, kind: str) -> list[dict[str, Any]]:
    return [event for event in job.records() if event["kind"] == kind]


def digests(job: JobResult) -> dict[int, list[str]]:
    return {event["iteration"]: event["digests"] for event in of_kind(job, "state_digest")}


def test_a_node_is_lost_and_comes_back(tmp_path: Path, warm_forkserver: str) -> None:
    quoted = ", ".join(f"'{fault}'" for fault in FAULTS)
    job = train(tmp_path / "faulty", warm_forkserver, *SURVIVING, f"launch.failpoints=[{quoted}]")
    lost, joined = of_kind(job, "membership_changed")
    assert (lost["nodes"], lost["iteration"], joined["nodes"]) == ([0, 1], 4, [0, 1, 2])
    assert [event["rung"] for event in of_kind(job, "recovery_decided")] == ["replicas", "replicas"]

    back = joined["iteration"] + 1
    script = ["lose(nodes=[2],before_iteration=5)", f"join(nodes=[2],before_iteration={back})"]
    overrides = (f"training.exit_at_iteration={back + 2}", f"launch.membership_schedule={script}")
    scripted = digests(train(tmp_path / "scripted", warm_forkserver, *overrides))
    assert sorted(scripted) == list(range(1, back + 3))
    assert {k: found for k, found in digests(job).items() if k in scripted} == scripted
