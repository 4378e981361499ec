"""Tests a job whose ranks share one GPU over NCCL: a node is killed, and all ranks start again with a spare node, from
windows in the memory of the other node."""

from pathlib import Path

import pytest

from megatron_ft.testing.jobs import run_job
from tests.distributed.test_replaced_nodes import (
    LAYOUTS,
    MODEL,
    SPARE,
    digests,
    losses,
    of_kind,
    run_killing_nodes,
    stop,
)

pytestmark = pytest.mark.timeout(600)
DEVICE = ("training.device=cuda", "launch.ranks_per_gpu=3", "training.transformer_impl=local")


@pytest.mark.parametrize("phase", ["grad_sync", "vote_after"])
def test_a_spare_takes_the_place_of_a_killed_node(tmp_path: Path, phase: str) -> None:
    # ``recovery.keep_processes`` keeps its default, which means false on CUDA.
    kept = [word for word in MODEL if not word.startswith("recovery.keep_processes")]
    common = [*kept, *LAYOUTS["pp1"], SPARE, *DEVICE, "run.name=job"]
    undisturbed = run_job(common, runs=tmp_path / "undisturbed", timeout_seconds=250)
    assert undisturbed.exit_code == 0, undisturbed.output
    fault = f"testing.failpoints=['{stop(1, 17, phase)}']"
    job = run_killing_nodes([*common, fault], runs=tmp_path / "killed")
    assert job.exit_code == 0, job.output
    assert [tuple(event["nodes"]) for event in of_kind(job, "ranks_restarted")] == [(0, 2)]
    assert [event["source"] for event in of_kind(job, "recovery_started")] == ["memory"]
    assert digests(job) == digests(undisturbed) and losses(job) == losses(undisturbed)
