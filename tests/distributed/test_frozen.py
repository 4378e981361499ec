"""Tests jobs with frozen parameters (``training.frozen``): all ranks die and go on from windows with the same bits, and
the job is resumed in another layout. ``tests/unit/mcore/training/test_frozen.py`` tests precisions and optimizers."""

from pathlib import Path

import pytest
import torch

from megatron_ft.mcore.convert.dense_files import DenseReader
from tests.distributed.test_snapshots import LAYOUT, SNAPSHOTS, digests, losses, of_kind, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # starts jobs

PIPELINE = (*LAYOUT, "launch.ranks_per_node=2", "parallel.pipeline_model_parallel_size=2")
SAVING = ("checkpoint.save_interval_iterations=7", "checkpoint.keep_last=0")
EXPERTS = "training.frozen=experts"


def unchanged(run_dir: Path, first: int, last: int) -> tuple[set[str], set[str]]:
    """Return the tensors of two checkpoints that have equal bits, and all others."""
    one, other = (DenseReader.open(run_dir / "checkpoints" / f"iter_{at:07d}") for at in (first, last))
    assert one.tensors.keys() == other.tensors.keys()
    same = {name for name in one.tensors if torch.equal(one.read(name), other.read(name))}
    return same, set(one.tensors) - same


def test_frozen_experts_keep_their_bits_over_losses_and_in_another_layout(tmp_path: Path, warm_forkserver: str) -> None:
    calm = train(tmp_path / "calm", warm_forkserver, *PIPELINE, *SAVING, EXPERTS)
    assert calm.exit_code == 0, calm.output
    same, others = unchanged(calm.run_dir, 7, 14)
    assert same and all(".experts." in name for name in same)
    assert others and not any(".experts." in name for name in others)

    fault = 'kill(at_iteration=12,phase="vote_after",generation=0)'
    words = (*PIPELINE, *SNAPSHOTS, EXPERTS, "recovery.max_restarts=1")
    died = train(tmp_path / "died", warm_forkserver, *words, faults=[fault])
    assert died.exit_code == 0, died.output
    # A rank that dies after the vote leaves none behind that waits for it, so every rank reaches the fault.
    assert {hit["rank"] for hit in died.records("failpoints.jsonl")} == {0, 1, 2, 3}
    (chosen,) = of_kind(died, "recovery_started")
    assert chosen["source"] == "memory" and chosen["iteration"] > 0
    assert digests(died) == digests(calm) and losses(died) == losses(calm)

    longer = ("training.train_iterations=16", "optimizer.lr_decay_iterations=14", "run.resume=must", *SAVING)
    refused = train(tmp_path / "calm", warm_forkserver, *LAYOUT, *longer, "training.frozen=null")
    assert refused.exit_code == 2 and "training.frozen: experts -> null" in refused.output
    resumed = train(tmp_path / "calm", warm_forkserver, *LAYOUT, *longer)
    assert resumed.exit_code == 0, resumed.output
    assert unchanged(calm.run_dir, 7, 16)[0] == same
