"""Tests what ``trace-replay`` counts in a job's records, and how it judges the counts."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.trace_replay import Replayed, changes_of, committed, judge, restart_seconds, standing_at_end, unproven
from megatron_ft.failures.schedule import FailureSchedule, MembershipEvent

SCHEDULE = FailureSchedule(
    source="t",
    most_nodes=3,
    num_initial_nodes=3,
    duration_seconds=9.0,
    events=(MembershipEvent(seconds=1.0, leaves=(0, 2)), MembershipEvent(seconds=2.0, joins=(2,))),
)
INJECTED = [
    {"action": "kill", "nodes": [0, 2], "event": 0, "at_seconds": 1.1, "time_unix_seconds": 1.0},
    {"action": "add", "nodes": [2], "event": 1, "at_seconds": 2.2, "time_unix_seconds": 2.0},
]


def iterations(*numbers: int, since: float = 0.0) -> list[dict[str, Any]]:
    return [
        {"iteration": number, "time_unix_seconds": since + place / 100, "loss": 1.0}
        for place, number in enumerate(numbers)
    ]


def event(kind: str, seconds: float, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "time_unix_seconds": seconds, **values}


def test_every_iteration_counts_once() -> None:
    found = committed(iterations(1, 2, 3), [])
    assert (found.num_iterations, found.problems) == (3, [])
    assert committed(iterations(1, 2, 2, 3), []).problems == ["iteration 2 reported twice"]
    assert committed(iterations(1, 3), []).problems == ["iteration 2 not reported"]


def test_an_iteration_whose_reporter_died_counts() -> None:
    changes = [event("membership_changed", 1.0, nodes=[1, 2], iteration=2)]
    found = committed(iterations(1, 3), changes)
    assert (found.num_iterations, found.num_untold, found.problems) == (3, 1, [])


def test_iterations_behind_a_checkpoint_that_served_are_void() -> None:
    restarted = event("recovery_started", 1.0, generation=1, strategy="checkpoint", iteration=2)
    found = committed(iterations(1, 2, 3, 4) + iterations(3, 4, 5, since=2.0), [restarted])
    assert (found.num_iterations, found.num_void, found.problems) == (5, 2, [])
    alive = {**restarted, "strategy": "living_state"}
    assert committed(iterations(1, 2, 3) + iterations(3, since=2.0), [alive]).problems, "living ranks run none again"


def test_a_death_has_to_be_in_the_jobs_own_events() -> None:
    without = event("membership_changed", 1.5, nodes=[1])
    assert unproven(INJECTED, [without]) == []
    assert unproven(INJECTED, [event("ranks_restarted", 1.5)]) == []
    assert unproven(INJECTED, []) == [f"no membership without node {node} after its death" for node in (0, 2)]
    assert unproven(INJECTED, [{**without, "time_unix_seconds": 0.5}]) == [], "they were no members any more"
    assert len(unproven(INJECTED, [{**without, "nodes": [1, 2]}])) == 1


def test_changes_are_what_was_injected_when_it_was() -> None:
    assert changes_of(INJECTED, 3) == [(1.1, 1), (2.2, 2)]
    with pytest.raises(AssertionError, match="add_not_injected"):
        changes_of([*INJECTED, {"action": "add_not_injected", "nodes": [2]}], 3)


def test_of_a_restarted_job_what_its_last_start_has_reached_stands() -> None:
    saved = [event("checkpoint_saved", 1.0, iteration=5), event("checkpoint_saved", 2.0, iteration=10)]
    before, after = iterations(9, 10, 11, 12), iterations(11, since=4.0)
    assert standing_at_end(before + after, saved, 4.0) == 11, "12 was lost and has not been run again"
    assert standing_at_end(before, saved, 4.0) == 10, "still on its way up"
    assert standing_at_end(before, saved, 1.5) == 5, "a checkpoint that came later is another job's"
    assert standing_at_end([], [], 4.0) == 0


def test_a_restart_lasts_until_its_own_first_iteration() -> None:
    found = restart_seconds(iterations(1, 2, since=1.0) + iterations(2, since=7.0), [0.0, 3.0, 5.0])
    assert found == [1.0, None, 2.0]


def replayed(useful: int, *problems: str) -> Replayed:
    counts = dict.fromkeys(("restarts_after_rung_1_declined", "run_again"), 0)
    return Replayed(
        useful_iterations=useful,
        first_iteration_seconds=1.0,
        iteration_seconds=0.5,
        counts=counts,
        problems=list(problems),
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "injected", "quick", "passes"),
    [
        (replayed(50), {5: replayed(30), 20: replayed(49)}, INJECTED, False, True),
        (replayed(50), {5: replayed(30), 20: replayed(50)}, INJECTED, False, False),
        (replayed(50), {5: replayed(60)}, INJECTED, True, True),
        (replayed(50, "iteration 3 reported twice"), {5: replayed(30)}, INJECTED, True, False),
        (replayed(50), {5: replayed(30, "exit code 7")}, INJECTED, True, False),
        (replayed(50), {5: replayed(30)}, INJECTED[:1], True, False),
        (replayed(50, "it died"), {}, INJECTED, False, False),
    ],
    ids=["better", "equal", "quick", "reported twice", "they failed", "not injected", "nothing to compare with"],
)
def test_the_better_interval_is_judged_and_all_has_to_be_well(
    tmp_path: Path, ours: Replayed, theirs: dict[int, Replayed], injected: list[Any], quick: bool, passes: bool
) -> None:
    out = tmp_path / "out.json"
    code = judge(argparse.Namespace(out=out, quick=quick), SCHEDULE, ours, theirs, injected, [1.0])
    result = json.loads(out.read_text())
    assert (code == 0) is passes is result["passed"]
    assert result["details"]["schedule"] == SCHEDULE.to_json()
