"""Tests nodes that join and leave a running job, with the state machine on a virtual clock."""

from dataclasses import replace

import pytest

from megatron_ft.control.membership.events import (
    AddRequested,
    DrainRequested,
    KillRequested,
    NodeJoined,
    NodeLost,
    RankBroken,
    RankExited,
    RankRaised,
    RankReported,
    StopRequested,
)
from megatron_ft.control.membership.machine import initial
from megatron_ft.control.membership.state import (
    Decision,
    FailedStart,
    MembershipPolicy,
    NodeState,
    Outcome,
    Phase,
    Step,
)
from tests.helpers.node_states import left
from tests.unit.control.membership.test_reconfigure import Job

WAIT, REFORM, CHANGE = Decision.WAIT, Decision.REFORM, Decision.CHANGE
POLICY = MembershipPolicy(
    num_nodes=2, ranks_per_node=2, start_timeout_seconds=100.0, stop_timeout_seconds=20.0, min_nodes=1, max_nodes=4
)
SPARE = replace(POLICY, num_nodes=3, max_nodes=None, num_spare_nodes=1)


def ready(job: Job, *nodes: int) -> Step:
    """Let nodes register and their ranks report."""
    for node in nodes:
        if job.see(NodeJoined(node)).decision is not Decision.START_NODES:
            assert job.tick(0.0).decision is Decision.START_NODES
        for rank in job.policy.ranks_of(node):
            step = job.see(RankReported(rank))
    return step


def stand(job: Job, *ranks: int, completed: int = 4) -> Step:
    """Let ranks report that they wait at the boundary of a change."""
    for rank in ranks:
        step = job.see(RankBroken(rank, job.position(rank, completed), job.now, planned=True))
    return step


def shape(step: Step) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    assert step.reform is not None
    return step.reform.previous_ranks, step.reform.layout.rank_nodes


def test_a_node_that_registers_later_is_started_and_joins_at_a_boundary() -> None:
    job = Job(POLICY)
    step = job.see(NodeJoined(3))
    assert (step.decision, step.nodes, step.state.phase) == (Decision.START_NODES, (3,), Phase.RUNNING)
    assert job.see(NodeJoined(3)).decision is WAIT, "it is started once"
    assert job.see(RankReported(6)).decision is WAIT
    job.see(RankReported(7), after_seconds=2.0)
    assert job.state.wake_seconds == 7.0
    assert job.tick(4.9).decision is WAIT
    step = job.tick(0.1)
    assert (step.decision, step.reason, step.nodes) == (CHANGE, "nodes [3] join", ())
    assert job.tick(1.0).decision is WAIT, "it is ordered once"
    assert stand(job, 0, 1, 2).decision is WAIT
    step = stand(job, 3)
    assert (step.decision, step.reason) == (REFORM, "nodes [3] join")
    assert shape(step) == ((0, 1, 2, 3, None, None), (0, 0, 1, 1, 3, 3))
    assert step.reform is not None and (step.reform.joining, step.reform.lost, step.reform.leaving) == ((3,), (), ())
    assert (step.state.members, step.state.nodes.joining, step.state.num_reforms) == ((0, 1, 3), (), 1)
    for rank in (0, 1, 2, 3, 6):
        assert job.see(RankExited(rank, 0, job.now, done=True)).decision is WAIT
    step = job.see(RankExited(7, 0, job.now, done=True))
    assert (step.decision, step.state.outcome) == (Decision.END, Outcome.FINISHED)


def test_nodes_that_are_ready_within_the_window_join_together() -> None:
    job = Job(POLICY)
    ready(job, 3)
    job.tick(4.0)
    ready(job, 2)
    step = job.tick(1.0)
    assert (step.decision, step.reason) == (CHANGE, "nodes [2, 3] join")
    step = stand(job, 0, 1, 2, 3)
    assert shape(step) == ((0, 1, 2, 3, None, None, None, None), (0, 0, 1, 1, 2, 2, 3, 3))


def test_a_joining_node_that_dies_before_it_is_named_is_killed_and_joins_nothing() -> None:
    job = Job(POLICY)
    ready(job, 3)
    step = job.die(6)
    assert (step.decision, step.nodes) == (Decision.KILL_NODES, (3,))
    assert job.state.nodes.joining == () and not job.state.failures
    assert job.die(7).decision is WAIT
    assert job.state.wake_seconds is None
    ready(job, 2)
    assert job.tick(5.0).decision is CHANGE
    stand(job, 0, 1)
    assert job.die(4).decision is WAIT, "ranks wait at the iteration boundary"
    step = stand(job, 2, 3)
    assert (step.decision, step.reason) == (REFORM, "no node joins or leaves")
    assert shape(step) == ((0, 1, 2, 3), (0, 0, 1, 1))
    assert job.tick(0.0).nodes == (2,), "what is left of it is killed"


def test_a_joining_node_that_dies_in_its_first_membership_breaks_it() -> None:
    job = Job(POLICY)
    ready(job, 3)
    job.tick(5.0)
    stand(job, 0, 1, 2, 3)
    step = job.die(7)
    assert (step.decision, step.reason) == (Decision.BREAK, "rank 5 was killed by SIGKILL")
    assert shape(job.say(0, 1, 2, 3)) == ((0, 1, 2, 3), (0, 0, 1, 1))


def test_a_joining_node_that_does_not_report_is_given_up() -> None:
    job = Job(POLICY)
    job.see(NodeJoined(3))
    job.see(RankReported(6))
    assert job.state.wake_seconds == 100.0
    step = job.tick(100.0)
    assert (step.decision, step.nodes) == (Decision.KILL_NODES, (3,))
    assert job.state.wake_seconds is None


def test_a_joining_node_is_lost_with_its_agent_and_may_register_again() -> None:
    job = Job(POLICY)
    ready(job, 3)
    assert job.see(NodeLost(3, 1.0, "cable")).decision is WAIT
    assert job.state.nodes.joining == () and not job.state.failures
    ready(job, 3)
    assert job.tick(5.0).decision is CHANGE


def test_a_member_leaves_as_asked_and_its_end_is_no_failure() -> None:
    job = Job(replace(POLICY, num_nodes=3))
    step = job.see(DrainRequested(1))
    assert (step.decision, step.reason, step.nodes) == (CHANGE, "nodes [1] leave", (1,))
    assert job.see(DrainRequested(1)).decision is WAIT
    step = stand(job, 0, 1, 2, 3, 4, 5)
    assert shape(step) == ((0, 1, 4, 5), (0, 0, 2, 2))
    assert step.reform is not None and (step.reform.leaving, step.reform.lost) == ((1,), ())
    assert [position.rank for position in step.reform.positions] == list(range(6)), "those who leave know, too"
    assert job.see(RankExited(2, 0, 0.0, done=True)).decision is WAIT
    assert job.see(RankExited(3, 1, 0.0, done=False)).decision is WAIT
    assert (job.state.phase, left(job.state), job.state.failures) == (Phase.RUNNING, {1}, ())
    step = job.see(AddRequested(1))
    assert (step.decision, step.nodes, left(step.state)) == (Decision.START_NODES, (1,), frozenset())


def test_a_node_is_started_again_only_when_the_last_of_its_ranks_is_gone() -> None:
    job = Job(replace(POLICY, num_nodes=3))
    job.die(2)
    job.say(0, 1, 4, 5)
    assert job.see(AddRequested(1)).decision is WAIT
    step = job.die(3)
    assert (step.decision, step.nodes) == (Decision.START_NODES, (1,))
    assert (job.state.nodes.lost, job.state.members) == (frozenset(), (0, 2))
    for rank in (2, 3):
        job.see(RankReported(rank))
    assert job.tick(5.0).decision is CHANGE
    assert shape(stand(job, 0, 1, 4, 5)) == ((0, 1, None, None, 2, 3), (0, 0, 1, 1, 2, 2))


def test_who_may_not_leave_stays() -> None:
    job = Job(POLICY)
    assert job.see(DrainRequested(3)).decision is WAIT, "it is no member"
    assert job.see(DrainRequested(0)).decision is CHANGE
    assert job.see(DrainRequested(1)).decision is WAIT, "one node has to stay"
    assert job.state.nodes.draining == {0}


def test_a_node_that_may_not_leave_after_a_loss_leaves_when_another_has_joined() -> None:
    job = Job(replace(POLICY, num_nodes=3, min_nodes=2))
    job.see(DrainRequested(0))
    stand(job, 0, 1, 2)
    job.die(4)
    step = stand(job, 3)
    assert step.reform is not None and (step.reform.lost, step.reform.leaving) == ((2,), ())
    assert (job.state.members, job.state.nodes.draining, job.state.phase) == ((0, 1), {0}, Phase.RUNNING)
    assert job.tick(0.0).decision is WAIT, "two nodes have to stay"
    ready(job, 3)
    job.tick(5.0)
    step = stand(job, 0, 1, 2, 3)
    assert step.reform is not None and step.reform.joining == (3,)
    step = job.tick(0.0)
    assert (step.decision, step.nodes) == (CHANGE, (0,))


def test_a_death_on_the_way_to_the_boundary_goes_first_and_takes_who_is_ready() -> None:
    job = Job(replace(POLICY, num_nodes=3))
    ready(job, 3)
    job.tick(5.0)
    stand(job, 0, 1, 2)
    assert job.die(5).decision is Decision.BREAK
    step = job.say(3)
    assert step.decision is REFORM
    assert shape(step) == ((0, 1, 2, 3, None, None), (0, 0, 1, 1, 3, 3))
    assert step.reason == "rank 5 was killed by SIGKILL"


def test_a_spare_takes_the_place_of_a_lost_node_and_no_other() -> None:
    job = Job(SPARE)
    ready(job, 3)
    assert job.tick(500.0).decision is WAIT
    assert job.state.nodes.joining[0].state is NodeState.READY and job.state.wake_seconds is None
    job.die(0)
    step = job.say(2, 3, 4, 5)
    assert shape(step) == ((2, 3, 4, 5, None, None), (1, 1, 2, 2, 3, 3))
    assert job.state.members == (1, 2, 3)


def test_a_spare_keeps_a_job_going_that_needs_all_nodes() -> None:
    job = Job(replace(SPARE, min_nodes=3))
    ready(job, 3)
    job.die(0)
    assert job.say(2, 3, 4, 5).decision is REFORM
    step = job.die(2)
    assert (step.decision, step.reason) == (Decision.STOP, "too few nodes are left: 2, below recovery.min_nodes=3")


def test_a_lost_spare_is_no_failure_and_a_node_beyond_the_job_is_started_by_request() -> None:
    job = Job(SPARE)
    assert job.see(NodeLost(3, 1.0, "cable")).decision is WAIT
    step = job.see(AddRequested(3))
    assert (step.decision, step.nodes) == (Decision.START_AGENTS, (3,))
    assert job.see(AddRequested(3)).decision is WAIT
    assert job.see(NodeLost(3, 2.0, "its process exited")).decision is WAIT
    assert job.see(AddRequested(3)).decision is Decision.START_AGENTS, "once more, as asked"
    assert job.see(NodeJoined(3)).decision is Decision.START_NODES


def test_spares_that_register_before_the_others_start_once_the_job_runs() -> None:
    early = Job.__new__(Job)
    early.__dict__.update(policy=SPARE, now=0.0, steps=[], state=initial(SPARE, 0.0))
    for node in (3, 0, 1):
        assert early.see(NodeJoined(node)).decision is WAIT
    assert early.see(NodeJoined(2)).decision is Decision.START
    early.report()
    assert early.state.wake_seconds == 0.0
    assert early.tick(0.0).nodes == (3,)


def test_lost_nodes_are_started_again_where_that_is_wanted() -> None:
    job = Job(replace(POLICY, num_nodes=3, restart_lost_nodes=True))
    job.die(2)
    job.say(0, 1, 4, 5)
    step = job.die(3)
    assert (step.decision, step.nodes) == (Decision.START_NODES, (1,)), "its agent lives"
    job = Job(replace(POLICY, num_nodes=3, restart_lost_nodes=True))
    job.see(NodeLost(1, 0.0, "cable"))
    job.say(0, 1, 4, 5)
    step = job.tick(0.0)
    assert (step.decision, step.nodes) == (Decision.START_AGENTS, (1,))
    assert job.tick(0.0).decision is WAIT
    assert job.see(NodeJoined(1)).decision is Decision.START_NODES


def come_back(job: Job, node: int, *, completed: int) -> None:
    """Let a node whose ranks were started join after iteration ``completed``."""
    for rank in job.policy.ranks_of(node):
        job.see(RankReported(rank))
    assert job.tick(5.0).decision is CHANGE
    ranks = [rank for member in job.state.members for rank in job.policy.ranks_of(member)]
    assert stand(job, *ranks, completed=completed).decision is REFORM


def lose(job: Job, node: int, *, completed: int) -> Step:
    """Let a node's ranks die and all other ranks report their positions. Return the next step."""
    first, second = job.policy.ranks_of(node)
    job.die(first)
    job.say(
        *(rank for other in job.state.members if other != node for rank in job.policy.ranks_of(other)),
        completed=completed,
    )
    return job.die(second)


def test_a_node_that_is_lost_again_and_again_is_left_out_until_somebody_adds_it() -> None:
    job = Job(replace(POLICY, num_nodes=3, restart_lost_nodes=True, max_node_restarts=2))
    for completed in (20, 24):
        assert lose(job, 1, completed=completed).decision is Decision.START_NODES
        come_back(job, 1, completed=completed + 2)
    assert lose(job, 1, completed=30).decision is WAIT, "three times in a row"
    assert job.tick(1000.0).decision is WAIT
    assert job.see(AddRequested(1)).decision is Decision.START_NODES
    come_back(job, 1, completed=40)
    assert lose(job, 1, completed=41).decision is Decision.START_NODES, "a start was requested: the count starts again"


def test_a_node_that_has_settled_may_be_lost_as_often_as_it_likes() -> None:
    job = Job(replace(POLICY, num_nodes=3, restart_lost_nodes=True, max_node_restarts=1))
    for completed in (20, 40, 60, 80):
        assert lose(job, 1, completed=completed).decision is Decision.START_NODES
        come_back(job, 1, completed=completed + 10)


def after_pause(job: Job, seconds: float) -> Step:
    """Return the step in which a node is started again after a failed start. It must not come before ``seconds`` have
    passed."""
    assert job.tick(seconds - 0.1).decision is WAIT
    assert job.state.wake_seconds == pytest.approx(job.now + 0.1)
    return job.tick(0.2)


RETURNING = replace(POLICY, num_nodes=3, restart_lost_nodes=True, max_node_restarts=2)


def test_a_node_whose_process_ends_before_it_registers_is_started_as_often_as_allowed() -> None:
    job = Job(RETURNING)
    job.see(NodeLost(1, 0.0, "cable"))
    job.say(0, 1, 4, 5)
    assert job.tick(0.0).decision is Decision.START_AGENTS
    step = job.see(NodeLost(1, 1.0, "its process exited with code 8"))
    assert step.state.failed_starts == (FailedStart(1, "its process exited with code 8", starts_again=True),)
    step = after_pause(job, 1.0)
    assert (step.decision, step.nodes) == (Decision.START_AGENTS, (1,))
    step = job.see(NodeLost(1, 2.0, "its process exited with code 8"))
    assert step.state.failed_starts == (FailedStart(1, "its process exited with code 8", starts_again=False),)
    assert (step.decision, job.state.wake_seconds) == (WAIT, None)
    step = job.see(AddRequested(1))
    assert (step.decision, step.state.failed_starts) == (Decision.START_AGENTS, ())


def test_pauses_between_failed_starts_grow_and_an_operator_ends_one() -> None:
    job = Job(replace(RETURNING, max_node_restarts=9))
    job.see(NodeLost(1, 0.0, "cable"))
    job.say(0, 1, 4, 5)
    assert job.tick(0.0).decision is Decision.START_AGENTS, "a node that was lost comes back at once"
    for seconds in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0):
        job.see(NodeLost(1, 1.0, "its process exited with code 8"))
        assert after_pause(job, seconds).decision is Decision.START_AGENTS
    job.see(NodeLost(1, 1.0, "its process exited with code 8"))
    assert job.see(AddRequested(1)).decision is Decision.START_AGENTS


@pytest.mark.parametrize("ends_early", [True, False])
def test_a_node_whose_process_hangs_before_it_registers_is_started_again(ends_early: bool) -> None:
    """Its process ends during the pause, or when the launcher replaces it. Either counts as one failure."""
    job = Job(RETURNING)
    job.see(NodeLost(1, 0.0, "cable"))
    job.say(0, 1, 4, 5)
    assert job.tick(0.0).decision is Decision.START_AGENTS
    assert job.state.wake_seconds == 100.0
    step = job.tick(100.0)
    reason = "its agent did not register (launch.start_timeout_seconds=100)"
    assert step.state.failed_starts == (FailedStart(1, reason, starts_again=True),)
    killed = NodeLost(1, 101.0, "its process was killed by SIGKILL")
    if ends_early:
        assert job.see(killed).state.failed_starts == ()
    assert after_pause(job, 1.0).decision is Decision.START_AGENTS
    if not ends_early:
        step = job.see(killed)
        assert (step.decision, step.state.failed_starts) == (WAIT, ())
    assert job.see(NodeJoined(1)).decision is Decision.START_NODES


def test_a_process_that_registers_late_takes_its_node_up_again() -> None:
    job = Job(replace(RETURNING, max_node_restarts=1))
    job.see(NodeLost(1, 0.0, "cable"))
    job.say(0, 1, 4, 5)
    job.tick(0.0)
    assert not job.tick(100.0).state.failed_starts[0].starts_again
    assert (job.tick(1000.0).decision, job.state.wake_seconds) == (WAIT, None)
    job.see(NodeJoined(1))
    assert job.tick(2.0).decision in (WAIT, Decision.START_NODES) and job.state.nodes[1].state is NodeState.STARTING
    assert job.see(NodeLost(1, 9.0, "cable")).state.failed_starts, "its loss counts"


def test_a_joining_node_that_dies_is_started_again_and_counts_like_a_loss() -> None:
    job = Job(RETURNING)
    assert lose(job, 1, completed=20).decision is Decision.START_NODES
    job.see(RankReported(2))
    step = job.die(2)
    assert (step.decision, step.nodes) == (Decision.KILL_NODES, (1,))
    assert step.state.failed_starts == (FailedStart(1, "rank 2 was killed by SIGKILL", starts_again=True),)
    assert job.die(3).decision is WAIT
    step = after_pause(job, 1.0)
    assert (step.decision, step.nodes, step.state.failed_starts) == (Decision.START_NODES, (1,), ())
    step = job.see(NodeLost(1, 3.0, "its process was killed by SIGKILL"))
    assert step.state.failed_starts == (FailedStart(1, "its process was killed by SIGKILL", starts_again=False),)
    assert (step.decision, job.state.wake_seconds) == (WAIT, None)


def test_the_reason_of_a_failed_start_contains_the_last_line_of_the_log() -> None:
    job = Job(RETURNING)
    lose(job, 1, completed=20)
    job.see(RankReported(2))
    step = job.see(RankExited(2, 7, job.now, done=False, last_line="this node cannot join: no compiler found"))
    reason = "rank 2 exited with code 7: this node cannot join: no compiler found"
    assert step.decision is Decision.KILL_NODES
    assert step.state.failed_starts == (FailedStart(1, reason, starts_again=True),)
    assert not step.state.failures and step.state.phase is Phase.RUNNING


def test_a_joining_node_that_is_late_is_killed_and_started_again() -> None:
    job = Job(RETURNING)
    assert lose(job, 1, completed=20).decision is Decision.START_NODES
    step = job.tick(100.0)
    assert (step.decision, step.nodes) == (Decision.KILL_NODES, (1,))
    reason = "not all ranks connected in time (launch.start_timeout_seconds=100)"
    assert step.state.failed_starts == (FailedStart(1, reason, starts_again=True),)
    job.die(2)
    job.die(3)
    assert after_pause(job, 1.0).decision is Decision.START_NODES
    come_back(job, 1, completed=30)


def test_a_spare_comes_back_also_where_its_process_never_registered() -> None:
    policy = replace(SPARE, restart_lost_nodes=True)
    job = Job(policy)
    step = job.see(NodeLost(3, 1.0, "its process exited with code 8"))
    assert [failed.node for failed in step.state.failed_starts] == [3]
    step = after_pause(job, 0.5)
    assert (step.decision, step.nodes) == (Decision.START_AGENTS, (3,))
    ready(job, 3)
    job.see(NodeLost(3, 2.0, "cable"))
    step = after_pause(job, 1.0)
    assert (step.decision, step.nodes) == (Decision.START_AGENTS, (3,))


def test_a_lost_process_of_a_node_that_is_to_come_back_anyway_is_no_failed_start() -> None:
    job = Job(RETURNING)
    job.die(2)
    job.say(0, 1, 4, 5)
    step = job.see(NodeLost(1, 1.0, "its process was killed by SIGKILL"))
    assert (step.decision, step.state.failed_starts) == (Decision.START_AGENTS, ())
    assert [record.num_losses for record in step.state.nodes.records if record.num_losses] == [1], "it was lost once"


def test_a_node_that_was_to_leave_and_dies_does_not_come_back() -> None:
    job = Job(replace(POLICY, num_nodes=3, restart_lost_nodes=True))
    assert job.see(DrainRequested(1)).decision is CHANGE
    assert lose(job, 1, completed=4).decision is WAIT
    assert left(job.state) == {1} and job.state.nodes.wanted == frozenset()
    assert job.tick(1000.0).decision is WAIT


def test_a_node_that_somebody_added_while_ranks_were_dying_is_started_after_a_restart() -> None:
    job = Job(replace(POLICY, num_nodes=3, min_nodes=2, max_restarts=1))
    job.see(NodeLost(2, 0.0, "cable"))
    job.see(AddRequested(2))
    job.see(RankRaised(0, job.now, iteration=3))
    for rank in (0, 1, 2, 3):
        step = job.die(rank)
    assert (step.decision, step.state.members) == (Decision.RESTART, (0, 1))
    for rank in (0, 1, 2, 3):
        job.see(RankReported(rank))
    assert job.tick(0.0).decision is Decision.START_AGENTS


def test_a_stop_request_does_not_wait_for_a_boundary_for_ever() -> None:
    job = Job(POLICY)
    job.see(DrainRequested(0))
    job.see(StopRequested())
    assert job.state.wake_seconds == 20.0
    assert job.tick(19.0).decision is WAIT
    step = job.tick(1.0)
    assert (step.decision, step.reason) == (Decision.KILL, "the ranks did not stop in time")


def test_a_stop_request_waits_for_the_membership_whose_change_was_ordered() -> None:
    job = Job(POLICY)
    ready(job, 3)
    job.tick(5.0)
    assert job.see(StopRequested()).decision is WAIT
    assert stand(job, 0, 1, 2, 3).decision is REFORM
    step = job.tick(0.0)
    assert (step.decision, step.reason) == (Decision.STOP, "the job was asked to stop")
    job = Job(POLICY)
    ready(job, 3)
    assert job.see(StopRequested()).decision is Decision.STOP
    assert job.tick(5.0).decision is WAIT, "no node joins a job that stops"
    for rank in range(4):
        step = job.see(RankExited(rank, 0, job.now, done=True))
    assert step.decision is Decision.END, "joining nodes would wait forever"


def test_ranks_that_do_not_come_to_the_boundary_in_time_end_the_job() -> None:
    job = Job(replace(POLICY, reconfigure_timeout_seconds=30.0))
    job.see(DrainRequested(0))
    assert job.tick(1000.0).decision is WAIT, "an iteration may take its time"
    stand(job, 0, 1, 2)
    assert job.tick(29.9).decision is WAIT
    step = job.tick(0.1)
    assert (step.decision, step.reason) == (
        Decision.STOP,
        "recovery.reconfigure_timeout_seconds=30: timed out waiting for ranks [3]",
    )
    assert job.tick(2.0).decision is Decision.KILL
    for rank in range(4):
        step = job.die(rank)
    assert (step.decision, step.state.outcome) == (Decision.END, Outcome.FAILED)


def test_a_rank_that_fails_on_the_way_to_the_boundary_fails_the_job() -> None:
    job = Job(POLICY)
    job.see(DrainRequested(0))
    stand(job, 0, 1)
    job.say(2)
    assert job.tick(1.9).decision is WAIT
    step = job.tick(0.1)
    assert (step.decision, step.reason) == (Decision.STOP, "rank 2 raised")
    assert [failure.rank for failure in step.state.failures] == [2]


def test_a_job_that_has_begun_to_finish_changes_no_more() -> None:
    job = Job(POLICY)
    ready(job, 3)
    job.see(RankExited(0, 0, 0.0, done=True))
    assert job.tick(5.0).decision is WAIT
    assert job.see(DrainRequested(1)).decision is WAIT
    for rank in (1, 2, 3):
        step = job.see(RankExited(rank, 0, 0.0, done=True))
    assert step.decision is Decision.END


def test_a_restart_takes_healthy_nodes_and_joining_nodes_before_those_that_failed() -> None:
    job = Job(replace(SPARE, min_nodes=3, max_restarts=1))
    ready(job, 3)
    job.see(RankRaised(2, 1.0))
    for rank in range(8):
        step = job.see(RankExited(rank, 1, 2.0, done=False))
    assert (step.decision, step.state.members) == (Decision.RESTART, (0, 1, 2)), "no node was lost"
    assert step.state.nodes.wanted == {3}
    job.report()
    assert job.tick(0.0).nodes == (3,)


def test_a_restart_leaves_out_nodes_that_have_left_or_are_to_leave() -> None:
    job = Job(replace(POLICY, num_nodes=4, max_restarts=1))
    job.see(DrainRequested(1))
    stand(job, *range(8))
    for rank in (2, 3):
        job.see(RankExited(rank, 0, 0.0, done=True))
    job.see(DrainRequested(2))
    job.see(RankRaised(0, 1.0))
    for rank in (0, 1, 4, 5, 6, 7):
        step = job.see(RankExited(rank, 1, 2.0, done=False))
    assert (step.decision, step.state.members, left(step.state)) == (Decision.RESTART, (0, 3), {1, 2})
    assert step.state.nodes.wanted == frozenset()


@pytest.mark.parametrize(("comes_back", "decision"), [(True, Decision.START_AGENTS), (False, WAIT)])
def test_a_lost_node_comes_back_after_a_restart_where_that_is_wanted(comes_back: bool, decision: Decision) -> None:
    job = Job(replace(POLICY, num_nodes=3, max_restarts=1, restart_lost_nodes=comes_back))
    job.see(NodeLost(1, 0.0, "cable"))
    job.see(RankRaised(0, 1.0))
    for rank in (0, 1, 4, 5):
        step = job.see(RankExited(rank, 1, 2.0, done=False))
    assert (step.decision, step.state.members) == (Decision.RESTART, (0, 2))
    for rank in (0, 1, 4, 5):
        job.see(RankReported(rank))
    step = job.tick(0.0)
    assert (step.decision, step.nodes) == (decision, (1,) if comes_back else ())


@pytest.mark.parametrize("policy", [replace(POLICY, min_nodes=None, max_nodes=None)])
def test_a_job_of_fixed_size_admits_nobody(policy: MembershipPolicy) -> None:
    job = Job(policy)
    for event in (AddRequested(1), DrainRequested(1), NodeJoined(1)):
        assert job.see(event).decision is WAIT
    assert job.see(KillRequested()).decision is Decision.KILL
