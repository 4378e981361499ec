"""Runs whole jobs from the launcher to the ranks. Nodes are lost and come back, and the bits equal those of the
scripted history.

One job survives all faults. The jobs are those of the longer claim ``elastic-bitwise``.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.elastic_jobs import Bench, Recorded, failpoints
from benchmarks.histories import scripted

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(400)]  # trains

NUM_NODES = 4
JOB = (
    f"launch.num_nodes={NUM_NODES}",
    "placement.num_slots_per_rank=4",
    "placement.rebalance_interval_iterations=3",
    "placement.rebalance_min_gain=0.0",
    "snapshot=sparse_window",
    "snapshot.num_peer_copies=1",
    "snapshot.iteration_seconds=1",
    "snapshot.bandwidth_bytes_per_second=3e5",
)
SURVIVING = (
    f"recovery.min_nodes={NUM_NODES - 1}",
    "nodes.restart_lost_nodes=true",
    "nodes.join_window_seconds=0.1",
)
FAULTS: tuple[dict[str, Any], ...] = (
    {"node": 2, "phase": "backward", "generation": 0, "passes": 9},
    {"node": 0, "phase": "vote_inside", "generation": 2, "passes": 2},
    {"node": 1, "phase": "capture", "generation": 4, "passes": 2},
)
"""Faults of the job. Each hits the second membership after the previous fault, which begins when the node that was lost
before has come back."""


def has_ended(events: Sequence[Any]) -> bool:
    """Return whether every lost node has come back and some iterations have followed."""
    changes = [number for number, event in enumerate(events) if event["kind"] == "membership_changed"]
    later = events[changes[-1] :] if len(changes) == 2 * len(FAULTS) else []
    return len([event for event in later if event["kind"] == "state_digest"]) >= 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, warm_forkserver: str) -> tuple[Recorded, Recorded]:
    """Run the job whose nodes are killed, and the job in which the same nodes leave and join by schedule."""
    bench = Bench(tmp_path_factory.mktemp("elastic-jobs"), warm_forkserver)
    with bench.running([*JOB, *SURVIVING, failpoints(FAULTS)], until=has_ended) as run:
        killed = Recorded.of(run)
    assert killed.problems == []
    end = f"training.exit_at_iteration={killed.last_iteration}"
    return killed, bench.run([*JOB, *scripted(killed.changes, killed.orders, NUM_NODES), end])


def test_each_lost_node_comes_back(runs: tuple[Recorded, Recorded]) -> None:
    killed, _ = runs
    assert [(hit["node"], hit["phase"]) for hit in killed.hits] == [(f["node"], f["phase"]) for f in FAULTS]
    members = [change["nodes"] for change in killed.changes]
    others = [[node for node in range(NUM_NODES) if node != fault["node"]] for fault in FAULTS]
    assert members == [nodes for without in others for nodes in (without, list(range(NUM_NODES)))]
    assert {started["strategy"] for started in killed.recoveries} == {"living_state"}


def test_no_committed_iteration_is_lost(runs: tuple[Recorded, Recorded]) -> None:
    """The job continues after the iteration in which the node was killed, or after the one before."""
    killed, _ = runs
    ended = [
        hit["iteration"] - change["iteration"] for hit, change in zip(killed.hits, killed.changes[::2], strict=True)
    ]
    assert set(ended) <= {0, 1}, ended


def test_every_bit_is_that_of_the_scripted_history(runs: tuple[Recorded, Recorded]) -> None:
    """Compare losses, and digests of every rank's whole state, after every iteration."""
    killed, reference = runs
    assert reference.problems == []
    assert killed.differences(reference, 1, killed.last_iteration - 1) == []
    assert killed.last_iteration > max(change["iteration"] for change in killed.changes), "it trained on at the end"
