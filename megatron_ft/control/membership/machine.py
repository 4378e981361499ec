"""A pure state machine that decides which nodes belong to the job, and what happens next.

The input is a machine event (``events``) and the time; the output is a new state, a decision and its reason. The module
reads no clock, file or socket: the controller supplies real time, tests and simulations supply virtual time.
"""

import signal
from collections.abc import Callable
from dataclasses import replace

from megatron_ft.control.membership import joining, reconfigure
from megatron_ft.control.membership.events import (
    AddRequested,
    DrainRequested,
    JobHung,
    KillRequested,
    MachineEvent,
    Moment,
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
from megatron_ft.control.membership.joining import NodeRules
from megatron_ft.control.membership.state import (
    TRAINING,
    AgentState,
    Decision,
    Failure,
    MembershipPolicy,
    Nodes,
    NodeState,
    Outcome,
    Phase,
    State,
    Step,
    keeps_layout,
    layout_of,
)
from megatron_ft.errors import RecoveryError

_REASONS = {Outcome.FINISHED: "all ranks have finished", Outcome.INTERRUPTED: "the job was asked to stop"}

Transition = Callable[[MembershipPolicy, State, MachineEvent, Moment], Step | None]
"""A rule, called after the event was recorded in the state. Returns a step, or None if the rule does not apply."""


def initial(policy: MembershipPolicy, now_seconds: float) -> State:
    """Return the state of a job that no node has joined yet."""
    deadline = now_seconds + policy.start_timeout_seconds
    return State(deadline_seconds=deadline, nodes=Nodes.of(range(policy.num_nodes)))


def advance(
    policy: MembershipPolicy,
    state: State,
    event: MachineEvent,
    now_seconds: float,
    arrived_seconds: float | None = None,
) -> Step:
    """Record one event, and return the step of the first rule in ``TRANSITIONS`` that applies.

    Args:
        now_seconds: present time on the controller's monotonic clock.
        arrived_seconds: time of the event's arrival, on the same clock. For a ``Tick``, all events that arrived
            before this time have been processed. Default: ``now_seconds``.
    """
    now = Moment(now_seconds, now_seconds if arrived_seconds is None else arrived_seconds)
    if state.phase is Phase.ENDED:
        return Step(state, Decision.WAIT, "the job has ended")
    # The controller has reported the failed starts of the last step, so they are removed from the state.
    observed = _observe(policy, replace(state, failed_starts=()), event, now)
    step = Step(observed, Decision.WAIT, observed.phase.value)
    for transition in TRANSITIONS:
        decided = transition(policy, observed, event, now)
        if decided is not None:
            step = decided
            break
    if keeps_layout(policy, step.state) and step.state.phase in (Phase.REFORMING, Phase.FILLING):
        return replace(step, state=NodeRules(policy).set_wake_up_of_filling(step, now))
    return replace(step, state=NodeRules(policy).set_wake_up(step.state, now))


def _observe(policy: MembershipPolicy, state: State, event: MachineEvent, now: Moment) -> State:
    match event:
        case NodeJoined(node):
            return NodeRules(policy).register(state, node)
        case AddRequested(node):
            return NodeRules(policy).add(state, node)
        case DrainRequested(node):
            return NodeRules(policy).drain(state, node)
        case RankReported(rank):
            return NodeRules(policy).connect(state, rank, now)
        case RankRaised() | RankBroken() | RankExited() | RankHung():
            return _observe_rank(policy, state, event, now)
        case JobHung(at_seconds, detail):
            return _fail(state, Failure(at_seconds=at_seconds, detail=detail))
        case NodeLost():
            return _lose_node(policy, state, event, now)
        case StopRequested() | KillRequested():
            stop_by = state.stop_by_seconds or now.seconds + policy.stop_timeout_seconds
            return replace(state, interrupted=True, stop_by_seconds=stop_by)
    return state


def _lose_node(policy: MembershipPolicy, state: State, event: NodeLost, now: Moment) -> State:
    node, detail = event.node, event.detail
    state = NodeRules(policy).lose_agent(state, node, detail, now)
    # The job waits for nodes that start by themselves, so this node may register again.
    if state.phase is Phase.FORMING and not policy.starts_nodes:
        return replace(state, nodes=state.nodes.change(node, was_registered=False))
    if not state.nodes.is_member(node):
        return state
    failure = Failure(node=node, at_seconds=event.at_seconds, sudden=True, detail=f"node {node} was lost: {detail}")
    return reconfigure.lose(policy, _fail(state, failure), node)


def _observe_rank(
    policy: MembershipPolicy, state: State, event: RankRaised | RankBroken | RankExited | RankHung, now: Moment
) -> State:
    # Record an event of a rank. If the node of the rank is lost or not a member, the event is no failure of the job.
    node, rank = policy.node_of(event.rank), event.rank
    if node not in state.members or node in state.nodes.waiting:
        if not isinstance(event, RankExited):
            return state
        cause = f": {event.last_line}" if event.last_line and event.returncode > 0 else ""
        reason = f"rank {rank} {describe_returncode(event.returncode)}{cause}"
        return NodeRules(policy).lose_rank(state, rank, reason, now)
    name = reconfigure.name_of(policy, state, rank)
    is_lost = node in state.nodes.lost
    match event:
        case RankBroken():
            received = reconfigure.receive(policy, state, event)
            return _fail(state, reconfigure.failure_of(policy, state, event)) if received is None else received
        case RankRaised(_, at_seconds, iteration, final):
            failure = Failure(
                rank=rank, at_seconds=at_seconds, iteration=iteration, final=final, detail=f"{name} raised"
            )
            # An error on a lost node follows from the loss.
            return state if is_lost else _fail(state, failure)
        case RankHung(_, at_seconds, detail, iteration):
            failure = Failure(
                rank=rank, at_seconds=at_seconds, iteration=iteration, sudden=True, detail=f"{name} {detail}"
            )
            is_over = is_lost or rank in state.gone
            return state if is_over else reconfigure.lose(policy, _fail(state, failure), node)
    reached = max(state.reached_iteration, event.iteration)
    state = replace(state, gone=state.gone | {rank}, reached_iteration=reached)
    if is_lost or (event.done and event.returncode == 0):
        return state
    failure = Failure(
        rank=rank,
        at_seconds=event.at_seconds,
        iteration=event.iteration,
        # SIGABRT and SIGTERM can be consequences of another death: a library aborts, or the job stops.
        sudden=event.returncode < 0 and -event.returncode not in (signal.SIGABRT, signal.SIGTERM),
        detail=f"{name} {describe_returncode(event.returncode)}",
    )
    return reconfigure.lose(policy, _fail(state, failure), node)


def _fail(state: State, failure: Failure) -> State:
    # Add a failure. Failures that the controller caused do not count, and each rank counts once: a rank that raises
    # reports its error and later its exit.
    known = any(old.rank == failure.rank and old.node == failure.node for old in state.failures)
    if state.phase is Phase.KILLING or known:
        return state
    return replace(state, failures=(*state.failures, failure))


def _restart(policy: MembershipPolicy, state: State, event: MachineEvent, now: Moment) -> Step | None:
    # Start all ranks again after the last one has ended, if enough nodes live and another attempt may succeed. An old
    # rank that lives can still write to the run's folder and answer its peers, so no new rank may start beside it.
    first = state.first_failure
    if first is None or first.final or state.interrupted or state.phase is Phase.FORMING or _any_lives(policy, state):
        return None
    if state.num_restarts_without_progress >= policy.max_restarts:
        return None
    members = _restartable(policy, state)
    is_short = len(members) < (policy.num_nodes if policy.keeps_layout else policy.fewest_nodes)
    waiting = NodeRules(policy).await_agents(state, now) if is_short and policy.keeps_layout else None
    if waiting is not None:
        return waiting
    if len(members) < policy.fewest_nodes:
        return None
    try:
        policy.layout_on(members, in_place=not is_short)
    except RecoveryError:
        return None  # the nodes are too few for the layout
    # The new state has no report of the old generation. It keeps earlier failures, counters, and records of nodes.
    restarted = State(
        phase=Phase.STARTING,
        generation=state.generation + 1,
        nodes=_restarted_nodes(policy, state.nodes, members),
        deadline_seconds=now.seconds + policy.start_timeout_seconds,
        has_changed_layout=policy.keeps_layout and is_short,
        num_reforms=state.num_reforms,
        survived=(*state.survived, state.failures),
        furthest_iteration=max(state.furthest_iteration, state.failed_iteration),
        num_restarts=state.num_restarts_without_progress + 1,
    )
    return Step(restarted, Decision.RESTART, first.detail)


def _restartable(policy: MembershipPolicy, state: State) -> tuple[int, ...]:
    """Return at most ``most_members`` nodes for a restart of all ranks. Members that were not lost are preferred. The
    nodes are ascending; if the job keeps its layout, they are in the order of their positions in the layout."""
    if policy.keeps_layout:
        return joining.members_after_restart(state)
    nodes, living_members = state.nodes, set(state.members) - state.nodes.lost
    live = {record.node for record in nodes.records if record.agent is not AgentState.LOST} & set(state.members)
    if policy.may_lose_nodes:
        live = {node for node in nodes.registered if nodes[node].state is not NodeState.LEFT}
    # A node that was asked to leave is used again only if there are too few other nodes.
    staying = {node for node in live if nodes[node].state is not NodeState.DRAINING and not nodes[node].was_draining}
    live = staying if len(staying) >= policy.fewest_nodes else live
    # Living members are preferred, because their snapshot servers hold the newest windows.
    ordered = sorted(live, key=lambda node: (node not in living_members, node not in nodes.waiting, node))
    return tuple(sorted(ordered[: policy.most_members]))


def _restarted_nodes(policy: MembershipPolicy, nodes: Nodes, members: tuple[int, ...]) -> Nodes:
    found = Nodes.of(members).change(members, has_ranks=True)
    for record in nodes.records:
        node, is_registered = record.node, record.agent is AgentState.REGISTERED
        has_left = record.state in (NodeState.LEFT, NodeState.DRAINING) or record.was_draining
        comes = policy.may_lose_nodes and (record.was_registered if policy.restart_lost_nodes else is_registered)
        # If all ranks restart after a loss, nodes outside the membership have no ranks: only agents are started again.
        if policy.replaces_by_restart:
            comes = policy.restart_lost_nodes and record.was_registered and not is_registered
        found = found.change(
            node,
            agent=AgentState.LOST if record.agent is AgentState.STARTING else record.agent,
            was_registered=record.was_registered,
            has_unregistered_agent=record.has_unregistered_agent or record.agent is AgentState.STARTING,
        )
        if node not in members and has_left:
            found = found.change(node, state=NodeState.LEFT)
        elif node not in members:
            found = found.change(node, is_wanted=record.is_wanted or comes)
    return found


def _any_lives(policy: MembershipPolicy, state: State) -> bool:
    return not policy.ranks_of_all(state.nodes.with_ranks) <= state.gone


def _end(policy: MembershipPolicy, state: State, event: MachineEvent, now: Moment) -> Step | None:
    nothing_runs = state.phase is Phase.FORMING and (state.interrupted or state.failures)
    # After a failure, all processes must have ended, because all may be started again. Without a failure, the job does
    # not wait for hot spares: they wait for another membership, and end with their agents.
    with_ranks = state.nodes.with_ranks
    remaining = (
        policy.ranks_of_all(with_ranks) if state.failures else layout_of(policy, state).processes_without(frozenset())
    )
    if not nothing_runs and not remaining <= state.gone:
        return None
    first = state.first_failure
    reason = _REASONS[state.outcome] if first is None else f"{first.detail}{_why_not_again(policy, state, now)}"
    return _ended(state, reason)


def _why_not_again(policy: MembershipPolicy, state: State, now: Moment) -> str:
    """Return why a job that restarts all ranks after a loss (``replaces_by_restart``) does not restart them now. Return
    an empty text for other jobs, after a request to stop, and after a failure that excludes a restart."""
    first = state.first_failure
    if (
        not policy.replaces_by_restart
        or first is None
        or first.final
        or state.interrupted
        or state.phase is Phase.FORMING
    ):
        return ""
    if state.num_restarts_without_progress >= policy.max_restarts:
        return f"; the ranks were restarted {policy.max_restarts} times without progress (recovery.max_restarts)"
    return f"; {NodeRules(policy).why_agents_are_missing(state, now)}"


def _ended(state: State, reason: str) -> Step:
    return Step(replace(state, phase=Phase.ENDED, deadline_seconds=None), Decision.END, reason)


def _end_without_exits(policy: MembershipPolicy, state: State, event: MachineEvent, now: Moment) -> Step | None:
    if state.phase is not Phase.KILLING or not state.is_late(now):
        return None
    # SIGKILL does not end a process in an uninterruptible wait of the kernel, e.g. for a file server that is gone.
    missing = sorted(policy.ranks_of_all(state.nodes.with_ranks) - state.gone)
    return _ended(state, f"timed out waiting {policy.kill_timeout_seconds} s for the exit of killed ranks {missing}")


def _kill(policy: MembershipPolicy, state: State, event: MachineEvent, now: Moment) -> Step | None:
    if state.phase is Phase.KILLING:
        return None
    waits_for_change = state.phase is Phase.CHANGING and state.interrupted
    overdue = (state.phase is Phase.STOPPING or waits_for_change) and state.is_late(now)
    # Ranks that are starting have no iteration to finish and no new state to save.
    nothing_to_save = state.phase is Phase.STARTING and state.interrupted
    if not overdue and not nothing_to_save and not isinstance(event, KillRequested):
        return None
    return _killing(policy, state, now, "the ranks did not stop in time" if overdue else "killed on request")


def _killing(policy: MembershipPolicy, state: State, now: Moment, reason: str) -> Step:
    state = replace(state, phase=Phase.KILLING, deadline_seconds=now.seconds + policy.kill_timeout_seconds)
    return Step(state, Decision.KILL, reason)


def _continue_without(policy: MembershipPolicy, state: State, event: MachineEvent, now: Moment) -> Step | None:
    return reconfigure.decide(policy, state, now)


def _stop(policy: MembershipPolicy, state: State, event: MachineEvent, now: Moment) -> Step | None:
    if state.phase not in (Phase.FORMING, Phase.STARTING, *TRAINING):
        return None
    first = state.first_failure
    if first is not None:
        return reconfigure.stop_after_failure(policy, state, now, first.detail)
    if not state.interrupted:
        return None
    deadline = now.seconds + policy.stop_timeout_seconds
    if state.phase is not Phase.CHANGING:
        state = replace(state, phase=Phase.STOPPING, deadline_seconds=deadline)
        return Step(state, Decision.STOP, "the job was asked to stop")
    # Some ranks may wait for the next membership already. So this membership begins first, and then stops at once.
    if state.deadline_seconds is None:
        state = replace(state, deadline_seconds=deadline)
        return Step(state, Decision.WAIT, "asked to stop while nodes join or leave: the job stops after this change")
    return None


def _shorten_stop(policy: MembershipPolicy, state: State, event: MachineEvent, now: Moment) -> Step | None:
    if state.phase is not Phase.STOPPING or not state.failures or isinstance(event, Tick):
        return None
    deadline = min(state.deadline_seconds or now.seconds, now.seconds + policy.failure_grace_seconds)
    return Step(
        replace(state, deadline_seconds=deadline), Decision.WAIT, "a rank or node was lost while the job stopped"
    )


def _time_out(policy: MembershipPolicy, state: State, event: MachineEvent, now: Moment) -> Step | None:
    if state.phase not in (Phase.FORMING, Phase.STARTING) or not state.is_late(now):
        return None
    if state.phase is Phase.FORMING:
        missing = f"nodes {sorted(set(state.members) - state.nodes.registered)}"
    else:
        ranks = policy.ranks_of_all(state.members) - state.connected
        numbers = [layout_of(policy, state).rank_of(rank) for rank in ranks]
        missing = f"ranks {sorted(number for number in numbers if number is not None)}"
    detail = f"launch.start_timeout_seconds={policy.start_timeout_seconds:g}: timed out waiting for {missing}"
    # The failure is final: nodes or ranks that are missing after the time limit would be missing after a restart, too.
    state = replace(state, failures=(Failure(at_seconds=now.seconds, final=True, detail=detail),))
    return _ended(state, detail) if state.phase is Phase.FORMING else _killing(policy, state, now, detail)


def _start(policy: MembershipPolicy, state: State, event: MachineEvent, now: Moment) -> Step | None:
    if state.phase is not Phase.FORMING or not state.nodes.registered.issuperset(state.members):
        return None
    nodes = state.nodes.change(state.members, has_ranks=True)
    deadline = now.seconds + policy.start_timeout_seconds
    state = replace(state, phase=Phase.STARTING, nodes=nodes, deadline_seconds=deadline)
    return Step(state, Decision.START, f"the agents of all nodes have registered: {len(state.members)}")


def _run(policy: MembershipPolicy, state: State, event: MachineEvent, now: Moment) -> Step | None:
    if state.phase is not Phase.STARTING or not state.connected >= policy.ranks_of_all(state.members):
        return None
    state = replace(state, phase=Phase.RUNNING, deadline_seconds=None)
    return Step(state, Decision.WAIT, f"all ranks have connected: {len(state.members) * policy.ranks_per_node}")


def _join_or_leave(policy: MembershipPolicy, state: State, event: MachineEvent, now: Moment) -> Step | None:
    return NodeRules(policy).decide(state, now)


TRANSITIONS: tuple[Transition, ...] = (
    # ``_restart`` comes before ``_end``, which would end each job whose ranks may be started again.
    _restart,  # all ranks are gone after a failure: start them again if another attempt may succeed
    _end,  # all ranks are gone, or none was started
    _end_without_exits,  # ranks were killed, and their exits are overdue
    _kill,  # a stop is overdue, or an operator wants the end at once
    # This comes before ``_stop``, which would stop the job also for failures that the job can survive.
    _continue_without,  # the job may lose nodes: break the membership, collect positions, begin the next one
    _stop,  # a failure that the job does not survive, or an operator wants the job to stop
    _shorten_stop,  # a rank or node failed while the job was stopping: the other ranks get less time
    _time_out,  # nodes or ranks did not report in time
    _start,  # FORMING -> STARTING: all nodes are registered
    _run,  # STARTING -> RUNNING: all ranks have connected
    _join_or_leave,  # starts, kills, admits or releases nodes while the members train
)
"""The rules in order of priority: the first one that applies decides."""


def describe_returncode(returncode: int) -> str:
    """Describe the exit of a process, e.g. ``exited with code 1`` or ``was killed by SIGKILL``."""
    if returncode == 0:
        return "exited with code 0 before its work was done"
    return f"exited with code {returncode}" if returncode > 0 else f"was killed by {signal_name(-returncode)}"


def signal_name(number: int) -> str:
    """Return the name of a signal, e.g. ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
