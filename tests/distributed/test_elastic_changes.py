"""Tests nodes that leave and join on request, ranks that die while a membership forms, and snapshots of elastic jobs,
bit by bit."""

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
    schedules,
    script,
    write_skewed,
)
from tests.helpers.elastic_ranks import run_jobs
from tests.helpers.sharing import chosen, runs_extended

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # trains

DROPOUT = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
"""Dropout, with which the random generators of joining ranks must be those of a scheduled job."""
CHANGES = {"2": {"leave": [2]}, "4": {"join": [2]}}
FORMING = ("reform_join", "reform_move", "reform_build")
OTHER_PHASES = ("reform_join", "reform_build")
"""Phases in which other tests of this module kill a rank."""
SNAPSHOTS = {
    "snapshot.policy": {"_target_": "megatron_ft.planning.snapshot.sparse_window.SparseWindow"},
    "snapshot.num_peer_copies": 2,
    "snapshot.bandwidth_bytes_per_second": 1e9,
    "snapshot.iteration_seconds": 1.0,
}
"""Each window is one slice. A window begins after every iteration if a buffer is free."""


TWO_COPIES = {"placement.num_slots_per_rank": 2}
"""Each expert has two copies on four nodes. On three nodes, some experts have one."""
LOST_ONCE = 'kill(rank=2, at_iteration=3, phase="backward", generation=0)'
LOST_AFTER_A_JOIN = 'kill(rank=0, generation=2, phase="forward")'


def wait_in(iteration: int) -> str:
    """Delay an iteration, so that copies of the slice captured two iterations before arrive in time."""
    return f'delay(rank=1, at_iteration={iteration}, phase="forward", seconds=2.0)'


def _jobs(folder: Path, *, extended: bool) -> dict[str, Any]:
    skewed = write_skewed(folder)
    rebalances = {
        **skewed,
        **TWO_COPIES,
        "placement.algorithm": {"_target_": "megatron_ft.planning.placement.overlap_search.OverlapSearch"},
        "placement.rebalance_interval_iterations": 2,
        "placement.rebalance_min_gain": 0.0,
        "placement.rebalance_bytes_per_token": 1e12,
    }
    jobs = {
        "grown": job({**script(*GROWN), **DROPOUT}, until=6),
        "planned": job({**faults(), **DROPOUT}, until=6, changes=CHANGES),
        "evacuated": job({**faults(), **SAVING, **SCARCE, **skewed}, until=6, changes={"2": {"leave": [3]}}),
        "fresh:evacuated": fresh(folder, "evacuated", (0, 1, 2), 2, **SCARCE),
        "killed:stayer": job({**faults(kill(1, 4, "reform_move")), **DROPOUT}, until=6, changes=CHANGES),
        "stayer": job({**repeats("killed:stayer"), **DROPOUT}, until=6),
        "killed:newcomer": job(
            faults('kill(rank=2, at_iteration=4, phase="reform_build", generation=2)'), until=6, changes=CHANGES
        ),
        "newcomer": job(repeats("killed:newcomer"), until=6),
        "other_data": job(faults(), until=6, changes=CHANGES, other_data=[2]),
        "placed again": job(script(GROWN[0], "change(lose=[],join=[],before_iteration=5)"), until=6),
        "history": job(script("lose(nodes=[2],before_iteration=4)", "join(nodes=[2],before_iteration=7)"), until=9),
        "captured": job(
            {**SNAPSHOTS, **faults(wait_in(6), wait_in(9))},
            until=9,
            num_keepers=4,
            changes={"3": {"leave": [2]}, "6": {"join": [2]}},
        ),
        "saved": job({**SAVING, "training.exit_at_iteration": 4}, until=6),
        "restarted": job(faults(), until=6, present=[0, 1, 3], resumes="saved"),
        "fresh:saved": job(
            {
                "topology.failure_domains": ["node0", "node1", "node3"],
                "checkpoint.load": str(folder / "saved" / "checkpoints" / "iter_0000004"),
            },
            nodes=3,
            until=6,
        ),
    }
    jobs |= {
        "killed:server": job(faults(kill(2, 3, "backward"), kill(0, 2, "reform_join"))),
        "server": job(repeats("killed:server")),
    }
    if extended:
        two = {**DROPOUT, **TWO_COPIES}
        jobs |= {
            "killed:after a join": job({**faults(LOST_AFTER_A_JOIN), **two}, until=6, changes=CHANGES),
            "after a join": job({**script(*GROWN, "lose(nodes=[0],before_iteration=5)"), **two}, until=6),
            "killed:back at once": job({**faults(LOST_ONCE), **DROPOUT}, returns={"2": [2]}),
            "back at once": job({**script("change(lose=[2],join=[2],before_iteration=3)"), **DROPOUT}),
            "moved": job({**lose((2, 3)), **rebalances}),
            "killed:moving": job({**faults(kill(2, 3, "migrate_step")), **rebalances}),
            "lose:2:3": job(lose((2, 3))),
            "lose:2:4": job(lose((2, 4))),
            "killed:replicate": job(
                {**SNAPSHOTS, **faults(wait_in(3), 'kill(rank=2, phase="replicate")')}, num_keepers=4
            ),
            "killed:capture": job({**SNAPSHOTS, **faults(kill(2, 3, "capture"))}, num_keepers=4),
        }
    for phase in FORMING if extended else set(FORMING) - set(OTHER_PHASES):
        jobs[f"killed:{phase}"] = job(faults(kill(2, 3, "backward"), kill(3, 2, phase)))
        jobs[phase] = job(repeats(f"killed:{phase}"))
    return jobs


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("elastic_changes")
    return run_jobs(_jobs(folder, extended=runs_extended(request)), folder, timeout_seconds=580)


# -- changes that are asked for -------------------------------------------------------------------------------


def test_nodes_leave_and_join_when_asked_for(outcomes: dict[str, Any]) -> None:
    """The leaving node ends without a failure, and a new process of it joins later. The bits equal those of a scheduled
    job."""
    assert [rank["error"] for rank in outcomes["planned"]["ranks"]] == [None] * 5
    assert memberships(outcomes, "planned") == memberships(outcomes, "grown")
    assert digests(outcomes, "planned") == digests(outcomes, "grown")
    assert figures(outcomes, "planned") == figures(outcomes, "grown")


def test_experts_leave_a_node_before_it_does(outcomes: dict[str, Any]) -> None:
    """Some experts are only on the leaving node, so they are moved while all ranks are present."""
    assert [rank["error"] for rank in outcomes["evacuated"]["ranks"]] == [None] * 4
    reasons = [record["reason"] for record in records(outcomes, "evacuated", "placement_in_force")]
    assert reasons == ["first", "evacuation", "membership"]
    check_like_fresh(outcomes, "evacuated", "fresh:evacuated", (0, 1, 2), 2)


# -- deaths while a membership forms --------------------------------------------------------------------------


@pytest.mark.parametrize("phase", chosen(FORMING, OTHER_PHASES))
def test_a_rank_dies_while_the_survivors_of_another_form(outcomes: dict[str, Any], phase: str) -> None:
    """The bits equal those of the recorded schedule. Both losses are in one entry unless all ranks had formed the
    membership in between."""
    name = f"killed:{phase}"
    assert "error" not in outcomes[name], outcomes[name]["error"]
    assert [rank["error"] for rank in outcomes[name]["ranks"]] == [None] * 4
    assert [target["iteration"] for target in outcomes[name]["targets"]] == [2, 2]
    assert memberships(outcomes, name)[-1] == (2, [0, 1], 2)
    at_once = ["lose(nodes=[2,3],before_iteration=3)"]
    one_by_one = ["lose(nodes=[2],before_iteration=3)", "lose(nodes=[3],before_iteration=3)"]
    assert schedules(outcomes, name)[-1] in ([at_once] if phase == "reform_join" else [at_once, one_by_one])
    check_same(outcomes, name, phase)


def test_the_first_rank_dies_before_it_serves_the_store_of_the_next_membership(outcomes: dict[str, Any]) -> None:
    """The other ranks do not wait for it as long as for a late rank."""
    assert "error" not in outcomes["killed:server"], outcomes["killed:server"]["error"]
    assert memberships(outcomes, "killed:server") == [(2, [1, 3], 2)]
    assert schedules(outcomes, "killed:server") == [["lose(nodes=[0,2],before_iteration=3)"]]
    check_same(outcomes, "killed:server", "server")


def test_a_rank_with_state_dies_while_another_joins(outcomes: dict[str, Any]) -> None:
    """The joining rank has not received all state, so it must join again."""
    name = "killed:stayer"
    assert "error" not in outcomes[name], outcomes[name]["error"]
    assert memberships(outcomes, name)[-1] == (3, [0, 2, 3], 4)
    assert records(outcomes, name, "membership_changed")[-1]["joining"] == [2]
    check_same(outcomes, name, "stayer")


def test_a_joining_node_dies_while_it_joins(outcomes: dict[str, Any]) -> None:
    name = "killed:newcomer"
    assert "error" not in outcomes[name], outcomes[name]["error"]
    assert memberships(outcomes, name)[-1] == (3, [0, 1, 3], 4)
    check_same(outcomes, name, "newcomer")


def test_a_joining_node_that_reads_other_data_does_not_join(outcomes: dict[str, Any]) -> None:
    """The joining rank ends before any state moves. The other ranks continue without it and plan a new placement."""
    assert "error" not in outcomes["other_data"], outcomes["other_data"]["error"]
    assert memberships(outcomes, "other_data")[-1] == (3, [0, 1, 3], 4)
    assert schedules(outcomes, "other_data")[-1] == ["change(lose=[],join=[],before_iteration=5)"]
    check_same(outcomes, "other_data", "placed again")
    broken = [rank["broken"][-1]["error"] for rank in outcomes["other_data"]["ranks"] if rank["broken"]]
    different = "must be the same data on every rank, but rank 2 and rank 0 read different data"
    assert any(different in text for text in broken)


@pytest.mark.extended
def test_what_a_joining_node_was_given_counts_before_it_has_done_an_iteration(outcomes: dict[str, Any]) -> None:
    """A node is lost in the first iteration after a join. Before the join, it had the only copy of an expert."""
    name = "killed:after a join"
    assert "error" not in outcomes[name], outcomes[name]["error"]
    assert [rank["error"] for rank in outcomes[name]["ranks"][1:]] == [None] * 4
    assert memberships(outcomes, name)[-1] == (3, [1, 2, 3], 4)
    joined, lost = records(outcomes, name, "membership_changed")[1:]
    assert (joined["joining"], lost["joining"]) == ([2], [])
    assert lost["schedule"] == ["join(nodes=[2],before_iteration=5)", "lose(nodes=[0],before_iteration=5)"]
    check_same(outcomes, name, "after a join")


@pytest.mark.extended
def test_a_node_is_back_in_the_membership_that_follows_its_loss(outcomes: dict[str, Any]) -> None:
    """Its new ranks have no state of the run. A schedule can express this."""
    name = "killed:back at once"
    assert "error" not in outcomes[name], outcomes[name]["error"]
    assert memberships(outcomes, name) == memberships(outcomes, "back at once") == [(1, [0, 1, 2, 3], 2)]
    (changed,) = records(outcomes, name, "membership_changed")
    assert changed["joining"] == [2]
    assert changed["schedule"] == ["change(lose=[2],join=[2],before_iteration=3)"]
    check_same(outcomes, name, "back at once")


@pytest.mark.extended
def test_a_rank_dies_while_experts_replace_each_other(outcomes: dict[str, Any]) -> None:
    """The other ranks have replaced different numbers of experts. They continue as from the placement before."""
    name = "killed:moving"
    assert "error" not in outcomes[name], outcomes[name]["error"]
    assert outcomes[name]["ranks"][2]["records"][-1]["phase"] == "migrate_step"
    assert memberships(outcomes, name) == [(1, [0, 1, 3], 2)]
    check_same(outcomes, name, "moved")


# -- snapshots --------------------------------------------------------------------------------------------


@pytest.mark.extended
@pytest.mark.parametrize("phase", ["capture", "replicate"])
def test_a_rank_dies_while_state_is_captured(outcomes: dict[str, Any], phase: str) -> None:
    """The previous iteration is committed. Capturing snapshots changes no bit of its result or of later results."""
    name = f"killed:{phase}"
    assert "error" not in outcomes[name], outcomes[name]["error"]
    (target,) = outcomes[name]["targets"]
    check_same(outcomes, name, f"lose:2:{target['iteration'] + 1}")
    assert [record["kind"] for record in outcomes[name]["ranks"][2]["records"]][-1:] == ["failpoint_hit"]


def test_windows_begin_again_in_every_membership(outcomes: dict[str, Any]) -> None:
    """Copies are placed on the present nodes, including joining ones, whose addresses their ranks report."""
    assert [rank["error"] for rank in outcomes["captured"]["ranks"]] == [None] * 5
    assert digests(outcomes, "captured") == digests(outcomes, "history")
    assert [record["iteration"] for record in records(outcomes, "captured", "snapshot_planned")] == [1, 4, 7]
    committed = [record["start_iteration"] for record in records(outcomes, "captured", "window_committed")]
    assert {4, 7} <= set(committed)
    assert not records(outcomes, "captured", "snapshot_problem")


# -- what ranks are forked with ---------------------------------------------------------------------------


def test_ranks_import_nothing_after_they_were_forked(outcomes: dict[str, Any]) -> None:
    """An import during a recovery would take time and could fail, so the process from which ranks are forked imports
    all modules."""
    ended = {
        f"{name}, rank {number}": rank["imported"]
        for name, outcome in outcomes.items()
        for number, rank in enumerate(outcome["ranks"])
        if "imported" in rank  # it was not killed
    }
    assert len(ended) > len(outcomes)
    assert not {rank: names for rank, names in ended.items() if names}


# -- a start on fewer nodes -------------------------------------------------------------------------------


def test_a_start_on_the_nodes_that_are_left(outcomes: dict[str, Any]) -> None:
    """The ranks continue from the newest checkpoint, like a job of that size."""
    (decided,) = records(outcomes, "restarted", "recovery_started")
    assert (decided["generation"], decided["strategy"], decided["iteration"]) == (1, "checkpoint", 4)
    assert digests(outcomes, "restarted") == digests(outcomes, "fresh:saved")
    assert figures(outcomes, "restarted") == figures(outcomes, "fresh:saved")
