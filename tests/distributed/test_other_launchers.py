"""Tests the training loop under other launchers: torchrun and, if it is installed, NVRx's ft_launcher.

``pip install --no-deps nvidia-resiliency-ext==0.4.1 defusedxml nvidia-ml-py pynvml`` installs enough of it for a CPU.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from megatron_ft.testing.jobs import run_job, start, wait
from megatron_ft.testing.slurm_cluster import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_SECONDS = 180.0
LAUNCHERS = {"torchrun": "torch.distributed.run", "ft_launcher": "nvidia_resiliency_ext.fault_tolerance.launcher"}
NUM_ITERATIONS = 24
SMALL = [
    "model=moe_micro",
    "training.micro_batch_size=1",
    "training.global_batch_size=4",
    f"training.train_iterations={NUM_ITERATIONS}",
    "training.eval_interval_iterations=0",
    "checkpoint.save_interval_iterations=4",
    "telemetry.progress=plain",
]


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> str:
    """Return the module of a launcher."""
    module = LAUNCHERS[request.param]
    package = module.partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"needs {package.replace('_', '-')}, see the top of this file")
    return module


def begin(launcher: str, runs: Path, *overrides: str, max_restarts: int = 2) -> "subprocess.Popen[str]":
    """Start two ranks of a small job."""
    options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={max_restarts}"]
    if launcher == LAUNCHERS["torchrun"]:  # it waits so long for ranks that stay in a collective with a dead one
        options.append("--shutdown-timeout=3")
    command = [sys.executable, "-m", launcher, *options, "pretrain_moe.py", *SMALL, f"run.dir={runs}"]
    return start([*command, *overrides], environment={"OMP_NUM_THREADS": "1"})


def losses(run_dir: Path) -> dict[int, set[float]]:
    """Return all losses that were reported for each iteration."""
    path, found = run_dir / "metrics.jsonl", {}
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n"):
            record = json.loads(line)
            found.setdefault(record["iteration"], set()).add(record["loss"])
    return found


def starts(run_dir: Path) -> list[dict[str, object]]:
    """Return what ranks reported at each start when all of them were ready."""
    records = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "ranks_ready"]


def rank_of(job: "subprocess.Popen[str]", rank: int) -> psutil.Process:
    """Return the process of a rank."""
    below = psutil.Process(job.pid).children(recursive=True)
    (found,) = [one for one in below if "pretrain_moe.py" in one.cmdline() and one.environ().get("RANK") == str(rank)]
    return found


@pytest.mark.extended
def test_a_killed_rank_costs_iterations_and_no_bit(launcher: str, tmp_path: Path, warm_forkserver: str) -> None:
    """The job has a run name if the launcher has no store through which restarted ranks find the run."""
    named = [] if launcher == LAUNCHERS["torchrun"] else ["run.name=moe_micro-001", "run.resume=auto"]
    job = begin(launcher, tmp_path / "killed", *named)
    run_dir = tmp_path / "killed" / "moe_micro-001"
    far_enough = lambda: max(losses(run_dir), default=0) >= 6  # noqa: E731
    wait_until("ranks have trained for a while", far_enough, seconds=LIMIT_SECONDS)
    rank_of(job, 1).kill()
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode == 0, output
    assert len(starts(run_dir)) == 2, output
    undisturbed = run_job(
        [*SMALL, "launch.ranks_per_node=2"], forkserver=warm_forkserver, runs=tmp_path / "alone", timeout_seconds=120
    )
    assert undisturbed.exit_code == 0, undisturbed.output
    expected = losses(undisturbed.run_dir)
    assert list(expected) == list(range(1, NUM_ITERATIONS + 1))
    assert losses(run_dir) == expected, "each iteration, and each that was run again, to the bit"


def test_a_start_that_would_not_find_its_run_again_is_refused(tmp_path: Path) -> None:
    """torchrun's store keeps the name of the run's folder over a restart, and ft_launcher's does not."""
    if find_spec("nvidia_resiliency_ext") is None:
        pytest.skip("needs nvidia-resiliency-ext, see the top of this file")
    job = begin(LAUNCHERS["ft_launcher"], tmp_path, "training.train_iterations=2", max_restarts=1)
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode != 0, output
    assert "error: run.name=null: must be given together with run.resume=auto: ft_launcher" in output, output


def test_what_there_is_no_control_plane_for_is_refused(launcher: str, tmp_path: Path) -> None:
    """Other keys are tested in ``tests/unit/config/test_launchers.py``."""
    job = begin(launcher, tmp_path, "recovery.max_restarts=1", "run.name=refused", "run.resume=auto", max_restarts=0)
    output = wait(job, LIMIT_SECONDS)
    assert job.returncode != 0
    assert output.count("error: recovery.max_restarts=1") == 1, output
    assert not (tmp_path / "refused").exists()
