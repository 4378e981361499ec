"""How a job goes on without nodes it loses: rules of the state machine of ``membership``.

A death ends the membership: the other ranks are told (``BREAK``) and say how far they are (``RankBroken``), which a
rank whose collective fails does by itself. When every rank that is left has spoken, the next membership begins
(``REFORM``). Whatever stands against it leads to the way of jobs that need all nodes: ``STOP``, then an end or a
restart.
"""

from dataclasses import replace

from megatron_ft.control.facts import RankBroken
from megatron_ft.control.membership_state import (
    Decision,
    Failure,
    MembershipPolicy,
    Phase,
    Reform,
    State,
    Step,
    is_late,
)
from megatron_ft.errors import RecoveryError
from megatron_ft.planning.recovery.target import choose_target

_BREAKABLE = (Phase.RUNNING, Phase.REFORMING)


def lose(policy: MembershipPolicy, state: State, node: int) -> State:
    """Count a node with a death as lost, in phases in which the job can go on without it."""
    if not policy.may_lose_nodes or state.phase not in _BREAKABLE:
        return state
    return replace(state, lost=state.lost | {node})


def hear(policy: MembershipPolicy, state: State, fact: RankBroken) -> State | None:
    """Take in what a rank says; None where it cannot be waited for others and its error is a failure."""
    spoke = {earlier.rank for earlier in state.broken}
    stale = fact.position.generation != state.generation
    if stale or fact.rank in spoke | state.gone or policy.node_of(fact.rank) in state.lost:
        return state
    if not policy.may_lose_nodes or state.phase not in _BREAKABLE:
        return None
    return replace(state, broken=(*state.broken, fact))


def decide(policy: MembershipPolicy, state: State, now: float) -> Step | None:
    """The next step of a job that may lose nodes, while its ranks run or say how far they are."""
    if not policy.may_lose_nodes or state.phase not in _BREAKABLE:
        return None
    if not state.failures:
        return _await_death(policy, state, now) if state.broken else None
    obstacle = _obstacle(policy, state)
    if obstacle is None and _left(policy, state) <= {fact.rank for fact in state.broken}:
        try:
            return _reform(policy, state, now)
        except RecoveryError as error:
            obstacle = str(error)
    if obstacle is None and state.lost != state.announced:
        return _break(policy, state, now)
    if obstacle is None and is_late(state, now):
        silent = sorted(_left(policy, state) - {fact.rank for fact in state.broken})
        names = [policy.number_among(state.members, rank) for rank in silent]
        obstacle = f"launch.reform_timeout_seconds={policy.reform_timeout_seconds:g}: no word of ranks {names}"
    if obstacle is None:
        return Step(state, Decision.WAIT, "ranks say how far they are")
    return _give_up(policy, state, now, obstacle)


def stop_after_failure(policy: MembershipPolicy, state: State, now: float, reason: str) -> Step:
    """Give the ranks that live the time for their last words."""
    state = replace(state, phase=Phase.STOPPING, deadline_seconds=now + policy.failure_grace_seconds)
    return Step(state, Decision.STOP, reason)


def _await_death(policy: MembershipPolicy, state: State, now: float) -> Step:
    """Errors without a death are their ranks' own failures, once a death had time to become known."""
    if not is_late(state, now):
        deadline = state.deadline_seconds or now + policy.failure_grace_seconds
        return Step(replace(state, deadline_seconds=deadline), Decision.WAIT, "ranks failed, nobody died yet")
    failures = tuple(failure_of(policy, state, fact) for fact in state.broken)
    state = replace(state, failures=failures, broken=())
    first = state.first_failure
    assert first is not None, "a rank has failed"
    return stop_after_failure(policy, state, now, first.detail)


def failure_of(policy: MembershipPolicy, state: State, fact: RankBroken) -> Failure:
    """The error of a rank as the failure of the job."""
    return Failure(
        rank=fact.rank,
        at_seconds=fact.at_seconds,
        iteration=fact.iteration,
        final=fact.final,
        detail=f"rank {policy.number_among(state.members, fact.rank)} raised",
    )


def _left(policy: MembershipPolicy, state: State) -> set[int]:
    """Ranks of the members that are not lost."""
    return {rank for node in state.members if node not in state.lost for rank in policy.ranks_of(node)}


def _obstacle(policy: MembershipPolicy, state: State) -> str | None:
    """Why the job cannot go on without the nodes it lost; None if it can."""
    for failure in state.failures:
        node = failure.node if failure.rank is None else policy.node_of(failure.rank)
        if node not in state.lost:
            return failure.detail
    ended = sorted(_left(policy, state) & state.gone)
    if ended:
        return f"rank {policy.number_among(state.members, ended[0])} had done its work"
    num_left = len(set(state.members) - state.lost)
    if num_left < policy.fewest_nodes:
        return f"{num_left} nodes are left, launch.min_nodes={policy.fewest_nodes}"
    return None


def _break(policy: MembershipPolicy, state: State, now: float) -> Step:
    first = state.first_failure
    assert first is not None, "a node was lost"
    deadline = now + policy.reform_timeout_seconds
    state = replace(state, phase=Phase.REFORMING, deadline_seconds=deadline, announced=state.lost)
    return Step(state, Decision.BREAK, first.detail)


def _reform(policy: MembershipPolicy, state: State, now: float) -> Step:
    """Begin the next membership.

    Raises:
        RecoveryError: there is no iteration that everybody can continue after.
    """
    first = state.first_failure
    assert first is not None, "a node was lost"
    ranks = sorted(_left(policy, state))
    said = {fact.rank: fact.position for fact in state.broken}
    positions = tuple(said[rank] for rank in ranks)
    reform = Reform(
        lost=tuple(sorted(state.lost & set(state.members))),
        positions=positions,
        target=choose_target(positions),
        previous_ranks=tuple(policy.number_among(state.members, rank) for rank in ranks),
        nodes=tuple(policy.node_of(rank) for rank in ranks),
    )
    following = replace(
        state,
        phase=Phase.RUNNING,
        generation=state.generation + 1,
        # A stop that was asked for meanwhile is ordered by the tick that comes at once.
        deadline_seconds=now if state.interrupted else None,
        members=tuple(node for node in state.members if node not in state.lost),
        announced=state.lost,
        broken=(),
        failures=(),
        survived=(*state.survived, state.failures),
        num_reforms=state.num_reforms + 1,
        furthest_iteration=max(state.furthest_iteration, first.iteration),
        num_restarts=state.num_fruitless_restarts,
    )
    return Step(following, Decision.REFORM, first.detail, reform)


def _give_up(policy: MembershipPolicy, state: State, now: float, obstacle: str) -> Step:
    if state.phase is Phase.RUNNING:  # no rank has been killed yet: each exit is still a death of its own
        state = replace(state, lost=state.lost - set(state.members))
    return stop_after_failure(policy, state, now, obstacle)
