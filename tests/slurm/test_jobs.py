"""Jobs that ``slurm/pretrain.sbatch`` starts, on a cluster whose nodes die. Ranks have no model."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.jobs import REPOSITORY
from tests.helpers.slurm_cluster import SlurmCluster, wait_until

pytestmark = pytest.mark.timeout(300)

LOSES_NODES = ["placement=overlap_search", "parallel.use_distributed_optimizer=false"]
KEEPS_LAYOUT = ["launch.keep_layout=true", "snapshot=sparse_window", "parallel.use_distributed_optimizer=false"]
SOON = ["detector.heartbeat_interval_seconds=0.5", "detector.heartbeat_timeout_seconds=3"]


@dataclass(frozen=True)
class Job:
    """A job of four nodes and where it writes."""

    cluster: SlurmCluster
    number: str
    run_dir: Path
    log: Path

    def records(self, kind: str) -> list[dict[str, Any]]:
        """What ranks have reported."""
        path = self.run_dir / "records.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record for record in records if record["kind"] == kind]

    def has(self, kind: str, count: int) -> bool:
        """Whether that many have been reported; a job that has ended will report none."""
        reported = len(self.records(kind)) >= count
        state = self.cluster.state_of(self.number)
        assert reported or state in ("PENDING", "CONFIGURING", "RUNNING"), f"{state}:\n{self.words()}"
        return reported

    def end(self) -> dict[str, Any]:
        """Wait for the job's marker; what it says."""
        marker = self.run_dir / "slurm" / f"{self.number}.json"
        over = lambda: marker.exists() or self.cluster.state_of(self.number) == "FAILED"  # noqa: E731
        wait_until(f"job {self.number} has ended", over)
        assert marker.exists(), self.words()
        return dict(json.loads(marker.read_text()))

    def words(self) -> str:
        """Its logs, for messages."""
        logs = [self.log, *sorted(self.run_dir.glob("logs/*.log"))]
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in logs if path.exists())


def submit(
    cluster: SlurmCluster, folder: Path, entry: str, overrides: Sequence[str], *, spares: int, num_nodes: int = 4
) -> Job:
    """Submit a job through the script that users submit."""
    log = folder / "job.log"
    options = ["--parsable", f"-N{num_nodes}", f"--output={log}"]
    words = [*options, "slurm/pretrain.sbatch", "run.name=dummy", *SOON, *overrides]
    number = cluster.run("sbatch", *words, extra=site_of(folder, entry, spares=spares), cwd=REPOSITORY).strip()
    return Job(cluster, number, folder / "runs" / "dummy", log)


def site_of(folder: Path, entry: str, *, spares: int) -> dict[str, str]:
    """What ``slurm/site.env`` leaves to a site, and the ranks of the job."""
    return {
        "MFT_INTERFACE": "eth0",
        "MFT_PYTHON": sys.executable,
        "MFT_RUNS": str(folder / "runs"),
        "MFT_RANKS_PER_NODE": "1",
        "MFT_SPARE_NODES": str(spares),
        "MFT_COMMAND": "-m tests.helpers.dummy_door",
        "MFT_DUMMY_ENTRY": entry,
    }


def test_submit_checks_and_says_where_to_look(cluster: SlurmCluster, tmp_path: Path) -> None:
    words = ["run.name=dummy", "training.train_iterations=3"]
    site = {**site_of(tmp_path, "run", spares=0), "MFT_SBATCH": "--time=5 --comment='a b'"}
    command = [sys.executable, "slurm/submit.py", "--nodes=4"]
    with pytest.raises(AssertionError, match="nothing was submitted"):
        cluster.run(*command, *words, "training.train_iterations=-1", extra=site, cwd=REPOSITORY)
    assert cluster.run("squeue", "-h") == ""
    said = cluster.run(*command, *words, extra=site, cwd=REPOSITORY).splitlines()[-4:]
    number, log, run_dir, marker = (line.split()[-1] for line in said)
    job = Job(cluster, number, Path(run_dir), Path(log))
    assert job.end()["exit_code"] == 0, job.words()
    assert Path(marker).exists()
    assert job.log.exists()
    assert "set -- run.name=dummy" in (job.run_dir / "slurm" / f"{number}.sbatch").read_text()


def test_a_job_over_four_nodes_ends_well(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, "run", ["training.train_iterations=7"], spares=0)
    assert job.end()["exit_code"] == 0, job.words()
    wait_until("Slurm knows", lambda: cluster.state_of(job.number) == "COMPLETED")
    assert [record["iteration"] for record in job.records("metrics")] == list(range(1, 8))
    started = sorted(path.name for path in (job.run_dir / "logs").glob("started-*"))
    assert started == [f"started-{rank}" for rank in range(4)]


def test_a_node_dies_and_the_others_train_on(cluster: SlurmCluster, tmp_path: Path) -> None:
    overrides = [*LOSES_NODES, "launch.min_nodes=2", "training.train_iterations=500"]
    job = submit(cluster, tmp_path, "run_surviving", overrides, spares=0)
    wait_until("all ranks have started", lambda: job.has("started", 4))
    cluster.kill_node(2)
    wait_until("the others have formed the next membership", lambda: job.has("reformed", 3))
    following = job.records("reformed")[0]["next"]
    assert sorted(record["node"] for record in job.records("reformed")) == [0, 1, 3]
    assert following["master_addr"] == f"{cluster.network}.10"
    assert job.end()["exit_code"] == 0, job.words()


def test_a_spare_takes_the_place_of_a_node_that_dies(cluster: SlurmCluster, tmp_path: Path) -> None:
    overrides = [*KEEPS_LAYOUT, "training.train_iterations=500"]
    job = submit(cluster, tmp_path, "run_surviving", overrides, spares=1)
    wait_until("all ranks have started", lambda: job.has("started", 3) and job.has("waiting", 1))
    cluster.kill_node(1)
    wait_until("the next membership has formed", lambda: job.has("reformed", 3))
    assert sorted((record["node"], record["rank"]) for record in job.records("reformed")) == [(0, 0), (2, 2), (3, 1)]
    assert job.end()["exit_code"] == 0, job.words()


def test_the_next_store_is_where_the_next_first_rank_is(cluster: SlurmCluster, tmp_path: Path) -> None:
    fault = 'launch.failpoints=["kill(node=0,at_iteration=5,phase=\\"forward\\",generation=0)"]'
    overrides = [*LOSES_NODES, "launch.min_nodes=2", "training.train_iterations=100", fault]
    job = submit(cluster, tmp_path, "run_surviving", overrides, spares=0)
    assert job.end()["exit_code"] == 0, job.words()
    following = job.records("reformed")[0]["next"]
    assert (following["nodes"], following["master_addr"]) == ([1, 2, 3], f"{cluster.network}.11")
