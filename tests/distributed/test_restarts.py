"""Tests jobs that train a real model and whose ranks are restarted after a fault."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_ft.testing.jobs import JobResult, run_job
from tests.helpers.sharing import chosen

pytestmark = pytest.mark.slow

NUM_ITERATIONS = 6
MODEL = (
    "model=moe_micro",
    "launch.ranks_per_node=2",
    "parallel.expert_model_parallel_size=2",
    f"training.train_iterations={NUM_ITERATIONS}",
    "training.micro_batch_size=1",
    "training.global_batch_size=4",
    "training.eval_interval_iterations=0",
    "training.digest_interval_iterations=1",
    "optimizer.lr_warmup_iterations=1",
    "checkpoint.save_interval_iterations=1",
    "checkpoint.async_save=false",
    "telemetry.log_interval_iterations=1",
    "telemetry.wandb=disabled",
)


def train(runs: Path, forkserver: str, faults: Sequence[str] = (), *overrides: str) -> JobResult:
    """Run a job to its end. Both ranks get the failpoints ``faults``."""
    quoted = ", ".join(f"'{fault}'" for fault in faults)
    words = [*MODEL, f"testing.failpoints=[{quoted}]", *overrides]
    return run_job(words, forkserver=forkserver, runs=runs)


def digests(job: JobResult) -> set[tuple[int, tuple[str, ...]]]:
    """Return the digests of all ranks' states after each iteration, from whichever generation reported them."""
    events = [event for event in job.records() if event["kind"] == "state_digest"]
    return {(event["iteration"], tuple(event["digests"])) for event in events}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm_forkserver: str) -> JobResult:
    job = train(tmp_path_factory.mktemp("undisturbed"), warm_forkserver)
    assert job.exit_code == 0, job.output
    assert sorted(iteration for iteration, _ in digests(job)) == list(range(1, NUM_ITERATIONS + 1))
    return job


@pytest.mark.parametrize("phase", chosen(["backward", "vote_after"], ["vote_after"]))
def test_a_job_whose_ranks_all_die_goes_on_and_ends_with_the_same_bits(
    tmp_path: Path, warm_forkserver: str, undisturbed: JobResult, phase: str
) -> None:
    fault = f'kill(at_iteration=3, phase="{phase}", generation=0)'
    job = train(tmp_path, warm_forkserver, [fault], "recovery.max_restarts=1")
    assert job.exit_code == 0, job.output
    hits = job.records("failpoints.jsonl")
    assert {(hit["action"], hit["iteration"], hit["phase"]) for hit in hits} == {("kill", 3, phase)}
    kinds = [event["kind"] for event in job.records()]
    assert kinds.count("ranks_restarted") == 1
    assert kinds.count("run_started") == 2
    restarted = [event for event in job.records() if event["kind"] == "run_started"][1]
    assert restarted["resumed_from_iteration"] == 2
    assert digests(job) == digests(undisturbed)
    assert "starting all ranks again (generation 1; restarts left without progress: 0): rank" in job.output


def test_without_a_checkpoint_a_job_starts_over(tmp_path: Path, warm_forkserver: str, undisturbed: JobResult) -> None:
    faults = ['raise(rank=1, at_iteration=2, phase="forward", generation=0)']
    overrides = ["recovery.max_restarts=1", "checkpoint.save_interval_iterations=0"]
    job = train(tmp_path, warm_forkserver, faults, *overrides)
    assert job.exit_code == 0, job.output
    restarted = [event for event in job.records() if event["kind"] == "run_started"][1]
    assert "resumed_from_iteration" not in restarted
    assert digests(job) == digests(undisturbed)


WINDOWS = (
    "snapshot=dense",
    "snapshot.policy.interval_iterations=1",
    "snapshot.num_peer_copies=0",
    "snapshot.iteration_seconds=1",
    "snapshot.bandwidth_bytes_per_second=1e12",
    "checkpoint.save_interval_iterations=3",
)


@pytest.mark.parametrize(("recovery", "strategy"), [("auto", "rollback"), ("checkpoint", "checkpoint")])
def test_a_job_uses_only_chosen_strategies(
    tmp_path: Path, warm_forkserver: str, undisturbed: JobResult, recovery: str, strategy: str
) -> None:
    """The newest window is newer than the newest checkpoint. It is only loaded if rollbacks are allowed."""
    fault = 'kill(at_iteration=6, phase="backward", generation=0)'
    overrides = [f"recovery={recovery}", "recovery.max_restarts=1", *WINDOWS]
    job = train(tmp_path, warm_forkserver, [fault], *overrides)
    assert job.exit_code == 0, job.output
    (started,) = [event for event in job.records() if event["kind"] == "recovery_started"]
    assert started["strategy"] == strategy and (started["iteration"] > 3) == (strategy == "rollback")
    assert any("not chosen" in reason for reason in started["declined"]) == (recovery == "checkpoint")
    assert digests(job) == digests(undisturbed)


@pytest.mark.extended
def test_ranks_do_not_continue_in_their_processes_if_only_checkpoints_are_chosen(
    tmp_path: Path, warm_forkserver: str
) -> None:
    """The job could continue without a lost node, and would do so by default."""
    overrides = [
        "launch.num_nodes=3",
        "launch.ranks_per_node=1",
        "parallel.expert_model_parallel_size=1",
        "parallel.use_distributed_optimizer=false",
        "placement=overlap_search",
        "placement.num_slots_per_rank=8",
        "recovery.min_nodes=2",
        "training.global_batch_size=6",
        "recovery=checkpoint",
    ]
    fault = 'kill(rank=1, at_iteration=4, phase="backward", generation=0)'
    job = train(tmp_path, warm_forkserver, [fault], *overrides)
    assert job.exit_code == 0, job.output
    kinds = [event["kind"] for event in job.records()]
    assert kinds.count("ranks_restarted") == 1 and "membership_changed" not in kinds
    (started,) = [event for event in job.records() if event["kind"] == "recovery_started"]
    assert (started["strategy"], started["generation"]) == ("checkpoint", 1)
