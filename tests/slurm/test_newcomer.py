"""The commands of ``slurm/README.md``, from a clone to a running job, as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.jobs import REPOSITORY
from tests.helpers.slurm_cluster import SlurmCluster
from tests.helpers.slurm_jobs import SlurmJob

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

MOST_COMMANDS = 5
_SMALL = "--nodes 3 model=moe_micro training.global_batch_size=6 training.train_iterations=4"
HERE = {
    "git clone REPOSITORY": f"git clone --quiet {REPOSITORY}",
    "make install": f"make install VENV={Path(sys.executable).parent.parent}",
    "ib0": "eth0",
    "MFT_RANKS_PER_NODE=8": f"MFT_RANKS_PER_NODE=1 MFT_PYTHON={sys.executable} OMP_NUM_THREADS=1",
    "--nodes 9 model=mixtral_8x7b": _SMALL,
}
"""What differs on this machine: an environment that is there, the cluster's interface, a model that fits."""


def commands() -> list[str]:
    """Those of the README, with what differs here."""
    block = re.search(r"```sh\n(.*?)```", (REPOSITORY / "slurm" / "README.md").read_text(), re.DOTALL)
    assert block is not None
    text = block.group(1)
    for there, here in HERE.items():
        assert text.count(there) == 1, f"{there!r} in\n{text}"
        text = text.replace(there, here)
    return text.splitlines()


def test_from_a_clone_to_a_running_job(cluster: SlurmCluster, tmp_path: Path) -> None:
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
    said = dict(re.findall(r"^(job|log|run|its end) +(\S+)$", done.stdout, re.MULTILINE))
    job = SlurmJob(cluster, said["job"], Path(said["run"]), Path(said["log"]))
    assert job.end()["exit_code"] == 0, job.words()
    assert job.iteration == 4
    assert Path(said["its end"]) == job.marker
