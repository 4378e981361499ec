"""Tests jobs that keep their layout but not their processes: after a loss all ranks start again, on nodes that replace
the lost ones."""

from dataclasses import replace

from megatron_ft.control.membership.events import (
    AddRequested,
    KillRequested,
    NodeJoined,
    NodeLost,
    RankExited,
    RankReported,
    StopRequested,
)
from megatron_ft.control.membership.joining import NodeRules
from megatron_ft.control.membership.state import AgentState, Decision, MembershipPolicy, Outcome, Phase, Step
from tests.helpers.node_states import of_agents
from tests.unit.control.membership.test_reconfigure import Job
from tests.unit.control.membership.test_replacing import SPARES

WAIT, STOP, RESTART, END = Decision.WAIT, Decision.STOP, Decision.RESTART, Decision.END
POLICY: MembershipPolicy = replace(SPARES, num_spare_nodes=1, keeps_processes=False, max_restarts=2)
AGAIN = replace(POLICY, num_spare_nodes=0, restart_lost_nodes=True)


def lose(job: Job, *nodes: int, iteration: int = 20) -> Step:
    """Let agents end, and all other ranks with errors. Return the last step."""
    for node in nodes:
        job.see(NodeLost(node, job.now, "cable"))
    return end_ranks(job, iteration=iteration)


def end_ranks(job: Job, *, iteration: int = 20) -> Step:
    """Let the remaining ranks end with errors. Return the last step."""
    ranks = [rank for node in job.state.members for rank in job.policy.ranks_of(node)]
    for rank in [rank for rank in ranks if rank not in job.state.gone]:
        job.see(RankExited(rank, 1, job.now, done=False, iteration=iteration))
    return job.steps[-1]


def report(job: Job) -> None:
    """Let all ranks of the members connect."""
    for node in job.state.members:
        for rank in job.policy.ranks_of(node):
            job.see(RankReported(rank))
    assert job.state.phase is Phase.RUNNING


def test_a_spare_takes_the_place_of_a_lost_node_and_all_ranks_start_again() -> None:
    job = Job(POLICY)
    assert job.see(NodeJoined(3)).decision is WAIT, "no rank of a spare is started"
    assert job.see(NodeLost(1, 0.0, "cable")).decision is STOP
    assert end_ranks(job).decision is RESTART
    assert (job.state.generation, job.state.members, job.state.phase) == (1, (0, 3, 2), Phase.STARTING)
    report(job)
    assert job.tick(1000.0).decision is WAIT, "the lost node does not come back"


def test_a_lost_rank_starts_again_on_its_own_node() -> None:
    job = Job(POLICY)
    job.see(NodeJoined(3))
    job.die(2)
    assert end_ranks(job).decision is RESTART
    assert job.state.members == (0, 1, 2)


def test_a_lost_node_without_a_spare_gets_an_agent_before_all_ranks_start() -> None:
    job = Job(AGAIN)
    step = lose(job, 1)
    assert (step.decision, step.nodes, step.state.phase) == (Decision.START_AGENTS, (1,), Phase.REPLACING)
    assert job.tick(1.0).decision is WAIT
    assert job.see(NodeJoined(1)).decision is RESTART
    assert job.state.members == (0, 1, 2)


def test_a_node_that_was_replaced_returns_as_a_spare_without_ranks() -> None:
    job = Job(replace(POLICY, restart_lost_nodes=True))
    job.see(NodeJoined(3))
    assert lose(job, 0).decision is RESTART
    report(job)
    step = job.tick(0.0)
    assert (step.decision, step.nodes) == (Decision.START_AGENTS, (0,))
    assert job.see(NodeJoined(0)).decision is WAIT
    assert lose(job, 2).decision is RESTART
    assert job.state.members == (3, 1, 0)


def test_the_restart_waits_for_as_many_nodes_as_are_missing() -> None:
    job = Job(AGAIN)
    assert lose(job, 0, 1, 2).nodes == (0, 1, 2), "even if every node is lost"
    assert job.see(NodeJoined(2)).decision is WAIT
    assert job.see(NodeJoined(0)).decision is WAIT
    assert job.see(NodeLost(2, job.now, "cable")).decision is WAIT
    assert job.see(NodeJoined(1)).decision is WAIT, "two of three have an agent"
    assert job.tick(1.0).nodes == (2,)
    assert job.see(NodeJoined(2)).decision is RESTART


def test_a_spare_that_registers_late_is_awaited_until_the_time_limit() -> None:
    job = Job(POLICY)
    assert (lose(job, 2).decision, job.state.phase) == (WAIT, Phase.REPLACING)
    assert job.see(NodeJoined(3)).decision is RESTART
    late = Job(POLICY)
    lose(late, 2)
    assert late.tick(99.0).decision is WAIT
    step = late.tick(1.0)
    assert (step.decision, step.state.outcome) == (END, Outcome.FAILED)
    assert step.reason == (
        "node 2 was lost: cable; launch.start_timeout_seconds=100: timed out waiting for nodes that replace the lost "
        "nodes [2]"
    )


def test_a_job_without_a_replacement_ends_and_says_why() -> None:
    job = Job(POLICY)
    job.see(NodeJoined(3))
    lose(job, 1)
    report(job)
    step = lose(job, 2)
    assert step.decision is END
    assert step.reason == (
        "node 2 was lost: cable; node 2 is lost and has no replacement: no spare is left, and the node is not "
        "started again, because nodes.restart_lost_nodes=false"
    )


def test_an_agent_that_fails_again_and_again_is_started_as_often_as_allowed() -> None:
    job = Job(replace(AGAIN, max_node_restarts=2))
    assert lose(job, 1).decision is Decision.START_AGENTS
    step = job.see(NodeLost(1, job.now, "no power"))
    assert [failed.starts_again for failed in step.state.failed_starts] == [True]
    assert job.tick(0.1).decision is WAIT, "after a pause"
    assert job.tick(1.0).decision is Decision.START_AGENTS
    step = job.see(NodeLost(1, job.now, "no power"))
    assert step.decision is END
    assert step.reason.endswith("too often in a row (nodes.max_node_restarts=2)")


def test_an_agent_that_hangs_is_given_up_and_started_again() -> None:
    job = Job(AGAIN)
    lose(job, 1)
    step = job.tick(job.policy.start_timeout_seconds)
    assert (step.decision, [failed.starts_again for failed in step.state.failed_starts]) == (WAIT, [True])
    assert job.tick(1.0).decision is Decision.START_AGENTS
    assert job.see(NodeJoined(1)).decision is RESTART


def test_nodes_that_start_by_themselves_are_awaited() -> None:
    job = Job(replace(AGAIN, starts_nodes=False))
    assert lose(job, 1).decision is Decision.START_AGENTS
    assert job.tick(99.0).decision is WAIT
    assert job.see(NodeJoined(1)).decision is RESTART
    late = Job(replace(AGAIN, starts_nodes=False))
    lose(late, 1)
    assert late.tick(100.0).decision is END


def test_a_loss_while_the_ranks_start_counts_as_a_restart_without_progress() -> None:
    job = Job(replace(AGAIN, num_spare_nodes=1, max_restarts=2))
    job.see(NodeJoined(3))
    assert lose(job, 1).decision is RESTART
    job.see(NodeLost(3, job.now, "cable"))
    assert end_ranks(job, iteration=0).decision is Decision.START_AGENTS
    assert job.see(NodeJoined(1)).decision is RESTART
    report(job)
    assert job.state.num_restarts == 2
    step = lose(job, 0, iteration=20)
    assert step.decision is END, "iteration 20 was reached before"
    assert step.reason.endswith("; the ranks were restarted 2 times without progress (recovery.max_restarts)")


def test_progress_between_losses_of_nodes_resets_the_number_of_restarts() -> None:
    job = Job(replace(AGAIN, max_restarts=1))
    for iteration in (20, 30, 40):
        assert lose(job, 1, iteration=iteration).decision is Decision.START_AGENTS
        assert job.see(NodeJoined(1)).decision is RESTART
        assert job.state.furthest_iteration == iteration
        report(job)


def test_a_request_to_end_is_followed_while_nodes_are_awaited() -> None:
    for request in (StopRequested(), KillRequested()):
        job = Job(AGAIN)
        lose(job, 1)
        assert job.see(request).decision is END


def test_a_spare_that_is_lost_gets_another_agent_and_an_operator_can_add_it() -> None:
    job = Job(replace(POLICY, restart_lost_nodes=True, max_node_restarts=1))
    job.see(NodeJoined(3))
    assert "waiting to join already" in str(NodeRules(job.policy).refuse_add(job.state, 3))
    job.see(NodeLost(3, job.now, "cable"))
    step = job.tick(0.5)
    assert (step.decision, step.nodes, step.state.phase) == (Decision.START_AGENTS, (3,), Phase.RUNNING)
    job.see(NodeLost(3, job.now, "cable"))
    assert job.tick(60.0).decision is WAIT, "lost too often in a row"
    assert NodeRules(job.policy).refuse_add(job.state, 3) is None
    assert job.see(AddRequested(3)).decision is Decision.START_AGENTS
    job.see(NodeJoined(3))
    assert of_agents(job.state, AgentState.REGISTERED) == {0, 1, 2, 3}
    assert lose(job, 1).decision is RESTART
    assert job.state.members == (0, 3, 2)


def test_without_spares_jobs_that_keep_their_processes_wait_for_agents_too() -> None:
    """When every node is lost, no rank is left whose process could continue."""
    job = Job(replace(AGAIN, keeps_processes=True))
    for node in range(3):
        step = job.see(NodeLost(node, job.now, "power"))
    assert (step.decision, step.nodes, step.state.phase) == (Decision.START_AGENTS, (0, 1, 2), Phase.REPLACING)
    for node in range(3):
        step = job.see(NodeJoined(node))
    assert (step.decision, step.state.members) == (RESTART, (0, 1, 2))
