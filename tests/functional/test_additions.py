"""Tests a sink, a launcher and an event that are not part of the package, each in one file; the first two also have a
YAML file.

A job uses all three, and nothing else is added or changed. The sink and the launcher are also rows of
``tests/contract/test_sink.py`` and ``test_launcher.py``.
"""

import shutil
import sys
from pathlib import Path

import pytest
import yaml

from megatron_ft.testing.jobs import REPOSITORY, JobResult, start, wait

pytestmark = pytest.mark.slow  # trains

HELPERS = REPOSITORY / "tests" / "helpers"
ADDED = {
    "telemetry/counting.yaml": HELPERS / "counting_sink.yaml",
    "launch/wrapped.yaml": HELPERS / "wrapped_launcher.yaml",
}
"""Content of each additional file of ``conf/``, by its path. Each names a class in a separate file."""
NUM_ITERATIONS = 3


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Create a copy of the entry point and ``conf/``, with the YAML file of each addition."""
    shutil.copy(REPOSITORY / "pretrain_moe.py", tmp_path)
    shutil.copytree(REPOSITORY / "conf", tmp_path / "conf")
    for name, source in ADDED.items():
        target = tmp_path / "conf" / name
        assert not target.exists()
        shutil.copy(source, target)
    return tmp_path


def test_a_job_uses_what_was_added(checkout: Path, runs: Path, warm_forkserver: str) -> None:
    words = [
        "telemetry=counting",
        "launch=wrapped",
        "model=moe_micro",
        f"training.train_iterations={NUM_ITERATIONS}",
        "training.eval_interval_iterations=0",
        "checkpoint.save_at_end=false",
        "telemetry.wandb=disabled",
        "launch.num_nodes=2",
        f"launch.forkserver_socket={warm_forkserver}",
        f"run.dir={runs}",
        "run.name=job",
    ]
    command = [sys.executable, str(checkout / "pretrain_moe.py"), *words]
    job = start(command, environment={"PYTHONPATH": str(REPOSITORY)})
    output = wait(job, 120)
    assert job.returncode == 0, output
    result = JobResult(job.returncode, runs / "job", output)
    run_dir, events = result.run_dir, result.records()
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert config["launch"]["node_launcher"] == "tests.helpers.wrapped_launcher:WrappedLauncher"
    assert {"counting", "metrics", "terminal"} <= config["telemetry"]["sinks"].keys(), "beside those of the project"
    assert (run_dir / "wrapped.txt").read_text() == "0\n1\n", "the launcher started both nodes"
    num_records = len(events) + len(result.records("metrics.jsonl"))
    assert (run_dir / "count.txt").read_text() == f"{num_records} records, exit code 0"
    assert [event["cups"] for event in events if event["kind"] == "coffee_finished"] == [1] * NUM_ITERATIONS
    assert output.count("no coffee after 1 cups") == NUM_ITERATIONS
