"""Tests jobs that leave their nodes and return, nodes that are not returned, and nodes that are drained. Ranks have no
model."""

from pathlib import Path

import psutil
import pytest

from megatron_ft.control.launchers.torchrun import expand_nodelist
from megatron_ft.control.slurm import calls
from megatron_ft.testing.slurm_cluster import SlurmCluster, wait_until
from megatron_ft.testing.slurm_jobs import Site, SlurmJob, submit

pytestmark = pytest.mark.timeout(300)

LONG = "training.train_iterations=100000"
SOON_LOST = "detector.lost_controller_seconds=4"
LOSES_NODES = ["placement=overlap_search", "parallel.use_distributed_optimizer=false", "recovery.min_nodes=2"]
REQUEUE_SECONDS = 120.0


def _site(folder: Path) -> Site:
    """Return the site's settings for ranks without a model, which never make progress."""
    return Site(folder, dummy="run", extra={"MFT_MAX_FRUITLESS": "100"})


def starts(job: SlurmJob) -> int:
    """Return the number of times that the first rank was started."""
    log = job.run_dir / "logs" / "rank-00000.log"
    return log.read_text().count("rank 0 of") if log.exists() else 0


def await_start(job: SlurmJob, count: int) -> None:
    started = lambda: job.will(lambda: starts(job) >= count)  # noqa: E731
    wait_until(f"start {count}", started, seconds=REQUEUE_SECONDS)


def end_by_hand(job: SlurmJob) -> None:
    """Request the batch script to end the job, and check that it reports this."""
    job.cluster.run("scancel", "--batch", "--signal=TERM", job.number)
    end = job.end()
    assert (end["exit_code"], end["reason"]) == (130, "the run received a signal to end"), job.words()


def test_a_job_at_its_time_limit_saves_and_comes_back(cluster: SlurmCluster, tmp_path: Path) -> None:
    options = ["--time=1", "--signal=B:USR1@30"]
    job = submit(cluster, _site(tmp_path), [LONG], num_nodes=2, options=options)
    await_start(job, 1)
    await_start(job, 2)
    first = job.attempts()[0]
    assert (first["asked"], first["exit_code"]) == ("SIGUSR1", 130)
    assert list((job.run_dir / "checkpoints").glob("iter_*/rank-1")), "it was saved"
    cluster.run("scancel", job.number)
    wait_until("Slurm has ended it", lambda: cluster.state_of(job.number) == "CANCELLED")


@pytest.mark.extended
def test_a_job_that_an_administrator_requeues_comes_back(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, _site(tmp_path), [LONG], num_nodes=2)
    await_start(job, 1)
    cluster.run("scontrol", "requeue", job.number)
    await_start(job, 2)
    assert not job.marker.exists(), "that was no end"
    end_by_hand(job)


def test_a_job_whose_batch_host_dies_is_requeued_by_the_nodes_that_are_left(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = submit(cluster, _site(tmp_path), [LONG, SOON_LOST], num_nodes=3)
    await_start(job, 1)
    cluster.kill_node(0)
    await_start(job, 2)
    assert "batch host node0 is dead" in "".join(path.read_text() for path in job.run_dir.glob("logs/node-*.log"))
    end_by_hand(job)
    assert [attempt["hosts"] for attempt in job.attempts()] == [["node1", "node2", "node3"]], "the first left no word"


def test_a_console_that_is_killed_is_followed_by_another(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, _site(tmp_path), [LONG], num_nodes=2)
    await_start(job, 1)
    consoles = [p for p in cluster.processes(0) if "megatron_ft.testing.dummy_entry" in p.cmdline() and _is_child(p)]
    assert len(consoles) == 1, consoles
    consoles[0].kill()
    await_start(job, 2)
    assert [attempt["exit_code"] for attempt in job.attempts()] == [-9]
    end_by_hand(job)


def _is_child(process: psutil.Process) -> bool:
    """Return whether a process is the launcher: a child of the batch script's process."""
    parent = process.parent()
    return parent is not None and "megatron_ft.control.slurm.batch_job" in parent.cmdline()


def test_a_node_that_is_drained_leaves_well(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, Site(tmp_path, dummy="run_surviving"), [*LOSES_NODES, "training.train_iterations=2000"])
    wait_until("all ranks have started", lambda: job.has("started", 4))
    cluster.drain(2)
    wait_until("its rank has left", lambda: job.has("left", 1))
    assert job.records("left")[0]["leaving"] == [2]
    end_by_hand(job)
    assert "node2 is drained: node 2 leaves" in job.log.read_text()


def test_a_host_that_is_excluded_is_not_given_again(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.environment[name])
    script = tmp_path / "script"
    script.write_text(f"#!/bin/bash\necho $SLURM_JOB_NODELIST >> {tmp_path}/nodes\nsleep 600\n")
    options = ["--parsable", "-N2", "--requeue", "--exclude=node2", "--output=/dev/null"]
    number = cluster.run("sbatch", *options, str(script)).strip()
    begun = lambda count: lambda: len(_lines(tmp_path / "nodes")) == count  # noqa: E731
    wait_until("it runs", begun(1))
    assert _lines(tmp_path / "nodes") == ["node[0-1]"]
    calls.requeue(number)
    calls.exclude(number, ["node1"])
    wait_until("it runs again", begun(2), seconds=REQUEUE_SECONDS)
    hosts = expand_nodelist("nodes", _lines(tmp_path / "nodes")[1])
    assert hosts == ["node0", "node3"], "nor what it was submitted without"
    assert calls.view_job(number).num_restarts == 1
    assert calls.drained_hosts(["node0", "node1"]) == []
    cluster.run("scancel", number)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
