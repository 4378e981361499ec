"""Compares the host memory of a real save on two data-parallel ranks with the plan."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.testing.jobs import REPOSITORY

TOLERANCE = 0.03
"""Relative tolerance of the predicted growth."""
KEPT_BYTES = 40_000_000
"""Largest amount of freed memory that glibc keeps: blocks of up to 32 MiB may not return to the system."""
OVERRIDES = (
    "model=moe_micro",
    "model.num_layers=2",
    "model.hidden_size=512",
    "model.ffn_hidden_size=1024",
    "model.moe_ffn_hidden_size=1024",
    "launch.ranks_per_node=2",
    "training.train_iterations=3",
    "training.micro_batch_size=1",
    "training.global_batch_size=2",
    "training.eval_interval_iterations=0",
    "optimizer.lr_warmup_iterations=1",
    "checkpoint.async_save=false",
    "telemetry.wandb=disabled",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((), id="dp2", marks=pytest.mark.extended),
        pytest.param(("parallel.expert_model_parallel_size=2",), id="ep2"),
    ],
)
def test_a_save_takes_what_the_plan_says(layout: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.distributed.test_saving_memory", str(tmp_path), *OVERRIDES, *layout]
    outcome = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=170, check=False)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert measured["num_parameters"] > 20_000_000
    predicted, grown = measured["predicted_bytes"], measured["grown_bytes"]
    # A rank grows less if its process has free memory from before.
    assert all(abs(each - predicted) <= TOLERANCE * predicted + KEPT_BYTES for each in grown), measured


# -- the runner: forks two ranks and measures them ---------------------------------------------------------------


def _measure(config: JobConfig, rank: Any) -> int:
    """Return the largest growth of this rank's resident memory during a save."""
    from megatron_ft.testing.ranks import join, resident_growth

    trainer, _ = join(config, rank)
    trainer.iterate(1)
    return resident_growth(trainer.save)


def main(folder: Path, overrides: list[str]) -> None:
    """Measure the growth, and compute the plan of the same job."""
    from megatron_ft.corpus.samples import check_data
    from megatron_ft.planning.job import JobPlan
    from megatron_ft.testing.ranks import compose, run_ranks

    config = compose(*overrides)
    plan = JobPlan.of(config, check_data(config), device="cpu")
    grown = run_ranks(_measure, config, world_size=2, run_dir=folder / "run")
    predicted = plan.stages[0].saving_bytes
    result = {"num_parameters": plan.num_parameters, "predicted_bytes": predicted, "grown_bytes": grown}
    (folder / "measured.json").write_text(json.dumps(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
