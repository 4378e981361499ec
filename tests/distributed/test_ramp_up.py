"""Tests jobs with a growing batch, a length in samples and masks of documents: a fault and another number of lanes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.testing.jobs import JobResult, run_job
from tests.helpers.sharing import chosen

pytestmark = pytest.mark.slow

SIZES = [1, 1, 1, 2, 2, 3, 4]
MODEL = (
    "model=moe_micro",
    "launch.ranks_per_node=2",
    "parallel.expert_model_parallel_size=2",
    f"training.train_samples={sum(SIZES) + 3}",
    "training.rampup_batch_size=[1,1,8]",
    "training.micro_batch_size=1",
    "training.global_batch_size=4",
    "training.eval_interval_iterations=0",
    "training.digest_interval_iterations=1",
    "optimizer.lr_warmup_samples=3",
    "data.eod_mask_loss=true",
    "data.reset_attention_mask=true",
    "telemetry.wandb=disabled",
)


def train(runs: Path, forkserver: str, *overrides: str) -> JobResult:
    job = run_job([*MODEL, *overrides], forkserver=forkserver, runs=runs)
    assert job.exit_code == 0, job.output
    return job


def digests(job: JobResult) -> set[tuple[int, tuple[str, ...]]]:
    events = [event for event in job.records() if event["kind"] == "state_digest"]
    return {(event["iteration"], tuple(event["digests"])) for event in events}


def figures(job: JobResult, names: Sequence[str]) -> dict[int, list[Any]]:
    return {record["iteration"]: [record[name] for name in names] for record in job.records("metrics.jsonl")}


EXACT = ("consumed_samples", "global_batch_size", "learning_rate", "tokens")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm_forkserver: str) -> JobResult:
    return train(tmp_path_factory.mktemp("undisturbed"), warm_forkserver)


def test_iterations_have_the_samples_of_the_ramp_up(undisturbed: JobResult) -> None:
    found = figures(undisturbed, EXACT)
    assert [found[number][1] for number in sorted(found)] == SIZES, "the last three samples are no whole iteration"
    assert [found[number][0] for number in sorted(found)] == [sum(SIZES[: n + 1]) for n in range(len(SIZES))]
    assert found[4][2] == max(rate for _, _, rate, _ in found.values()), "three samples of warm-up"


@pytest.mark.parametrize("phase", chosen(["backward", "update"], ["update"]))
def test_a_kill_within_the_ramp_up_changes_no_bit(
    tmp_path: Path, warm_forkserver: str, undisturbed: JobResult, phase: str
) -> None:
    """All ranks die. They replay a window whose iterations have batches of different sizes."""
    fault = f"testing.failpoints=['kill(at_iteration=6, phase=\"{phase}\", generation=0)']"
    windows = ("snapshot=sparse_window", "snapshot.num_peer_copies=0", "recovery.max_restarts=1")
    job = train(tmp_path, warm_forkserver, *windows, fault)
    restarted = [event for event in job.records() if event["kind"] == "run_started"]
    assert len(restarted) == 2 and restarted[1]["resumed_from"].startswith("window"), restarted
    assert digests(job) == digests(undisturbed)
    assert figures(job, (*EXACT, "loss")) == figures(undisturbed, (*EXACT, "loss"))


@pytest.mark.extended
def test_another_number_of_lanes_goes_on_with_the_same_samples(
    tmp_path: Path, warm_forkserver: str, undisturbed: JobResult
) -> None:
    train(tmp_path, warm_forkserver, "run.name=lanes", "training.exit_at_iteration=4")
    one = ("launch.ranks_per_node=1", "parallel.expert_model_parallel_size=1", "run.name=lanes", "run.resume=must")
    job = train(tmp_path, warm_forkserver, *one)
    assert figures(job, EXACT) == figures(undisturbed, EXACT)
    losses, expected = figures(job, ("loss",)), figures(undisturbed, ("loss",))
    for iteration, (loss,) in losses.items():
        assert loss == pytest.approx(expected[iteration][0], rel=1e-4)
