"""Provides the cluster for the tests of this folder. Tests are skipped, with the reason, if no cluster can be
started."""

from collections.abc import Iterator

import pytest

from megatron_ft.testing.slurm_cluster import SlurmCluster, slurm_cluster, why_impossible


@pytest.fixture(scope="session")
def _possible() -> None:
    reason = why_impossible()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def cluster(_possible: None) -> Iterator[SlurmCluster]:
    """Yield a cluster with three nodes and a spare, all idle."""
    with slurm_cluster(4) as running:
        yield running
