"""Tests the membership state machine on a virtual clock."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.control.membership.events import (
    KillRequested,
    MachineEvent,
    NodeJoined,
    NodeLost,
    RankExited,
    RankRaised,
    RankReported,
    StopRequested,
    Tick,
)
from megatron_ft.control.membership.machine import advance, describe_returncode, initial
from megatron_ft.control.membership.state import Decision, Failure, MembershipPolicy, Outcome, Phase, State, Step

POLICY = MembershipPolicy(
    num_nodes=2,
    ranks_per_node=2,
    start_timeout_seconds=100.0,
    stop_timeout_seconds=20.0,
    failure_grace_seconds=2.0,
    kill_timeout_seconds=10.0,
)


TWO_RESTARTS = replace(POLICY, max_restarts=2)


class Job:
    """Job whose clock the test advances."""

    def __init__(self, policy: MembershipPolicy = POLICY) -> None:
        self.policy = policy
        self.state = initial(policy, 0.0)
        self.now = 0.0

    def see(self, event: MachineEvent, *, after_seconds: float = 0.0) -> Step:
        self.now += after_seconds
        step = advance(self.policy, self.state, event, self.now)
        self.state = step.state
        return step

    def running(self) -> "Job":
        self.see(NodeJoined(0))
        assert self.see(NodeJoined(1)).decision is Decision.START
        return self.report()

    def fail(self, *, at_iteration: int) -> Step:
        """Kill rank 1 in ``at_iteration``, and let the other ranks fail. Return the last step."""
        self.see(RankExited(1, -9, 1.0, done=False, iteration=at_iteration))
        for rank in (0, 2):
            self.exit(rank, 1, at_seconds=2.0)
        return self.exit(3, 1, at_seconds=2.0)

    def report(self) -> "Job":
        for rank in range(4):
            self.see(RankReported(rank))
        assert self.state.phase is Phase.RUNNING
        return self

    def exit(self, rank: int, returncode: int = 0, at_seconds: float = 0.0) -> Step:
        return self.see(RankExited(rank, returncode, at_seconds, done=returncode == 0))


def test_a_job_starts_when_all_nodes_joined_and_finishes_when_all_ranks_ended() -> None:
    job = Job()
    assert job.see(NodeJoined(1)).decision is Decision.WAIT
    assert job.see(NodeJoined(1)).decision is Decision.WAIT
    job = Job().running()
    assert [job.exit(rank).decision for rank in (2, 0, 3)] == [Decision.WAIT] * 3
    last = job.exit(1)
    assert (last.decision, last.state.outcome) == (Decision.END, Outcome.FINISHED)


def test_start_is_decided_once() -> None:
    job = Job()
    decisions = [job.see(event).decision for event in (NodeJoined(0), NodeJoined(1), NodeJoined(1), NodeJoined(0))]
    assert decisions.count(Decision.START) == 1


def test_the_first_death_is_the_earliest_not_the_first_heard_of() -> None:
    job = Job().running()
    assert job.exit(3, 1, at_seconds=50.4).decision is Decision.STOP
    job.exit(1, 4, at_seconds=50.1)
    job.exit(0, 1, at_seconds=50.2)
    end = job.exit(2, 1, at_seconds=50.3)
    assert (end.decision, end.state.outcome) == (Decision.END, Outcome.FAILED)
    assert end.reason == "rank 1 exited with code 4"


def test_a_killed_rank_comes_before_peers_that_complained_while_its_exit_was_on_the_way() -> None:
    job = Job().running()
    job.see(RankRaised(2, 50.00))
    job.exit(3, -6, at_seconds=50.01)
    job.exit(1, -9, at_seconds=50.05)
    assert job.state.first_failure is not None
    assert job.state.first_failure.rank == 1
    late = Job().running()
    late.see(RankRaised(2, 50.0))
    late.exit(1, -9, at_seconds=51.5)
    assert late.state.first_failure is not None
    assert late.state.first_failure.rank == 2


def test_a_rank_that_raises_fails_when_it_raises_not_when_it_is_gone() -> None:
    job = Job().running()
    assert job.see(RankRaised(2, 10.0)).decision is Decision.STOP
    job.exit(0, 1, at_seconds=10.2)
    job.exit(2, 1, at_seconds=11.0)
    first = job.state.first_failure
    assert first is not None
    assert (first.rank, first.at_seconds) == (2, 10.0)


def test_after_the_first_death_the_rest_is_killed_when_its_grace_is_over() -> None:
    job = Job().running()
    job.exit(1, -9)
    assert job.see(Tick(), after_seconds=1.9).decision is Decision.WAIT
    assert job.see(Tick(), after_seconds=0.1).decision is Decision.KILL
    for rank in (0, 2):
        job.exit(rank, -9, at_seconds=99.0)
    end = job.exit(3, -9, at_seconds=99.0)
    assert end.decision is Decision.END
    assert len(end.state.failures) == 1, "ranks that were killed by order did not fail"


def test_a_stop_request_gives_ranks_their_time_then_kills() -> None:
    job = Job().running()
    assert job.see(StopRequested()).decision is Decision.STOP
    assert job.see(StopRequested()).decision is Decision.WAIT
    assert job.see(Tick(), after_seconds=19.9).decision is Decision.WAIT
    assert job.see(Tick(), after_seconds=0.2).decision is Decision.KILL
    for rank in range(4):
        step = job.exit(rank, -9)
    assert (step.decision, step.state.outcome) == (Decision.END, Outcome.INTERRUPTED)


def test_a_kill_request_kills_at_once_and_only_once() -> None:
    job = Job().running()
    job.see(StopRequested())
    assert job.see(KillRequested()).decision is Decision.KILL
    assert job.see(KillRequested()).decision is Decision.WAIT


def test_ranks_that_stop_when_asked_make_an_interrupted_job() -> None:
    job = Job().running()
    job.see(StopRequested())
    for rank in range(4):
        step = job.exit(rank)
    assert (step.decision, step.state.outcome) == (Decision.END, Outcome.INTERRUPTED)


def test_a_death_while_stopping_is_a_failure_and_shortens_the_wait() -> None:
    job = Job().running()
    job.see(StopRequested())
    assert job.exit(0, 5).decision is Decision.WAIT
    assert job.see(Tick(), after_seconds=2.1).decision is Decision.KILL
    assert job.state.outcome is Outcome.FAILED


def test_killed_ranks_nobody_reports_are_given_up() -> None:
    job = Job().running()
    job.see(KillRequested())
    job.exit(0, -9)
    assert job.see(Tick(), after_seconds=9.9).decision is Decision.WAIT
    end = job.see(Tick(), after_seconds=0.2)
    assert end.decision is Decision.END
    assert "[1, 2, 3]" in end.reason


def test_a_lost_node_is_a_failure_and_its_ranks_are_gone() -> None:
    job = Job().running()
    assert job.see(NodeLost(1, 7.0, "cable")).decision is Decision.STOP
    job.exit(0)
    end = job.exit(1)
    assert (end.decision, end.reason) == (Decision.END, "node 1 was lost: cable")


def test_a_lost_node_comes_before_ranks_that_complained_of_it() -> None:
    job = Job().running()
    job.see(RankRaised(0, 7.0))
    job.see(NodeLost(1, 7.5, "cable"))
    job.exit(0, 1, at_seconds=7.1)
    assert job.exit(1, 1, at_seconds=7.1).reason == "node 1 was lost: cable"


def test_ranks_that_have_not_started_have_nothing_to_save() -> None:
    job = Job()
    for event in (NodeJoined(0), NodeJoined(1), RankReported(0)):
        job.see(event)
    assert job.see(StopRequested()).decision is Decision.KILL
    for rank in range(4):
        step = job.exit(rank, -9)
    assert (step.decision, step.state.outcome) == (Decision.END, Outcome.INTERRUPTED)


@pytest.mark.parametrize("event", [StopRequested(), KillRequested(), NodeLost(0, 1.0)])
def test_before_ranks_exist_the_job_just_ends(event: MachineEvent) -> None:
    job = Job()
    job.see(NodeJoined(0))
    assert job.see(event).decision is Decision.END


def test_nodes_that_do_not_join_and_ranks_that_do_not_report_are_named() -> None:
    job = Job()
    job.see(NodeJoined(0))
    end = job.see(Tick(), after_seconds=100.0)
    assert end.decision is Decision.END
    assert "launch.start_timeout_seconds=100" in end.reason and "nodes [1]" in end.reason
    job = Job()
    for event in (NodeJoined(0), NodeJoined(1), RankReported(0), RankReported(2)):
        job.see(event, after_seconds=1.0)
    step = job.see(Tick(), after_seconds=100.0)
    assert step.decision is Decision.KILL
    assert "ranks [1, 3]" in step.reason
    for rank in range(4):
        step = job.exit(rank, -9)
    assert (step.decision, step.state.outcome) == (Decision.END, Outcome.FAILED)


def test_when_all_ranks_are_gone_they_start_again() -> None:
    job = Job(TWO_RESTARTS).running()
    step = job.fail(at_iteration=5)
    assert (step.decision, step.reason) == (Decision.RESTART, "rank 1 was killed by SIGKILL")
    state = job.state
    assert (state.phase, state.generation, state.outcome) == (Phase.STARTING, 1, Outcome.FINISHED)
    assert state.gone == state.connected == frozenset()
    assert [failure.rank for failure in state.survived[0]] == [1, 0, 2, 3]
    job.report()
    for rank in range(4):
        end = job.exit(rank)
    assert (end.decision, end.state.outcome) == (Decision.END, Outcome.FINISHED)


def test_survivors_are_killed_before_all_start_again() -> None:
    job = Job(TWO_RESTARTS).running()
    assert job.exit(1, -9).decision is Decision.STOP
    assert job.see(Tick(), after_seconds=2.0).decision is Decision.KILL
    decisions = [job.exit(rank, -9, at_seconds=9.0).decision for rank in (0, 2, 3)]
    assert decisions == [Decision.WAIT, Decision.WAIT, Decision.RESTART]
    assert [failure.rank for failure in job.state.survived[0]] == [1], "the killed ones did not fail"


def test_restarts_without_progress_are_counted() -> None:
    job = Job(TWO_RESTARTS).running()
    for _ in range(2):
        assert job.fail(at_iteration=5).decision is Decision.RESTART
        job.report()
    end = job.fail(at_iteration=5)
    assert (end.decision, end.state.outcome) == (Decision.END, Outcome.FAILED)
    assert end.reason == "rank 1 was killed by SIGKILL"
    assert len(end.state.survived) == 2


def test_progress_makes_restarts_count_from_zero() -> None:
    job = Job(replace(POLICY, max_restarts=1)).running()
    for generation, iteration in enumerate((3, 4, 9, 10), start=1):
        assert job.fail(at_iteration=iteration).decision is Decision.RESTART
        assert job.state.generation == generation
        job.report()
    assert job.fail(at_iteration=7).decision is Decision.END, "it had been further before"


def test_ranks_that_die_before_they_report_start_again() -> None:
    job = Job(TWO_RESTARTS)
    for event in (NodeJoined(0), NodeJoined(1), RankReported(0)):
        job.see(event)
    assert job.fail(at_iteration=0).decision is Decision.RESTART
    assert job.see(Tick(), after_seconds=99.0).decision is Decision.WAIT
    assert job.see(Tick(), after_seconds=1.0).decision is Decision.KILL, "each start has its own time"
    for rank in range(4):
        end = job.exit(rank, -9)
    assert (end.decision, end.state.outcome) == (Decision.END, Outcome.FAILED), (
        "ranks that never report have not failed by themselves"
    )


def test_an_error_that_another_try_cannot_mend_ends_the_job() -> None:
    job = Job(TWO_RESTARTS).running()
    job.see(RankRaised(0, -0.5, final=True))
    assert job.fail(at_iteration=5).decision is Decision.END
    job = Job(TWO_RESTARTS).running()
    job.see(RankRaised(0, 0.5, final=True))
    assert job.fail(at_iteration=5).decision is Decision.RESTART, "a complaint about a killed peer decides nothing"


@pytest.mark.parametrize("event", [StopRequested(), KillRequested(), NodeLost(0, 1.0)])
def test_nothing_starts_again_after_a_request_or_without_a_node(event: MachineEvent) -> None:
    job = Job(TWO_RESTARTS).running()
    job.see(event)
    assert job.fail(at_iteration=5).decision is Decision.END


def test_a_stop_request_while_ranks_start_again_is_no_failure() -> None:
    job = Job(TWO_RESTARTS).running()
    job.fail(at_iteration=5)
    assert job.see(StopRequested()).decision is Decision.KILL
    for rank in range(4):
        step = job.exit(rank, -9)
    assert (step.decision, step.state.outcome) == (Decision.END, Outcome.INTERRUPTED)


def test_how_a_process_ended_in_words() -> None:
    assert describe_returncode(-9) == "was killed by SIGKILL"
    assert describe_returncode(-64) in ("was killed by SIGRTMAX", "was killed by signal 64")
    assert describe_returncode(3) == "exited with code 3"


EVENTS = st.one_of(
    st.builds(NodeJoined, st.integers(0, 1)),
    st.builds(NodeLost, st.integers(0, 1), st.floats(0, 100)),
    st.builds(RankReported, st.integers(0, 3)),
    st.builds(RankRaised, st.integers(0, 3), st.floats(0, 100)),
    st.builds(RankExited, st.integers(0, 3), st.sampled_from([0, 1, -9]), st.floats(0, 100), st.booleans()),
    st.just(StopRequested()),
    st.just(KillRequested()),
    st.just(Tick()),
)
HISTORIES = st.lists(st.tuples(EVENTS, st.floats(0, 30)), max_size=30)
MISHAPS = st.one_of(
    st.builds(RankReported, st.integers(0, 3)),
    st.builds(RankRaised, st.integers(0, 3), st.floats(0, 100), st.integers(0, 3)),
    st.builds(
        RankExited,
        st.integers(0, 3),
        st.sampled_from([0, 1, -9]),
        st.floats(0, 100),
        st.booleans(),
        st.integers(0, 3),
    ),
)


@settings(max_examples=300, deadline=None)
@given(HISTORIES)
def test_whatever_happens_the_job_ends_in_bounded_time_and_decides_each_thing_once(
    history: list[tuple[MachineEvent, float]],
) -> None:
    job = Job()
    decisions = [job.see(event, after_seconds=seconds).decision for event, seconds in history]
    stopping = job.state.phase not in (Phase.FORMING, Phase.STARTING, Phase.RUNNING)
    if not stopping:
        decisions.append(job.see(KillRequested()).decision)
    for _ in range(3):
        decisions.append(job.see(Tick(), after_seconds=30.0).decision)
    assert job.state.phase is Phase.ENDED
    for decision in (Decision.START, Decision.STOP, Decision.KILL, Decision.END):
        assert decisions.count(decision) <= 1
    order = [d for d in decisions if d is not Decision.WAIT]
    assert order == sorted(order, key=[Decision.START, Decision.STOP, Decision.KILL, Decision.END].index)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2), HISTORIES, st.lists(MISHAPS, max_size=80))
def test_restarts_end_too_and_each_generation_is_whole(
    max_restarts: int, history: list[tuple[MachineEvent, float]], mishaps: list[MachineEvent]
) -> None:
    job = Job(replace(POLICY, max_restarts=max_restarts))
    fruitless, furthest = 0, 0
    for event, seconds in [*history, *((NodeJoined(node), 0.0) for node in (0, 1)), *((m, 0.1) for m in mishaps)]:
        before = job.state
        step = job.see(event, after_seconds=seconds)
        if step.decision is not Decision.RESTART:
            assert job.state.generation == before.generation
            continue
        first = Failure.first_of(job.state.survived[-1])
        assert first is not None and not first.final
        fruitless = 1 if first.iteration > furthest else fruitless + 1
        furthest = max(furthest, first.iteration)
        assert fruitless <= max_restarts
        assert not before.interrupted and len(before.gone) >= 3, "only the last rank was missing"
        assert (job.state.generation, job.state.gone, job.state.failures) == (before.generation + 1, frozenset(), ())
        assert len(job.state.survived) == job.state.generation
        assert all(failure.rank is not None for failure in job.state.survived[-1])
    job.see(KillRequested())
    for _ in range(3):
        job.see(Tick(), after_seconds=30.0)
    assert job.state.phase is Phase.ENDED


def test_the_state_of_nothing() -> None:
    assert State().first_failure is None
    assert State().outcome is Outcome.FINISHED
