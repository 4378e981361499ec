"""Count the package files whose code runs during a recovery and during the capture of a slice.

``tests/helpers/file_trace`` records in every process of a job when functions of which files run. The test cuts the
recording by the times of the job's own records. The bounds are the numbers measured when they were last lowered: they
may only fall.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import megatron_ft
from megatron_ft.control.launcher import PRELOAD
from megatron_ft.testing.jobs import JobResult, forkserver, run_job
from tests.helpers.file_trace.sitecustomize import SLOT_SECONDS

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(400)]  # trains

TRACER = Path(__file__).parents[1] / "helpers" / "file_trace"
PACKAGE = Path(megatron_ft.__file__).resolve().parent
PROGRAMS = {
    "pretrain_moe": "launcher",
    "megatron_ft.control.controller.main": "controller",
    "megatron_ft.control.node.agent": "agent",
    "megatron_ft.control.node.fork_server.fork": "rank",
    "megatron_ft.snapshot.server": "snapshot server",
}
SMALL = (
    "model=moe_micro",
    "training.micro_batch_size=1",
    "training.eval_interval_iterations=0",
    "checkpoint.save_at_end=false",
    "telemetry.wandb=disabled",
    "telemetry.log_interval_iterations=1",
)
REPLICAS = (
    "training.global_batch_size=6",
    "training.train_iterations=12",
    "parallel.use_distributed_optimizer=false",
    "launch.num_nodes=3",
    "recovery.min_nodes=2",
    "placement=overlap_search",
    "placement.min_replicas=2",
    "placement.num_slots_per_rank=8",
)
WINDOWS = (
    "training.global_batch_size=4",
    "training.train_iterations=14",
    "launch.num_nodes=2",
    "recovery.max_restarts=1",
    "parallel.expert_model_parallel_size=2",
    "snapshot=sparse_window",
    "snapshot.num_peer_copies=1",
    "snapshot.bandwidth_bytes_per_second=6e6",
    "snapshot.iteration_seconds=0.1",
)
ALL = "all of these"
ROOM = 2
"""Number of files that periodic work (heartbeats, writes of logs) may add to an interval."""
MOST_OF_A_RECOVERY = {"controller": 20, "agent": 8, "rank": 64, ALL: 80}
MOST_OF_A_SLICE = {"rank": 62, "snapshot server": 12, ALL: 68}


@dataclass(frozen=True)
class Traced:
    """Job that has ended, and the recordings of its processes."""

    job: JobResult
    trace: Path

    def event(self, kind: str, number: int = 0) -> dict[str, Any]:
        """Return an event of one kind by its number, counted from 0."""
        return [event for event in self.job.records() if event["kind"] == kind][number]

    def reported(self, iteration: int, since: float = 0.0) -> float:
        """Return the time at which the first iteration from ``iteration`` on was reported, at ``since`` or later."""
        metrics = self.job.records("metrics.jsonl")
        return min(
            record["time_unix_seconds"]
            for record in metrics
            if record.get("iteration", 0) >= iteration and record["time_unix_seconds"] >= since and "loss" in record
        )

    def files(self, begin: float, end: float) -> dict[str, set[str]]:
        """Return, by role, the files whose functions ran between two times, in all processes of the role."""
        first, last = int(begin / SLOT_SECONDS), int(end / SLOT_SECONDS)
        found: dict[str, set[str]] = {role: set() for role in PROGRAMS.values()}
        for path in self.trace.iterdir():
            role = PROGRAMS.get(path.stem)
            if role is None:
                continue
            for line in path.read_text().splitlines():
                slot, name = line.split()
                if first <= int(slot) <= last:
                    found[role].add(name)
        return found


@pytest.fixture(scope="module")
def traced_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Set the folder to which processes started from now on write their recordings."""
    trace = tmp_path_factory.mktemp("trace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FILE_TRACE", str(trace))
        patch.setenv("FILE_TRACE_FOLDER", f"{PACKAGE}{os.sep}")
        patch.setenv("PYTHONPATH", str(TRACER), prepend=os.pathsep)
        yield trace


@pytest.fixture(scope="module")
def warm(traced_environment: Path) -> Iterator[str]:
    """Yield a fork server whose ranks record which files they run."""
    with forkserver(*PRELOAD) as socket:
        yield socket


def train(folder: Path, warm: str, overrides: Sequence[str], fault: str) -> JobResult:
    words = [*SMALL, *overrides, f"testing.failpoints=['{fault}']", "run.name=job"]
    job = run_job(words, forkserver=warm, runs=folder)
    assert job.exit_code == 0, job.output
    return job


@pytest.fixture(scope="module")
def recovered(tmp_path_factory: pytest.TempPathFactory, traced_environment: Path, warm: str) -> Traced:
    """Return a job of three nodes that continued without one of them."""
    fault = 'kill(rank=1,at_iteration=7,phase="backward",generation=0)'
    return Traced(train(tmp_path_factory.mktemp("replicas"), warm, REPLICAS, fault), traced_environment)


@pytest.fixture(scope="module")
def restored(tmp_path_factory: pytest.TempPathFactory, traced_environment: Path, warm: str) -> Traced:
    """Return a job whose ranks all died and that continued from a window in memory."""
    fault = 'kill(at_iteration=11,phase="backward",generation=0)'
    return Traced(train(tmp_path_factory.mktemp("windows"), warm, WINDOWS, fault), traced_environment)


def check(found: Mapping[str, set[str]], most: Mapping[str, int], usual: Mapping[str, set[str]]) -> None:
    """Print the files of each role, and compare their number with the bound. A star marks files that do not run in an
    undisturbed iteration."""
    counts = {}
    for role in most:
        files = found[role] if role in found else set().union(*(found[name] for name in most if name in found))
        counts[role] = len(files)
        print(f"\n{role}: {len(files)} files, {len(files - usual.get(role, set()))} beyond an undisturbed iteration")
        for name in sorted(files) if role in found else ():
            print(f"  {' ' if name in usual[role] else '*'} {name}")
    above = {role: count for role, count in counts.items() if count > most[role] + ROOM}
    assert above == {}, f"{counts}, and at most {dict(most)} with room for {ROOM}"


@pytest.fixture(scope="module")
def usual(recovered: Traced) -> dict[str, set[str]]:
    """Return the files of two undisturbed iterations of the job with replicas and without snapshots."""
    found = recovered.files(recovered.reported(3), recovered.reported(5))
    return {**found, ALL: set().union(*found.values())}


def test_a_recovery_passes_through_few_files(recovered: Traced, usual: Mapping[str, set[str]]) -> None:
    """The interval is from the death of a rank to the report of the next committed iteration."""
    death, change = recovered.event("rank_failed"), recovered.event("membership_changed")
    end = recovered.reported(change["iteration"] + 1, since=change["time_unix_seconds"])
    check(recovered.files(death["time_unix_seconds"], end), MOST_OF_A_RECOVERY, usual)


def test_a_slice_passes_through_few_files(restored: Traced, usual: Mapping[str, set[str]]) -> None:
    """The interval is from the capture of a window's last slice until the window is restored and the ranks are
    ready."""
    recovery, ready = restored.event("recovery_started"), restored.event("ranks_ready", 1)
    assert recovery["source"] == "memory"
    begin = restored.reported(recovery["iteration"] - 1)
    check(restored.files(begin, ready["time_unix_seconds"]), MOST_OF_A_SLICE, usual)
