"""The cluster that tests of this folder run on; they skip, with the reason, where there can be none."""

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
    """Three nodes and a spare, all idle."""
    with slurm_cluster(4) as running:
        yield running
