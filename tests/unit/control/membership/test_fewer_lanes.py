"""Tests jobs that keep their layout while a node can take each lost place, and continue with fewer nodes otherwise."""

import random
from dataclasses import replace

import pytest

from megatron_ft.control.membership.events import DrainRequested, NodeJoined, NodeLost, RankBroken, RankExited
from megatron_ft.control.membership.joining import NodeRules
from megatron_ft.control.membership.state import AgentState, Decision, MembershipPolicy, Phase, Step
from megatron_ft.planning.recovery.layout import JobLayouts, LaneLimits
from tests.helpers.node_states import of_agents
from tests.unit.control.membership.test_joining import ready, shape
from tests.unit.control.membership.test_reconfigure import Job
from tests.unit.control.membership.test_replacing import facts_of, lose, report, settle

WAIT, REFORM, STOP, RESTART = Decision.WAIT, Decision.REFORM, Decision.STOP, Decision.RESTART
BOTH = MembershipPolicy(
    num_nodes=4,
    ranks_per_node=2,
    start_timeout_seconds=100.0,
    stop_timeout_seconds=20.0,
    num_spare_nodes=1,
    keeps_layout=True,
    min_nodes=2,
)
PIPELINE = replace(
    BOTH,
    ranks_per_node=1,
    job_layouts=JobLayouts(num_nodes=4, ranks_per_node=1, num_stages=2, keeps_layout=True, limits=LaneLimits(most=2)),
)


def keeps(step: Step) -> bool:
    """Return whether the next membership keeps the layout."""
    assert step.decision is REFORM and step.reform is not None
    assert step.reform.keeps_layout is not step.state.has_changed_layout
    return step.reform.keeps_layout


def test_a_spare_keeps_the_layout_and_the_next_loss_takes_a_lane() -> None:
    job = Job(BOTH)
    ready(job, 4)
    step = lose(job, 1)
    assert keeps(step) and shape(step) == ((0, 1, None, None, 4, 5, 6, 7), (0, 0, 4, 4, 2, 2, 3, 3))
    step = lose(job, 2)
    assert not keeps(step)
    assert shape(step) == ((0, 1, 2, 3, 6, 7), (0, 0, 4, 4, 3, 3)), "ranks keep the order of their places"
    assert settle(job) == []
    assert lose(job, 3).decision is REFORM and job.state.members == (0, 4)
    step = job.die(8)
    assert (step.decision, step.reason) == (STOP, "too few nodes are left: 1, below recovery.min_nodes=2")


def test_more_losses_than_spares_change_the_layout_and_the_spare_joins() -> None:
    job = Job(BOTH)
    ready(job, 4)
    job.die(2)
    job.die(4)
    step = job.say(0, 1, 6, 7)
    assert not keeps(step) and shape(step) == ((0, 1, 6, 7, None, None), (0, 0, 3, 3, 4, 4))


def test_a_node_that_may_be_started_again_keeps_the_layout_until_it_was_lost_too_often() -> None:
    job = Job(replace(BOTH, num_spare_nodes=0, restart_lost_nodes=True, max_node_restarts=1))
    assert lose(job, 1).decision is Decision.START_NODES
    assert keeps(report(job, 1)), "the layout waits for the node"
    step = lose(job, 1)
    assert not keeps(step) and job.state.members == (0, 2, 3)


def test_a_place_that_becomes_hopeless_while_it_is_filled_is_given_up() -> None:
    job = Job(replace(BOTH, num_spare_nodes=0, restart_lost_nodes=True, max_node_restarts=1))
    assert lose(job, 1).decision is Decision.START_NODES
    step = job.see(RankExited(2, -9, job.now, done=False))
    assert not keeps(step) and job.state.members == (0, 2, 3)
    assert [(step.decision, step.nodes) for step in settle(job)] == [(Decision.KILL_NODES, (1,))]


def test_a_node_that_comes_back_grows_the_job_again_and_spares_replace_without_places() -> None:
    job = Job(BOTH)
    ready(job, 4)
    lose(job, 1)
    job.see(NodeLost(2, 0.0, "cable"))
    step = job.say(0, 1, 6, 7, 8, 9)
    assert not keeps(step)
    assert job.see(NodeJoined(2)).decision is Decision.START_NODES
    report(job, 2)
    change = job.tick(BOTH.join_window_seconds)
    assert change.decision is Decision.CHANGE
    for rank in (0, 1, 6, 7, 8, 9):
        step = job.see(RankBroken(rank, job.position(rank), job.now, iteration=5, planned=True))
    assert not keeps(step) and job.state.members == (0, 4, 3, 2)
    assert job.state.has_changed_layout, "from now on, ranks exchange state as in an elastic job"


def _grown() -> Job:
    """Return a job that went on without node 2, and then has all four nodes again."""
    job = Job(replace(BOTH, max_restarts=1))
    ready(job, 4)
    lose(job, 1)
    assert not keeps(lose(job, 2))
    job.see(NodeJoined(2))
    report(job, 2)
    assert job.tick(BOTH.join_window_seconds).decision is Decision.CHANGE
    for rank in (0, 1, 6, 7, 8, 9):
        step = job.see(RankBroken(rank, job.position(rank), job.now, iteration=5, planned=True))
    assert not keeps(step) and job.state.members == (0, 4, 3, 2)
    return job


def test_a_spare_takes_no_place_in_a_job_that_has_all_its_nodes_again() -> None:
    job = _grown()
    job.see(NodeJoined(1))
    report(job, 1)
    assert job.state.nodes.waiting == {1}
    assert NodeRules(job.policy).replacements(job.state) == frozenset(), "no node takes a place"
    step = lose(job, 4)
    assert not keeps(step)
    assert shape(step) == ((0, 1, 4, 5, 6, 7, None, None), (0, 0, 3, 3, 2, 2, 1, 1)), "it joins behind the others"


def test_only_a_start_of_all_ranks_returns_to_the_layout() -> None:
    job = _grown()
    for node in job.state.members:
        for rank in job.policy.ranks_of(node):
            step = job.see(RankExited(rank, 1, job.now, done=False))
    assert (step.decision, step.state.members) == (RESTART, (0, 4, 3, 2))
    assert not step.state.has_changed_layout


def test_the_nodes_that_could_take_a_further_place_are_known() -> None:
    job = Job(BOTH)
    rules = NodeRules(job.policy)
    assert rules.replacements(job.state) == {4}, "the spare may have been started together with the job"
    ready(job, 4)
    assert rules.replacements(job.state) == {4}
    lose(job, 1)
    assert job.state.members == (0, 4, 2, 3) and rules.replacements(job.state) == frozenset()
    job.see(NodeJoined(1))
    assert rules.replacements(job.state) == {1}, "a former member that registers again waits as a spare"


def test_a_spare_that_died_takes_no_place_unless_it_is_started_again() -> None:
    for restarts, expected in ((False, frozenset[int]()), (True, frozenset({4}))):
        job = Job(replace(BOTH, restart_lost_nodes=restarts))
        ready(job, 4)
        job.see(NodeLost(4, 0.0, "cable"))
        assert NodeRules(job.policy).replacements(job.state) == expected


def test_a_member_that_was_lost_too_often_is_not_started_again() -> None:
    job = Job(replace(BOTH, num_spare_nodes=0, restart_lost_nodes=True, max_node_restarts=1))
    assert not NodeRules(job.policy).is_worn(job.state, 1, 5)
    lose(job, 1)
    report(job, 1)
    assert [NodeRules(job.policy).is_worn(job.state, node, 5) for node in (0, 1)] == [False, True]
    assert not NodeRules(job.policy).is_worn(job.state, 1, 50), "it has trained for long enough since"
    step = lose(job, 1)
    assert not keeps(step)


def test_nodes_leave_on_request_only_after_the_layout_has_changed() -> None:
    job = Job(replace(BOTH, num_spare_nodes=0, restart_lost_nodes=True, max_node_restarts=0))
    refused = NodeRules(job.policy).refuse_drain(job.state, 0)
    assert refused is not None and "recovery.keep_layout=true" in refused
    lose(job, 1)
    assert NodeRules(job.policy).refuse_drain(job.state, 0) is None
    assert job.see(DrainRequested(0)).decision is Decision.CHANGE


def test_pipelines_change_their_layout_from_the_places_of_substitutes() -> None:
    job = Job(PIPELINE)
    ready(job, 4)
    job.die(1)
    step = job.say(0, 2, 3)
    assert keeps(step) and shape(step) == ((0, None, 2, 3), (0, 4, 2, 3))
    job.die(2)
    step = job.say(0, 3, 4)
    assert not keeps(step)
    assert step.reform is not None and step.reform.base is not None
    assert step.reform.base.nodes == (0, 4, 2, 3)
    # One lane: node 0 keeps stage 0, node 3 keeps stage 1, and the substitute is a hot spare.
    assert (shape(step), step.reform.layout.spares) == (((0, 3), (0, 3)), (4,))


def test_too_few_groups_for_a_lane_stop_the_job_with_both_reasons() -> None:
    job = Job(replace(PIPELINE, min_nodes=1, num_spare_nodes=0, restart_lost_nodes=False))
    job.die(1)
    job.die(2)
    step = job.die(3)
    assert step.decision is STOP
    assert "node 1 is lost and has no replacement" in step.reason and "complete groups" in step.reason


def test_all_ranks_start_again_on_fewer_nodes_if_no_agent_can_take_a_place() -> None:
    job = Job(replace(BOTH, max_restarts=1, num_spare_nodes=0, restart_lost_nodes=False, min_nodes=3))
    job.see(NodeLost(1, 0.0, "cable"))
    for rank in (0, 1, 4, 5, 6, 7):
        step = job.see(RankExited(rank, 1, 0.0, done=False))
    assert (step.decision, step.state.members) == (RESTART, (0, 2, 3))
    assert step.state.has_changed_layout
    full = Job(replace(BOTH, max_restarts=1))
    for rank in range(8):
        step = full.see(RankExited(rank, 1, 0.0, done=False))
    assert (step.decision, step.state.members, step.state.has_changed_layout) == (RESTART, (0, 1, 2, 3), False)


@pytest.mark.parametrize("block", range(3))
def test_whatever_happens_the_layout_changes_only_if_a_place_stays_empty(block: int) -> None:
    kept = changed = grown = 0
    for seed in range(100 * block, 100 * block + 100):
        chance = random.Random(seed)
        job = Job(
            replace(
                BOTH,
                ranks_per_node=chance.randint(1, 2),
                num_spare_nodes=chance.randint(0, 2),
                restart_lost_nodes=chance.random() < 0.5,
                max_node_restarts=chance.randint(0, 2),
                min_nodes=chance.randint(1, 3),
                max_restarts=chance.randint(0, 2),
            )
        )
        for _ in range(200):
            before = job.state
            event = next(facts_of(job, chance), None)
            wake = before.wake_seconds
            step = job.tick(1.0 if wake is None else max(0.0, wake - job.now)) if event is None else job.see(event)  # type: ignore[arg-type]
            after = step.state
            assert job.policy.fewest_nodes <= len(after.members) <= job.policy.num_nodes
            if after.phase in (Phase.REFORMING, Phase.FILLING, Phase.REPLACING):
                assert after.wake_seconds is not None, f"nothing will ever happen: {after}"
            if step.reform is not None:
                empty = NodeRules(job.policy).why_place_stays_empty(before)
                assert step.reform.keeps_layout <= (not before.has_changed_layout)
                if step.reform.keeps_layout:
                    kept += 1
                    assert len(after.members) == job.policy.num_nodes
                elif not before.has_changed_layout:
                    changed += 1
                    assert len(before.members) == job.policy.num_nodes
                    assert empty is not None or step.reform.lost, "the layout changed without a loss"
                grown += len(after.members) > len(before.members)
                assert not of_agents(after, AgentState.LOST) & set(after.members)
            if step.decision is Decision.END:
                break
    assert min(kept, changed, grown) > 5, (kept, changed, grown)
