"""Who belongs to the job, and what happens next: a pure state machine.

Facts (``facts``) and a clock go in; a new state, a decision and its reason come out. Nothing here reads a clock, a
file or a socket: the controller drives it with real ones, tests and simulations with virtual ones.
"""

import signal
from dataclasses import replace

from megatron_ft.control import membership_reform as reform
from megatron_ft.control.facts import (
    Fact,
    KillRequested,
    NodeJoined,
    NodeLost,
    RankBroken,
    RankExited,
    RankRaised,
    RankReported,
    StopRequested,
    Tick,
)
from megatron_ft.control.membership_state import (
    Decision,
    Failure,
    MembershipPolicy,
    Outcome,
    Phase,
    State,
    Step,
    is_late,
)

_REASONS = {Outcome.FINISHED: "all ranks have finished", Outcome.INTERRUPTED: "asked to stop"}
_BEFORE_STOP = (Phase.FORMING, Phase.STARTING, Phase.RUNNING)


def initial(policy: MembershipPolicy, now_seconds: float) -> State:
    """The state of a job nobody joined yet."""
    deadline = now_seconds + policy.start_timeout_seconds
    return State(deadline_seconds=deadline, members=tuple(range(policy.num_nodes)))


def advance(policy: MembershipPolicy, state: State, fact: Fact, now_seconds: float) -> Step:
    """Take in one fact and decide.

    Args:
        now_seconds: the controller's monotonic clock.
    """
    if state.phase is Phase.ENDED:
        return Step(state, Decision.WAIT, "the job has ended")
    observed = _observe(policy, state, fact)
    for rule in (_restart, _end, _killed_for_nothing, _kill, _survive, _stop, _time_out, _go_on):
        step = rule(policy, observed, fact, now_seconds)
        if step is not None:
            return step
    return Step(observed, Decision.WAIT, f"{observed.phase.value}")


def _observe(policy: MembershipPolicy, state: State, fact: Fact) -> State:
    match fact:
        case NodeJoined(node):
            return replace(state, joined=state.joined | {node})
        case RankReported(rank):
            return replace(state, reported=state.reported | {rank})
        case RankRaised() | RankBroken() | RankExited():
            return _observe_rank(policy, state, fact)
        case NodeLost(node, at_seconds, detail):
            gone = state.gone | set(policy.ranks_of(node))
            state = replace(state, gone=gone, agents_lost=state.agents_lost | {node})
            if node in state.lost:
                return state
            failure = Failure(node=node, at_seconds=at_seconds, sudden=True, detail=f"node {node} was lost: {detail}")
            return reform.lose(policy, _fail(state, failure), node)
        case StopRequested() | KillRequested():
            return replace(state, interrupted=True)
    return state


def _observe_rank(policy: MembershipPolicy, state: State, fact: RankRaised | RankBroken | RankExited) -> State:
    """What befalls ranks of lost nodes is no failure: they are left behind."""
    node, rank = policy.node_of(fact.rank), fact.rank
    name = f"rank {policy.number_among(state.members, rank)}" if node in state.members else f"a rank of node {node}"
    match fact:
        case RankBroken():
            heard = reform.hear(policy, state, fact)
            return _fail(state, reform.failure_of(policy, state, fact)) if heard is None else heard
        case RankRaised(_, at_seconds, iteration, final):
            failure = Failure(
                rank=rank, at_seconds=at_seconds, iteration=iteration, final=final, detail=f"{name} raised"
            )
            return state if node in state.lost else _fail(state, failure)
    state = replace(state, gone=state.gone | {rank})
    if node in state.lost or (fact.done and fact.returncode == 0):
        return state
    failure = Failure(
        rank=rank,
        at_seconds=fact.at_seconds,
        iteration=fact.iteration,
        sudden=fact.returncode < 0 and -fact.returncode not in (signal.SIGABRT, signal.SIGTERM),
        detail=f"{name} {describe_returncode(fact.returncode)}",
    )
    return reform.lose(policy, _fail(state, failure), node)


def _fail(state: State, failure: Failure) -> State:
    """Add a death; those we caused by killing do not count, and a rank dies once."""
    known = any(old.rank == failure.rank and old.node == failure.node for old in state.failures)
    if state.phase is Phase.KILLING or known:
        return state
    return replace(state, failures=(*state.failures, failure))


def _restart(policy: MembershipPolicy, state: State, fact: Fact, now: float) -> Step | None:
    """Start all ranks again once the last one is gone, where ranks alone failed and another try may mend it."""
    first = state.first_failure
    if first is None or first.final or state.interrupted or len(state.gone) < policy.world_size:
        return None
    if state.agents_lost or any(failure.rank is None for failure in state.failures):
        return None
    if state.num_fruitless_restarts >= policy.max_restarts:
        return None
    restarted = State(
        phase=Phase.STARTING,
        generation=state.generation + 1,
        deadline_seconds=now + policy.start_timeout_seconds,
        joined=state.joined,
        members=tuple(range(policy.num_nodes)),
        num_reforms=state.num_reforms,
        survived=(*state.survived, state.failures),
        furthest_iteration=max(state.furthest_iteration, first.iteration),
        num_restarts=state.num_fruitless_restarts + 1,
    )
    return Step(restarted, Decision.RESTART, first.detail)


def _end(policy: MembershipPolicy, state: State, fact: Fact, _now: float) -> Step | None:
    nothing_runs = state.phase is Phase.FORMING and (state.interrupted or state.failures)
    # After a failure the last word of every rank counts: all of them may be started again.
    nodes = range(policy.num_nodes) if state.failures else state.members
    remaining = {rank for node in nodes for rank in policy.ranks_of(node)} - state.gone
    if remaining and not nothing_runs:
        return None
    first = state.first_failure
    reason = first.detail if first else _REASONS[state.outcome]
    return Step(replace(state, phase=Phase.ENDED, deadline_seconds=None), Decision.END, reason)


def _killed_for_nothing(policy: MembershipPolicy, state: State, fact: Fact, now: float) -> Step | None:
    if state.phase is not Phase.KILLING or not is_late(state, now):
        return None
    missing = sorted(set(range(policy.world_size)) - state.gone)
    reason = f"no word of killed ranks {missing} for {policy.kill_timeout_seconds} s"
    return Step(replace(state, phase=Phase.ENDED, deadline_seconds=None), Decision.END, reason)


def _kill(policy: MembershipPolicy, state: State, fact: Fact, now: float) -> Step | None:
    if state.phase is Phase.KILLING:
        return None
    overdue = state.phase is Phase.STOPPING and is_late(state, now)
    nothing_to_save = state.phase is Phase.STARTING and state.interrupted
    if not overdue and not nothing_to_save and not isinstance(fact, KillRequested):
        return None
    reason = "ranks did not stop in time" if overdue else "asked to end"
    state = replace(state, phase=Phase.KILLING, deadline_seconds=now + policy.kill_timeout_seconds)
    return Step(state, Decision.KILL, reason)


def _survive(policy: MembershipPolicy, state: State, fact: Fact, now: float) -> Step | None:
    return reform.decide(policy, state, now)


def _stop(policy: MembershipPolicy, state: State, fact: Fact, now: float) -> Step | None:
    if state.phase not in _BEFORE_STOP:
        return _hurry(policy, state, fact, now)
    first = state.first_failure
    if first is not None:
        return reform.stop_after_failure(policy, state, now, first.detail)
    if state.interrupted:
        state = replace(state, phase=Phase.STOPPING, deadline_seconds=now + policy.stop_timeout_seconds)
        return Step(state, Decision.STOP, "asked to stop")
    return None


def _hurry(policy: MembershipPolicy, state: State, fact: Fact, now: float) -> Step | None:
    """A death while stopping: the rest gets the shorter grace."""
    if state.phase is not Phase.STOPPING or not state.failures or isinstance(fact, Tick):
        return None
    deadline = min(state.deadline_seconds or now, now + policy.failure_grace_seconds)
    return Step(replace(state, deadline_seconds=deadline), Decision.WAIT, "stopping after a failure")


def _time_out(policy: MembershipPolicy, state: State, fact: Fact, now: float) -> Step | None:
    if state.phase not in (Phase.FORMING, Phase.STARTING) or not is_late(state, now):
        return None
    if state.phase is Phase.FORMING:
        missing = f"nodes {sorted(set(range(policy.num_nodes)) - state.joined)}"
    else:
        missing = f"ranks {sorted(set(range(policy.world_size)) - state.reported)}"
    detail = f"launch.start_timeout_seconds={policy.start_timeout_seconds:g}: no word of {missing}"
    state = replace(state, failures=(Failure(at_seconds=now, detail=detail),))
    if state.phase is Phase.FORMING:
        return Step(replace(state, phase=Phase.ENDED, deadline_seconds=None), Decision.END, detail)
    state = replace(state, phase=Phase.KILLING, deadline_seconds=now + policy.kill_timeout_seconds)
    return Step(state, Decision.KILL, detail)


def _go_on(policy: MembershipPolicy, state: State, fact: Fact, now: float) -> Step | None:
    if state.phase is Phase.FORMING and len(state.joined) == policy.num_nodes:
        state = replace(state, phase=Phase.STARTING, deadline_seconds=now + policy.start_timeout_seconds)
        return Step(state, Decision.START, f"all {policy.num_nodes} nodes joined")
    if state.phase is Phase.STARTING and len(state.reported) == policy.world_size:
        state = replace(state, phase=Phase.RUNNING, deadline_seconds=None)
        return Step(state, Decision.WAIT, f"all {policy.world_size} ranks reported")
    return None


def describe_returncode(returncode: int) -> str:
    """``exited with code 1`` or ``was killed by SIGKILL``."""
    if returncode == 0:
        return "exited with code 0 before its work was done"
    return f"exited with code {returncode}" if returncode > 0 else f"was killed by {signal_name(-returncode)}"


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
