"""Tests jobs that capture snapshots, die, and continue from the snapshots with the same bits."""

import dataclasses
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.errors import CheckpointError, ConfigError, RecoveryError
from megatron_ft.mcore.snapshot.local_window import VOTE
from megatron_ft.snapshot.storage.window_file import WindowFile, rank_name, window_name, write_window
from megatron_ft.snapshot.storage.window_folder import RejectedWindow, WindowFolder
from megatron_ft.testing.jobs import JobResult, run_job

pytestmark = pytest.mark.slow

NUM_ITERATIONS = 14
MODEL = (
    "model=moe_micro",
    "precision=bf16",
    f"training.train_iterations={NUM_ITERATIONS}",
    "training.micro_batch_size=1",
    "training.global_batch_size=4",
    "training.eval_interval_iterations=0",
    "training.digest_interval_iterations=1",
    "telemetry.log_interval_iterations=1",
    "telemetry.wandb=disabled",
)
LAYOUT = ("launch.num_nodes=2", "parallel.expert_model_parallel_size=2")
SNAPSHOTS = (
    "snapshot=sparse_window",
    "snapshot.num_peer_copies=1",
    "snapshot.bandwidth_bytes_per_second=6e6",
    "snapshot.iteration_seconds=0.1",
)


ONE_RANK = ("launch.num_nodes=1", "launch.ranks_per_node=1", "parallel.expert_model_parallel_size=1", "snapshot=none")
"""Layout without snapshots. A resumed run has the layout of its newest job unless another one is given."""


def train(runs: Path, forkserver: str, *overrides: str, faults: Sequence[str] = ()) -> JobResult:
    quoted = ", ".join(f"'{fault}'" for fault in faults)
    words = [*MODEL, f"testing.failpoints=[{quoted}]", "run.name=job", *overrides]
    return run_job(words, forkserver=forkserver, runs=runs)


def of_kind(job: JobResult, kind: str) -> list[dict[str, Any]]:
    return [event for event in job.records() if event["kind"] == kind]


def digests(job: JobResult) -> set[tuple[int, tuple[str, ...]]]:
    return {(event["iteration"], tuple(event["digests"])) for event in of_kind(job, "state_digest")}


def losses(job: JobResult) -> set[tuple[int, float]]:
    records = job.records("metrics.jsonl")
    return {(record["iteration"], record["loss"]) for record in records if "loss" in record}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm_forkserver: str) -> JobResult:
    job = train(tmp_path_factory.mktemp("undisturbed"), warm_forkserver, *LAYOUT)
    assert job.exit_code == 0, job.output
    return job


@pytest.mark.extended
def test_taking_snapshots_changes_no_bit(tmp_path: Path, warm_forkserver: str, undisturbed: JobResult) -> None:
    job = train(tmp_path, warm_forkserver, *LAYOUT, *SNAPSHOTS)
    assert job.exit_code == 0, job.output
    planned = of_kind(job, "snapshot_planned")
    assert planned and all(event["window_iterations"] >= 3 for event in planned)
    assert of_kind(job, "window_committed") and not of_kind(job, "snapshot_problem")
    assert digests(job) == digests(undisturbed) and losses(job) == losses(undisturbed)


def test_ranks_that_all_die_go_on_from_memory_and_a_second_time_while_they_replay(
    tmp_path: Path, warm_forkserver: str, undisturbed: JobResult
) -> None:
    faults = [
        'kill(at_iteration=11,phase="backward",generation=0)',
        'kill(phase="replay",generation=1)',
        'kill(at_iteration=12,phase="capture",generation=2)',
    ]
    job = train(tmp_path, warm_forkserver, *LAYOUT, *SNAPSHOTS, "recovery.max_restarts=3", faults=faults)
    assert job.exit_code == 0, job.output
    hits = {(hit["phase"], hit["rank"]) for hit in job.records("failpoints.jsonl")}
    assert hits == {(phase, rank) for phase in ("backward", "replay", "capture") for rank in (0, 1)}
    chosen = [(event["source"], event["iteration"] > 0) for event in of_kind(job, "recovery_started")]
    assert chosen == [("memory", True)] * 3
    assert digests(job) == digests(undisturbed) and losses(job) == losses(undisturbed)


PIPELINE = ("launch.num_nodes=2", "parallel.pipeline_model_parallel_size=2")
IN_BUBBLES = {
    "sparse_window": SNAPSHOTS,
    "dense": ("snapshot=dense", "snapshot.policy.interval_iterations=3", "snapshot.num_peer_copies=1"),
}


@pytest.fixture(scope="module")
def undisturbed_pipeline(tmp_path_factory: pytest.TempPathFactory, warm_forkserver: str) -> JobResult:
    job = train(tmp_path_factory.mktemp("undisturbed"), warm_forkserver, *PIPELINE)
    assert job.exit_code == 0, job.output
    return job


@pytest.mark.parametrize("policy", IN_BUBBLES)
def test_windows_that_are_copied_in_bubbles_restore_the_same_bits(
    tmp_path: Path, warm_forkserver: str, undisturbed_pipeline: JobResult, policy: str
) -> None:
    """A rank dies while a slice is copied, and all ranks continue from the memory of their nodes."""
    fault = 'kill(at_iteration=11,phase="backward",generation=0)'
    keys = (*PIPELINE, *IN_BUBBLES[policy], "snapshot.copy_in_bubbles=true", "recovery.max_restarts=1")
    job = train(tmp_path, warm_forkserver, *keys, faults=[fault])
    assert job.exit_code == 0, job.output
    # The last stage begins its backward pass first, so the fault may never reach the other stage.
    assert ("backward", 1) in {(hit["phase"], hit["rank"]) for hit in job.records("failpoints.jsonl")}
    (started,) = of_kind(job, "recovery_started")
    assert started["source"] == "memory" and started["iteration"] > 0
    committed = of_kind(job, "window_committed")
    assert sum(event["idle_copied_bytes"] for event in committed) > 0
    assert all(event["idle_copied_bytes"] <= event["captured_bytes"] for event in committed)
    idle = of_kind(job, "pipeline_idle")
    assert idle and all(len(event["seconds"]) == 2 and min(event["seconds"]) > 0 for event in idle)
    assert not of_kind(job, "snapshot_problem")
    assert digests(job) == digests(undisturbed_pipeline) and losses(job) == losses(undisturbed_pipeline)


def test_a_job_that_is_gone_goes_on_from_storage_and_passes_damage_over(
    tmp_path: Path, warm_forkserver: str, undisturbed: JobResult
) -> None:
    persisting = [*LAYOUT, *SNAPSHOTS, "snapshot.persist_interval_windows=1"]
    fault = 'kill(at_iteration=13,phase="forward",rank=1)'
    died = train(tmp_path, warm_forkserver, *persisting, faults=[fault])
    assert died.exit_code != 0 and died.records("failpoints.jsonl")
    folder = WindowFolder(died.run_dir / "windows")
    newest, reports = folder.newest(2)
    assert newest is not None and not reports
    older = [stored for stored in folder.list_windows() if stored < newest]
    path = died.run_dir / "windows" / window_name(newest) / "rank-00001.window"
    content = bytearray(path.read_bytes())
    content[-5000] ^= 1
    path.write_bytes(content)
    resumed = train(tmp_path, warm_forkserver, *persisting, "run.resume=auto", "run.start_over=true")
    assert resumed.exit_code == 0, resumed.output
    (chosen,) = of_kind(resumed, "recovery_started")
    assert chosen["strategy"] == ("rollback" if older else "start_over")
    assert "rank-00001.window" in json.dumps(chosen["declined"])
    assert any("rank-00001.window" in problem["error"] for problem in of_kind(resumed, "snapshot_problem"))
    assert digests(resumed) == digests(undisturbed) and losses(resumed) == losses(undisturbed)


@pytest.mark.extended
def test_a_window_is_replayed_on_one_node_and_its_dense_state_goes_on_at_another_layout(
    tmp_path: Path, warm_forkserver: str, undisturbed: JobResult
) -> None:
    persisting = [*LAYOUT, *SNAPSHOTS, "snapshot.persist_interval_windows=1"]
    died = train(tmp_path, warm_forkserver, *persisting, faults=['kill(at_iteration=13,phase="forward",rank=0)'])
    assert died.exit_code != 0
    folded = ("launch.num_nodes=1", "launch.ranks_per_node=2", "snapshot=none", "training.exit_at_iteration=1")
    replayed = train(tmp_path, warm_forkserver, "run.resume=auto", *folded)
    assert replayed.exit_code == 0, replayed.output
    chosen = of_kind(replayed, "recovery_started")[-1]
    assert chosen["source"] == "persisted"
    at = chosen["iteration"]
    assert of_kind(replayed, "checkpoint_saved")[-1]["iteration"] == at
    assert digests(replayed) <= digests(undisturbed) and max(digests(replayed))[0] >= at
    elsewhere = train(tmp_path, warm_forkserver, "run.resume=auto", *ONE_RANK)
    assert elsewhere.exit_code == 0, elsewhere.output
    assert of_kind(elsewhere, "recovery_started")[-1]["strategy"] == "checkpoint"
    assert of_kind(elsewhere, "checkpoint_loaded")[-1]["iteration"] == at
    before, after = dict(losses(undisturbed)), dict(losses(elsewhere))
    assert set(after) == set(before)
    assert all(abs(after[iteration] / before[iteration] - 1) < 2e-3 for iteration in before)


@pytest.mark.extended
def test_a_window_of_another_layout_is_named_and_not_used(tmp_path: Path, warm_forkserver: str) -> None:
    persisting = [*LAYOUT, *SNAPSHOTS, "snapshot.persist_interval_windows=1"]
    died = train(tmp_path, warm_forkserver, *persisting, faults=['kill(at_iteration=13,phase="forward",rank=0)'])
    assert died.exit_code != 0
    refused = train(tmp_path, warm_forkserver, "run.resume=auto", *ONE_RANK)
    assert refused.exit_code == CheckpointError.exit_code, refused.output
    assert "captured with another layout" in refused.output and "run.start_over=true" in refused.output
    elsewhere = train(tmp_path, warm_forkserver, "run.resume=auto", "run.start_over=true", *ONE_RANK)
    assert elsewhere.exit_code == 0, elsewhere.output
    *_, chosen = of_kind(elsewhere, "recovery_started")
    assert chosen["strategy"] == "start_over" and "captured with another layout" in json.dumps(chosen["declined"])


@pytest.mark.extended
def test_a_run_is_not_continued_with_another_schedule(tmp_path: Path, warm_forkserver: str) -> None:
    persisting = [*LAYOUT, *SNAPSHOTS, "snapshot.persist_interval_windows=1"]
    died = train(tmp_path, warm_forkserver, *persisting, faults=['kill(at_iteration=13,phase="forward",rank=0)'])
    assert died.exit_code != 0
    changed = train(tmp_path, warm_forkserver, *persisting, "run.resume=auto", "optimizer.lr=2e-4")
    assert changed.exit_code == ConfigError.exit_code, changed.output
    assert "optimizer.lr: 0.001 -> 0.0002" in changed.output
    assert "Traceback" not in changed.output and "To continue" not in changed.output, "no rank was started"
    assert not list(changed.run_dir.glob("config-*.yaml")), "its configuration is still that of the run"
    assert max(record["iteration"] for record in changed.records("metrics.jsonl")) < 14


def test_memory_beyond_the_limit_is_refused_before_anything_starts(tmp_path: Path, warm_forkserver: str) -> None:
    job = train(tmp_path, warm_forkserver, *LAYOUT, *SNAPSHOTS, "snapshot.host_memory_limit_bytes=1000000")
    assert job.exit_code == 2 and "snapshot.host_memory_limit_bytes" in job.output
    assert not (tmp_path / "job").exists()


@pytest.mark.extended
def test_skipped_iterations_are_captured_and_replayed(tmp_path: Path, warm_forkserver: str) -> None:
    """The loss scale overflows in some iterations. No update of these iterations waits for the slices."""
    skipping = [
        *LAYOUT,
        "precision=fp16",
        "precision.initial_loss_scale=68719476736",
        "training.max_consecutive_skips=20",
    ]
    calm = train(tmp_path / "calm", warm_forkserver, *skipping)
    assert calm.exit_code == 0 and of_kind(calm, "iteration_skipped"), calm.output
    fault = 'kill(at_iteration=12,phase="forward",generation=0)'
    job = train(tmp_path / "job", warm_forkserver, *skipping, *SNAPSHOTS, "recovery.max_restarts=1", faults=[fault])
    assert job.exit_code == 0, job.output
    assert [event["source"] for event in of_kind(job, "recovery_started")] == ["memory"]
    assert digests(job) == digests(calm)


def test_a_window_that_is_replayed_to_something_else_is_not_chosen_again(
    tmp_path: Path, warm_forkserver: str, undisturbed: JobResult
) -> None:
    """The logged loss of the window is changed. The window is undamaged, but its replay differs, so an older source is
    used."""
    persisting = [*LAYOUT, *SNAPSHOTS, "snapshot.persist_interval_windows=1", "checkpoint.save_interval_iterations=4"]
    died = train(tmp_path, warm_forkserver, *persisting, faults=['kill(at_iteration=13,phase="forward",rank=1)'])
    assert died.exit_code != 0 and died.records("failpoints.jsonl")
    newest, _ = WindowFolder(died.run_dir / "windows").newest(2)
    assert newest is not None
    for rank in range(2):
        alter_vote(died.run_dir / "windows" / window_name(newest) / rank_name(rank))
    resumed = train(tmp_path, warm_forkserver, *persisting, "run.resume=auto", "recovery.max_restarts=3")
    assert resumed.exit_code == 0, resumed.output
    refused, chosen = of_kind(resumed, "recovery_started")
    assert refused["source"] == "persisted" and chosen["strategy"] in ("rollback", "checkpoint")
    assert 0 < chosen["iteration"] < refused["iteration"]
    (declined,) = [text for text in chosen["declined"] if "was rejected by an earlier start" in text]
    assert f"window of iteration {newest.start_iteration} was rejected" in declined
    assert "had other results than the iteration itself: loss=" in declined
    assert any(problem["what"] == "replay" for problem in of_kind(resumed, "snapshot_problem"))
    assert len(of_kind(resumed, "ranks_restarted")) == 1
    assert [window.start_iteration for window in RejectedWindow.read_all(resumed.run_dir)] == [newest.start_iteration]
    assert digests(resumed) == digests(undisturbed) and losses(resumed) == losses(undisturbed)


@pytest.mark.extended
def test_a_job_whose_only_window_was_refused_stops_and_does_not_start_over(
    tmp_path: Path, warm_forkserver: str
) -> None:
    persisting = [*LAYOUT, *SNAPSHOTS, "snapshot.persist_interval_windows=1", "checkpoint.save_at_end=false"]
    died = train(tmp_path, warm_forkserver, *persisting, faults=['kill(at_iteration=13,phase="forward",rank=1)'])
    assert died.exit_code != 0
    folder = WindowFolder(died.run_dir / "windows")
    newest, _ = folder.newest(2)
    assert newest is not None
    for stored in folder.list_windows():
        if stored != newest:
            shutil.rmtree(died.run_dir / "windows" / window_name(stored))
    for rank in range(2):
        alter_vote(died.run_dir / "windows" / window_name(newest) / rank_name(rank))
    codes = [RecoveryError.exit_code, CheckpointError.exit_code]
    while codes:
        stopped = train(tmp_path, warm_forkserver, *persisting, "run.resume=auto")
        assert stopped.exit_code == codes.pop(0), stopped.output
    assert "cannot continue the run in " in stopped.output
    assert [event["source"] for event in of_kind(stopped, "recovery_started")] == ["persisted"], (
        "the second job never started"
    )


def alter_vote(path: Path) -> None:
    """Change the loss of the first iteration that a replay runs, in an otherwise valid file."""
    with WindowFile.open(path) as opened:
        window, payload = opened.window, [opened.read_slice(index) for index in range(opened.window.num_slices)]
    slices = list(window.slices)
    vote = json.loads(slices[1].header[VOTE])
    vote["loss"] = math.nextafter(vote["loss"], math.inf)
    slices[1] = dataclasses.replace(slices[1], header={**slices[1].header, VOTE: json.dumps(vote)})
    path.unlink()
    write_window(path.parents[1], dataclasses.replace(window, slices=slices), payload)
