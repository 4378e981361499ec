"""Tests which nodes take the places of lost nodes in jobs that keep their layout, with chosen and with random
events."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from megatron_ft.control.membership.events import (
    AddRequested,
    DrainRequested,
    KillRequested,
    NodeJoined,
    NodeLost,
    RankBroken,
    RankExited,
    RankHung,
    RankRaised,
    RankReported,
    StopRequested,
)
from megatron_ft.control.membership.joining import NodeRules
from megatron_ft.control.membership.state import AgentState, Decision, MembershipPolicy, Outcome, Phase, State, Step
from megatron_ft.planning.recovery.membership import Target
from tests.helpers.node_states import of_agents
from tests.unit.control.membership.test_joining import ready, shape
from tests.unit.control.membership.test_reconfigure import Job

WAIT, REFORM, BREAK, STOP, RESTART = Decision.WAIT, Decision.REFORM, Decision.BREAK, Decision.STOP, Decision.RESTART
SPARES = MembershipPolicy(
    num_nodes=3,
    ranks_per_node=2,
    start_timeout_seconds=100.0,
    stop_timeout_seconds=20.0,
    num_spare_nodes=2,
    keeps_layout=True,
)
AGAIN = replace(SPARES, num_spare_nodes=0, restart_lost_nodes=True)


def lose(job: Job, node: int, *, completed: int = 4) -> Step:
    """Let a node's ranks die and all other ranks report their positions. Return the step after the last report."""
    first, second = job.policy.ranks_of(node)
    assert job.die(first).decision is BREAK
    job.die(second)
    left = [other for other in job.state.members if other not in job.state.nodes.lost]
    job.say(*(rank for other in left for rank in job.policy.ranks_of(other)), completed=completed)
    return job.steps[-1]


def report(job: Job, node: int) -> Step:
    """Let all ranks of a node connect. Return the next step."""
    for rank in job.policy.ranks_of(node):
        step = job.see(RankReported(rank))
    return step


def settle(job: Job) -> list[Step]:
    """Send ticks as long as they have an immediate effect. Return all decisions except those to wait."""
    before = len(job.steps)
    while job.state.wake_seconds is not None and job.state.wake_seconds <= job.now:
        job.tick(0.0)
    return [step for step in job.steps[before:] if step.decision is not WAIT]


def test_a_ready_spare_takes_the_place_of_a_lost_node() -> None:
    job = Job(SPARES)
    ready(job, 3, 4)
    assert job.tick(1000.0).decision is WAIT, "spares wait"
    step = lose(job, 0)
    assert (step.decision, step.reason, step.nodes) == (REFORM, "rank 0 was killed by SIGKILL", (0,))
    assert shape(step) == ((None, None, 2, 3, 4, 5), (3, 3, 1, 1, 2, 2))
    assert step.reform is not None and (step.reform.lost, step.reform.joining) == ((0,), (3,))
    assert [position.rank for position in step.reform.positions] == [2, 3, 4, 5], "only of those that stay"
    assert (job.state.members, job.state.phase, job.state.generation) == ((3, 1, 2), Phase.RUNNING, 1)
    assert settle(job) == [], "the other spare waits, and the lost node does not come back"
    step = lose(job, 3)
    assert shape(step) == ((None, None, 2, 3, 4, 5), (4, 4, 1, 1, 2, 2)), "the spare has the numbers of its place"
    for rank in (8, 9, 2, 3, 4, 5):
        end = job.see(RankExited(rank, 0, job.now, done=True))
    assert (end.decision, end.state.outcome) == (Decision.END, Outcome.FINISHED)


def test_several_places_are_filled_in_order_by_those_that_have_waited_longest() -> None:
    job = Job(replace(SPARES, num_spare_nodes=3))
    ready(job, 5, 3, 4)
    job.die(0)
    job.die(4)
    step = job.say(2, 3)
    assert step.decision is REFORM
    assert shape(step) == ((None, None, 2, 3, None, None), (5, 5, 1, 1, 3, 3))


def test_a_lost_node_without_a_spare_is_started_again_and_takes_its_own_place() -> None:
    job = Job(AGAIN)
    step = lose(job, 1)
    assert job.state.phase is Phase.FILLING
    assert (step.decision, step.nodes) == (Decision.START_NODES, (1,))
    assert job.state.nodes.lost == {1}, "its place is not filled yet"
    assert settle(job) == []
    assert job.see(RankReported(2)).decision is WAIT
    step = job.see(RankReported(3))
    assert shape(step) == ((0, 1, None, None, 4, 5), (0, 0, 1, 1, 2, 2))
    assert step.reform is not None and (step.reform.lost, step.reform.joining) == ((1,), (1,))
    assert step.nodes == (), "its new ranks are not killed"
    assert step.reform.target == Target(iteration=4, vote=None)
    assert (job.state.members, job.state.nodes.lost, job.state.nodes.wanted) == ((0, 1, 2), frozenset(), frozenset())
    assert settle(job) == []


def test_a_node_is_started_only_when_the_last_of_its_ranks_is_gone() -> None:
    job = Job(AGAIN)
    job.die(2)
    assert job.say(0, 1, 4, 5).decision is WAIT
    assert settle(job) == []
    step = job.die(3)
    assert (step.decision, step.nodes) == (Decision.START_NODES, (1,))


def test_a_lost_node_without_a_process_gets_one_first() -> None:
    job = Job(AGAIN)
    assert job.see(NodeLost(1, 0.0, "cable")).decision is BREAK
    step = job.say(0, 1, 4, 5)
    assert (step.decision, step.nodes) == (Decision.START_AGENTS, (1,))
    assert settle(job) == []
    step = job.see(NodeJoined(1))
    assert (step.decision, step.nodes) == (Decision.START_NODES, (1,))
    assert report(job, 1).decision is REFORM


def test_a_place_is_not_given_up_where_the_process_that_was_started_for_it_hangs() -> None:
    job = Job(AGAIN)
    job.see(NodeLost(1, 0.0, "cable"))
    assert job.say(0, 1, 4, 5).decision is Decision.START_AGENTS
    step = job.tick(job.policy.start_timeout_seconds)
    assert (step.decision, [failed.starts_again for failed in step.state.failed_starts]) == (WAIT, [True])
    assert job.tick(1.0).decision is Decision.START_AGENTS
    assert job.see(NodeLost(1, job.now, "its process was killed by SIGKILL")).decision is WAIT, "that one is replaced"
    assert job.see(NodeJoined(1)).decision is Decision.START_NODES
    assert report(job, 1).decision is REFORM


def test_those_that_stood_at_a_lost_place_take_it_again_whoever_is_ready_first() -> None:
    job = Job(AGAIN)
    job.die(2)
    job.die(3)
    job.die(4)
    job.die(5)
    job.say(0, 1)
    settle(job)
    assert report(job, 2).decision is WAIT
    assert shape(report(job, 1))[1] == (0, 0, 1, 1, 2, 2)


def test_a_spare_goes_before_the_nodes_own_ranks_which_come_back_as_a_spare() -> None:
    job = Job(replace(AGAIN, num_spare_nodes=1))
    ready(job, 3)
    assert shape(lose(job, 1))[1] == (0, 0, 3, 3, 2, 2)
    (step,) = settle(job)
    assert (step.decision, step.nodes) == (Decision.START_NODES, (1,))
    assert report(job, 1).decision is WAIT
    assert job.tick(1000.0).decision is WAIT, "it waits for the next loss"
    assert shape(lose(job, 2))[1] == (0, 0, 3, 3, 1, 1)


def test_a_spare_that_registers_while_a_place_waits_takes_it() -> None:
    job = Job(replace(SPARES, num_spare_nodes=1))
    assert lose(job, 2).decision is WAIT, "the spare's process was started with the job"
    assert job.see(NodeJoined(3)).decision is Decision.START_NODES
    assert shape(report(job, 3))[1] == (0, 0, 1, 1, 3, 3)
    late = Job(replace(SPARES, num_spare_nodes=1))
    lose(late, 2)
    step = late.tick(100.0)
    assert (step.decision, late.now) == (STOP, 100.0)
    assert step.reason == (
        "node 2 is lost and has no replacement: no spare is left, and the node is not started again, because "
        "nodes.restart_lost_nodes=false"
    )


def test_where_nobody_can_come_the_job_stops_at_once() -> None:
    job = Job(SPARES)
    ready(job, 3)
    job.see(NodeLost(4, 0.0, "cable"))
    job.die(0)
    step = job.die(2)
    assert (step.decision, step.state.phase) == (STOP, Phase.STOPPING)
    assert "node 0 is lost and has no replacement" in step.reason


def test_a_place_that_nobody_starts_in_is_tried_as_often_as_allowed() -> None:
    job = Job(replace(AGAIN, max_node_restarts=2))
    assert lose(job, 1, completed=40).nodes == (1,)
    step = job.die(2)
    assert (step.decision, step.nodes) == (Decision.KILL_NODES, (1,))
    assert job.die(3).decision is WAIT
    step = job.tick(1.0)
    assert (step.decision, step.nodes) == (Decision.START_NODES, (1,))
    step = job.die(2)
    assert step.decision is STOP
    assert step.reason.endswith("too often in a row (nodes.max_node_restarts=2)")
    assert "node 1 is lost" in step.reason


def test_joining_nodes_that_do_not_report_in_time_are_killed_and_tried_again() -> None:
    job = Job(AGAIN)
    lose(job, 1)
    settle(job)
    job.see(RankReported(2))
    assert job.state.wake_seconds == 100.0
    step = job.tick(100.0)
    assert (step.decision, step.nodes) == (Decision.KILL_NODES, (1,))
    assert settle(job) == [], "its ranks still live"
    job.die(2)
    job.die(3)
    assert job.tick(1.0).decision is Decision.START_NODES
    assert report(job, 1).decision is REFORM


def test_processes_that_do_not_register_in_time_are_not_waited_for_more_often_than_allowed() -> None:
    job = Job(replace(AGAIN, max_node_restarts=1))
    job.see(NodeLost(1, 0.0, "cable"))
    job.say(0, 1, 4, 5)
    settle(job)
    assert job.state.wake_seconds == 100.0
    assert job.tick(99.0).decision is WAIT
    assert job.tick(1.0).decision is STOP


def test_a_death_while_a_place_waits_is_announced_and_asks_for_one_more() -> None:
    job = Job(AGAIN)
    lose(job, 1)
    settle(job)
    report_one = job.see(RankReported(2))
    assert report_one.decision is WAIT
    step = job.die(4)
    assert (step.decision, step.nodes) == (BREAK, (2,)), "the ranks that start on node 1 are not killed"
    step = job.die(5)
    assert (step.decision, step.nodes) == (Decision.START_NODES, (2,))
    assert job.see(RankReported(3)).decision is WAIT
    step = report(job, 2)
    assert shape(step) == ((0, 1, None, None, None, None), (0, 0, 1, 1, 2, 2))
    assert [position.rank for position in step.reform.positions] == [0, 1] if step.reform else False


def test_a_joining_node_that_dies_while_its_place_waits_is_tried_again() -> None:
    job = Job(AGAIN)
    job.die(2)
    job.die(4)
    job.die(3)
    job.die(5)
    job.say(0, 1)
    settle(job)
    report(job, 1)
    assert job.see(NodeLost(1, 0.0, "cable")).decision is WAIT
    assert job.tick(0.9).decision is WAIT, "a start that has failed is followed by a pause"
    assert job.tick(0.1).decision is Decision.START_AGENTS
    job.see(NodeJoined(1))
    settle(job)
    assert report(job, 2).decision is WAIT
    assert report(job, 1).decision is REFORM


def test_a_substitute_that_dies_before_it_has_committed_leads_to_the_same_target() -> None:
    job = Job(SPARES)
    ready(job, 3, 4)
    first = lose(job, 1)
    assert first.reform is not None
    assert job.die(6).reason == "rank 2 was killed by SIGKILL", "by its number in the membership"
    step = job.say(0, 1, 4, 5)
    assert shape(step) == ((0, 1, None, None, 4, 5), (0, 0, 4, 4, 2, 2))
    assert step.reform is not None and step.reform.target == first.reform.target
    assert (job.state.generation, job.state.members) == (2, (0, 4, 2))


def test_a_rank_that_stays_silent_loses_its_node_whose_place_is_filled_too() -> None:
    job = Job(SPARES)
    ready(job, 3, 4)
    job.die(0)
    job.say(2, 3, 4)
    step = job.tick(10.0)
    assert (step.decision, step.nodes) == (BREAK, (0, 2))
    assert settle(job)[-1].decision is REFORM
    assert job.state.members == (3, 1, 4)
    alone = Job(replace(SPARES, num_spare_nodes=1))
    ready(alone, 3)
    alone.die(0)
    alone.say(2, 3, 4)
    assert alone.tick(10.0).decision is WAIT, "no node can take a second place: the wait is longer"
    assert alone.tick(50.0).reason == "recovery.reconfigure_timeout_seconds=60: timed out waiting for ranks [5]"


def test_ranks_that_spoke_before_a_death_was_known_wait_for_its_place() -> None:
    job = Job(AGAIN)
    job.say(0, 1, 4, 5)
    step = job.die(2)
    assert (step.decision, step.nodes, step.state.phase) == (BREAK, (1,), Phase.REFORMING)
    assert job.die(3).decision is Decision.START_NODES


def test_the_death_of_everybody_is_an_obstacle() -> None:
    job = Job(SPARES)
    ready(job, 3)
    for rank in (0, 2):
        assert job.die(rank).decision is BREAK
    step = job.die(4)
    assert (step.decision, step.reason) == (STOP, "no node is left: every node of the job is lost")


def test_no_membership_is_formed_of_ranks_without_state() -> None:
    """The last ranks with state die while they send it to other ranks. All ranks then restart at once."""
    job = Job(replace(AGAIN, num_nodes=2, ranks_per_node=1, max_restarts=1))
    job.die(1)
    job.say(0)
    assert job.see(RankReported(1)).decision is REFORM
    assert job.die(0).decision is BREAK
    position = replace(job.position(1), has_state=False)
    step = job.see(RankBroken(1, position, job.now, iteration=5))
    assert (step.decision, step.reason) == (
        STOP,
        "no surviving rank has the model state: all ranks that had it are lost",
    )
    assert job.die(1).decision is Decision.RESTART


def test_positions_that_cannot_be_end_the_wait_before_it_begins() -> None:
    job = Job(AGAIN)
    job.die(2)
    job.say(0, 1, 4)
    step = job.say(5, completed=5)
    assert step.decision is STOP and "has no gradients of iteration 5" in step.reason


def test_no_member_may_leave_and_no_change_is_ordered() -> None:
    job = Job(SPARES)
    ready(job, 3)
    assert "recovery.keep_layout=true" in (NodeRules(job.policy).refuse_drain(job.state, 0) or "")
    assert job.see(DrainRequested(0)).decision is WAIT
    assert job.state.nodes.draining == frozenset()


def test_all_ranks_start_again_by_place_with_a_spare_for_a_node_that_is_gone() -> None:
    job = Job(replace(SPARES, max_restarts=1))
    ready(job, 4, 3)
    lose(job, 0)
    assert job.state.members == (4, 1, 2)
    job.see(NodeLost(1, 1.0, "cable"))
    job.see(RankRaised(4, 1.0))
    for rank in (4, 5, 8, 9, 6, 7):
        step = job.see(RankExited(rank, 1, 1.0, done=False))
    assert (step.decision, step.state.members, step.state.num_restarts) == (Decision.RESTART, (4, 0, 2), 1)
    assert job.state.nodes.with_ranks == {0, 2, 4}
    assert report(job, 4).decision is WAIT
    report(job, 0)
    report(job, 2)
    assert job.state.phase is Phase.RUNNING
    assert [(step.decision, step.nodes) for step in settle(job)] == [(Decision.START_NODES, (3,))]


def test_too_few_living_processes_for_all_places_end_the_job() -> None:
    job = Job(replace(SPARES, max_restarts=1))
    for node in (3, 4, 1):
        job.see(NodeLost(node, 0.0, "cable"))
    for rank in (0, 1, 4, 5):
        step = job.die(rank)
    assert (step.decision, step.reason) == (Decision.END, "node 1 was lost: cable")


def test_a_stop_request_waits_for_the_place_and_a_second_one_does_not() -> None:
    job = Job(AGAIN)
    lose(job, 1)
    assert job.see(StopRequested()).decision is WAIT
    assert report(job, 1).decision is REFORM
    assert job.tick(0.0).decision is STOP
    job = Job(AGAIN)
    lose(job, 1)
    settle(job)
    assert job.see(KillRequested()).decision is Decision.KILL


def test_after_a_stop_request_the_wait_for_a_place_ends_with_the_time_to_stop() -> None:
    job = Job(AGAIN)
    lose(job, 1)
    settle(job)
    job.see(StopRequested(), after_seconds=1.0)
    assert job.state.wake_seconds == 21.0
    assert job.tick(5.0).decision is WAIT
    job.see(NodeLost(1, 6.0, "cable"))
    assert job.tick(1.0).decision is Decision.START_AGENTS
    settle(job)
    assert job.state.wake_seconds == 21.0, "a start of the node does not renew the time"
    assert job.tick(13.0).decision is WAIT
    step = job.tick(1.0)
    assert (step.decision, step.state.phase) == (STOP, Phase.STOPPING)
    assert step.reason.startswith("the job was asked to stop")
    for rank in (0, 1, 4, 5):
        step = job.see(RankExited(rank, 8, job.now, done=False))
    assert step.decision is Decision.END, "and no rank is started again"


def test_a_node_that_is_lost_again_and_again_is_given_up_unless_it_settles() -> None:
    job = Job(replace(AGAIN, max_node_restarts=1))
    for completed in (20, 40):
        lose(job, 1, completed=completed)
        settle(job)
        assert report(job, 1).decision is REFORM
    step = lose(job, 1, completed=45)
    assert (step.decision, max(record.num_losses for record in job.state.nodes.records)) == (STOP, 2)


def facts_of(job: Job, chance: random.Random) -> Iterator[object]:
    """Return possible events for such a job, with those that let it continue more often."""
    state, policy = job.state, job.policy
    nodes = range(policy.most_nodes)
    present = [node for node in state.nodes.with_ranks if node not in of_agents(state, AgentState.LOST)]
    living = [rank for node in present for rank in policy.ranks_of(node) if rank not in state.gone]
    if chance.random() < 0.1 and living:
        rank = chance.choice(living)
        yield chance.choice(
            (
                RankExited(rank, -9, job.now, done=False),
                RankExited(rank, 1, job.now, done=False),
                RankHung(rank, job.now, "gave no sign"),
                NodeLost(policy.node_of(rank), job.now, "cable"),
            )
        )
    elif chance.random() < 0.05:
        yield chance.choice((AddRequested, DrainRequested, NodeJoined))(chance.choice(nodes))
    else:
        yield from _help(job, chance, living)


def _help(job: Job, chance: random.Random, living: list[int]) -> Iterator[object]:
    """Return the events that follow from orders: killed ranks end, started ranks connect, ordered ranks report."""
    state, policy = job.state, job.policy
    lost = {node for step in job.steps for node in step.nodes if step.decision in (BREAK, REFORM, Decision.KILL_NODES)}
    for rank in living:
        node = policy.node_of(rank)
        doomed = (
            node in lost and (node in state.nodes.lost or node not in state.members) and node not in state.nodes.waiting
        )
        if doomed or state.phase in (Phase.STOPPING, Phase.KILLING):
            yield RankExited(rank, -9, job.now, done=False)
            return
    silent = [rank for rank in living if rank not in state.connected]
    if silent:
        yield RankReported(chance.choice(silent))
        return
    spoke = {event.rank for event in state.broken}
    left = [rank for rank in living if job.is_member(rank) and policy.node_of(rank) not in state.nodes.lost]
    unheard = [rank for rank in left if rank not in spoke]
    if state.phase is Phase.REFORMING and unheard:
        rank = chance.choice(unheard)
        yield RankBroken(rank, job.position(rank), job.now)
    for node in sorted(of_agents(state, AgentState.STARTING)):
        yield NodeJoined(node)
        return


def check(policy: MembershipPolicy, before: State, step: Step) -> None:
    """Check the rules that every step of a job that keeps its layout must follow."""
    after = step.state
    assert len(after.members) == len(set(after.members)) == policy.num_nodes
    assert after.generation - before.generation == (step.decision in (REFORM, RESTART))
    if step.decision not in (REFORM, RESTART):
        assert after.members == before.members
        assert step.decision is not Decision.CHANGE, "no node changes its place without a loss"
    waiting = (Phase.REFORMING, Phase.FILLING, Phase.STARTING, Phase.STOPPING, Phase.KILLING, Phase.REPLACING)
    if after.phase in waiting:
        assert after.wake_seconds is not None or not after.failures, (
            f"the state has failures and no wake-up time: {after}"
        )
    if step.decision in (Decision.START_NODES, Decision.KILL_NODES):
        assert not set(step.nodes) & (set(before.members) - before.nodes.lost), "members were treated as joining nodes"
    if step.decision in (BREAK, REFORM):
        assert not set(step.nodes) & after.nodes.waiting, "ranks that were started for a place would be killed"
    if step.decision is RESTART:
        assert not set(after.members) & of_agents(before, AgentState.LOST), "ranks are started on a node that is lost"
    if not policy.keeps_processes:
        forbidden = (BREAK, REFORM, Decision.START_NODES, Decision.KILL_NODES)
        assert step.decision not in forbidden, f"{step.decision} needs processes that continue"
    if step.reform is not None:
        check_reform(policy, before, step)


def check_reform(policy: MembershipPolicy, before: State, step: Step) -> None:
    reform, members, size = step.reform, step.state.members, policy.ranks_per_node
    assert reform is not None
    assert members == reform.layout.rank_nodes[::size] and len(reform.layout.processes) == policy.world_size
    assert set(before.members) & before.nodes.lost <= set(reform.lost), "a lost node kept its place"
    for place, (former, node) in enumerate(zip(before.members, members, strict=True)):
        numbers = tuple(range(place * size, (place + 1) * size))
        if former in reform.lost:
            assert node not in of_agents(step.state, AgentState.LOST)
            assert set(policy.ranks_of(node)) <= step.state.connected - step.state.gone, (
                "a place was filled by the dead"
            )
            assert reform.previous_ranks[numbers[0] : numbers[-1] + 1] == (None,) * size
        else:
            assert node == former, "who stays, stays at its place"
            assert reform.previous_ranks[numbers[0] : numbers[-1] + 1] == numbers
    stayers = [previous for previous in reform.previous_ranks if previous is not None]
    assert [position.rank for position in reform.positions] == stayers
    assert not step.state.nodes.lost & set(members)


def go(job: Job, chance: random.Random, *, only_help: bool) -> Step:
    """Apply one event, or advance the clock to the next deadline, and check the resulting steps."""
    before = job.state
    living = [rank for node in before.nodes.with_ranks for rank in job.policy.ranks_of(node) if rank not in before.gone]
    event = next(_help(job, chance, living) if only_help else facts_of(job, chance), None)
    if event is not None:
        step = job.see(event, after_seconds=chance.choice((0.0, 0.0, 0.1, 5.0)))  # type: ignore[arg-type]
    elif before.wake_seconds is None:
        assert before.phase in (Phase.RUNNING, Phase.ENDED), f"nothing will ever happen: {before}"
        step = job.tick(1.0)
    else:
        step = job.tick(max(0.0, before.wake_seconds - job.now))
    check(job.policy, before, step)
    return step


def play(seed: int) -> Job:
    """Run a job with random events, followed by a time without failures."""
    chance = random.Random(seed)
    policy = replace(
        SPARES,
        num_nodes=chance.randint(2, 4),
        ranks_per_node=chance.randint(1, 2),
        num_spare_nodes=chance.randint(0, 2),
        restart_lost_nodes=chance.random() < 0.7,
        max_node_restarts=chance.randint(0, 4),
        max_restarts=chance.randint(0, 3),
        keeps_processes=chance.random() < 0.7,
    )
    job = Job(policy)
    for _ in range(200):
        if go(job, chance, only_help=False).decision is Decision.END:
            return job
    for _ in range(200):
        state = go(job, chance, only_help=True).state
        if state.phase is Phase.ENDED or (state.phase is Phase.RUNNING and not state.failures):
            return job
    raise AssertionError(f"the job never continues: {job.state}")


def test_whatever_happens_all_places_are_filled_by_the_living_or_the_job_ends() -> None:
    jobs = [play(seed) for seed in range(300)]
    steps = [step for job in jobs for step in job.steps]
    reforms = [step.reform for step in steps if step.reform is not None]
    assert len(reforms) > 300, "nothing was shown"
    pairs = [pair for job in jobs for pair in itertools.pairwise(job.steps)]
    again = [after for before, after in pairs if before.state.phase is Phase.REPLACING and after.decision is RESTART]
    in_place = [reform for reform in reforms if set(reform.lost) & set(reform.joining)]
    several = [reform for reform in reforms if len(reform.lost) > 1]
    during_wait = [step for step in steps if step.decision is Decision.START_AGENTS]
    assert min(len(in_place), len(several), len(during_wait), len(again)) > 30
