"""How a job goes on without nodes it loses: rules of the state machine of ``membership``.

A death ends the membership: the other ranks are told (``BREAK``) and say how far they are (``RankBroken``), which a
rank whose collective fails does by itself. When every rank that is left has spoken, the next membership begins
(``REFORM``), with nodes that are ready to join; in a job that keeps its layout, once somebody is ready for every lost
place (``membership_places``). Whatever stands against it leads to the way of jobs that need all
nodes: ``STOP``, then an end or a restart. A change that was ordered (``membership_join``) comes to the same without a
death, once all members stand at the boundary; a death meanwhile goes first, and the change is ordered again after it.
"""

from dataclasses import replace

from megatron_ft.control.membership.events import RankBroken
from megatron_ft.control.membership.joining import admitted, count_returns, describe_change, returning
from megatron_ft.control.membership import replacing as places
from megatron_ft.control.membership.state import (
    Decision,
    Failure,
    MembershipPolicy,
    Moment,
    Phase,
    Reform,
    State,
    Step,
    is_late,
    left_ranks,
)
from megatron_ft.errors import RecoveryError
from megatron_ft.planning.recovery.target import Position, choose_target

_BREAKABLE = (Phase.RUNNING, Phase.REFORMING)


def lose(policy: MembershipPolicy, state: State, node: int) -> State:
    """Count a node with a death as lost, in phases in which the job can go on without it."""
    if not policy.may_lose_nodes or state.phase not in _BREAKABLE:
        return state
    return replace(state, lost=state.lost | {node})


def hear(policy: MembershipPolicy, state: State, fact: RankBroken) -> State | None:
    """Take in what a rank says; None where it cannot be waited for others and its error is a failure."""
    stale = fact.position.generation != state.generation
    node = policy.node_of(fact.rank)
    if stale or fact.rank in state.spoke or fact.rank in state.gone or node in state.lost or node not in state.members:
        return state
    if not policy.may_lose_nodes or state.phase not in _BREAKABLE:
        return None
    return replace(
        state,
        broken=(*state.broken, fact),
        spoke=state.spoke | {fact.rank},
        has_errors=state.has_errors or not fact.planned,
    )


def decide(policy: MembershipPolicy, state: State, now: Moment) -> Step | None:
    """The next step of a job that may lose nodes, while its ranks run or say how far they are."""
    if not policy.may_lose_nodes or state.phase not in _BREAKABLE:
        return None
    if not state.failures:
        return _await_others(policy, state, now) if state.broken else None
    state = places.give_up_late(policy, state, now)
    obstacle = _obstacle(policy, state)
    if obstacle is None and left_ranks(policy, state) <= state.spoke:
        try:
            return _reform(policy, state, now) if places.are_filled(policy, state) else _fill(policy, state, now)
        except RecoveryError as error:
            obstacle = str(error)
    if obstacle is None and state.lost != state.announced:
        return _break(policy, state, now)
    if obstacle is None and is_late(state, now):
        return _leave_silent(policy, state, now)
    if obstacle is None:
        return Step(state, Decision.WAIT, "ranks say how far they are")
    return _give_up(policy, state, now, obstacle)


def _fill(policy: MembershipPolicy, state: State, now: Moment) -> Step:
    """Everybody who is left has spoken, and places are empty.

    Raises:
        RecoveryError: there is no iteration that everybody can continue after.
    """
    if state.lost != state.announced:
        return _break(policy, state, now)
    state = places.count_losses(state, choose_target(_positions(policy, state)).iteration)
    obstacle = places.obstacle(policy, state)
    return places.fill(policy, state, now) if obstacle is None else _give_up(policy, state, now, obstacle)


def _leave_silent(policy: MembershipPolicy, state: State, now: Moment) -> Step:
    """Count nodes as lost whose ranks do not say how far they are while others have: something holds them for good.

    Where too few would be left, they have as long as the whole takes.
    """
    silent = sorted(left_ranks(policy, state) - state.spoke)
    last = state.reform_by_seconds
    if last is None or now.arrived_seconds >= last:
        return _give_up(policy, state, now, _silent(policy, state))
    wait = Step(replace(state, deadline_seconds=last), Decision.WAIT, "ranks say how far they are")
    if not state.spoke:
        return wait
    latest = max(failure.at_seconds for failure in state.failures)  # on the clock of the deaths, not on ``now``'s
    limit = f"(launch.position_timeout_seconds={policy.position_timeout_seconds:g})"
    failures = tuple(
        Failure(
            rank=rank,
            number=policy.number_among(state.members, rank),
            at_seconds=latest,
            detail=f"rank {policy.number_among(state.members, rank)} does not say how far it is {limit}",
        )
        for rank in silent
    )
    nodes = {policy.node_of(rank) for rank in silent}
    without = replace(state, lost=state.lost | nodes, failures=(*state.failures, *failures))
    return wait if _obstacle(policy, without) is not None else _break(policy, without, now)


def stop_after_failure(policy: MembershipPolicy, state: State, now: Moment, reason: str) -> Step:
    """Give the ranks that live the time for their last words."""
    state = replace(state, phase=Phase.STOPPING, deadline_seconds=now.seconds + policy.failure_grace_seconds)
    return Step(state, Decision.STOP, reason)


def _silent(policy: MembershipPolicy, state: State) -> str:
    silent = sorted(left_ranks(policy, state) - state.spoke)
    names = [policy.number_among(state.members, rank) for rank in silent]
    return f"launch.reform_timeout_seconds={policy.reform_timeout_seconds:g}: no word of ranks {names}"


def _await_others(policy: MembershipPolicy, state: State, now: Moment) -> Step:
    """Nobody has died, and ranks have spoken: they stand at the boundary of a change, or failed."""
    if state.has_errors:
        return _await_death(policy, state, now)
    obstacle = _silent(policy, state) if is_late(state, now) else None
    if left_ranks(policy, state) <= state.spoke:
        try:
            return _reform(policy, state, now)
        except RecoveryError as error:
            obstacle = str(error)
    if obstacle is None:
        deadline = state.deadline_seconds or now.seconds + policy.reform_timeout_seconds
        return Step(replace(state, deadline_seconds=deadline), Decision.WAIT, "ranks stand at the boundary")
    state = replace(state, failures=(Failure(at_seconds=now.seconds, detail=obstacle),))
    return stop_after_failure(policy, state, now, obstacle)


def _await_death(policy: MembershipPolicy, state: State, now: Moment) -> Step:
    """Errors without a death are their ranks' own failures, once a death had time to become known."""
    if not is_late(state, now):
        grace = now.seconds + policy.failure_grace_seconds
        deadline = grace if state.deadline_seconds is None else min(state.deadline_seconds, grace)
        return Step(replace(state, deadline_seconds=deadline), Decision.WAIT, "ranks failed, nobody died yet")
    failures = tuple(failure_of(policy, state, fact) for fact in state.broken if not fact.planned)
    state = replace(state, failures=failures, broken=(), spoke=frozenset(), has_errors=False)
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


def _obstacle(policy: MembershipPolicy, state: State) -> str | None:
    """Why the job cannot go on without the nodes it lost; None if it can."""
    for failure in state.failures:
        node = failure.node if failure.rank is None else policy.node_of(failure.rank)
        if node not in state.lost:
            return failure.detail
    ended = sorted(left_ranks(policy, state) & state.gone)
    if ended:
        return f"rank {policy.number_among(state.members, ended[0])} had done its work"
    if policy.keeps_layout:
        return places.obstacle(policy, state)
    num_left = len(set(state.members) - state.lost)
    num_joining = len(admitted(policy, state, num_left))
    if num_left == 0 or num_left + num_joining < policy.fewest_nodes:
        joining = f" and {num_joining} are ready to join" if num_joining else ""
        return f"{num_left} nodes are left{joining}, launch.min_nodes={policy.fewest_nodes}"
    return None


def _break(policy: MembershipPolicy, state: State, now: Moment) -> Step:
    first = state.first_failure
    assert first is not None, "a node was lost"
    last = now.seconds + policy.reform_timeout_seconds if state.reform_by_seconds is None else state.reform_by_seconds
    deadline = min(last, now.seconds + policy.position_timeout_seconds)
    state = replace(
        state, phase=Phase.REFORMING, announced=state.lost, deadline_seconds=deadline, reform_by_seconds=last
    )
    return Step(state, Decision.BREAK, first.detail, nodes=tuple(sorted(state.announced - state.waiting)))


def _reform(policy: MembershipPolicy, state: State, now: Moment) -> Step:
    """Begin the next membership.

    Raises:
        RecoveryError: there is no iteration that everybody can continue after.
    """
    reform = _next(policy, state)
    first = state.first_failure
    members = tuple(dict.fromkeys(reform.nodes))
    uncounted = set(reform.lost) - state.counted
    returns = count_returns(state, reform.target.iteration, lost=uncounted, joining=reform.joining)
    again = returning(policy, reform.lost, returns) - state.draining
    taken = state.waiting | set(members)
    following = replace(
        state,
        phase=Phase.RUNNING,
        generation=state.generation + 1,
        # A stop that was asked for meanwhile is ordered by the tick that comes at once.
        deadline_seconds=now.arrived_seconds if state.interrupted else None,
        reform_by_seconds=None,
        members=members,
        lost=state.lost - taken,
        announced=state.lost - taken,
        counted=frozenset(),
        wanted=(state.wanted | again) - taken,
        newcomers=tuple(newcomer for newcomer in state.newcomers if newcomer.node not in members),
        draining=state.draining & set(members),
        left=state.left | set(reform.leaving) | (state.draining & set(reform.lost)),
        returns=returns,
        change=None,
        broken=(),
        spoke=frozenset(),
        has_errors=False,
        failures=(),
        survived=(*state.survived, state.failures),
        num_reforms=state.num_reforms + 1,
        furthest_iteration=max(state.furthest_iteration, first.iteration if first else 0),
        num_restarts=state.num_fruitless_restarts,
    )
    reason = describe_change(reform.joining, reform.leaving) if first is None else first.detail
    return Step(following, Decision.REFORM, reason, reform, nodes=tuple(sorted(set(reform.lost) - taken)))


def _next(policy: MembershipPolicy, state: State) -> Reform:
    """Who is of the next membership. A death goes first: nobody leaves with it."""
    leaving = frozenset() if state.failures or state.change is None else state.change
    staying = set(state.members) - state.lost - leaving
    members = tuple(sorted(staying | set(admitted(policy, state, len(staying)))))
    if policy.keeps_layout:
        members = places.filled(state)
    joining = set(members) - staying
    ranks = [rank for node in members for rank in policy.ranks_of(node)]
    positions = _positions(policy, state)
    return Reform(
        lost=tuple(sorted(state.lost & set(state.members))),
        leaving=tuple(sorted(leaving)),
        joining=tuple(sorted(joining)),
        positions=positions,
        target=choose_target(positions),
        previous_ranks=tuple(
            None if policy.node_of(rank) in joining else policy.number_among(state.members, rank) for rank in ranks
        ),
        nodes=tuple(policy.node_of(rank) for rank in ranks),
    )


def _positions(policy: MembershipPolicy, state: State) -> tuple[Position, ...]:
    """How far each rank that is left is, in rank order."""
    left = left_ranks(policy, state)
    spoke = {fact.rank: fact.position for fact in state.broken if fact.rank in left}
    return tuple(sorted(spoke.values(), key=lambda position: position.rank))


def _give_up(policy: MembershipPolicy, state: State, now: Moment, obstacle: str) -> Step:
    if state.phase is Phase.RUNNING:  # no rank has been killed yet: each exit is still a death of its own
        state = replace(state, lost=state.lost - set(state.members))
    return stop_after_failure(policy, state, now, obstacle)
