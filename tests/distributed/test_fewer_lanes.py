"""Tests jobs that keep their layout while other nodes can take lost places, and continue with fewer lanes when a place
stays empty (``recovery.keep_layout`` together with ``recovery.min_nodes``)."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_in_place import KEPT, kill
from tests.helpers.elastic_jobs import (
    SAVING,
    check_like_fresh,
    check_same,
    fresh,
    job,
    memberships,
    records,
    script,
)
from tests.helpers.elastic_ranks import run_jobs
from tests.helpers.sharing import chosen, runs_extended

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # trains

SHARDED = {"parallel.use_distributed_optimizer": True, "placement.state_copies": 2, "precision.params_dtype": "bf16"}
EAGER = {
    "placement.rebalance_interval_iterations": 2,
    "placement.rebalance_min_gain": 0.0,
    "placement.rebalance_bytes_per_token": 1e12,
    "placement.num_slots_per_rank": 2,
    "placement.algorithm": {"_target_": "megatron_ft.planning.placement.overlap_search.OverlapSearch"},
}
WINDOWS = {key: value for key, value in KEPT.items() if key.startswith("snapshot.")}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4": SHARDED,
    "dp4 whole": {},
    "rebalanced": {**SHARDED, **EAGER},
    "dropout": {**SHARDED, **WINDOWS, "model.hidden_dropout": 0.1},
    "dropout whole": {**WINDOWS, "model.hidden_dropout": 0.1},
    "pp2": {**SHARDED, "parallel.pipeline_model_parallel_size": 2, "placement.num_slots_per_rank": 4},
    "pp2 dropout": {
        **SHARDED,
        **WINDOWS,
        "model.hidden_dropout": 0.1,
        "parallel.pipeline_model_parallel_size": 2,
        "placement.num_slots_per_rank": 4,
    },
    "tp2": {
        **SHARDED,
        "parallel.tensor_model_parallel_size": 2,
        "placement.min_replicas": 3,
        "placement.state_copies": 3,
    },
}
BOTH = {"recovery.keep_layout": True, "recovery.min_nodes": 2, "nodes.num_spare_nodes": 1}
FAULTS: dict[str, tuple[str, str, list[str]]] = {
    "dp4: before the vote": ("dp4", "2 in 5", [kill(1, 3, "backward"), kill(2, 5, "grad_sync", 1)]),
    "dp4: after the vote": ("dp4", "2 in 5", [kill(1, 3, "vote_after"), kill(2, 4, "gather", 1)]),
    "dp4: joining": ("dp4", "3 in 3 with a new 1", [kill(1, 3, "backward"), kill(3, 2, "reform_join", 1)]),
    "dp4: moving": ("dp4", "3 in 3 with a new 1", [kill(1, 3, "backward"), kill(3, 2, "reform_move", 1)]),
    "dp4: formed": ("dp4", "3 in 3", [kill(1, 3, "backward"), kill(3, 3, "forward", 1)]),
    "dp4: the new layout": (
        "dp4",
        "2 and 0 in 5",
        [kill(1, 3, "backward"), kill(2, 5, "forward", 1), kill(0, 4, "reform_move", 2)],
    ),
    "dp4 whole": ("dp4 whole", "2 in 5", [kill(1, 3, "backward"), kill(2, 5, "backward", 1)]),
    "rebalanced": ("rebalanced", "2 in 5", [kill(1, 3, "migrate_step"), kill(2, 5, "migrate_step", 1)]),
    "dropout: a replay first": ("dropout", "2 in 9", [kill(1, 8, "forward"), kill(2, 9, "forward", 1)]),
    "pp2 dropout: a replay first": ("pp2 dropout", "2 in 9", [kill(1, 8, "forward"), kill(2, 9, "forward", 1)]),
    "dropout: in a replay": ("dropout", "1 in 8", [kill(1, 8, "forward"), kill(1, 7, "forward", 1)]),
    "dropout: a survivor in a replay": (
        "dropout",
        "3 in 8 with a new 1",
        [kill(1, 8, "forward"), kill(3, 7, "backward", 1)],
    ),
    "dropout whole: in a replay": ("dropout whole", "1 in 8", [kill(1, 8, "forward"), kill(1, 7, "backward", 1)]),
    "pp2 dropout: in a replay": ("pp2 dropout", "1 in 8", [kill(1, 8, "forward"), kill(1, 7, "forward", 1)]),
    "pp2": ("pp2", "2 in 5", [kill(1, 3, "backward"), kill(2, 5, "backward", 1)]),
    "tp2": ("tp2", "2 in 5", [kill(1, 3, "backward"), kill(2, 5, "backward", 1)]),
}
"""Layout, losses without a substitute, and faults by name. The spare, node 4, takes the place of node 1."""
LOSSES = {
    "2 in 5": "lose(nodes=[2],before_iteration=5)",
    "3 in 3": "lose(nodes=[3],before_iteration=3)",
    "3 in 3 with a new 1": "change(lose=[1,3],join=[1],before_iteration=3)",
    "2 and 0 in 5": "lose(nodes=[0,2],before_iteration=5)",
    "2 in 9": "lose(nodes=[2],before_iteration=9)",
    "1 in 8": "lose(nodes=[1],before_iteration=8)",
    "3 in 8 with a new 1": "change(lose=[1,3],join=[1],before_iteration=8)",
}
"""Schedules with the same losses. A substitute that has no state yet joins, as any node does."""
EXTENDED = (
    "dp4: after the vote",
    "dp4: joining",
    "dp4: moving",
    "dp4: formed",
    "dp4: the new layout",
    "dp4 whole",
    "rebalanced",
    "dropout: a replay first",
    "dropout: in a replay",
    "dropout whole: in a replay",
    "pp2",
)
"""Faults whose path another fault also takes."""


def _jobs(folder: Path, *, extended: bool) -> dict[str, Any]:
    jobs: dict[str, Any] = {}
    wanted = {name: fault for name, fault in FAULTS.items() if extended or name not in EXTENDED}
    for layout, losses, _ in wanted.values():
        keys = {key: value for key, value in LAYOUTS[layout].items() if not key.startswith("snapshot.")}
        until = 10 if "dropout" in layout else 6
        jobs[f"{layout} without {losses}"] = job({**keys, **script(LOSSES[losses])}, until=until)
    for name, (layout, _, specs) in wanted.items():
        keys = {**LAYOUTS[layout], **BOTH, "testing.failpoints": specs}
        until = 10 if "dropout" in layout else 6
        jobs[name] = job(keys, until=until, spares=[4], num_keepers=5 * ("snapshot.policy" in keys))
    faults = [kill(1, 2, "backward"), kill(2, 3, "backward", 1)]
    both = {**SHARDED, **BOTH, **SAVING, "testing.failpoints": faults}
    jobs["grown"] = job(both, until=6, spares=[4], changes={"4": {"join": [2]}})
    jobs["fresh"] = fresh(folder, "grown", (0, 4, 3, 2), 4, **SHARDED)
    # The only owners of a shard are lost together, so only a replay computes the shard. One of the substitutes dies.
    lost = [kill(1, 8, "forward"), kill(2, 8, "forward"), kill(1, 7, "forward", 1)]
    keys = {**SHARDED, **WINDOWS, **BOTH, "nodes.num_spare_nodes": 2, "testing.failpoints": lost}
    jobs["a lost shard in a replay"] = job(keys, until=9, spares=[4, 5], num_keepers=6, keepers_live=True)
    return jobs


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("fewer-lanes")
    return run_jobs(_jobs(folder, extended=runs_extended(request)), folder, timeout_seconds=880)


@pytest.mark.parametrize("name", chosen(FAULTS, EXTENDED))
def test_bits_of_a_scheduled_loss(outcomes: dict[str, Any], name: str) -> None:
    """The substitute changes no bit, and the loss without a substitute has the effect of a scheduled one."""
    layout, losses, specs = FAULTS[name]
    assert len(records(outcomes, name, "failpoint_hit")) == len(specs)
    check_same(outcomes, name, f"{layout} without {losses}")


@pytest.mark.parametrize("name", chosen(FAULTS, EXTENDED))
def test_the_layout_changes_with_the_second_loss_only(outcomes: dict[str, Any], name: str) -> None:
    _, losses, specs = FAULTS[name]
    formed = {generation: nodes for generation, nodes, _ in memberships(outcomes, name)}
    lost = {"1": 4, "2": 2, "3": 3}[losses[0]]
    assert formed.get(1, [0, 4, 2, 3]) == [0, 4, 2, 3]
    assert max(formed) == len(specs)
    assert set(formed[max(formed)]) == {0, 2, 3, 4} - {lost} - ({0} if len(specs) == 3 else set())
    started = {record["generation"]: record["strategy"] for record in records(outcomes, name, "recovery_started")}
    if 1 in formed:
        assert started[1] == ("localized_replay" if "replay" in name else "living_state")
    assert started[max(started)] == "living_state"
    last = records(outcomes, name, "recovery_started")[-1]
    assert last["declined"] == ["keeping the layout of the job's start: no node has replaced a lost node"]


def test_a_node_that_returns_adds_a_lane(outcomes: dict[str, Any]) -> None:
    """From then on, the job computes what a job of four nodes in this order computes from a dense checkpoint."""
    assert memberships(outcomes, "grown") == [(1, [0, 4, 2, 3], 1), (2, [0, 4, 3], 2), (3, [0, 4, 3, 2], 4)]
    check_like_fresh(outcomes, "grown", "fresh", (0, 4, 3, 2), 4)


def test_a_loss_inside_the_replay_of_lost_state_is_refused_by_name(outcomes: dict[str, Any]) -> None:
    """No rank has the lost shard before the replay has ended, so copies of living ranks would not be enough."""
    name = "a lost shard in a replay"
    assert len(records(outcomes, name, "failpoint_hit")) == 3
    errors = [rank["error"] for rank in outcomes[name]["ranks"] if rank["error"]]
    assert errors and all("all ranks that had state are lost" in error for error in errors), errors
