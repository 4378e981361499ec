"""Tests jobs whose nodes start by themselves: which nodes they wait for, how long, and what happens if none comes."""

from dataclasses import replace

import pytest

from megatron_ft.config.serialize import from_dict
from megatron_ft.control.membership.events import AddRequested, NodeJoined, NodeLost, RankReported
from megatron_ft.control.membership.joining import NodeRules
from megatron_ft.control.membership.machine import advance, initial
from megatron_ft.control.membership.state import Decision, MembershipPolicy, Phase, Step
from tests.helpers.keys import grouped
from tests.unit.control.membership.test_joining import POLICY, ready
from tests.unit.control.membership.test_reconfigure import Job
from tests.unit.control.membership.test_replacing import SPARES, lose, report

COMING = replace(POLICY, starts_nodes=False)
PLACES = replace(SPARES, starts_nodes=False, num_spare_nodes=1)
AWAITED = replace(PLACES, num_spare_nodes=0, restart_lost_nodes=True)


@pytest.mark.parametrize("starts_nodes", [True, False])
def test_before_the_start_a_node_may_go_and_come_back(starts_nodes: bool) -> None:
    policy = replace(COMING, starts_nodes=starts_nodes)
    state = advance(policy, initial(policy, 0.0), NodeJoined(0), 1.0).state
    step = advance(policy, state, NodeLost(0, 2.0, "no sign"), 2.0)
    if starts_nodes:
        assert step.decision is Decision.END, "who started it has no other"
        return
    assert (step.decision, step.state.phase, step.state.nodes.registered) == (Decision.WAIT, Phase.FORMING, frozenset())
    step = advance(policy, step.state, NodeJoined(1), 3.0)
    assert step.decision is Decision.WAIT, "node 0 is not there"
    assert step.state.deadline_seconds == 100.0, "the wait is no longer for it"
    assert advance(policy, step.state, NodeJoined(0), 4.0).decision is Decision.START


def test_a_lost_node_comes_back_whenever_it_comes() -> None:
    job = Job(COMING)
    job.see(NodeLost(1, 0.0, "cable"))
    assert job.say(0, 1).decision is Decision.REFORM
    assert job.tick(100_000.0).decision is Decision.WAIT
    assert job.see(NodeJoined(1)).decision is Decision.START_NODES


def test_nobody_can_add_a_node_that_is_not_there() -> None:
    job = Job(COMING)
    assert NodeRules(COMING).refuse_add(job.state, 2) == (
        "node 2 has no agent, and launch.node_launcher=none cannot start one; start the node, and it joins"
    )
    assert NodeRules(POLICY).refuse_add(job.state, 2) is None
    ready(job, 2)
    job.see(NodeLost(2, 0.0, "cable"))
    assert NodeRules(COMING).refuse_add(job.state, 2) is not None
    job.see(AddRequested(2))
    assert job.see(NodeJoined(2)).decision is Decision.START_NODES


@pytest.mark.parametrize("starts_nodes", [True, False])
def test_ranks_with_errors_wait_until_missing_heartbeats_can_reveal_a_death(starts_nodes: bool) -> None:
    config = from_dict(grouped(num_nodes=3, ranks_per_node=2, min_nodes=2))
    job = Job(MembershipPolicy.of(config, starts_nodes=starts_nodes))
    job.say(0, 1, 4, 5)
    job.tick(2.0)
    job.tick(9.0)
    step = job.see(NodeLost(1, job.now, "no heartbeat from its agent"))
    assert (step.decision is Decision.REFORM) != starts_nodes, "the launcher would have seen the end at once"
    late = Job(job.policy)
    late.say(0)
    assert late.tick(12.0).decision is Decision.STOP, "no process has ended"


def test_a_kill_waits_until_missing_heartbeats_can_reveal_a_death() -> None:
    config = from_dict({**grouped(num_nodes=3, ranks_per_node=2), "detector": {"heartbeat_timeout_seconds": 30.0}})
    timeouts = [MembershipPolicy.of(config, starts_nodes=starts).kill_timeout_seconds for starts in (True, False)]
    assert timeouts == [10.0, 32.0]


def lose_cable(job: Job, node: int) -> Step:
    """Lose a node with its process, and let all other nodes report their positions."""
    job.see(NodeLost(node, 0.0, "cable"))
    left = [other for other in job.state.members if other != node]
    return job.say(*(rank for other in left for rank in job.policy.ranks_of(other)))


def test_a_place_waits_for_a_spare_that_has_not_come_yet() -> None:
    job = Job(PLACES)
    assert lose_cable(job, 1).decision is Decision.WAIT
    assert job.tick(99.0).decision is Decision.WAIT
    assert job.see(NodeJoined(3)).decision is Decision.START_NODES
    assert report(job, 3).decision is Decision.REFORM
    assert job.state.members == (0, 3, 2)


def test_a_lost_node_that_is_awaited_takes_its_place_from_elsewhere() -> None:
    job = Job(AWAITED)
    step = lose_cable(job, 1)
    assert (step.decision, step.nodes) == (Decision.START_AGENTS, (1,)), "the console starts none and waits"
    assert job.tick(99.0).decision is Decision.WAIT
    assert job.see(NodeJoined(1)).decision is Decision.START_NODES
    for rank in job.policy.ranks_of(1):
        step = job.see(RankReported(rank))
    assert step.decision is Decision.REFORM
    assert job.state.members == (0, 1, 2)


@pytest.mark.parametrize("policy", [PLACES, AWAITED])
def test_who_does_not_come_in_time_is_not_waited_for(policy: MembershipPolicy) -> None:
    job = Job(policy)
    lose_cable(job, 1)
    step = job.tick(101.0)
    assert step.decision is Decision.STOP
    assert "node 1 is lost and has no replacement" in step.reason


def test_a_dead_rank_of_a_node_that_is_there_is_started_as_ever() -> None:
    job = Job(AWAITED)
    step = lose(job, 1)
    assert (step.decision, step.nodes) == (Decision.START_NODES, (1,))
