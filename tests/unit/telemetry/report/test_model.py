"""Tests the content of pages of made-up runs."""

import pytest

from megatron_ft import events
from megatron_ft.events import Metrics
from megatron_ft.telemetry.report.model import Mark
from megatron_ft.telemetry.report.timeline import Timeline, _steps_of
from megatron_ft.testing.made_up_runs import (
    ZERO,
    MadeUpRun,
    elastic,
    localized,
    next_membership,
    restarted,
    stage_recovery,
    started,
)


def test_the_heading(run: MadeUpRun) -> None:
    localized(run)
    report = run.report()
    assert (report.name, report.model, report.size) == ("trial", "moe_micro", "4 ranks on 4 nodes, cpu")
    assert (report.outcome.level, report.outcome.text) == ("good", "finished: all ranks have finished")
    assert (report.iteration, report.train_iterations, report.num_jobs) == (16, 16, 1)
    assert report.newest_unix_seconds == pytest.approx(ZERO + 10.1)


def test_how_a_run_ended(run: MadeUpRun) -> None:
    run.say(0.0, started())
    assert run.report().outcome.level == "open"
    run.say(1.0, events.RunStopped(exit_code=9, reason="no state"))
    outcome = run.report().outcome
    assert outcome.level == "bad"
    assert outcome.text == "stopped: no state (exit code 9, the state before a failure could not be restored exactly)"
    run.say(2.0, started(resumed_from_iteration=3))
    assert "the run continues" in run.report().outcome.text, "the newest start counts"


def test_a_run_that_has_reported_nothing(run: MadeUpRun) -> None:
    report = run.report()
    assert (report.name, report.size, report.loss, report.recoveries) == ("trial-001", None, (), ())
    assert report.outcome.text == "nothing reported yet"


def test_a_localized_recovery(run: MadeUpRun) -> None:
    localized(run)
    (recovery,) = run.report().recoveries
    assert (recovery.number, recovery.generation, recovery.strategy, recovery.iteration) == (
        1,
        1,
        "localized_replay",
        12,
    )
    assert recovery.is_failure and recovery.lost == "node 2; rank 2 (SIGKILL)"
    assert (recovery.num_replayed, recovery.num_again) == (5, 0)
    assert recovery.seconds == pytest.approx(8.0 - 6.4), "until the last stage was ready"
    assert recovery.pause_seconds == pytest.approx(8.6 - 6.3), "from the kill to the next iteration"
    steps = _steps_of(recovery)
    texts = [text for _, text in steps]
    assert texts[0] == "injected fault: kill in forward of iteration 13, rank 2"
    assert "rank 2 of stage 1 replayed 5 iterations up to 12 in 0.90 s" in texts
    assert texts[-1] == "first iteration after the recovery: 13"
    assert [at for at, _ in steps] == sorted(at for at, _ in steps)


def test_elastic_changes(run: MadeUpRun) -> None:
    elastic(run)
    report = run.report()
    lost, joined = report.recoveries
    assert (lost.strategy, lost.lost, lost.seconds) == ("living_state", "node 1; rank 1 (SIGKILL)", 0.9)
    assert (lost.is_failure, lost.num_replayed, lost.num_again) == (True, 0, 0)
    assert (joined.is_failure, joined.lost, joined.iteration) == (False, "nodes [1] join", 8)
    assert report.size == "3 ranks on 3 nodes, cpu"
    assert [(mark.kind, mark.iteration, mark.number) for mark in report.marks] == [
        ("failure", 5, None),
        ("recovery", 4, 1),
        ("change", 8, 2),
    ]


def test_a_restart_on_fewer_nodes(run: MadeUpRun) -> None:
    restarted(run)
    report = run.report()
    (recovery,) = report.recoveries
    assert recovery.lost == "node 1; rank 1 (SIGKILL); 1 more rank as a consequence"
    assert (recovery.strategy, recovery.iteration, recovery.num_again) == ("checkpoint", 6, 2)
    assert recovery.declined == ("continuing without a restart: no copy of expert 3", "no window")
    assert recovery.seconds == pytest.approx(7.2 - 4.5)
    assert report.num_jobs == 1 and report.size == "2 ranks on 2 nodes, cpu"
    assert report.marks[0] == Mark(
        iteration=9, kind="failure", words="failed in iteration 9: rank 1 (SIGKILL), rank 0 (exit code 8)"
    )
    iterations = [iteration for iteration, _ in report.loss]
    assert iterations == list(range(1, 13)), "what was trained again is there once"


def test_generations_begin_again_in_each_job(run: MadeUpRun) -> None:
    elastic(run)
    run.say(20.0, events.RunStopped(exit_code=130, reason="SIGTERM"))
    run.say(100.0, events.RecoveryStarted(generation=0, strategy="checkpoint", iteration=9))
    run.say(100.5, started(3, resumed_from_iteration=9), events.RanksReady(seconds=0.4, world_size=3))
    end = run.train(10, 12, 100.5)
    run.decide(end + 0.1, 0, "nodes [2] leave", left_nodes=[2])
    about = {"world_size": 2, "nodes": (0, 1), "reason": "nodes [2] leave", "iteration": 12}
    run.say(end + 0.5, events.MembershipChanged(generation=1, seconds=0.4, **about))
    report = run.report()
    assert [(each.generation, each.lost) for each in report.recoveries][2:] == [(0, "SIGTERM"), (1, "nodes [2] leave")]
    assert (report.recoveries[0].lost, report.num_jobs) == ("node 1; rank 1 (SIGKILL)", 2)
    resumed = report.recoveries[2]
    assert not resumed.is_failure, "it was stopped, and another job continued it"
    assert (resumed.strategy, resumed.seconds, resumed.pause_seconds, Timeline.of(resumed)) == (
        "checkpoint",
        0.4,
        None,
        None,
    )


def test_a_job_after_one_that_was_killed_has_its_own_recovery(run: MadeUpRun) -> None:
    elastic(run)
    run.say(100.0, events.RecoveryStarted(generation=0, strategy="checkpoint", iteration=9))
    run.say(100.5, started(3, resumed_from_iteration=9), events.RanksReady(seconds=0.4, world_size=3))
    assert [recovery.strategy for recovery in run.report().recoveries] == ["living_state", "living_state", "checkpoint"]


def test_a_failure_that_nothing_follows_is_marked(run: MadeUpRun) -> None:
    run.say(0.0, started())
    run.train(1, 3, 0.0)
    run.say(2.0, events.RankFailed(rank=0, exit_code=1, first=True, iteration=4))
    run.say(2.1, events.RunStopped(exit_code=7, reason="rank 0 raised"))
    report = run.report()
    assert report.recoveries == ()
    assert [(mark.kind, mark.iteration) for mark in report.marks] == [("failure", 4)]


def test_words_of_a_recovery_that_come_after_the_next_one_belong_to_theirs(run: MadeUpRun) -> None:
    localized(run, ends=False)
    about = {"world_size": 4, "nodes": (0, 1, 3, 4), "reason": "again", "iteration": 16}
    run.say(12.0, events.MembershipChanged(generation=2, seconds=0.5, **about))
    run.say(12.1, stage_recovery(1, "serves", began=7.0, seconds=1.0, bytes_moved=7))
    first, second = run.report().recoveries
    for recovery, has_no_work in ((second, True), (first, False)):
        timeline = Timeline.of(recovery)
        assert timeline is not None and [lane.work is None for lane in timeline.lanes] == [has_no_work] * 4


def test_losses_that_are_no_numbers_are_left_out(run: MadeUpRun) -> None:
    for iteration, loss in enumerate((1.0, float("nan"), float("inf"), 1e300, 2.0), start=1):
        run.line("metrics.jsonl", Metrics(iteration=iteration, values={"loss": loss}).to_record())
    run.line("metrics.jsonl", Metrics(iteration=6, values={"grad_norm": 1.0}).to_record())
    assert run.report().loss == ((1, 1.0), (5, 2.0))


def test_many_ranks_of_many_nodes_are_named_in_short(run: MadeUpRun) -> None:
    run.say(0.0, started(8))
    for rank in (4, 5, 6, 1):
        run.say(1.0, events.RankFailed(rank=rank, signal="SIGKILL", first=rank == 4, iteration=2))
    run.say(1.0, events.RankFailed(rank=0, exit_code=8, iteration=2))
    run.decide(1.1, 0, "killed", declined="no spare", lost_nodes=[1, 3, 2])
    run.say(1.2, events.RecoveryStarted(generation=1, strategy="rollback", iteration=1))
    (recovery,) = run.report().recoveries
    assert recovery.lost == "nodes 1-3; ranks 1, 4-6 (SIGKILL); 1 more rank as a consequence"


def test_a_node_that_is_lost_without_a_word_of_its_ranks_is_marked_too(run: MadeUpRun) -> None:
    run.say(0.0, started())
    run.train(1, 7, 0.0)
    run.decide(4.0, 0, "node 2 was lost", next=next_membership(1, (0, 1, 3), (0, 1, 3)), lost_nodes=[2])
    about = {"world_size": 3, "nodes": (0, 1, 3), "reason": "node 2 was lost", "iteration": 6}
    run.say(5.0, events.MembershipChanged(generation=1, seconds=0.9, **about))
    assert [(mark.kind, mark.iteration) for mark in run.report().marks] == [("failure", 8), ("recovery", 6)]


def test_a_job_that_fails_before_it_trains_has_decisions_of_its_own(run: MadeUpRun) -> None:
    elastic(run)
    run.say(20.0, events.RunStopped(exit_code=7, reason="killed"))
    run.say(99.0, events.RankFailed(rank=0, node=0, exit_code=9, first=True, iteration=8))
    about = {"reason": "rank 0 raised", "failed_ranks": (0,), "iteration": 8, "num_restarts_left": 1}
    run.say(100.0, events.RanksRestarted(generation=1, **about))
    run.say(101.0, started(3, resumed_from_iteration=8), events.RanksReady(seconds=0.4, world_size=3))
    run.decide(101.5, 0, "late", declined="reported after the start")
    report = run.report()
    assert report.num_jobs == 2
    first, _, restart = report.recoveries
    assert (first.lost, first.declined) == ("node 1; rank 1 (SIGKILL)", ())
    assert restart.declined == ("continuing without a restart: reported after the start",)
