"""Tests that jobs which lose ranks have the same bits as jobs in which the same nodes leave by schedule."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.elastic_jobs import (
    GROWN,
    SAVING,
    SCARCE,
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

EAGER = {
    "placement.rebalance_interval_iterations": 2,
    "placement.rebalance_min_gain": 0.0,
    "placement.rebalance_bytes_per_token": 1e12,
}
BF16 = {"precision.params_dtype": "bf16"}
BEFORE_THE_BALLOT = ("forward", "dispatch", "backward", "grad_sync", "vote_before")
PHASES = (*BEFORE_THE_BALLOT, "vote_inside", "vote_after", "update", "gather")
OTHER_PHASES = ("forward", "dispatch", "grad_sync", "vote_before", "vote_inside", "vote_after", "update")
"""Phases that are like one of the other phases: another test kills ranks in them, or they differ in no operation."""
SWAPPED = (
    "lose(nodes=[0,3],before_iteration=1)",
    "join(nodes=[3],before_iteration=3)",
    "change(lose=[1],join=[0],before_iteration=5)",
)
"""Schedule of a job that begins with two nodes. The first rank, whose process has the store, joins last."""
FRESH = (
    ("scripted", (0, 1, 3), 2),
    ("scripted", (1, 3), 4),
    ("grown", (0, 1, 3), 2),
    ("grown", (0, 1, 2, 3), 4),
    ("swapped", (0, 2, 3), 4),
    ("grown:bf16", (0, 1, 2, 3), 4),
)
"""(Scheduled job, nodes of a membership, iteration after which the membership begins)."""
OTHER_FRESH = (FRESH[0], FRESH[2], FRESH[3], FRESH[5])
"""Repetitions of other rows: memberships after the same loss, and another precision."""
SAVING_EACH = {"checkpoint.save_interval_iterations": 1, "checkpoint.keep_last": 5}
"""Save after every iteration. A save is committed at the latest when the next one begins."""
TWO_LOSSES = [(2, 3), (0, 5)]
"""(Node, first iteration without the node)."""


def _jobs(folder: Path, *, extended: bool) -> dict[str, Any]:
    skewed = write_skewed(folder)
    eager = {**EAGER, **skewed}
    jobs = {
        "undisturbed": job({}, until=6),
        "scripted": job({**lose(*TWO_LOSSES), **SAVING}, until=6),
        "grown": job({**script(*GROWN), **SAVING}, until=6),
        "swapped": job({**script(*SWAPPED), **SAVING}, until=6),
        "lose:2:3": job(lose((2, 3))),
        "lose:2:4": job(lose((2, 4))),
        "lose:0:3": job(lose((0, 3))),
        "killed:rank 0": job(faults(kill(0, 3, "backward"))),
        "killed:twice": job({**faults(kill(2, 3, "dispatch"), kill(0, 5, "backward")), **SAVING}, until=6),
        "killed:committing": job(
            {**faults('kill(rank=1, at_iteration=4, phase="forward", generation=1)'), **SAVING_EACH},
            dies_committing={"2": 2},
        ),
        "committing": job(repeats("killed:committing")),
        "left behind": job(
            faults('raise(rank=3, at_iteration=3, phase="update")', kill(2, 3, "gather")),
        ),
        "no copies": job({**faults(kill(3, 3, "backward")), **SCARCE, **skewed}),
    }
    if extended:
        jobs["rebalanced"] = job({**eager, **lose((2, 3))}, until=6)
        jobs["rebalanced:killed"] = job({**eager, **faults(kill(2, 3, "backward"))}, until=6)
        jobs["killed:checkpoint"] = job({**faults(kill(2, 2, "checkpoint")), **SAVING})
        jobs["grown:bf16"] = job({**script(*GROWN), **SAVING, **BF16}, until=6)
    for phase in PHASES:
        if extended or phase not in OTHER_PHASES:
            jobs[f"killed:{phase}"] = job(faults(kill(2, 3, phase)))
    for name, nodes, loaded in FRESH:
        if not extended and (name, nodes, loaded) in OTHER_FRESH:
            continue
        jobs[f"fresh:{name}:{loaded}"] = fresh(folder, name, nodes, loaded, **(BF16 if "bf16" in name else {}))
    return jobs


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("elastic")
    return run_jobs(_jobs(folder, extended=runs_extended(request)), folder, timeout_seconds=580)


# -- a schedule -------------------------------------------------------------------------------------------


def test_nodes_leave_as_the_schedule_says(outcomes: dict[str, Any]) -> None:
    assert memberships(outcomes, "scripted") == [(1, [0, 1, 3], 2), (2, [1, 3], 4)]
    assert [rank["error"] for rank in outcomes["scripted"]["ranks"]] == [None] * 4
    found = digests(outcomes, "scripted")
    assert {iteration: len(found[iteration]) for iteration in found} == {1: 4, 2: 4, 3: 3, 4: 3, 5: 2, 6: 2}
    assert len({digest for ranks in found.values() for digest in ranks}) == sum(map(len, found.values()))


@pytest.mark.parametrize("membership", chosen(FRESH, OTHER_FRESH), ids=str)
def test_every_membership_trains_like_a_job_of_its_size(
    outcomes: dict[str, Any], membership: tuple[str, tuple[int, ...], int]
) -> None:
    """The membership has the same bits as a new job of its size that starts from a dense checkpoint of the same
    iteration with the same placement."""
    name, nodes, loaded = membership
    check_like_fresh(outcomes, name, f"fresh:{name}:{loaded}", nodes, loaded)


def test_nodes_come_and_go_as_the_schedule_says(outcomes: dict[str, Any]) -> None:
    assert memberships(outcomes, "grown") == [(1, [0, 1, 3], 2), (2, [0, 1, 2, 3], 4)]
    assert memberships(outcomes, "swapped") == [(1, [1, 2], 0), (2, [1, 2, 3], 2), (3, [0, 2, 3], 4)]
    for name in ("grown", "swapped"):
        assert [rank["error"] for rank in outcomes[name]["ranks"]] == [None] * 4


@pytest.mark.parametrize("name", ["scripted", "grown", "swapped"])
def test_every_size_reads_the_same_samples(outcomes: dict[str, Any], name: str) -> None:
    """Global batch and order of samples stay the same, so losses equal those of a run without losses up to the order of
    sums."""
    undisturbed, found = figures(outcomes, "undisturbed"), figures(outcomes, name)
    for iteration in range(1, 7):
        mine, theirs = found[iteration], undisturbed[iteration]
        assert (mine["consumed_samples"], mine["tokens"]) == (4 * iteration, theirs["tokens"])
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


# -- faults -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", chosen(PHASES, OTHER_PHASES))
def test_a_killed_rank_leaves_the_bits_of_its_history(outcomes: dict[str, Any], phase: str) -> None:
    """Rank 2 is killed in every phase of iteration 3. The iteration is rolled back if no survivor has its complete
    vote, and finished otherwise."""
    check_same(outcomes, f"killed:{phase}", f"lose:2:{_first_without(outcomes, phase)}")
    assert [record["kind"] for record in outcomes[f"killed:{phase}"]["ranks"][2]["records"]] == ["failpoint_hit"]
    (change,) = memberships(outcomes, f"killed:{phase}")
    assert change[:2] == (1, [0, 1, 3])


@pytest.mark.parametrize("phase", chosen(BEFORE_THE_BALLOT, OTHER_PHASES))
def test_an_iteration_without_every_ballot_is_void(outcomes: dict[str, Any], phase: str) -> None:
    assert _first_without(outcomes, phase) == 3


@pytest.mark.parametrize("phase", chosen(["update", "gather"], OTHER_PHASES))
def test_who_has_settled_a_vote_has_every_ballot(outcomes: dict[str, Any], phase: str) -> None:
    """This holds whether or not another survivor has the complete vote too."""
    positions = [broken["position"] for rank in outcomes[f"killed:{phase}"]["ranks"] for broken in rank["broken"]]
    assert [position["contributed"] >= 3 for position in positions] == [True] * 3


def _first_without(outcomes: dict[str, Any], phase: str) -> int:
    """Return the first iteration that the remaining ranks completed without the lost rank."""
    outcome = outcomes[f"killed:{phase}"]
    assert "error" not in outcome, outcome["error"]
    (target,) = outcome["targets"]
    return int(target["iteration"]) + 1


def test_the_first_rank_is_lost(outcomes: dict[str, Any]) -> None:
    """The lost rank had the store and reported the metrics."""
    assert memberships(outcomes, "killed:rank 0") == [(1, [1, 2, 3], 2)]
    check_same(outcomes, "killed:rank 0", "lose:0:3")


def test_two_are_lost_one_after_the_other(outcomes: dict[str, Any]) -> None:
    assert [target["iteration"] for target in outcomes["killed:twice"]["targets"]] == [2, 4]
    check_same(outcomes, "killed:twice", "scripted")
    assert memberships(outcomes, "killed:twice") == memberships(outcomes, "scripted")


@pytest.mark.extended
def test_a_save_that_broke_is_made_again(outcomes: dict[str, Any]) -> None:
    check_same(outcomes, "killed:checkpoint", "lose:2:3")
    saved = records(outcomes, "killed:checkpoint", "checkpoint_saved")
    assert [record["iteration"] for record in saved] == [2, 4]


def test_a_save_that_breaks_while_it_is_committed_is_reported_once_and_made_up_for(outcomes: dict[str, Any]) -> None:
    """Rank 2 dies after iteration 3, while the save of iteration 2 is committed; another rank dies before iteration 4
    is committed."""
    name = "killed:committing"
    assert [generation for generation, _, iteration in memberships(outcomes, name) if iteration == 3] == [1, 2]
    failed = records(outcomes, name, "checkpoint_failed")
    assert [(record["iteration"], Path(record["path"]).name) for record in failed if record["iteration"] == 2] == [
        (2, "iter_0000002")
    ]
    assert all("ranks were lost" in record["error"] for record in failed)
    saved = [record["iteration"] for record in records(outcomes, name, "checkpoint_saved")]
    assert 2 not in saved and {1, 3, 4} <= set(saved)
    check_same(outcomes, name, "committing")


def test_a_rank_that_is_behind_finishes_from_its_gradients(outcomes: dict[str, Any]) -> None:
    """One rank failed before its update of iteration 3, and the other ranks have completed theirs."""
    ranks = outcomes["left behind"]["ranks"]
    behind = ranks[3]["broken"][0]["position"]
    assert (behind["completed"], behind["contributed"]) == (2, 3)
    assert [ranks[rank]["broken"][0]["position"]["completed"] for rank in (0, 1)] == [3, 3]
    assert outcomes["left behind"]["targets"][0]["vote"]["iteration"] == 3
    check_same(outcomes, "left behind", "lose:2:4")


@pytest.mark.extended
def test_a_placement_without_a_committed_iteration_is_taken_back(outcomes: dict[str, Any]) -> None:
    """The placement was introduced with the iteration that failed. The loads from which it was planned are kept."""
    reasons = [record["reason"] for record in records(outcomes, "rebalanced:killed", "placement_in_force")]
    assert reasons.index("membership") == 2, "another placement had taken over at the full size"
    check_same(outcomes, "rebalanced:killed", "rebalanced")


def test_experts_without_a_living_holder_are_named(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["no copies"]
    assert "error" not in outcome, outcome["error"]
    for rank in (0, 1, 2):
        last = outcome["ranks"][rank]["error"].strip().splitlines()[-1]
        assert last.startswith(
            "megatron_ft.errors.RecoveryError: generation 1 cannot continue from the state of the remaining ranks: "
        )
        named = last.rpartition("no surviving rank holds these operators: ")[2].split(", ")
        assert len(named) == 2 and named[0].startswith("1.expert.") and named[1].startswith("2.expert."), last
