"""Rules for transitions from one membership to the next. Most transitions follow the loss of nodes.

When a rank or a node fails, the membership ends. All other ranks are ordered to stop (``BREAK``) and report their
positions (``RankBroken``); a rank whose collective fails reports without an order. When every remaining rank has
reported, the next membership begins (``REFORM``), together with nodes that are ready to join. A job that keeps its
layout first waits until a node is ready to replace each lost node (``joining``), or until it is certain that a lost
node gets no replacement. If the job cannot continue, it stops (``STOP``). It then ends, or all of its ranks restart.

If nodes join or leave on request (``joining``), there is no failure. These rules then apply when all members have
stopped at the boundary. If a rank fails before, this failure is handled first, and the change is ordered again.
"""

from dataclasses import replace

from megatron_ft.control.membership import joining
from megatron_ft.control.membership.events import Moment, RankBroken
from megatron_ft.control.membership.joining import NodeRules, count_loss, describe_change
from megatron_ft.control.membership.state import (
    BREAKABLE,
    TRAINING,
    Decision,
    Failure,
    MembershipPolicy,
    Nodes,
    NodeState,
    Phase,
    Reform,
    State,
    Step,
    keeps_layout,
    layout_of,
)
from megatron_ft.errors import RecoveryError
from megatron_ft.planning.recovery.membership import Position, choose_target


def name_of(policy: MembershipPolicy, state: State, rank: int) -> str:
    """Return a name of the process ``rank`` of a member, for messages."""
    number = layout_of(policy, state).rank_of(rank)
    return f"process {rank}, a hot spare," if number is None else f"rank {number}"


def remaining_ranks(policy: MembershipPolicy, state: State) -> frozenset[int]:
    """Return the ranks of the members that are not lost. Hot spares (processes without a rank) are left out."""
    return layout_of(policy, state).processes_without(state.nodes.lost)


def lose(policy: MembershipPolicy, state: State, node: int) -> State:
    """Mark the node of a failed rank as lost, if the job's present phase allows the job to continue without a node."""
    # In other phases, the node stays a member, and its failure stops the job.
    if not policy.may_lose_nodes or state.phase not in BREAKABLE:
        return state
    return replace(state, nodes=state.nodes.lose([node]))


def receive(policy: MembershipPolicy, state: State, event: RankBroken) -> State | None:
    """Record the report of a rank that has stopped. Return None if the job's settings or its present
    phase do not allow the loss of nodes; the rank's error then counts as a failure of the rank."""
    node, rank = policy.node_of(event.rank), event.rank
    # A late report of an earlier generation is ignored: it would contradict the new positions, and the contradiction
    # would stop the job.
    is_stale = event.position.generation != state.generation
    if is_stale or rank in state.has_reported or rank in state.gone or node in state.nodes.lost:
        return state
    if node not in state.members:
        return state
    if not policy.may_lose_nodes or state.phase not in BREAKABLE:
        return None
    return replace(
        state,
        broken=(*state.broken, event),
        has_reported=state.has_reported | {rank},
        has_errors=state.has_errors or not event.planned,
    )


def decide(policy: MembershipPolicy, state: State, now: Moment) -> Step | None:
    """Return the next step after a rank was lost or has reported, or None if no rule of this module applies."""
    if not policy.may_lose_nodes or state.phase not in BREAKABLE:
        return None
    if not state.failures:
        return _wait_for_others(policy, state, now) if state.broken else None
    state = NodeRules(policy).give_up_late_nodes(state, now)
    obstacle = _obstacle(policy, state)
    # All remaining ranks must report: a missing rank may be the only one that knows the newest complete vote.
    if obstacle is None and remaining_ranks(policy, state) <= state.has_reported:
        try:
            if _keeps_next(policy, state) and not NodeRules(policy).can_fill_places(state):
                return _fill(policy, state, now)
            return _reform(policy, state, now)
        except RecoveryError as error:
            obstacle = str(error)
    # Further losses are announced, too: agents kill the ranks of the lost node, and the time limit of the other ranks
    # begins again.
    if obstacle is None and state.nodes.lost != state.nodes.announced:
        return _break(policy, state, now)
    if obstacle is None and state.is_late(now):
        return _lose_unresponsive(policy, state, now)
    if obstacle is None:
        return Step(state, Decision.WAIT, "waiting for ranks to report their positions")
    return _give_up(policy, state, now, obstacle)


def _fill(policy: MembershipPolicy, state: State, now: Moment) -> Step:
    """Return the step that replaces lost nodes. If one has no replacement, this step continues or stops the job.

    Raises:
        RecoveryError: there is no iteration after which all ranks can continue.
    """
    if state.nodes.lost != state.nodes.announced:
        return _break(policy, state, now)
    # In this layout, the ranks cannot save a checkpoint without the lost nodes, so the job ends.
    if state.stop_by_seconds is not None and now.arrived_seconds >= state.stop_by_seconds:
        return _give_up(policy, state, now, "the job was asked to stop, and nodes that replace lost nodes did not come")
    state = joining.count_losses(state, choose_target(_positions(policy, state)).iteration)
    if NodeRules(policy).why_place_stays_empty(state) is None:
        return NodeRules(policy).fill_places(state, now)
    obstacle = _why_not_in_place(policy, state)
    return _reform(policy, state, now) if obstacle is None else _give_up(policy, state, now, obstacle)


def _lose_unresponsive(policy: MembershipPolicy, state: State, now: Moment) -> Step:
    # If some ranks have reported but others have not, the others are blocked: mark their nodes as lost. If too few
    # nodes would remain, wait for the blocked ranks until ``reform_by_seconds``.
    unresponsive = sorted(remaining_ranks(policy, state) - state.has_reported)
    last = state.reform_by_seconds
    if last is None or now.arrived_seconds >= last:
        return _give_up(policy, state, now, _describe_unresponsive(policy, state))
    wait = Step(replace(state, deadline_seconds=last), Decision.WAIT, "waiting for ranks to report their positions")
    # While no rank has reported, a slow iteration is more likely than an unresponsive rank, so the limit applies only
    # after the first report.
    if not state.has_reported:
        return wait
    latest = max(failure.at_seconds for failure in state.failures)  # these times and ``now`` are from different clocks
    limit = f"(recovery.position_timeout_seconds={policy.position_timeout_seconds:g})"
    failures = tuple(
        Failure(
            rank=rank,
            number=layout_of(policy, state).rank_of(rank),
            at_seconds=latest,
            detail=f"{name_of(policy, state, rank)} did not report its position {limit}",
        )
        for rank in unresponsive
    )
    nodes = state.nodes.lose({policy.node_of(rank) for rank in unresponsive})
    without = replace(state, nodes=nodes, failures=(*state.failures, *failures))
    return wait if _obstacle(policy, without) is not None else _break(policy, without, now)


def stop_after_failure(policy: MembershipPolicy, state: State, now: Moment, reason: str) -> Step:
    """Stop the job because of a failure; living ranks get time to report their errors."""
    state = replace(state, phase=Phase.STOPPING, deadline_seconds=now.seconds + policy.failure_grace_seconds)
    return Step(state, Decision.STOP, reason)


def _describe_unresponsive(policy: MembershipPolicy, state: State) -> str:
    unresponsive = sorted(remaining_ranks(policy, state) - state.has_reported)
    names = [layout_of(policy, state).rank_of(rank) for rank in unresponsive]
    limit = f"recovery.reconfigure_timeout_seconds={policy.reconfigure_timeout_seconds:g}"
    return f"{limit}: timed out waiting for ranks {names}"


def _wait_for_others(policy: MembershipPolicy, state: State, now: Moment) -> Step:
    # Wait for the reports of all ranks. No process has ended: ranks stopped at the boundary of a change, or had errors.
    if state.has_errors:
        return _wait_for_death(policy, state, now)
    obstacle = _describe_unresponsive(policy, state) if state.is_late(now) else None
    if remaining_ranks(policy, state) <= state.has_reported:
        try:
            return _reform(policy, state, now)
        except RecoveryError as error:
            obstacle = str(error)
    if obstacle is None:
        # The first report sets the deadline; later ones must not extend it.
        deadline = state.deadline_seconds or now.seconds + policy.reconfigure_timeout_seconds
        return Step(replace(state, deadline_seconds=deadline), Decision.WAIT, "ranks wait at the iteration boundary")
    state = replace(state, failures=(Failure(at_seconds=now.seconds, detail=obstacle),))
    return stop_after_failure(policy, state, now, obstacle)


def _wait_for_death(policy: MembershipPolicy, state: State, now: Moment) -> Step:
    if not state.is_late(now):
        # The error of a rank often arrives before the exit of the other rank that caused the error. If no process ends
        # in the grace period, no other rank caused the error.
        grace = now.seconds + policy.death_grace_seconds
        deadline = grace if state.deadline_seconds is None else min(state.deadline_seconds, grace)
        return Step(
            replace(state, deadline_seconds=deadline), Decision.WAIT, "ranks reported errors, but no process has ended"
        )
    failures = tuple(failure_of(policy, state, event) for event in state.broken if not event.planned)
    state = replace(state, failures=failures, broken=(), has_reported=frozenset(), has_errors=False)
    first = state.first_failure
    assert first is not None, "no rank has failed"
    return stop_after_failure(policy, state, now, first.detail)


def failure_of(policy: MembershipPolicy, state: State, event: RankBroken) -> Failure:
    return Failure(
        rank=event.rank,
        at_seconds=event.at_seconds,
        iteration=event.iteration,
        final=event.final,
        detail=f"{name_of(policy, state, event.rank)} raised",
    )


def _obstacle(policy: MembershipPolicy, state: State) -> str | None:
    # Return the reason why the job cannot continue without its lost nodes; None if it can.
    for failure in state.failures:
        node = failure.node if failure.rank is None else policy.node_of(failure.rank)
        # The node of this failure is not lost, so the next membership would still contain the cause of the failure.
        if node not in state.nodes.lost:
            return failure.detail
    ended = sorted(remaining_ranks(policy, state) & state.gone)
    if ended:
        # A rank that has ended cannot report a position or take part in the next membership, and its state is gone.
        name = name_of(policy, state, ended[0])
        return f"{name} has already finished, so the other ranks cannot continue after this loss"
    return _why_not_in_place(policy, state) if keeps_layout(policy, state) else _why_too_few(policy, state)


def _keeps_next(policy: MembershipPolicy, state: State) -> bool:
    """Return whether the next membership keeps the layout: each lost node has or will get a replacement."""
    return keeps_layout(policy, state) and NodeRules(policy).why_place_stays_empty(state) is None


def _why_not_in_place(policy: MembershipPolicy, state: State) -> str | None:
    """Return why a job with ``recovery.keep_layout`` can continue neither in its layout nor with fewer lanes (model
    replicas). Return None if it can continue."""
    empty = NodeRules(policy).why_place_stays_empty(state)
    if empty is None or policy.fewest_nodes >= policy.num_nodes:
        return empty
    few = _why_too_few(policy, state)
    return None if few is None else f"{empty}; {few}"


def _why_too_few(policy: MembershipPolicy, state: State) -> str | None:
    left = set(state.members) - state.nodes.lost
    admitted = NodeRules(policy).admitted(state, len(left))
    num_left, num_joining = len(left), len(admitted)
    if num_left == 0 or num_left + num_joining < policy.fewest_nodes:
        ready = f" plus {num_joining} ready to join" if num_joining else ""
        return f"too few nodes are left: {num_left}{ready}, below recovery.min_nodes={policy.fewest_nodes}"
    try:
        policy.layout_on(sorted({*left, *admitted}), layout_of(policy, state), in_place=False)
    except RecoveryError as error:
        return str(error)
    return None


def _break(policy: MembershipPolicy, state: State, now: Moment) -> Step:
    first = state.first_failure
    assert first is not None, "no node was lost"
    # The time limit for all reports counts from the first loss: a chain of losses must not extend it.
    last = (
        now.seconds + policy.reconfigure_timeout_seconds if state.reform_by_seconds is None else state.reform_by_seconds
    )
    state = replace(
        state,
        phase=Phase.REFORMING,
        nodes=state.nodes.change(state.nodes.lost, is_announced=True),
        deadline_seconds=min(last, now.seconds + policy.position_timeout_seconds),
        reform_by_seconds=last,
    )
    # Agents kill all ranks of the nodes in ``nodes``, so nodes whose ranks were started again are left out: their new
    # ranks must live.
    nodes = tuple(sorted(state.nodes.lost - state.nodes.waiting))
    return Step(state, Decision.BREAK, first.detail, nodes=nodes)


def _reform(policy: MembershipPolicy, state: State, now: Moment) -> Step:
    """Begin the next membership.

    Raises:
        RecoveryError: there is no iteration after which all ranks can continue, or too few nodes are left.
    """
    reform = _next(policy, state)
    first = state.first_failure
    waiting = state.nodes.waiting
    members = reform.layout.nodes
    following = replace(
        state,
        phase=Phase.RUNNING,
        generation=state.generation + 1,
        layout=reform.layout,
        base=reform.base,
        begun_iteration=reform.target.iteration,
        has_changed_layout=policy.keeps_layout and not reform.keeps_layout,
        nodes=_next_nodes(policy, state.nodes, reform, members),
        # If a stop was requested meanwhile, this deadline causes an immediate tick, which orders the stop.
        deadline_seconds=now.arrived_seconds if state.interrupted else None,
        reform_by_seconds=None,
        broken=(),
        has_reported=frozenset(),
        has_errors=False,
        failures=(),
        survived=(*state.survived, state.failures),
        num_reforms=state.num_reforms + 1,
        furthest_iteration=max(state.furthest_iteration, state.failed_iteration),
        reached_iteration=0,
        num_restarts=state.num_restarts_without_progress,
    )
    reason = describe_change(reform.joining, reform.leaving) if first is None else first.detail
    dead = tuple(sorted(set(reform.lost) - waiting - set(members)))
    return Step(following, Decision.REFORM, reason, reform, nodes=dead)


def _next_nodes(policy: MembershipPolicy, nodes: Nodes, reform: Reform, members: tuple[int, ...]) -> Nodes:
    iteration = reform.target.iteration
    for node in reform.lost:
        record = nodes[node]
        if not record.is_counted:
            nodes = nodes.change(node, num_losses=count_loss(record, iteration))
        if record.state is NodeState.LOST:  # in another state, the node's ranks have been started again
            returns = NodeRules(policy).may_return(nodes[node]) and not record.was_draining
            state = NodeState.LEFT if record.was_draining else NodeState.LOST
            nodes = nodes.change(node, state=state, is_wanted=record.is_wanted or returns)
    nodes = nodes.change(reform.leaving, state=NodeState.LEFT)
    nodes = nodes.change(reform.joining, state=NodeState.MEMBER, is_wanted=False, joined_iteration=iteration)
    nodes = nodes.change(nodes.members, leaves_now=False, was_draining=False, is_counted=False)
    nodes = replace(nodes, members=members)
    # Ranks of the next membership know all losses so far. They must be informed if a node that returned is lost again.
    nodes = nodes.change([record.node for record in nodes.records if record.is_announced], is_announced=False)
    return nodes.change(nodes.lost, is_announced=True)


def _next(policy: MembershipPolicy, state: State) -> Reform:
    """Return the nodes and ranks of the next membership, and the iteration after which these ranks continue. No node
    leaves on request at the same time as a failure is handled."""
    leaves = not state.failures
    leaving = frozenset(node for node in state.nodes.draining if leaves and state.nodes[node].leaves_now)
    staying = set(state.members) - state.nodes.lost - leaving
    chosen = staying | set(NodeRules(policy).admitted(state, len(staying)))
    in_place = _keeps_next(policy, state)
    # Nodes that stay keep their order. Without PP and TP, ranks have the order of nodes. Ranks that keep their order
    # also keep most optimizer state.
    placed = [node for node in state.members if node in chosen] if policy.keeps_layout else []
    members = (*placed, *sorted(chosen.difference(placed)))
    if in_place:
        members = joining.members_after_filling(policy, state)
    new = set(members) - staying
    positions = _positions(policy, state)
    target, former = choose_target(positions), layout_of(policy, state)
    # The present membership is the base if it has committed an iteration, or if all its ranks had received their state.
    # Otherwise ranks continue from the state of an earlier membership (``choose_holding``).
    is_formed = all(position.is_formed for position in positions)
    # If the job keeps its layout, memberships differ only in the node at each position, so each can be the base.
    is_base = target.iteration > state.begun_iteration or is_formed or keeps_layout(policy, state)
    base = former if is_base else state.base
    layout = policy.layout_on(members, base, in_place=in_place)
    return Reform(
        lost=tuple(sorted(state.nodes.lost & set(state.members))),
        leaving=tuple(sorted(leaving)),
        joining=tuple(sorted(new)),
        positions=positions,
        target=target,
        previous_ranks=tuple(
            None if policy.node_of(rank) in new else former.rank_of(rank) for rank in layout.processes
        ),
        layout=layout,
        base=base,
        keeps_layout=in_place,
    )


def _positions(policy: MembershipPolicy, state: State) -> tuple[Position, ...]:
    left = remaining_ranks(policy, state)
    # A rank may have died after its report. An iteration that only this rank has completed must not become the target.
    positions = {event.rank: event.position for event in state.broken if event.rank in left}
    return tuple(sorted(positions.values(), key=lambda position: position.rank))


def _give_up(policy: MembershipPolicy, state: State, now: Moment, obstacle: str) -> Step:
    if state.phase in TRAINING:  # no rank has been killed yet: each exit still counts as a failure
        state = replace(state, nodes=state.nodes.restore_members())
    return stop_after_failure(policy, state, now, obstacle)
