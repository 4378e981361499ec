"""Tests how a job continues without lost nodes, on a virtual clock: with chosen and with random events."""

import random
from dataclasses import replace

import pytest

from megatron_ft.control.membership.events import (
    JobHung,
    KillRequested,
    MachineEvent,
    NodeJoined,
    NodeLost,
    RankBroken,
    RankExited,
    RankHung,
    RankRaised,
    RankReported,
    StopRequested,
    Tick,
)
from megatron_ft.control.membership.machine import advance, initial
from megatron_ft.control.membership.state import Decision, MembershipPolicy, Outcome, Phase, Step, layout_of
from megatron_ft.control.report import lost_records
from megatron_ft.events import RankFailed
from megatron_ft.planning.iteration import Vote
from megatron_ft.planning.recovery.layout import JobLayouts, LaneLimits, MembershipLayout
from megatron_ft.planning.recovery.membership import Position, Target
from megatron_ft.testing.votes import vote_of

POLICY = MembershipPolicy(
    num_nodes=3, ranks_per_node=2, start_timeout_seconds=100.0, stop_timeout_seconds=20.0, min_nodes=1
)
VOTE = vote_of(5)


class Job:
    """Job of three nodes with two ranks each, all of which train. The test advances its clock."""

    def __init__(self, policy: MembershipPolicy = POLICY) -> None:
        self.policy = policy
        self.now = 0.0
        self.state = initial(policy, 0.0)
        self.steps: list[Step] = []
        for node in range(policy.num_nodes):
            self.see(NodeJoined(node))
        self.report()

    def report(self) -> None:
        for rank in range(self.policy.world_size):
            self.see(RankReported(rank))
        assert self.state.phase is Phase.RUNNING

    def see(self, event: MachineEvent, *, after_seconds: float = 0.0) -> Step:
        self.now += after_seconds
        step = advance(self.policy, self.state, event, self.now)
        self.state = step.state
        self.steps.append(step)
        return step

    def die(self, rank: int, *, iteration: int = 0) -> Step:
        return self.see(RankExited(rank, -9, self.now, done=False, iteration=iteration))

    def say(self, *ranks: int, completed: int = 4, vote: Vote | None = None) -> Step:
        for rank in ranks:
            step = self.see(RankBroken(rank, self.position(rank, completed, vote), self.now, iteration=completed + 1))
        return step

    def position(self, rank: int, completed: int = 4, vote: Vote | None = None) -> Position:
        contributed = completed if vote is None else vote.iteration
        number = layout_of(self.policy, self.state).rank_of(rank) if self.is_member(rank) else 0
        return Position(
            rank=number or 0, generation=self.state.generation, completed=completed, contributed=contributed, vote=vote
        )

    def is_member(self, rank: int) -> bool:
        return self.policy.node_of(rank) in self.state.members

    def tick(self, after_seconds: float) -> Step:
        return self.see(Tick(), after_seconds=after_seconds)


def test_a_death_breaks_the_membership_and_the_others_go_on_when_all_have_spoken() -> None:
    job = Job()
    step = job.die(3)
    assert (step.decision, step.reason) == (Decision.BREAK, "rank 3 was killed by SIGKILL")
    assert (step.state.phase, step.state.nodes.announced) == (Phase.REFORMING, {1})
    assert job.say(0, 1, 4).decision is Decision.WAIT
    step = job.say(5)
    assert step.decision is Decision.REFORM and step.reform is not None
    assert (step.reform.lost, step.reform.previous_ranks, step.reform.layout.rank_nodes) == (
        (1,),
        (0, 1, 4, 5),
        (0, 0, 2, 2),
    )
    assert step.reform.target == Target(iteration=4, vote=None)
    assert [position.rank for position in step.reform.positions] == [0, 1, 4, 5]
    assert (step.state.phase, step.state.generation, step.state.members) == (Phase.RUNNING, 1, (0, 2))
    assert job.die(2).decision is Decision.WAIT, "it was on the lost node"
    for rank in (0, 1, 4, 5):
        end = job.see(RankExited(rank, 0, job.now, done=True))
    assert (end.decision, end.state.outcome) == (Decision.END, Outcome.FINISHED)


def test_the_target_carries_a_vote_that_somebody_has_settled() -> None:
    job = Job()
    job.die(3)
    job.say(0, 1, 4, vote=VOTE)
    step = job.see(RankBroken(5, replace(job.position(5), contributed=5), 0.0))
    assert step.reform is not None and step.reform.target == Target(iteration=5, vote=VOTE)


def test_positions_that_cannot_be_lead_to_the_way_of_jobs_that_need_all() -> None:
    job = Job()
    job.die(3)
    job.say(0, 1, 4)
    step = job.say(5, completed=5)
    assert (step.decision, step.state.phase) == (Decision.STOP, Phase.STOPPING)
    assert "has no gradients of iteration 5" in step.reason


def test_ranks_may_fail_before_the_death_of_their_peer_is_known() -> None:
    job = Job()
    assert job.say(0, 1, 4, 5).decision is Decision.WAIT
    step = job.see(RankExited(2, -9, 0.0, done=False), after_seconds=1.9)
    assert step.decision is Decision.REFORM, "no rank is left that could be stopped"
    assert step.reform is not None and step.reform.lost == (1,)


def test_an_error_without_a_death_is_the_failure_of_its_rank() -> None:
    job = Job()
    job.say(4)
    job.see(Tick(), after_seconds=1.0)
    assert job.say(0).decision is Decision.WAIT
    step = job.tick(1.0)
    assert (step.decision, step.reason) == (Decision.STOP, "rank 4 raised")
    assert [failure.rank for failure in step.state.failures] == [4, 0]


def test_a_death_while_ranks_say_how_far_they_are_loses_its_node_too() -> None:
    job = Job()
    job.die(3)
    job.say(0, 1, 4)
    step = job.die(5)
    assert step.decision is Decision.REFORM, "ranks 0 and 1 have spoken"
    assert step.reform is not None and (step.reform.lost, step.reform.layout.rank_nodes) == ((1, 2), (0, 0))
    job = Job()
    job.die(3)
    job.say(0)
    assert job.die(5).decision is Decision.BREAK
    assert job.state.nodes.announced == {1, 2}
    assert job.say(1).decision is Decision.REFORM


def test_a_death_after_the_next_membership_was_ordered_breaks_that_one() -> None:
    job = Job()
    job.die(0)
    job.say(2, 3, 4, 5)
    step = job.die(4)
    assert (step.decision, step.reason) == (Decision.BREAK, "rank 2 was killed by SIGKILL"), "by its new number"
    assert job.say(2).decision is Decision.WAIT
    step = job.say(3)
    assert step.reform is not None and step.reform.previous_ranks == (0, 1)
    assert (step.state.generation, step.state.members) == (2, (1,))


def test_what_is_said_of_an_earlier_membership_or_twice_changes_nothing() -> None:
    job = Job()
    late = RankBroken(2, job.position(2), 0.0)
    job.die(0)
    job.say(2, 3, 4, 5)
    job.see(late)
    assert job.state.broken == ()
    job.say(2, 2)
    assert len(job.state.broken) == 1
    job.see(RankBroken(0, job.position(0), 0.0))
    assert len(job.state.broken) == 1, "its node is lost"


def test_a_lost_agent_loses_its_node_and_the_others_start_again_without_it() -> None:
    job = Job(replace(POLICY, max_restarts=1))
    assert job.see(NodeLost(1, 0.0, "cable")).decision is Decision.BREAK
    assert job.say(0, 1, 4, 5).decision is Decision.REFORM
    assert job.see(NodeLost(1, 1.0, "again")).decision is Decision.WAIT
    job.see(RankRaised(0, 2.0))
    for rank in (0, 1, 4, 5):
        step = job.see(RankExited(rank, 1, 3.0, done=False))
    assert (step.decision, step.reason) == (Decision.RESTART, "rank 0 raised")
    assert (step.state.members, step.state.generation) == ((0, 2), 2)
    for rank in (0, 1, 4, 5):
        step = job.see(RankReported(rank))
    assert step.state.phase is Phase.RUNNING
    job.see(RankRaised(4, 4.0))
    for rank in (0, 1, 4, 5):
        step = job.see(RankExited(rank, 1, 5.0, done=False))
    assert (step.decision, step.reason) == (Decision.END, "rank 2 raised"), "once is enough"


def test_too_few_living_agents_end_the_job() -> None:
    job = Job(replace(POLICY, min_nodes=2, max_restarts=3))
    job.see(NodeLost(1, 0.0, "cable"))
    job.say(0, 1, 4, 5)
    step = job.see(NodeLost(2, 1.0, "cable"))
    assert (step.decision, step.reason) == (Decision.STOP, "too few nodes are left: 1, below recovery.min_nodes=2")
    for rank in (0, 1):
        step = job.see(RankExited(rank, 1, 3.0, done=False))
    assert (step.decision, step.reason) == (Decision.END, "node 2 was lost: cable")


def test_too_few_nodes_stop_and_all_start_again_where_the_agents_live() -> None:
    job = Job(replace(POLICY, min_nodes=2, max_restarts=1))
    job.die(0)
    job.say(2, 3, 4, 5)
    step = job.die(2, iteration=7)
    assert (step.decision, step.reason) == (Decision.STOP, "too few nodes are left: 1, below recovery.min_nodes=2")
    for rank in (1, 3, 4, 5):
        step = job.see(RankExited(rank, 1, job.now + 1, done=False))
    assert (step.decision, step.reason) == (Decision.RESTART, "rank 0 was killed by SIGKILL")
    assert (step.state.generation, step.state.members, step.state.nodes.lost) == (2, (0, 1, 2), frozenset())
    assert len(step.state.survived) == 2
    job.report()


def test_ranks_of_which_none_keeps_its_process_start_again_on_the_remaining_nodes() -> None:
    job = Job(replace(POLICY, min_nodes=2, max_restarts=1, keeps_processes=False))
    step = job.see(NodeLost(1, 0.0, "cable"))
    assert (step.decision, step.reason) == (Decision.STOP, "node 1 was lost: cable")
    for rank in (0, 1, 4, 5):
        step = job.see(RankExited(rank, 1, job.now + 1, done=False))
    assert (step.decision, step.state.members, step.state.num_reforms) == (Decision.RESTART, (0, 2), 0)


def test_ranks_that_do_not_speak_in_time_are_named() -> None:
    job = Job(replace(POLICY, reconfigure_timeout_seconds=30.0, position_timeout_seconds=30.0))
    job.die(0)
    job.say(2, 3, 4)
    assert job.tick(29.9).decision is Decision.WAIT
    step = job.tick(0.1)
    assert (step.decision, step.reason) == (
        Decision.STOP,
        "recovery.reconfigure_timeout_seconds=30: timed out waiting for ranks [5]",
    )
    assert job.tick(2.0).decision is Decision.KILL


def test_a_rank_that_stays_silent_while_others_have_spoken_loses_its_node() -> None:
    job = Job(replace(POLICY, position_timeout_seconds=8.0))
    job.die(0)
    assert job.tick(5.0).decision is Decision.WAIT
    job.say(2, 3, 4)
    assert job.tick(2.9).decision is Decision.WAIT
    step = job.tick(0.1)
    assert (step.decision, step.state.nodes.announced) == (Decision.BREAK, {0, 2})
    assert step.state.failures[-1].detail == (
        "rank 5 did not report its position (recovery.position_timeout_seconds=8)"
    )
    step = job.tick(0.0)
    assert step.decision is Decision.REFORM and step.reform is not None
    assert (step.reform.lost, step.reform.layout.rank_nodes) == ((0, 2), (1, 1))
    first, silent = lost_records(step, {}, job.policy)
    assert isinstance(first, RankFailed) and isinstance(silent, RankFailed)
    assert (first.rank, first.first) == (0, True)
    assert (silent.rank, silent.node, silent.error) == (5, 2, step.state.survived[-1][-1].detail)
    assert job.die(5).decision is Decision.WAIT, "it is killed, and that is no failure"


def test_silence_is_borne_as_long_as_the_whole_may_take_where_nobody_else_could_go_on() -> None:
    job = Job(replace(POLICY, min_nodes=2, position_timeout_seconds=8.0, reconfigure_timeout_seconds=30.0))
    job.die(0)
    job.say(2, 3, 4)
    assert job.tick(29.9).decision is Decision.WAIT
    assert job.say(5).decision is Decision.REFORM
    job = Job(replace(POLICY, position_timeout_seconds=8.0, reconfigure_timeout_seconds=30.0))
    job.die(0)
    assert job.tick(29.9).decision is Decision.WAIT, "all are silent: an iteration takes its time"
    step = job.tick(0.1)
    assert (step.decision, step.reason) == (
        Decision.STOP,
        "recovery.reconfigure_timeout_seconds=30: timed out waiting for ranks [2, 3, 4, 5]",
    )


def test_a_rank_that_has_done_its_work_cannot_go_on() -> None:
    job = Job()
    job.see(RankExited(1, 0, 0.0, done=True))
    step = job.die(3)
    assert (step.decision, step.reason) == (
        Decision.STOP,
        "rank 1 has already finished, so the other ranks cannot continue after this loss",
    )


def test_a_rank_that_raises_instead_of_speaking_ends_the_job() -> None:
    job = Job()
    job.die(3)
    assert job.see(RankRaised(0, 0.5)).decision is Decision.STOP


def test_a_stop_request_waits_for_the_next_membership() -> None:
    job = Job()
    job.die(3)
    assert job.see(StopRequested()).decision is Decision.WAIT
    assert job.say(0, 1, 4, 5).decision is Decision.REFORM
    assert job.state.deadline_seconds == job.now
    step = job.tick(0.0)
    assert (step.decision, step.reason) == (Decision.STOP, "the job was asked to stop")
    for rank in (0, 1, 4, 5):
        step = job.see(RankExited(rank, 0, job.now, done=True))
    assert (step.decision, step.state.outcome) == (Decision.END, Outcome.INTERRUPTED)


def test_a_stop_request_waits_until_it_is_known_why_a_rank_failed() -> None:
    job = Job()
    job.say(0)
    assert job.see(StopRequested()).decision is Decision.WAIT
    assert job.tick(2.0).reason == "rank 0 raised"


def test_a_kill_request_kills_while_ranks_say_how_far_they_are() -> None:
    job = Job()
    job.die(3)
    assert job.see(KillRequested()).decision is Decision.KILL


def test_a_rank_that_fails_while_the_job_stops_is_a_failure() -> None:
    job = Job()
    job.see(StopRequested())
    job.say(4)
    assert job.state.first_failure is not None and job.state.first_failure.rank == 4
    assert job.tick(2.0).decision is Decision.KILL


def test_without_min_nodes_every_death_stops_the_job() -> None:
    job = Job(replace(POLICY, min_nodes=None))
    assert job.die(3).decision is Decision.STOP
    job = Job(replace(POLICY, min_nodes=None))
    assert job.say(3).decision is Decision.STOP


def test_a_hung_rank_is_lost_with_its_node_and_dies_once() -> None:
    job = Job()
    step = job.see(RankHung(3, 0.0, "gave no sign for 2 s", iteration=5))
    assert (step.decision, step.reason) == (Decision.BREAK, "rank 3 gave no sign for 2 s")
    job.die(3)
    assert len(job.state.failures) == 1
    step = job.say(0, 1, 4, 5)
    assert step.reform is not None and step.reform.lost == (1,)
    assert job.see(RankHung(3, 0.0, "gave no sign for 2 s")).decision is Decision.WAIT
    job = Job(replace(POLICY, min_nodes=None))
    assert job.see(RankHung(3, 0.0, "gave no sign for 2 s")).decision is Decision.STOP


def test_a_job_whose_ranks_hang_together_starts_again() -> None:
    job = Job(replace(POLICY, max_restarts=1))
    step = job.see(JobHung(0.0, "no rank made progress"))
    assert (step.decision, step.reason) == (Decision.STOP, "no rank made progress")
    assert job.tick(2.0).decision is Decision.KILL
    for rank in range(6):
        step = job.die(rank)
    assert (step.decision, step.state.members) == (Decision.RESTART, (0, 1, 2))


class Chance:
    """Job whose ranks, agents and messages are random, determined by a seed. Every step is checked."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.job = Job(replace(POLICY, min_nodes=self.random.randint(1, 3), max_restarts=self.random.randint(0, 2)))
        self.alive = set(range(self.job.policy.world_size))
        self.output: list[RankBroken] = []
        self.waiting: set[int] = set()
        self.decided: dict[int, list[Decision]] = {}
        self.gone_agents: set[int] = set()

    def run(self) -> Step:
        for _ in range(400):
            step = self.job.see(self.event(), after_seconds=self.random.choice([0.0, 0.0, 0.01, 0.5, 3.0]))
            self.check(step)
            if step.decision is Decision.END:
                return step
        raise AssertionError(f"no end: {self.job.state}")

    def event(self) -> MachineEvent:
        """Return the next random event. Deaths and requests are rare; ranks report after orders, and repeat reports."""
        state, roll = self.job.state, self.random.random()
        if state.deadline_seconds is not None and self.job.now >= state.deadline_seconds:
            return Tick()
        if not self.alive or roll < 0.15:
            return Tick() if state.phase is not Phase.STARTING else self.start()
        rank = self.random.choice(sorted(self.alive))
        if state.phase is Phase.STARTING:
            return self.start()
        if state.phase is Phase.KILLING or roll < 0.22:
            return self.exit(rank, -9)
        if state.phase is Phase.STOPPING and rank not in self.waiting and roll < 0.7:
            return self.exit(rank, self.random.choice([0, 1]))
        if roll < 0.24:
            return self.lose(self.job.policy.node_of(rank))
        if roll < 0.26:
            return self.random.choice([StopRequested(), KillRequested(), RankRaised(rank, self.job.now)])
        if roll < 0.28 and rank not in self.waiting:
            return self.exit(rank, 0)
        if roll < 0.35 and self.output:
            return self.random.choice(self.output)
        if state.phase is Phase.REFORMING or (state.phase is Phase.RUNNING and roll < 0.4):
            return self.speak(rank)
        return Tick()

    def start(self) -> MachineEvent:
        return RankReported(self.random.randrange(self.job.policy.world_size))

    def exit(self, rank: int, returncode: int) -> MachineEvent:
        self.alive.discard(rank)
        return RankExited(rank, returncode, self.job.now, done=returncode == 0, iteration=self.random.randrange(9))

    def lose(self, node: int) -> MachineEvent:
        self.gone_agents.add(node)
        self.alive -= set(self.job.policy.ranks_of(node))
        return NodeLost(node, self.job.now)

    def speak(self, rank: int) -> MachineEvent:
        self.waiting.add(rank)
        self.output.append(RankBroken(rank, self.job.position(rank), self.job.now))
        return self.output[-1]

    def check(self, step: Step) -> None:
        before, after = self.job.steps[-2].state, step.state
        policy = self.job.policy
        assert after.generation - before.generation == (step.decision in (Decision.RESTART, Decision.REFORM))
        assert list(after.members) == sorted(set(after.members))
        assert len({event.rank for event in after.broken}) == len(after.broken), "each rank counts once"
        assert {event.position.generation for event in after.broken} <= {after.generation}, "nothing stale counts"
        assert after.phase not in (Phase.RUNNING, Phase.REFORMING) or len(after.members) >= policy.fewest_nodes
        if step.decision in (Decision.REFORM, Decision.RESTART, Decision.END):
            earlier = self.decided.setdefault(before.generation, [])
            assert not earlier, "one decision ends a generation"
            earlier.append(step.decision)
        if step.decision is Decision.RESTART:
            assert not self.gone_agents & set(after.members)
            assert not self.alive
            assert len(after.members) >= policy.fewest_nodes
            assert set(after.members) == set(range(policy.num_nodes)) - self.gone_agents
            self.alive = {rank for node in after.members for rank in policy.ranks_of(node)}
            self.waiting = set()
        else:
            assert set(after.members) <= set(before.members), "who was lost is lost"
        if step.decision is Decision.BREAK:
            assert before.nodes.announced < after.nodes.announced
        if step.decision is Decision.REFORM:
            self.check_reform(step)
        for node in set(before.members) - set(after.members):
            self.alive -= set(policy.ranks_of(node))

    def check_reform(self, step: Step) -> None:
        before, reform = self.job.steps[-2].state, step.reform
        assert reform is not None
        members = {rank for node in step.state.members for rank in self.job.policy.ranks_of(node)}
        assert members <= self.alive, "no member of the new membership has died"
        current = {event.rank for event in self.output if event.position.generation == before.generation}
        assert members <= current, "everybody has spoken"
        assert not self.gone_agents & set(step.state.members)
        assert [position.generation for position in reform.positions] == [before.generation] * len(members)
        assert reform.layout.rank_nodes == tuple(self.job.policy.node_of(rank) for rank in sorted(members))
        self.waiting = set()


TRIED = [Decision[name] for name in ("WAIT", "START", "RESTART", "BREAK", "REFORM", "STOP", "KILL", "END")]


def test_whatever_happens_the_rules_hold() -> None:
    decisions = [decision for seed in range(400) for decision in _decisions(seed)]
    counts = {decision: decisions.count(decision) for decision in Decision}
    assert min(counts[decision] for decision in TRIED) > 20, f"too little was tried: {counts}"
    assert not set(decisions) - set(TRIED), "no node joins or leaves"


def _decisions(seed: int) -> list[Decision]:
    chance = Chance(seed)
    try:
        chance.run()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return [step.decision for step in chance.job.steps]


@pytest.mark.parametrize("event", [RankExited(3, -9, 1.0, done=False), NodeLost(1, 1.0)])
def test_a_death_before_all_ranks_have_reported_stops_the_start(event: MachineEvent) -> None:
    job = Job()
    job.state = replace(job.state, phase=Phase.STARTING, connected=frozenset({0}))
    assert job.see(event).decision is Decision.STOP


# -- hot spares --------------------------------------------------------------------------------------------------

PIPELINE = MembershipPolicy(
    num_nodes=4,
    ranks_per_node=1,
    start_timeout_seconds=100.0,
    stop_timeout_seconds=20.0,
    min_nodes=1,
    job_layouts=JobLayouts(num_nodes=4, ranks_per_node=1, num_stages=2, limits=LaneLimits(most=2)),
)
"""Nodes 0 and 1 have stage 0, and nodes 2 and 3 have stage 1."""


def spared() -> Job:
    """Return a job that has lost node 1, so that node 3 is a hot spare."""
    job = Job(PIPELINE)
    job.die(1)
    step = job.say(0, 2, 3)
    assert step.reform is not None
    assert (step.reform.previous_ranks, step.reform.layout.rank_nodes, step.reform.layout.nodes) == (
        (0, 2),
        (0, 2),
        (0, 2, 3),
    )
    assert step.state.members == (0, 2, 3)
    return job


def test_a_job_ends_when_the_ranks_end_and_hot_spares_do_not_count() -> None:
    job = spared()
    assert job.see(RankExited(0, 0, job.now, done=True)).decision is Decision.WAIT
    assert job.see(RankExited(2, 0, job.now, done=True)).decision is Decision.END


def test_hot_spares_have_no_position_to_report() -> None:
    job = spared()
    assert job.die(3).reason == "process 3, a hot spare, was killed by SIGKILL"
    job.say(0)
    step = job.say(2)
    assert step.reform is not None and (step.reform.previous_ranks, step.reform.layout.nodes) == ((0, 1), (0, 2))


def test_a_hot_spare_has_a_rank_again_without_a_previous_number() -> None:
    job = spared()
    job.die(0)
    step = job.say(2)
    assert (step.decision, step.reform and step.reform.layout.rank_nodes) == (Decision.REFORM, (3, 2))
    assert step.reform is not None and step.reform.previous_ranks == (None, 1)


@pytest.mark.parametrize(("is_formed", "expected"), [(True, (0, 2)), (False, (0, 1))])
def test_a_membership_that_all_ranks_have_formed_is_the_base_of_the_next(
    is_formed: bool, expected: tuple[int, ...]
) -> None:
    """Node 2 was lost and has joined again, and then node 3 is lost before the membership has committed an iteration.
    Only if all ranks had received their state, node 2 has the state of stage 1."""
    job = Job(PIPELINE)
    _, fewer, joined = PIPELINE.layouts.history([(0, 1, 3), range(4)])
    assert isinstance(fewer, MembershipLayout) and isinstance(joined, MembershipLayout)
    assert joined.rank_nodes == (0, 1, 3, 2)
    job.state = replace(job.state, generation=2, layout=joined, base=fewer, begun_iteration=4)
    job.die(3)
    job.say(0, 1)
    step = job.see(RankBroken(2, replace(job.position(2), is_formed=is_formed), 0.0))
    assert step.reform is not None and step.reform.layout.rank_nodes == expected


def test_nodes_that_are_too_few_for_the_layout_are_named() -> None:
    job = spared()
    job.die(0)
    step = job.die(3)
    assert step.decision is Decision.STOP
    assert step.reason.startswith("the job cannot continue on nodes [2]: complete groups of TP * CP = 1 ranks")
