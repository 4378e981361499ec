"""Tests jobs that ``slurm/pretrain.sbatch`` starts on a cluster whose nodes die. Ranks have no model."""

import sys
from pathlib import Path

import pytest

from megatron_ft.testing.jobs import REPOSITORY
from megatron_ft.testing.slurm_cluster import SlurmCluster, wait_until
from megatron_ft.testing.slurm_jobs import Site, SlurmJob, submit

pytestmark = pytest.mark.timeout(300)

LOSES_NODES = ["placement=overlap_search", "parallel.use_distributed_optimizer=false"]
KEEPS_LAYOUT = ["recovery.keep_layout=true", "snapshot=sparse_window", "parallel.use_distributed_optimizer=false"]


def test_submit_checks_and_says_where_to_look(cluster: SlurmCluster, tmp_path: Path) -> None:
    words = ["run.name=dummy", "training.train_iterations=3"]
    site = {**Site(tmp_path, dummy="run").variables, "MFT_SBATCH": "--time=5 --comment='a b'"}
    command = [sys.executable, "slurm/submit.py", "--nodes=4"]
    with pytest.raises(AssertionError, match="so it was not submitted"):
        cluster.run(*command, *words, "training.train_iterations=-1", extra=site, cwd=REPOSITORY)
    assert cluster.run("squeue", "-h") == ""
    output = cluster.run(*command, *words, extra=site, cwd=REPOSITORY).splitlines()[-4:]
    number, log, run_dir, marker = (line.split()[-1] for line in output)
    job = SlurmJob(cluster, number, Path(run_dir), Path(log))
    assert job.end()["exit_code"] == 0, job.words()
    assert Path(marker).exists()
    assert job.log.exists()
    assert "set -- run.name=dummy" in (job.run_dir / "slurm" / f"{number}.sbatch").read_text()


def test_a_job_over_four_nodes_ends_well(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, Site(tmp_path, dummy="run"), ["training.train_iterations=7"])
    assert job.end()["exit_code"] == 0, job.words()
    wait_until("Slurm knows", lambda: cluster.state_of(job.number) == "COMPLETED")
    assert [record["iteration"] for record in job.records("metrics")] == list(range(1, 8))
    started = sorted(path.name for path in (job.run_dir / "logs").glob("started-*"))
    assert started == [f"started-{rank}" for rank in range(4)]


def test_a_node_dies_and_the_others_train_on(cluster: SlurmCluster, tmp_path: Path) -> None:
    overrides = [*LOSES_NODES, "recovery.min_nodes=2", "training.train_iterations=500"]
    job = submit(cluster, Site(tmp_path, dummy="run_surviving"), overrides)
    wait_until("all ranks have started", lambda: job.has("started", 4))
    cluster.kill_node(2)
    wait_until("the others have formed the next membership", lambda: job.has("reformed", 3))
    following = job.records("reformed")[0]["next"]
    assert sorted(record["node"] for record in job.records("reformed")) == [0, 1, 3]
    assert following["master_addr"] == f"{cluster.network}.10"
    assert job.end()["exit_code"] == 0, job.words()


@pytest.mark.extended
def test_a_spare_takes_the_place_of_a_node_that_dies(cluster: SlurmCluster, tmp_path: Path) -> None:
    overrides = [*KEEPS_LAYOUT, "training.train_iterations=500"]
    job = submit(cluster, Site(tmp_path, dummy="run_surviving", spares=1), overrides)
    wait_until("all ranks have started", lambda: job.has("started", 3) and job.has("waiting", 1))
    cluster.kill_node(1)
    wait_until("the next membership has formed", lambda: job.has("reformed", 3))
    assert sorted((record["node"], record["rank"]) for record in job.records("reformed")) == [(0, 0), (2, 2), (3, 1)]
    assert job.end()["exit_code"] == 0, job.words()


def test_the_next_store_is_where_the_next_first_rank_is(cluster: SlurmCluster, tmp_path: Path) -> None:
    fault = 'testing.failpoints=["kill(node=0,at_iteration=5,phase=\\"forward\\",generation=0)"]'
    overrides = [*LOSES_NODES, "recovery.min_nodes=2", "training.train_iterations=100", fault]
    job = submit(cluster, Site(tmp_path, dummy="run_surviving"), overrides)
    assert job.end()["exit_code"] == 0, job.words()
    following = job.records("reformed")[0]["next"]
    assert (following["nodes"], following["master_addr"]) == ([1, 2, 3], f"{cluster.network}.11")
