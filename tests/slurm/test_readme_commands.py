"""Runs the commands of ``slurm/README.md`` unchanged, from a clone to a running job that loses a node."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ft.testing.jobs import REPOSITORY
from megatron_ft.testing.slurm_cluster import SlurmCluster, wait_until
from megatron_ft.testing.slurm_jobs import SOON, SlurmJob

pytestmark = [pytest.mark.timeout(500), pytest.mark.slow]

MOST_COMMANDS = 5
NUM_ITERATIONS, SAVE_INTERVAL = 60, 4
_SMALL = (
    f"--nodes 2 model=moe_micro training.global_batch_size=4 training.train_iterations={NUM_ITERATIONS} "
    f"checkpoint.save_interval_iterations={SAVE_INTERVAL} {' '.join(SOON)}"
)
_ENVIRONMENT = Path(sys.executable).parent.parent
HERE = {
    "git clone REPOSITORY": f"git clone --quiet {REPOSITORY}",
    # Nothing is installed: the running environment must not become that of the clone.
    "make install": f"make install -o {_ENVIRONMENT}/installed-train VENV={_ENVIRONMENT}",
    "ib0": "eth0",
    "MFT_RANKS_PER_NODE=8": f"MFT_RANKS_PER_NODE=1 MFT_PYTHON={sys.executable} OMP_NUM_THREADS=1",
    "--nodes 8 experiment=mixtral_slurm": _SMALL,
}
"""Replacements for this machine: an existing environment, the cluster's interface, and a model that fits."""


def commands() -> list[str]:
    """Return the commands of the README with these replacements."""
    block = re.search(r"```sh\n(.*?)```", (REPOSITORY / "slurm" / "README.md").read_text(), re.DOTALL)
    assert block is not None
    text = block.group(1)
    for there, here in HERE.items():
        assert text.count(there) == 1, f"{there!r} in\n{text}"
        text = text.replace(there, here)
    return text.splitlines()


def test_from_a_clone_to_a_job_that_loses_a_node_and_ends_well(cluster: SlurmCluster, tmp_path: Path) -> None:
    assert len(commands()) <= MOST_COMMANDS
    script = "set -euo pipefail\n" + "\n".join(commands())
    environment = {name: text for name, text in cluster.environment.items() if not name.startswith("MFT_")}
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"node 1 +checkpoint, by Slurm +<= 4", done.stdout), done.stdout
    output = dict(re.findall(r"^(job|log|run|result) +(\S+)$", done.stdout, re.MULTILINE))
    job = SlurmJob(cluster, output["job"], Path(output["run"]), Path(output["log"]))
    wait_until("a checkpoint is there", lambda: job.has("checkpoint_saved", 1), seconds=180)
    cluster.kill_node(1)
    assert job.end()["exit_code"] == 0, job.words()
    assert Path(output["result"]) == job.marker
    first, second = job.attempts()
    assert first["exit_code"] != 0 and "node1" in first["hosts"] and "node1" not in second["hosts"]
    resumed = job.records("run_started")[1]["resumed_from_iteration"]
    assert resumed is not None and resumed >= SAVE_INTERVAL and resumed % SAVE_INTERVAL == 0
    assert job.iteration == NUM_ITERATIONS
