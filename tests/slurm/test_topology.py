"""Tests failure domains from Slurm, on a cluster with two racks and on one without a topology. Ranks have no model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from megatron_ft.testing.slurm_cluster import SlurmCluster, slurm_cluster, wait_until
from megatron_ft.testing.slurm_jobs import Site, submit
from tests.slurm.test_jobs import KEEPS_LAYOUT

ASKS_SLURM = "topology.failure_domain_source=slurm_topology"


@pytest.fixture
def racks(_possible: None) -> Iterator[SlurmCluster]:
    """Yield a cluster with three nodes and a spare, two of them on each leaf switch."""
    with slurm_cluster(4, topology={"rack0": [0, 2], "rack1": [1, 3]}) as running:
        yield running


def test_domains_are_read_where_the_job_starts(racks: SlurmCluster, tmp_path: Path) -> None:
    overrides = [*KEEPS_LAYOUT, ASKS_SLURM, "snapshot.num_peer_copies=1", "training.train_iterations=7"]
    job = submit(racks, Site(tmp_path, dummy="run_in_domains", spares=1), overrides)
    assert job.end()["exit_code"] == 0, job.words()
    reported = {record["node"]: record for record in job.records("domains")}
    domains = ["rack0", "rack1", "rack0", "rack1"]
    assert all(record["domains"] == domains for record in reported.values())
    assert [reported[node]["peers"] for node in (0, 2)] == [[1], [1]], "not each other: they hang on one switch"
    kept = yaml.safe_load((job.run_dir / "config.yaml").read_text())["topology"]
    assert (kept["failure_domains"], kept["failure_domain_source"]) == (domains, "listed")
    assert "rack0 (nodes 0, 2), rack1 (nodes 1, 3)" in job.log.read_text()


def test_two_racks_are_too_few_for_copies_in_two_others(racks: SlurmCluster, tmp_path: Path) -> None:
    overrides = [*KEEPS_LAYOUT, ASKS_SLURM, "snapshot.num_peer_copies=2", "training.train_iterations=7"]
    job = submit(racks, Site(tmp_path, dummy="run_in_domains", spares=1), overrides)
    wait_until("the job has ended", lambda: racks.state_of(job.number) == "FAILED")
    assert "snapshot.num_peer_copies=2: must be below the number of failure domains, 2" in job.log.read_text()
    assert not job.run_dir.exists()


def test_a_cluster_without_topology_is_refused(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, Site(tmp_path, dummy="run_in_domains"), [ASKS_SLURM, "training.train_iterations=7"])
    wait_until("the job has ended", lambda: cluster.state_of(job.number) == "FAILED")
    assert "slurm_topology: needs a Slurm cluster with TopologyPlugin=topology/tree" in job.log.read_text()
    assert not job.run_dir.exists()
