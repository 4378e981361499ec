"""How many files of the package a recovery and a captured slice pass through, by what really runs.

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
"""Files that periodic work (heartbeats, writes of logs) may add to an interval, or not."""
MOST_OF_A_RECOVERY = {"controller": 31, "agent": 11, "rank": 102, ALL: 131}
MOST_OF_A_SLICE = {"rank": 106, "snapshot server": 15, ALL: 115}


@dataclass(frozen=True)
class Traced:
    """A job that has ended, and what its processes recorded."""

    job: JobResult
    trace: Path

    def event(self, kind: str, number: int = 0) -> dict[str, Any]:
        """One event of a kind, counted from 0."""
        return [event for event in self.job.records() if event["kind"] == kind][number]

    def reported(self, iteration: int, since: float = 0.0) -> float:
        """When the first iteration from ``iteration`` on was reported, at ``since`` or later."""
        metrics = self.job.records("metrics.jsonl")
        return min(
            record["time_unix_seconds"]
            for record in metrics
            if record.get("iteration", 0) >= iteration and record["time_unix_seconds"] >= since and "loss" in record
        )

    def files(self, begin: float, end: float) -> dict[str, set[str]]:
        """Role to the files whose functions ran between two times, in all processes of that role."""
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
    """The folder that processes started from now on record to."""
    trace = tmp_path_factory.mktemp("trace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FILE_TRACE", str(trace))
        patch.setenv("FILE_TRACE_FOLDER", f"{PACKAGE}{os.sep}")
        patch.setenv("PYTHONPATH", str(TRACER), prepend=os.pathsep)
        yield trace


@pytest.fixture(scope="module")
def warm(traced_environment: Path) -> Iterator[str]:
    """A fork server whose ranks record."""
    with forkserver(*PRELOAD) as socket:
        yield socket


def train(folder: Path, warm: str, overrides: Sequence[str], fault: str) -> JobResult:
    words = [*SMALL, *overrides, f"testing.failpoints=['{fault}']", "run.name=job"]
    job = run_job(words, forkserver=warm, runs=folder)
    assert job.exit_code == 0, job.output
    return job


@pytest.fixture(scope="module")
def recovered(tmp_path_factory: pytest.TempPathFactory, traced_environment: Path, warm: str) -> Traced:
    """A job of three nodes that continues without one."""
    fault = 'kill(rank=1,at_iteration=7,phase="backward",generation=0)'
    return Traced(train(tmp_path_factory.mktemp("replicas"), warm, REPLICAS, fault), traced_environment)


@pytest.fixture(scope="module")
def restored(tmp_path_factory: pytest.TempPathFactory, traced_environment: Path, warm: str) -> Traced:
    """A job whose ranks all die and continue from a window in memory."""
    fault = 'kill(at_iteration=11,phase="backward",generation=0)'
    return Traced(train(tmp_path_factory.mktemp("windows"), warm, WINDOWS, fault), traced_environment)


def check(found: Mapping[str, set[str]], most: Mapping[str, int], usual: Mapping[str, set[str]]) -> None:
    """Print the files of each role, a star for those that do not run in an undisturbed iteration; hold the bounds."""
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
    """Files of two undisturbed iterations of the job that keeps replicas and takes no snapshots."""
    found = recovered.files(recovered.reported(3), recovered.reported(5))
    return {**found, ALL: set().union(*found.values())}


def test_a_recovery_passes_through_few_files(recovered: Traced, usual: Mapping[str, set[str]]) -> None:
    """From the death of a rank to the report of the next committed iteration."""
    death, change = recovered.event("rank_failed"), recovered.event("membership_changed")
    end = recovered.reported(change["iteration"] + 1, since=change["time_unix_seconds"])
    check(recovered.files(death["time_unix_seconds"], end), MOST_OF_A_RECOVERY, usual)


def test_a_slice_passes_through_few_files(restored: Traced, usual: Mapping[str, set[str]]) -> None:
    """From before the capture of the last slice of a window until that window is restored and ranks are ready."""
    recovery, ready = restored.event("recovery_started"), restored.event("ranks_ready", 1)
    assert recovery["source"] == "memory"
    begin = restored.reported(recovery["iteration"] - 1)
    check(restored.files(begin, ready["time_unix_seconds"]), MOST_OF_A_SLICE, usual)
