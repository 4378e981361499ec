"""Ranks are lost, the others train on in their processes: the same bits as a run that is given the same history."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.elastic_ranks import run_jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # trains

BIASED = {"model.moe_router_score_function": "sigmoid", "model.moe_router_enable_expert_bias": True}
EAGER = {
    "placement.rebalance_interval_iterations": 2,
    "placement.rebalance_min_gain": 0.0,
    "placement.rebalance_bytes_per_token": 1e12,
}
SKEWED = [[90.0, 5.0, 3.0, 2.0]] * 2
"""Loads of both layers to start from, so that seen ones ask for another placement."""
SCARCE = {"placement.num_slots_per_rank": 2, "placement.min_replicas": 1}
"""With skewed loads some experts have one holder."""
SAVING = {"checkpoint.save_interval_iterations": 2, "checkpoint.keep_last": 5}
BEFORE_THE_BALLOT = ("forward", "dispatch", "backward", "grad_sync", "vote_before")
PHASES = (*BEFORE_THE_BALLOT, "vote_inside", "vote_after", "update", "gather")
TWO_LOSSES = [(2, 3), (0, 5)]
"""(Node, first iteration without it)."""


def lose(*losses: tuple[int, int]) -> dict[str, Any]:
    """A history without faults."""
    return {"launch.membership_schedule": [f"lose(nodes=[{node}],before_iteration={k})" for node, k in losses]}


def faults(*specs: str) -> dict[str, Any]:
    """Injected ones."""
    return {"launch.min_nodes": 2, "launch.failpoints": list(specs)}


def kill(rank: int, iteration: int, phase: str) -> str:
    """The spec of one."""
    return f'kill(rank={rank}, at_iteration={iteration}, phase="{phase}")'


def _job(overrides: dict[str, Any], *, nodes: int = 4, until: int = 4) -> dict[str, Any]:
    return {"nodes": nodes, "overrides": {**BIASED, "training.train_iterations": until, **overrides}}


def _jobs(folder: Path) -> dict[str, Any]:
    skewed = folder / "loads.json"
    skewed.write_text(json.dumps(SKEWED))
    eager = {**EAGER, "placement.loads_file": str(skewed)}
    jobs = {
        "undisturbed": _job({}, until=6),
        "scripted": _job({**lose(*TWO_LOSSES), **SAVING}, until=6),
        "lose:2:3": _job(lose((2, 3))),
        "lose:2:4": _job(lose((2, 4))),
        "lose:0:3": _job(lose((0, 3))),
        "killed:rank 0": _job(faults(kill(0, 3, "backward"))),
        "killed:twice": _job({**faults(kill(2, 3, "dispatch"), kill(0, 5, "backward")), **SAVING}, until=6),
        "killed:checkpoint": _job({**faults(kill(2, 2, "checkpoint")), **SAVING}),
        "left behind": _job(
            faults('raise(rank=3, at_iteration=3, phase="update")', kill(2, 3, "gather")),
        ),
        "rebalanced": _job({**eager, **lose((2, 3))}, until=6),
        "rebalanced:killed": _job({**eager, **faults(kill(2, 3, "backward"))}, until=6),
        "no copies": _job({**faults(kill(3, 3, "backward")), **SCARCE, "placement.loads_file": str(skewed)}),
    }
    for phase in PHASES:
        jobs[f"killed:{phase}"] = _job(faults(kill(2, 3, phase)))
    for nodes, loaded in (((0, 1, 3), 2), ((1, 3), 4)):
        jobs[f"fresh:{len(nodes)}"] = _job(
            {
                "training.exit_at_iteration": loaded + 2,
                "launch.failure_domains": [f"node{node}" for node in nodes],
                "checkpoint.load": str(folder / "scripted" / "checkpoints" / f"iter_{loaded:07d}"),
                "placement.schedule": [f"{loaded + 1}:{folder}/scripted/placements/iter_{loaded + 1:07d}.json"],
            },
            nodes=len(nodes),
            until=6,
        )
    return jobs


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("elastic")
    return run_jobs(_jobs(folder), folder, timeout_seconds=580)


def records(outcomes: dict[str, Any], name: str, kind: str) -> list[dict[str, Any]]:
    """Those of one kind that a job's ranks reported, in order of iterations."""
    outcome = outcomes[name]
    assert "error" not in outcome, f"{name}: {outcome['error']}"
    found = [record for rank in outcome["ranks"] for record in rank["records"] if record["kind"] == kind]
    return sorted(found, key=lambda record: (record["iteration"], record["number"]))


def digests(outcomes: dict[str, Any], name: str) -> dict[int, list[str]]:
    """Digest of each rank's state after each iteration, as last reported."""
    return {record["iteration"]: record["digests"] for record in records(outcomes, name, "state_digest")}


def figures(outcomes: dict[str, Any], name: str) -> dict[int, dict[str, Any]]:
    """Metrics by iteration, without those that depend on the clock."""
    return {
        record["iteration"]: {key: value for key, value in record.items() if "second" not in key and key != "number"}
        for record in records(outcomes, name, "metrics")
    }


def check_same(outcomes: dict[str, Any], faulty: str, scripted: str) -> None:
    """States and figures of all iterations, to the bit.

    Whose digests of a target were not taken before the loss takes them after it, on the ranks and the placement there
    are then: the next iteration's speak for them.
    """
    targets = {target["iteration"] for target in outcomes[faulty]["targets"]}
    expected, found = digests(outcomes, scripted), digests(outcomes, faulty)
    last = max(expected)
    assert max(targets) < last and expected.keys() == found.keys()
    assert {k: found[k] for k in found if k not in targets} == {k: expected[k] for k in expected if k not in targets}
    assert figures(outcomes, faulty) == figures(outcomes, scripted)


def memberships(outcomes: dict[str, Any], name: str) -> list[tuple[int, list[int], int]]:
    """(Generation, nodes, iteration it begins after) of each that followed."""
    changed = records(outcomes, name, "membership_changed")
    return [(record["generation"], record["nodes"], record["iteration"]) for record in changed]


# -- a schedule -------------------------------------------------------------------------------------------


def test_nodes_leave_as_the_schedule_says(outcomes: dict[str, Any]) -> None:
    assert memberships(outcomes, "scripted") == [(1, [0, 1, 3], 2), (2, [1, 3], 4)]
    assert [rank["error"] for rank in outcomes["scripted"]["ranks"]] == [None] * 4
    found = digests(outcomes, "scripted")
    assert {iteration: len(found[iteration]) for iteration in found} == {1: 4, 2: 4, 3: 3, 4: 3, 5: 2, 6: 2}
    assert len({digest for ranks in found.values() for digest in ranks}) == sum(map(len, found.values()))


@pytest.mark.parametrize(("nodes", "first"), [(3, 3), (2, 5)])
def test_survivors_train_like_a_job_of_their_size(outcomes: dict[str, Any], nodes: int, first: int) -> None:
    """One that starts from a dense checkpoint of the same iteration, with the same placement: to the bit."""
    expected, found = digests(outcomes, f"fresh:{nodes}"), digests(outcomes, "scripted")
    for iteration in (first, first + 1):
        assert len(found[iteration]) == nodes and found[iteration] == expected[iteration]
        mine, theirs = (figures(outcomes, name)[iteration] for name in ("scripted", f"fresh:{nodes}"))
        assert mine == theirs


def test_every_size_reads_the_same_samples(outcomes: dict[str, Any]) -> None:
    """Global batch and order stay: the losses are those of a run that lost nobody, but for the order of sums."""
    undisturbed, found = figures(outcomes, "undisturbed"), figures(outcomes, "scripted")
    for iteration in range(1, 7):
        mine, theirs = found[iteration], undisturbed[iteration]
        assert (mine["consumed_samples"], mine["tokens"]) == (4 * iteration, theirs["tokens"])
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


# -- faults -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_rank_leaves_the_bits_of_its_history(outcomes: dict[str, Any], phase: str) -> None:
    """Wherever in iteration 3 rank 2 dies: before the vote it is void, and where anybody has settled it, it is done."""
    check_same(outcomes, f"killed:{phase}", f"lose:2:{_first_without(outcomes, phase)}")
    assert [record["kind"] for record in outcomes[f"killed:{phase}"]["ranks"][2]["records"]] == ["failpoint_hit"]
    (change,) = memberships(outcomes, f"killed:{phase}")
    assert change[:2] == (1, [0, 1, 3])


@pytest.mark.parametrize("phase", BEFORE_THE_BALLOT)
def test_an_iteration_without_every_ballot_is_void(outcomes: dict[str, Any], phase: str) -> None:
    assert _first_without(outcomes, phase) == 3


@pytest.mark.parametrize("phase", ["update", "gather"])
def test_who_has_settled_a_vote_has_every_ballot(outcomes: dict[str, Any], phase: str) -> None:
    """Whether or not anybody who lives has settled it as well."""
    positions = [broken["position"] for rank in outcomes[f"killed:{phase}"]["ranks"] for broken in rank["broken"]]
    assert [position["contributed"] >= 3 for position in positions] == [True] * 3


def _first_without(outcomes: dict[str, Any], phase: str) -> int:
    """The iteration that the others did next."""
    outcome = outcomes[f"killed:{phase}"]
    assert "error" not in outcome, outcome["error"]
    (target,) = outcome["targets"]
    return int(target["iteration"]) + 1


def test_the_first_rank_is_lost(outcomes: dict[str, Any]) -> None:
    """It served the store, and it was the one that reported."""
    assert memberships(outcomes, "killed:rank 0") == [(1, [1, 2, 3], 2)]
    check_same(outcomes, "killed:rank 0", "lose:0:3")


def test_two_are_lost_one_after_the_other(outcomes: dict[str, Any]) -> None:
    assert [target["iteration"] for target in outcomes["killed:twice"]["targets"]] == [2, 4]
    check_same(outcomes, "killed:twice", "scripted")
    assert memberships(outcomes, "killed:twice") == memberships(outcomes, "scripted")


def test_a_save_that_broke_is_made_again(outcomes: dict[str, Any]) -> None:
    check_same(outcomes, "killed:checkpoint", "lose:2:3")
    saved = records(outcomes, "killed:checkpoint", "checkpoint_saved")
    assert [record["iteration"] for record in saved] == [2, 4]


def test_a_rank_that_is_behind_finishes_from_its_gradients(outcomes: dict[str, Any]) -> None:
    """It broke before its update of iteration 3, the others did theirs."""
    ranks = outcomes["left behind"]["ranks"]
    behind = ranks[3]["broken"][0]["position"]
    assert (behind["completed"], behind["contributed"]) == (2, 3)
    assert [ranks[rank]["broken"][0]["position"]["completed"] for rank in (0, 1)] == [3, 3]
    assert outcomes["left behind"]["targets"][0]["vote"]["iteration"] == 3
    check_same(outcomes, "left behind", "lose:2:4")


def test_a_placement_without_a_committed_iteration_is_taken_back(outcomes: dict[str, Any]) -> None:
    """It had taken over before the iteration that broke; loads that it was made from are kept."""
    reasons = [record["reason"] for record in records(outcomes, "rebalanced:killed", "placement_in_force")]
    assert reasons.index("membership") == 2, "another placement had taken over at the full size"
    check_same(outcomes, "rebalanced:killed", "rebalanced")


def test_experts_without_a_living_holder_are_named(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["no copies"]
    assert "error" not in outcome, outcome["error"]
    for rank in (0, 1, 2):
        last = outcome["ranks"][rank]["error"].strip().splitlines()[-1]
        assert last.startswith("megatron_ft.errors.RecoveryError: generation 1 cannot go on from living ranks: ")
        named = last.rpartition("no living rank holds: ")[2].split(", ")
        assert len(named) == 2 and named[0].startswith("1.expert.") and named[1].startswith("2.expert."), last
