"""Tests the lanes of made-up recoveries: the activities of each rank and their times."""

import pytest

from megatron_ft import events
from megatron_ft.telemetry.report.timeline import Lane, Timeline
from megatron_ft.testing.made_up_runs import (
    ITERATION_SECONDS,
    MadeUpRun,
    elastic,
    localized,
    next_membership,
    restarted,
    stage_recovery,
    started,
)


def timeline_of(run: MadeUpRun, number: int = 1) -> Timeline:
    timeline = Timeline.of(run.report().recoveries[number - 1])
    assert timeline is not None
    return timeline


def kinds(lane: Lane) -> list[str]:
    return [span.kind for span in lane.spans]


def labels(lane: Lane, kind: str) -> list[str]:
    return [span.label for span in lane.spans if span.kind == kind]


def test_a_localized_recovery_has_a_lane_for_each_rank_by_stage(run: MadeUpRun) -> None:
    localized(run)
    lanes = timeline_of(run).lanes
    assert [(lane.stage, lane.rank, lane.node) for lane in lanes] == [(0, 0, 0), (0, 1, 1), (1, 2, 4), (1, 3, 3)]
    assert [lane.fate for lane in lanes] == ["", "", "new process", ""]
    own = [[kind for kind in kinds(lane) if kind in ("replays", "serves", "waits")] for lane in lanes]
    assert own == [["serves"], ["waits"], ["replays"], ["replays"]]
    assert all(labels(lane, "trains")[-3:] == ["13", "14", "15"] for lane in lanes)


def test_times_count_from_the_failure(run: MadeUpRun) -> None:
    localized(run)
    timeline = timeline_of(run)
    dead, living = timeline.lanes[2], timeline.lanes[3]
    (replayed,) = [span for span in living.spans if span.kind == "replays"]
    assert (replayed.begin, replayed.end) == pytest.approx((0.7, 1.7))
    assert replayed.words == "replays iterations 8 to 12, 40 forward passes, 2.0 MB received: 1.00 s"
    assert dead.died_seconds == pytest.approx(0.02) and living.died_seconds is None
    assert [span.end for span in dead.spans if span.kind == "unfinished"] == [0.0]
    assert [(moment.words, round(moment.seconds, 2)) for moment in timeline.instants] == [
        ("failure", 0.0),
        ("decided", 0.1),
        ("ready", 1.7),
        ("iteration 13 done", 2.3),
    ]
    assert timeline.begin < 0.0 < 2.3 <= timeline.end < 4.0


def test_those_that_go_on_have_new_numbers_and_the_lost_one_comes_last(run: MadeUpRun) -> None:
    elastic(run)
    lanes = timeline_of(run).lanes
    assert [(lane.name, lane.node, lane.fate) for lane in lanes] == [
        ("rank 0", 0, ""),
        ("rank 1", 2, "was rank 2"),
        ("rank 1", 1, "lost"),
    ]
    assert [kinds(lane).count("forms") for lane in lanes] == [1, 1, 0]
    assert labels(lanes[2], "trains") == ["2", "3", "4"] and lanes[2].died_seconds == pytest.approx(0.0)


def test_those_that_join_begin_with_the_membership(run: MadeUpRun) -> None:
    elastic(run)
    timeline = timeline_of(run, 2)
    assert [(lane.name, lane.fate) for lane in timeline.lanes] == [
        ("rank 0", ""),
        ("rank 1", "new process"),
        ("rank 2", "was rank 1"),
    ]
    assert kinds(timeline.lanes[1]) == ["forms", "trains", "trains"]
    assert timeline.instants[0].words == "requested"
    assert "unfinished" not in timeline.kinds, "nothing was broken off"


def test_ranks_that_start_again_load_and_train_what_is_void_again(run: MadeUpRun) -> None:
    restarted(run)
    lanes = timeline_of(run).lanes
    assert [(lane.rank, lane.fate) for lane in lanes] == [
        (0, "new process"),
        (1, "new process"),
        (None, "not started again"),
    ]
    first = lanes[0]
    assert labels(first, "trains") == ["6", "7", "8", "7", "8", "9"]
    assert [kind for kind in kinds(first) if kind != "trains"] == ["unfinished", "starts", "loads"]


def test_without_decisions_processes_are_known_by_their_nodes(run: MadeUpRun) -> None:
    elastic(run)
    (run.path / "decisions.jsonl").unlink()
    lanes = timeline_of(run).lanes
    assert [(lane.name, lane.node, lane.fate) for lane in lanes] == [
        ("rank 0", 0, ""),
        ("rank 1", 2, "was rank 2"),
        ("rank 1", 1, "lost"),
    ]


def test_a_localized_recovery_without_its_decision_keeps_places(run: MadeUpRun) -> None:
    localized(run)
    (run.path / "decisions.jsonl").unlink()
    lanes = timeline_of(run).lanes
    assert [(lane.rank, lane.node, lane.fate) for lane in lanes] == [
        (0, 0, ""),
        (1, 1, ""),
        (2, 4, "new process"),
        (3, 3, ""),
    ]


def test_a_place_that_nothing_tells_the_node_of(run: MadeUpRun) -> None:
    run.say(0.0, started())
    run.say(2.0, events.RankFailed(rank=2, node=2, signal="SIGKILL", first=True, iteration=4))
    run.say(3.0, *(stage_recovery(rank, "replays", began=2.5, seconds=0.5) for rank in range(4)))
    lanes = timeline_of(run).lanes
    assert [(lane.rank, lane.node) for lane in lanes] == [(0, 0), (1, 1), (2, None), (3, 3)]
    assert [lane.fate for lane in lanes] == ["", "", "new process", ""]


def test_a_failure_during_a_recovery(run: MadeUpRun) -> None:
    localized(run, ends=False)
    run.say(20.0, events.RankFailed(rank=0, node=0, signal="SIGKILL", first=True, iteration=17))
    run.say(20.5, events.RecoveryStarted(generation=2, strategy="localized_replay", iteration=14))
    run.say(21.0, events.RankFailed(rank=1, node=1, signal="SIGKILL", first=True, iteration=17))
    run.say(21.5, events.RecoveryStarted(generation=3, strategy="localized_replay", iteration=13))
    _, second, third = run.report().recoveries
    assert (second.num_again, third.num_again) == (2, 1), "each counts what the one ahead of it does not"
    assert kinds(timeline_of(run, 2).lanes[0]) == ["trains", "trains", "trains", "unfinished"]
    assert kinds(timeline_of(run, 3).lanes[0]) == [], "nothing was trained in between"


def test_a_window_that_the_whole_job_replays(run: MadeUpRun) -> None:
    run.say(0.0, started(2), events.RanksReady(seconds=0.1))
    end = run.train(1, 5, 0.0)
    run.say(end, events.RankFailed(rank=1, node=1, signal="SIGKILL", first=True, iteration=6))
    about = {"reason": "killed", "failed_ranks": (1,), "iteration": 6, "num_restarts_left": 0}
    run.say(3.0, events.RanksRestarted(generation=1, **about))
    run.say(5.0, events.WindowReplayed(iteration=4, start_iteration=1, num_iterations=3, seconds=1.0))
    run.say(5.1, events.RecoveryStarted(generation=1, strategy="rollback", iteration=4))
    run.say(5.2, started(2, resumed_from_iteration=4), events.RanksReady(seconds=0.1))
    (recovery,) = run.report().recoveries
    assert (recovery.strategy, recovery.num_replayed, recovery.num_again) == ("rollback", 3, 1)
    assert [labels(lane, "replays") for lane in timeline_of(run).lanes] == [["3 iterations"], ["3 iterations"]]


def test_a_recovery_that_is_still_going_on(run: MadeUpRun) -> None:
    run.say(0.0, started())
    run.train(1, 3, 0.0)
    run.say(2.0, events.RankFailed(rank=2, node=2, signal="SIGKILL", first=True, iteration=4))
    run.say(2.4, events.RecoveryStarted(generation=1, strategy="localized_replay", iteration=3))
    run.say(3.0, stage_recovery(0, "serves", began=2.5, seconds=0.5, bytes_moved=10))
    (recovery,) = run.report().recoveries
    assert (recovery.strategy, recovery.pause_seconds) == ("localized_replay", None)
    assert [lane.rank for lane in timeline_of(run).lanes] == [1, 2, 3, 0], "stages that no record names come first"


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_times_that_cannot_be_are_not_drawn(run: MadeUpRun, seconds: float) -> None:
    localized(run)
    about = {"world_size": 4, "nodes": (0, 1, 3, 4), "reason": "again", "iteration": 16}
    run.say(12.0, events.MembershipChanged(generation=2, seconds=seconds, **about))
    run.say(12.0, stage_recovery(0, "replays", began=seconds, seconds=seconds, generation=2))
    assert all(set(kinds(lane)) <= {"trains", "unfinished"} for lane in timeline_of(run, 2).lanes)
    assert "NaN" not in run.page() and "nan" not in run.page().replace("nan s", "")


def test_records_without_times_have_no_timeline(run: MadeUpRun) -> None:
    for record in (started(), events.RecoveryStarted(generation=1, strategy="living_state", iteration=4)):
        run.line("events.jsonl", record.to_record())
    (recovery,) = run.report().recoveries
    assert Timeline.of(recovery) is None and recovery.strategy == "living_state"


def test_a_rank_trains_no_longer_than_it_lives(run: MadeUpRun) -> None:
    run.say(0.0, started())
    run.train(1, 4, 0.0)
    run.say(1.9, events.RankFailed(rank=2, node=2, signal="SIGKILL", first=True, iteration=5))
    about = {"world_size": 3, "nodes": (0, 1, 3), "reason": "rank 2 was killed", "iteration": 4}
    run.say(3.0, events.MembershipChanged(generation=1, seconds=0.9, **about))
    first, *_, lost = timeline_of(run).lanes
    assert [round(span.end, 2) for span in first.spans if span.kind == "trains"] == [-0.9, -0.4, 0.1]
    assert [round(span.end, 2) for span in lost.spans] == [-0.9, -0.4, 0.0], "iteration 4 was reported after its death"


def test_a_change_that_only_its_membership_tells_of_began_when_it_says(run: MadeUpRun) -> None:
    run.say(0.0, started(2))
    run.train(1, 4, 0.0)
    about = {"world_size": 2, "nodes": (0, 1), "reason": "as asked", "iteration": 4}
    run.say(3.0, events.MembershipChanged(generation=1, seconds=0.75, **about))
    run.train(5, 5, 3.0)
    (recovery,) = run.report().recoveries
    assert recovery.pause_seconds == pytest.approx(3.5 - 2.25)
    (formed,) = [span for span in timeline_of(run).lanes[0].spans if span.kind == "forms"]
    assert (formed.begin, formed.end) == pytest.approx((0.0, 0.75))


def test_nodes_stand_where_the_decision_before_has_put_them(run: MadeUpRun) -> None:
    run.say(0.0, started())
    run.decide(2.0, 0, "killed", next=next_membership(1, (0, 1, None, 3), (0, 1, 4, 3)), lost_nodes=[2])
    run.say(3.0, events.RecoveryStarted(generation=1, strategy="localized_replay", iteration=16))
    run.say(12.0, events.RankFailed(rank=2, node=4, signal="SIGKILL", first=True, iteration=17))
    run.decide(12.1, 1, "killed", next=next_membership(2, (0, 1, 3), (0, 1, 3)), lost_nodes=[4])
    run.say(13.0, events.RecoveryStarted(generation=2, strategy="living_state", iteration=16))
    lanes = timeline_of(run, 2).lanes
    assert [(lane.name, lane.node, lane.fate) for lane in lanes][2:] == [
        ("rank 2", 3, "was rank 3"),
        ("rank 2", 4, "lost"),
    ]


def test_a_report_of_an_iteration_before_the_change_ends_no_pause(run: MadeUpRun) -> None:
    run.say(0.0, started(2))
    end = run.train(1, 4, 0.0)
    run.decide(end - 0.01, 0, "nodes [1] join", next=next_membership(1, (0, 1), (0, 1)), joined_nodes=[1])
    about = {"world_size": 2, "nodes": (0, 1), "reason": "nodes [1] join", "iteration": 4}
    run.say(end + 0.7, events.MembershipChanged(generation=1, seconds=0.6, **about))
    run.train(5, 5, end + 0.7)
    (recovery,) = run.report().recoveries
    assert recovery.pause_seconds == pytest.approx(0.01 + 0.7 + ITERATION_SECONDS)
    assert recovery.course is not None and [record.iteration for record in recovery.course.after] == [5]
