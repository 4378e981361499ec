"""Tests the planned jobs of ``faults-from-outside``, and how it evaluates the files of a job."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.campaign import Counts, Outcome
from benchmarks.faults_from_outside import Comparison, ends_of, judge
from benchmarks.outside_driver import Tail
from benchmarks.outside_jobs import jobs_of, loss_of, losses_of, on_other_nodes, targets
from benchmarks.outside_records import FaultRecord, read_faults

FAULT = {"fault": 0, "kind": "whole node", "first": "node:2", "moment": "any", "after": 1}
SEEN = {
    "fault": 0,
    "lost": [2],
    "answer": {"survives": True, "strategy": "living_state"},
    "injected_at": 100.0,
    "processes": {"node-002.log": 1, "node-002-keeper.log": 2, "rank-00002.log": 3},
    "proven": True,
    "iteration": 9,
}


def lost(at: float, node: int, kind: str = "node_lost") -> dict[str, Any]:
    return {"kind": kind, "time_unix_seconds": at, "node": node}


def changed(at: float, nodes: list[int], generation: int = 1) -> dict[str, Any]:
    return {"kind": "membership_changed", "time_unix_seconds": at, "nodes": nodes, "generation": generation}


def went_on(at: float, strategy: str = "living_state") -> dict[str, Any]:
    return {"kind": "recovery_started", "time_unix_seconds": at, "strategy": strategy}


def read(*events: dict[str, Any], orders: tuple[dict[str, Any], ...] = (), **seen: Any) -> FaultRecord:
    (record,) = read_faults([FAULT], [{**SEEN, **seen}], events, orders)
    return record


def test_the_plan_covers_every_kind_in_small_jobs() -> None:
    jobs = jobs_of(1, quick=False)
    faults = [fault for job in jobs for fault in job.faults]
    assert len(faults) >= 210 and all(2 <= job.num_nodes <= 4 for job in jobs)
    assert {job.kind for job in jobs} == {"replicas", "kept"} and sum(job.kills_launcher for job in jobs) >= 5
    whole = sum("node:" in str(fault["first"]) for fault in faults)
    assert whole > len(faults) / 2, "whole nodes are the main fault"
    assert sum(fault["first"] == "lost" for fault in faults) <= 0.1 * len(faults)
    kinds = {fault["kind"] for fault in faults}
    assert {"agent", "snapshot server", "controller", "two nodes at once", "agent stopped"} <= kinds
    assert {"first iteration after a join", "whole node while saving", "whole node, large payload"} <= kinds


def test_the_plan_is_the_seeds() -> None:
    assert jobs_of(1, quick=False) == jobs_of(1, quick=False)
    assert jobs_of(1, quick=False) != jobs_of(2, quick=False)


def test_what_comes_after_a_join_follows_a_loss() -> None:
    for job in (*jobs_of(1, quick=False), *jobs_of(1, quick=True)):
        for fault, before in zip(job.faults[1:], job.faults, strict=False):
            if fault["moment"] == "joined":
                assert loss_of(before)[0], "a machine has to come back"
        assert job.faults[0]["moment"] != "joined"
        delays = [float(str(fault["delay"])) for fault in job.faults if "second" in fault]
        assert all(0.02 <= delay <= 0.5 for delay in delays)


@pytest.mark.parametrize(
    ("fault", "loss"),
    [
        ({"first": "node:2"}, ((2,), True)),
        ({"first": "rank:1"}, ((1,), False)),
        ({"first": "keeper:1"}, ((1,), True)),
        ({"first": "node:3+node:0"}, ((0, 3), True)),
        ({"first": "rank:1", "second": "node:3"}, ((1, 3), True)),
        ({"first": "controller"}, ((), False)),
        ({"first": "controller+rank:2"}, ((2,), False)),
        ({"first": "agent:2", "seconds": 9.0}, ((2,), True)),
        ({"first": "rank:2", "seconds": 1.0}, ((), False)),
    ],
)
def test_a_fault_names_the_loss_that_is_asked_about(fault: dict[str, Any], loss: object) -> None:
    assert loss_of(fault) == loss
    assert targets("controller+node:2") == [("controller", None), ("node", 2)]


def test_two_nodes_can_be_any_others() -> None:
    found = list(on_other_nodes({"first": "controller+node:2", "second": "rank:0", "delay": 0.1}, 3))
    assert [(fault["first"], fault["second"]) for fault in found[:3]] == [
        ("controller+node:2", "rank:0"),
        ("controller+node:0", "rank:1"),
        ("controller+node:0", "rank:2"),
    ]
    assert len(found) == 7 and all(fault["delay"] == 0.1 for fault in found)
    assert list(on_other_nodes({"first": "node:1"}, 4)) == [{"first": "node:1"}]
    assert losses_of(3) == [(0, 1), (0, 2), (1, 2), (0, 1, 2)]


def test_forming_lasts_from_the_last_detection_to_the_membership() -> None:
    record = read(lost(100.1, 2), went_on(101.0), changed(101.5, [0, 1, 3]), changed(109.0, [0, 1, 2, 3], 2))
    assert record.forming_seconds == pytest.approx(1.4) and record.problems == () and record.is_proven
    burst = read(lost(100.1, 2), lost(100.6, 3), changed(101.5, [0, 1]), lost=[2, 3])
    assert burst.forming_seconds == pytest.approx(0.9)
    late = read(lost(100.1, 2), changed(103.3, [0, 1, 3]))
    assert late.problems == ("forming the membership took 3.20 s",)


def test_a_takeover_of_the_controller_is_no_forming() -> None:
    events = (lost(100.1, 2), changed(104.0, [0, 1, 3]))
    order = {"time_unix_seconds": 103.0, "lost_nodes": [2]}
    assert read(*events, orders=(order,)).problems == ("forming the membership took 3.90 s",)
    beside = {"controller.log": 5, "rank-00002.log": 3}
    assert read(*events, orders=(order,), processes=beside).forming_seconds == pytest.approx(1.0)


def test_replayed_iterations_are_no_forming() -> None:
    replay = {"kind": "stage_recovery", "time_unix_seconds": 105.0, "generation": 1, "seconds": 4.0}
    local = {"survives": True, "strategy": "localized_replay"}
    record = read(
        lost(100.0, 2), went_on(105.0, "localized_replay"), replay, changed(105.5, [0, 1, 2, 3]), answer=local
    )
    assert record.forming_seconds == pytest.approx(1.5) and not record.problems


@pytest.mark.parametrize(
    ("events", "orders"),
    [
        ([lost(100.1, 2), lost(105.0, 1, "rank_failed")], ()),
        ([lost(100.1, 2)], ({"time_unix_seconds": 104.0, "lost_nodes": [1, 2]},)),
    ],
    ids=["told", "in an order alone"],
)
def test_a_healthy_node_that_is_lost_is_found(events: list[Any], orders: tuple[Any, ...]) -> None:
    record = read(*events, changed(101.0, [0, 1, 3]), orders=orders)
    assert record.healthy_lost == (1,) and "healthy nodes [1] were lost" in record.problems


def test_another_way_on_than_the_foretold_one_is_a_problem() -> None:
    record = read(lost(100.1, 2), went_on(101.0, "checkpoint"), changed(101.0, [0, 1, 3]))
    assert record.problems == ("the job continued with checkpoint, but living_state was predicted",)
    record = read(lost(100.1, 2))
    assert record.problems == ("no membership followed",)


def test_a_loss_that_is_too_much_ends_the_job() -> None:
    too_much = {"survives": False, "strategy": "checkpoint"}
    assert read(lost(100.1, 2), answer=too_much, ended=9).problems == ()
    assert read(lost(100.1, 2), answer=too_much, ended=0).problems == ("the job ended with exit code 0",)
    assert read(went_on(101.0), answer=too_much, ended=9).problems == ("the job continued with living_state",)
    assert read(answer=too_much, problem="runs on").problems == ("runs on",)
    again = read(lost(100.1, 1), went_on(101.0, "checkpoint"), answer=too_much, fell_to="checkpoint")
    assert again.problems == ()
    other = read(went_on(101.0), went_on(109.0, "checkpoint"), answer=too_much, fell_to="checkpoint")
    assert other.problems == ("the job continued with living_state",)


def test_each_fault_has_its_own_stretch_of_the_run() -> None:
    second = {**SEEN, "fault": 1, "lost": [0], "injected_at": 200.0, "processes": {"rank-00000.log": 9}}
    events = [lost(100.1, 2), changed(101.0, [0, 1, 3]), lost(200.2, 0), changed(201.0, [1, 2, 3], 2), lost(202.0, 3)]
    faults = [FAULT, {**FAULT, "fault": 1, "first": "rank:0"}, {**FAULT, "fault": 2}]
    first, other, never = read_faults(faults, [SEEN, second], events, ())
    assert (first.healthy_lost, other.healthy_lost) == ((), (3,))
    assert never.problems == ("an earlier fault ended the job",) and not never.is_proven


def test_a_file_that_grows_is_read_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text('{"a": 1}\n{"a": ')
    assert tail.read() == [{"a": 1}]
    with path.open("a") as file:
        file.write("2}\n")
    assert tail.read() == [{"a": 1}, {"a": 2}]


def outcome(*, passed: bool = True, foretold: bool = True, healthy: tuple[int, ...] = ()) -> Outcome:
    details = {"kind": "rank", "is_foretold": foretold, "healthy_lost": healthy}
    return Outcome(
        proven=True,
        passed=passed,
        num_compared=8,
        details={**details, "forming_seconds": 0.5, "seconds_until_whole": 4.0},
    )


@pytest.mark.parametrize(
    ("outcomes", "failed_before", "passes"),
    [
        ([outcome()] * 200, 0, True),
        ([outcome()] * 199, 0, False),
        ([outcome()] * 172 + [outcome(foretold=False)] * 28, 0, True),
        ([outcome()] * 168 + [outcome(foretold=False)] * 32, 0, False),
        ([outcome()] * 200, 1, False),
        ([outcome()] * 200 + [outcome(passed=False)], 0, False),
        ([outcome()] * 200 + [outcome(healthy=(3,))], 0, False),
    ],
    ids=["all", "too few", "85 %", "too few foretold", "failed earlier", "one failed", "a healthy node lost"],
)
def test_all_that_was_foretold_is_to_be_survived(
    tmp_path: Path, outcomes: list[Outcome], failed_before: int, passes: bool
) -> None:
    good = sum(each.passed for each in outcomes)
    counts = Counts(
        planned=len(outcomes),
        passed=good,
        failed=len(outcomes) - good,
        uncompared=0,
        unproven=0,
        resumed=0,
        failed_before=failed_before,
        unproven_before=0,
    )
    out = tmp_path / "out.json"
    code = judge(out, jobs_of(1, quick=False), counts, outcomes, quick=False)
    result = json.loads(out.read_text())
    assert (code == 0) is passes is result["passed"]
    assert ("1 failed before" in result["figure"]) is (failed_before == 1)


def test_a_fault_is_compared_up_to_the_next_one_or_the_end_of_the_job() -> None:
    seen = [{**SEEN, "iteration": 9}, {**SEEN, "iteration": 15}]
    records = [read_faults([FAULT], [each], [], [])[0] for each in seen]

    def ends(until: int, last: int) -> list[tuple[int, int, bool]]:
        return ends_of(records, Comparison(until=until, num_compared={}, last=last, difference=""))

    assert ends(20, 20) == [(9, 15, True), (15, 20, True)]
    assert ends(13, 13) == [(9, 15, True), (15, 13, False)], "the second fault ended the job: it has nothing after it"
    assert ends(13, 20) == [(9, 15, False), (15, 13, False)], "iteration 14 differs"
