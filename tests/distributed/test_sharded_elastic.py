"""Tests that jobs with the distributed optimizer continue from copies of its shards, bit by bit."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.elastic_jobs import (
    GROWN,
    SAVING,
    check_like_fresh,
    check_same,
    digests,
    faults,
    figures,
    fresh,
    job,
    kill,
    lose,
    memberships,
    records,
    repeats,
    script,
    write_skewed,
)
from tests.helpers.elastic_ranks import run_jobs
from tests.helpers.sharing import chosen, runs_extended

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # trains

SHARDED = {"parallel.use_distributed_optimizer": True, "placement.state_copies": 2}
"""With four nodes, the node with the next number has the copy of a node's shard; node 0 has that of node 3."""
BF16 = {**SHARDED, "precision.params_dtype": "bf16"}
PHASES = ("grad_sync", "vote_before", "vote_inside", "vote_after", "update", "gather")
OTHER_PHASES = ("grad_sync", "vote_before", "vote_inside", "vote_after", "update", "reform_build", "forward")
"""Phases of first and second losses whose path another phase also takes; another test kills ranks in ``backward``."""
CHANGES = {"2": {"leave": [2]}, "4": {"join": [2]}}
EAGER = {
    "placement.rebalance_interval_iterations": 2,
    "placement.rebalance_min_gain": 0.0,
    "placement.rebalance_bytes_per_token": 1e12,
}
IN_PLACE = {
    **EAGER,
    "placement.num_slots_per_rank": 2,
    "placement.algorithm": {"_target_": "megatron_ft.planning.placement.overlap_search.OverlapSearch"},
}
"""Experts replace each other, because each rank always has two of them in each layer."""
SECOND_LOSSES = {
    "reform_move": kill(0, 2, "reform_move"),
    "reform_build": kill(0, 2, "reform_build"),
    "shards": 'kill(rank=0, at_iteration=2, phase="reform_move", passes=2)',
    "forward": 'kill(node=3, generation=1, phase="forward")',
}
"""Deaths of a second rank after the death of rank 2 in iteration 3 and before the next commit: before experts move,
before the model is built, before shards move, and after that. In the last one, the membership without node 2 is formed,
so another node has a copy of the new shard of node 3."""


def _jobs(folder: Path, *, extended: bool) -> dict[str, Any]:
    skewed = write_skewed(folder)
    jobs = {
        "lose:2:3": job({**BF16, **lose((2, 3))}),
        "lose:2:4": job({**BF16, **lose((2, 4))}),
        "grown": job({**SHARDED, **script(*GROWN)}, until=6),
        "planned": job({**SHARDED, **faults(), **SAVING}, until=6, changes=CHANGES),
        "fresh:planned:4": fresh(folder, "planned", (0, 1, 2, 3), 4, **SHARDED),
        "evacuated": job({**BF16, **faults(), **SAVING}, until=6, changes={"2": {"leave": [2, 3]}}),
        "fresh:evacuated": fresh(folder, "evacuated", (0, 1), 2, **BF16),
        "back at once": job({**BF16, **script("change(lose=[2],join=[2],before_iteration=3)")}),
        "killed:back at once": job(
            {**BF16, **faults('kill(rank=2, at_iteration=3, phase="backward", generation=0)')}, returns={"2": [2]}
        ),
        "moved": job({**BF16, **lose((2, 3)), **skewed, **IN_PLACE}),
        "killed:migrate_step": job({**BF16, **faults(kill(2, 3, "migrate_step")), **skewed, **IN_PLACE}),
        "built": job({**BF16, **lose((2, 3)), **skewed, **EAGER}),
        "killed:migrate_build": job({**BF16, **faults(kill(2, 3, "migrate_build")), **skewed, **EAGER}),
        "no copies": job({**BF16, **faults(kill(2, 3, "backward"), kill(3, 2, "reform_join"))}),
    }
    if extended:
        jobs["fresh:planned:2"] = fresh(folder, "planned", (0, 1, 3), 2, **SHARDED)
    for phase in PHASES:
        if extended or phase not in OTHER_PHASES:
            jobs[f"killed:{phase}"] = job({**BF16, **faults(kill(2, 3, phase))})
    for phase, second in SECOND_LOSSES.items():
        if phase in OTHER_PHASES and not extended:
            continue
        jobs[f"killed:twice:{phase}"] = job({**SHARDED, **faults(kill(2, 3, "backward"), second)})
        jobs[f"twice:{phase}"] = job({**SHARDED, **repeats(f"killed:twice:{phase}")})
    return jobs


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sharded_elastic")
    return run_jobs(_jobs(folder, extended=runs_extended(request)), folder, timeout_seconds=580)


def _check_ranks(outcomes: dict[str, Any], name: str) -> None:
    assert "error" not in outcomes[name], outcomes[name]["error"]
    assert [rank["error"] for rank in outcomes[name]["ranks"] if rank["error"]] == []


@pytest.mark.parametrize("phase", chosen(PHASES, OTHER_PHASES))
def test_a_killed_rank_leaves_the_bits_of_its_history(outcomes: dict[str, Any], phase: str) -> None:
    """Rank 2 is killed in iteration 3, before or after the other ranks have received the gradients of its shard, and
    before or after the complete vote. If a survivor has the vote, the iteration is finished without rank 2."""
    name = f"killed:{phase}"
    _check_ranks(outcomes, name)
    (target,) = outcomes[name]["targets"]
    check_same(outcomes, name, f"lose:2:{target['iteration'] + 1}")
    assert memberships(outcomes, name)[0][:2] == (1, [0, 1, 3])


@pytest.mark.parametrize("phase", chosen(["vote_after", "update", "gather"], OTHER_PHASES))
def test_an_iteration_is_finished_with_the_gradients_of_a_lost_shard(outcomes: dict[str, Any], phase: str) -> None:
    """The lost rank has completed its vote, so the survivors have received its gradients. Some survivor may not have
    the vote; the iteration counts if one of them does."""
    positions = [broken["position"] for rank in outcomes[f"killed:{phase}"]["ranks"] for broken in rank["broken"]]
    assert [position["contributed"] for position in positions] == [3] * 3


def test_nodes_leave_and_join_when_asked_for(outcomes: dict[str, Any]) -> None:
    _check_ranks(outcomes, "planned")
    assert memberships(outcomes, "planned") == memberships(outcomes, "grown")
    assert digests(outcomes, "planned") == digests(outcomes, "grown")
    assert figures(outcomes, "planned") == figures(outcomes, "grown")


@pytest.mark.parametrize(
    ("nodes", "loaded"), [pytest.param((0, 1, 3), 2, marks=pytest.mark.extended), ((0, 1, 2, 3), 4)], ids=str
)
def test_every_membership_trains_like_a_job_of_its_size(
    outcomes: dict[str, Any], nodes: tuple[int, ...], loaded: int
) -> None:
    check_like_fresh(outcomes, "planned", f"fresh:planned:{loaded}", nodes, loaded)


def test_a_shard_and_its_only_copy_leave_together(outcomes: dict[str, Any]) -> None:
    """Node 3 has the copy of node 2's shard. Both send this shard to the other nodes before they leave."""
    _check_ranks(outcomes, "evacuated")
    assert memberships(outcomes, "evacuated") == [(1, [0, 1], 2)]
    check_like_fresh(outcomes, "evacuated", "fresh:evacuated", (0, 1), 2)


def test_a_node_is_back_in_the_membership_that_follows_its_loss(outcomes: dict[str, Any]) -> None:
    _check_ranks(outcomes, "back at once")
    (changed,) = records(outcomes, "killed:back at once", "membership_changed")
    assert (changed["nodes"], changed["joining"]) == ([0, 1, 2, 3], [2])
    check_same(outcomes, "killed:back at once", "back at once")


@pytest.mark.parametrize(("phase", "scripted"), [("migrate_step", "moved"), ("migrate_build", "built")])
def test_a_rank_dies_while_experts_move(outcomes: dict[str, Any], phase: str, scripted: str) -> None:
    """The copies of the shards do not change, so they are used until new ones are complete."""
    name = f"killed:{phase}"
    assert "error" not in outcomes[name], outcomes[name]["error"]
    assert outcomes[name]["ranks"][2]["records"][-1]["phase"] == phase
    assert memberships(outcomes, name) == [(1, [0, 1, 3], 2)]
    check_same(outcomes, name, scripted)


@pytest.mark.parametrize("phase", chosen(SECOND_LOSSES, OTHER_PHASES))
def test_a_second_rank_dies_before_the_next_commit(outcomes: dict[str, Any], phase: str) -> None:
    name = f"killed:twice:{phase}"
    assert "error" not in outcomes[name], outcomes[name]["error"]
    assert [target["iteration"] for target in outcomes[name]["targets"]] == [2, 2]
    left = [0, 1] if phase == "forward" else [1, 3]
    assert memberships(outcomes, name)[-1] == (2, left, 2)
    check_same(outcomes, name, f"twice:{phase}")


def test_a_shard_without_a_living_holder_is_named(outcomes: dict[str, Any]) -> None:
    """The owner of a shard and the rank with its copy are lost before another copy is made."""
    outcome = outcomes["no copies"]
    assert "error" not in outcome, outcome["error"]
    for rank in (0, 1):
        last = outcome["ranks"][rank]["error"].strip().splitlines()[-1]
        assert last.startswith(
            "megatron_ft.errors.RecoveryError: generation 2 cannot continue from the state of the remaining ranks: "
            "no living rank holds these elements: "
        ), last
        assert "of iteration 2" in last and "; operators " in last
