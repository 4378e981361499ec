"""Who belongs to the job, and what happens next: a pure state machine.

Facts (``facts``) and a clock go in; a new state, a decision and its reason come out. Nothing here reads a clock, a
file or a socket: the controller drives it with real ones, tests and simulations with virtual ones.
"""

import signal
from dataclasses import replace

from megatron_ft.control.membership.events import (
    AddRequested,
    DrainRequested,
    Fact,
    JobHung,
    KillRequested,
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
from megatron_ft.control.membership import joining as joining
from megatron_ft.control.membership import reconfigure as reform
from megatron_ft.control.membership import replacing as places
from megatron_ft.control.membership.state import (
    Decision,
    Failure,
    MembershipPolicy,
    Moment,
    Outcome,
    Phase,
    State,
    Step,
    is_late,
    ranks_of_all,
)

_REASONS = {Outcome.FINISHED: "all ranks have finished", Outcome.INTERRUPTED: "asked to stop"}
_BEFORE_STOP = (Phase.FORMING, Phase.STARTING, Phase.RUNNING)


def initial(policy: MembershipPolicy, now_seconds: float) -> State:
    """The state of a job nobody joined yet."""
    deadline = now_seconds + policy.start_timeout_seconds
    return State(deadline_seconds=deadline, members=tuple(range(policy.num_nodes)))


def advance(
    policy: MembershipPolicy, state: State, fact: Fact, now_seconds: float, arrived_seconds: float | None = None
) -> Step:
    """Take in one fact and decide.

    Args:
        now_seconds: the controller's monotonic clock.
        arrived_seconds: when the fact came, on the same clock; of a ``Tick``: everything that came before that time
            has been taken in. Default: ``now_seconds``.
    """
    now = Moment(now_seconds, now_seconds if arrived_seconds is None else arrived_seconds)
    if state.phase is Phase.ENDED:
        return Step(state, Decision.WAIT, "the job has ended")
    observed = _observe(policy, replace(state, failed_starts=()), fact, now)
    step = Step(observed, Decision.WAIT, f"{observed.phase.value}")
    for rule in (_restart, _end, _killed_for_nothing, _kill, _survive, _stop, _time_out, _go_on, _change):
        decided = rule(policy, observed, fact, now)
        if decided is not None:
            step = decided
            break
    fills = policy.keeps_layout and step.state.phase is Phase.REFORMING
    look_again = places.look_again(policy, step, now) if fills else None
    state = look_again or joining.look_again(policy, step.state, now)
    return step if state is step.state else replace(step, state=state)


def _observe(policy: MembershipPolicy, state: State, fact: Fact, now: Moment) -> State:
    match fact:
        case NodeJoined(node):
            return joining.join(policy, state, node)
        case AddRequested(node):
            return joining.add(policy, state, node)
        case DrainRequested(node):
            return joining.drain(policy, state, node)
        case RankReported(rank):
            return joining.report(policy, state, rank, now)
        case RankRaised() | RankBroken() | RankExited() | RankHung():
            return _observe_rank(policy, state, fact)
        case JobHung(at_seconds, detail):
            return _fail(state, Failure(at_seconds=at_seconds, detail=detail))
        case NodeLost(node, at_seconds, detail):
            state = joining.lose_agent(policy, state, node, detail)
            if state.phase is Phase.FORMING and not policy.starts_nodes:  # it may come back, as others may still come
                return replace(state, joined=state.joined - {node})
            if not joining.is_member(state, node):
                return state
            failure = Failure(node=node, at_seconds=at_seconds, sudden=True, detail=f"node {node} was lost: {detail}")
            return reform.lose(policy, _fail(state, failure), node)
        case StopRequested() | KillRequested():
            return replace(state, interrupted=True)
    return state


def _observe_rank(
    policy: MembershipPolicy, state: State, fact: RankRaised | RankBroken | RankExited | RankHung
) -> State:
    """What befalls ranks of nodes that are lost or no members is no failure."""
    node, rank = policy.node_of(fact.rank), fact.rank
    if node not in state.members or node in state.waiting:
        if not isinstance(fact, RankExited):
            return state
        return joining.lose_rank(policy, state, rank, f"its rank {rank} {describe_returncode(fact.returncode)}")
    name = f"rank {policy.number_among(state.members, rank)}"
    match fact:
        case RankBroken():
            heard = reform.hear(policy, state, fact)
            return _fail(state, reform.failure_of(policy, state, fact)) if heard is None else heard
        case RankRaised(_, at_seconds, iteration, final):
            failure = Failure(
                rank=rank, at_seconds=at_seconds, iteration=iteration, final=final, detail=f"{name} raised"
            )
            return state if node in state.lost else _fail(state, failure)
        case RankHung(_, at_seconds, detail, iteration):
            failure = Failure(
                rank=rank, at_seconds=at_seconds, iteration=iteration, sudden=True, detail=f"{name} {detail}"
            )
            unknown = node in state.lost or rank in state.gone
            return state if unknown else reform.lose(policy, _fail(state, failure), node)
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


def _restart(policy: MembershipPolicy, state: State, fact: Fact, now: Moment) -> Step | None:
    """Start ranks again once the last one is gone, where enough nodes live and another try may mend what failed."""
    first = state.first_failure
    if first is None or first.final or state.interrupted or state.phase is Phase.FORMING or _any_lives(policy, state):
        return None
    members = _able(policy, state)
    if len(members) < policy.fewest_nodes or state.num_fruitless_restarts >= policy.max_restarts:
        return None
    out = state.left | (state.draining - set(members))
    restarted = State(
        phase=Phase.STARTING,
        generation=state.generation + 1,
        deadline_seconds=now.seconds + policy.start_timeout_seconds,
        joined=state.joined,
        agents_lost=state.agents_lost,
        started=frozenset(members),
        wanted=(_wanted(policy, state) | state.wanted) - set(members) - out,
        left=out,
        members=members,
        num_reforms=state.num_reforms,
        survived=(*state.survived, state.failures),
        furthest_iteration=max(state.furthest_iteration, first.iteration),
        num_restarts=state.num_fruitless_restarts + 1,
    )
    return Step(restarted, Decision.RESTART, first.detail)


def _able(policy: MembershipPolicy, state: State) -> tuple[int, ...]:
    """Nodes that ranks can be started on again, as many as a membership has: healthy members first, rising.

    In a job that keeps its layout, by place.
    """
    if policy.keeps_layout:
        return places.restartable(state)
    live = (state.joined - state.agents_lost - state.left) if policy.may_lose_nodes else frozenset(state.members)
    live -= state.agents_lost
    staying = live - state.draining
    live = staying if len(staying) >= policy.fewest_nodes else live
    waiting = {newcomer.node for newcomer in state.newcomers}
    ordered = sorted(live, key=lambda node: (not joining.is_member(state, node), node not in waiting, node))
    return tuple(sorted(ordered[: policy.most_members]))


def _wanted(policy: MembershipPolicy, state: State) -> frozenset[int]:
    """Nodes that are to join where they are no members: all that live, and lost ones as far as they come back."""
    if not policy.may_lose_nodes:
        return frozenset()
    return state.joined if policy.restart_lost_nodes else state.joined - state.agents_lost


def _any_lives(policy: MembershipPolicy, state: State) -> bool:
    """Whether there are started ranks of which no exit has been heard."""
    return not ranks_of_all(policy, state.started) <= state.gone


def _end(policy: MembershipPolicy, state: State, fact: Fact, _now: Moment) -> Step | None:
    nothing_runs = state.phase is Phase.FORMING and (state.interrupted or state.failures)
    # After a failure the last word of every rank counts: all of them may be started again.
    remaining = ranks_of_all(policy, state.started if state.failures else state.members)
    if not nothing_runs and not remaining <= state.gone:
        return None
    first = state.first_failure
    reason = first.detail if first else _REASONS[state.outcome]
    return Step(replace(state, phase=Phase.ENDED, deadline_seconds=None), Decision.END, reason)


def _killed_for_nothing(policy: MembershipPolicy, state: State, fact: Fact, now: Moment) -> Step | None:
    if state.phase is not Phase.KILLING or not is_late(state, now):
        return None
    missing = sorted(ranks_of_all(policy, state.started) - state.gone)
    reason = f"no word of killed ranks {missing} for {policy.kill_timeout_seconds} s"
    return Step(replace(state, phase=Phase.ENDED, deadline_seconds=None), Decision.END, reason)


def _kill(policy: MembershipPolicy, state: State, fact: Fact, now: Moment) -> Step | None:
    if state.phase is Phase.KILLING:
        return None
    waits_for_change = state.phase is Phase.RUNNING and state.interrupted and state.change is not None
    overdue = (state.phase is Phase.STOPPING or waits_for_change) and is_late(state, now)
    nothing_to_save = state.phase is Phase.STARTING and state.interrupted
    if not overdue and not nothing_to_save and not isinstance(fact, KillRequested):
        return None
    reason = "ranks did not stop in time" if overdue else "asked to end"
    state = replace(state, phase=Phase.KILLING, deadline_seconds=now.seconds + policy.kill_timeout_seconds)
    return Step(state, Decision.KILL, reason)


def _survive(policy: MembershipPolicy, state: State, fact: Fact, now: Moment) -> Step | None:
    return reform.decide(policy, state, now)


def _stop(policy: MembershipPolicy, state: State, fact: Fact, now: Moment) -> Step | None:
    if state.phase not in _BEFORE_STOP:
        return _hurry(policy, state, fact, now)
    first = state.first_failure
    if first is not None:
        return reform.stop_after_failure(policy, state, now, first.detail)
    if state.interrupted and state.change is None:  # ranks may stand at the boundary: first the next membership
        state = replace(state, phase=Phase.STOPPING, deadline_seconds=now.seconds + policy.stop_timeout_seconds)
        return Step(state, Decision.STOP, "asked to stop")
    if state.interrupted and state.deadline_seconds is None:
        state = replace(state, deadline_seconds=now.seconds + policy.stop_timeout_seconds)
        return Step(state, Decision.WAIT, "asked to stop while ranks are on their way to a boundary")
    return None


def _hurry(policy: MembershipPolicy, state: State, fact: Fact, now: Moment) -> Step | None:
    """A death while stopping: the rest gets the shorter grace."""
    if state.phase is not Phase.STOPPING or not state.failures or isinstance(fact, Tick):
        return None
    deadline = min(state.deadline_seconds or now.seconds, now.seconds + policy.failure_grace_seconds)
    return Step(replace(state, deadline_seconds=deadline), Decision.WAIT, "stopping after a failure")


def _time_out(policy: MembershipPolicy, state: State, fact: Fact, now: Moment) -> Step | None:
    if state.phase not in (Phase.FORMING, Phase.STARTING) or not is_late(state, now):
        return None
    if state.phase is Phase.FORMING:
        missing = f"nodes {sorted(set(state.members) - state.joined)}"
    else:
        ranks = ranks_of_all(policy, state.members) - state.reported
        names = sorted(policy.number_among(state.members, rank) for rank in ranks)
        missing = f"ranks {names}"
    detail = f"launch.start_timeout_seconds={policy.start_timeout_seconds:g}: no word of {missing}"
    state = replace(state, failures=(Failure(at_seconds=now.seconds, final=True, detail=detail),))
    if state.phase is Phase.FORMING:
        return Step(replace(state, phase=Phase.ENDED, deadline_seconds=None), Decision.END, detail)
    state = replace(state, phase=Phase.KILLING, deadline_seconds=now.seconds + policy.kill_timeout_seconds)
    return Step(state, Decision.KILL, detail)


def _go_on(policy: MembershipPolicy, state: State, fact: Fact, now: Moment) -> Step | None:
    if state.phase is Phase.FORMING and state.joined.issuperset(state.members):
        deadline = now.seconds + policy.start_timeout_seconds
        state = replace(state, phase=Phase.STARTING, deadline_seconds=deadline, started=frozenset(state.members))
        return Step(state, Decision.START, f"all {len(state.members)} nodes joined")
    if state.phase is Phase.STARTING and state.reported >= ranks_of_all(policy, state.members):
        state = replace(state, phase=Phase.RUNNING, deadline_seconds=None)
        return Step(state, Decision.WAIT, f"all {len(state.members) * policy.ranks_per_node} ranks reported")
    return None


def _change(policy: MembershipPolicy, state: State, fact: Fact, now: Moment) -> Step | None:
    return joining.decide(policy, state, now)


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
