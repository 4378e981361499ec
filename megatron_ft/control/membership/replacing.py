"""Rules for jobs that keep their layout: which nodes take the places of lost ones.

Every membership has a node at each place. After all remaining ranks have reported their positions, the next membership
begins if as many joining nodes (spares) are ready as places were lost. If there are too few, nodes are started: the
ranks of lost nodes whose old ranks have ended (``START_NODES``), and before that their agents if these have ended too
(``START_AGENTS``). A node that ends or does not become ready in time is killed and started again, as often as
``max_node_restarts`` allows. If no node can take a place, the job stops like one that needs all nodes.
"""

from dataclasses import replace

from megatron_ft.control.membership.joining import count_loss, fail_start, give_up_agent, kill_or_start
from megatron_ft.control.membership.nodes import AgentState, NodeRecord, NodeState
from megatron_ft.control.membership.state import Decision, MembershipPolicy, Moment, Phase, State, Step, is_late


def lost_places(state: State) -> tuple[int, ...]:
    """Return the places whose node is lost, ascending."""
    return tuple(place for place, node in enumerate(state.members) if node in state.nodes.lost)


def are_filled(policy: MembershipPolicy, state: State) -> bool:
    """Whether a node is ready for every place; always true in jobs that do not keep their layout."""
    return not policy.keeps_layout or len(_ready(state)) == len(lost_places(state))


def filled(state: State) -> tuple[int, ...]:
    """Return the node at each place of the next membership.

    Nodes that have waited longest join: first at their own former places, then in order at the others.
    """
    ready = _ready(state)
    others = iter(node for node in ready if node not in state.members)
    stays = set(state.members) - state.nodes.lost | set(ready)
    # A node at its former place finds the windows that its own snapshot server has kept.
    return tuple(node if node in stays else next(others) for node in state.members)


def restartable(state: State) -> tuple[int, ...]:
    """Return the node at each place for a restart of all ranks: another node where the agent of the former one has
    ended.

    Nodes that waited to join come first. The result has fewer entries than places if too few nodes live.
    """
    live = state.nodes.registered
    order = [record.node for record in state.nodes.joining] + sorted(live)
    others = iter([node for node in dict.fromkeys(order) if node in live and node not in state.members])
    found = [node if node in live else next(others, None) for node in state.members]
    return tuple(node for node in found if node is not None)


def obstacle(policy: MembershipPolicy, state: State) -> str | None:
    """Return the reason why a lost place stays empty; None if there is a node for each."""
    places = lost_places(state)
    if len(places) == len(state.members):
        return "no node is left: every node of the job is lost"
    coming = _coming(policy, state) | _returning(policy, state)
    if len(coming) >= len(places):
        return None
    place = next(place for place in places if state.members[place] not in coming)
    node = state.members[place]
    why = "nodes.restart_lost_nodes=false"
    if policy.restart_lost_nodes:
        why = (
            f"it was lost, or failed to start, too often in a row (nodes.max_node_restarts={policy.max_node_restarts})"
        )
    return f"node {node} (place {place}) has no replacement: no spare is left, and the node is not restarted: {why}"


def count_losses(state: State, iteration: int) -> State:
    """Count lost members of this generation as losses of their nodes, each once; ``iteration`` is the target."""
    # A place that waits needs the count before the next membership counts losses; ``is_counted`` keeps that from
    # counting them again.
    nodes = state.nodes
    for node in state.members:
        record = nodes[node]
        if node in state.nodes.lost and not record.is_counted:
            nodes = nodes.change(node, num_losses=count_loss(record, iteration), is_counted=True)
    return replace(state, nodes=nodes)


def give_up_late(policy: MembershipPolicy, state: State, now: Moment) -> State:
    """Give up nodes that were to be started for a place and are late: the agent has not registered, or old ranks have
    not ended."""
    if state.phase is not Phase.FILLING or not is_late(state, now):
        return state
    reason = f"it did not register in time (launch.start_timeout_seconds={policy.start_timeout_seconds:g})"
    expected = _expected(policy, state)
    for node in sorted(state.nodes.wanted | expected):
        if policy.starts_nodes and state.nodes[node].agent is AgentState.STARTING:
            state = give_up_agent(policy, state, node, now)
        else:
            # More losses than the limit: neither ``_returning`` nor ``may_return`` starts these nodes again.
            state = fail_start(policy, state, node, reason, now, num_losses=policy.max_node_restarts + 1)
    starting = {record.node for record in state.nodes.records if record.agent is AgentState.STARTING}
    nodes = state.nodes.change(expected | starting, agent=AgentState.LOST)
    return replace(state, nodes=nodes, deadline_seconds=now.seconds + policy.start_timeout_seconds)


def fill(policy: MembershipPolicy, state: State, now: Moment) -> Step:
    """Let nodes start for the lost places, while the remaining nodes wait."""
    fresh_deadline = now.seconds + policy.start_timeout_seconds
    deadline = state.deadline_seconds if state.phase is Phase.FILLING else fresh_deadline
    nodes = state.nodes.change(_returning(policy, state), is_wanted=True)
    state = replace(state, phase=Phase.FILLING, nodes=nodes, reform_by_seconds=None, deadline_seconds=deadline)
    step = kill_or_start(policy, state, now)
    if step is None:
        return Step(state, Decision.WAIT, f"waiting for nodes that fill the places {list(lost_places(state))}")
    if step.decision is Decision.KILL_NODES:
        return step
    # Each ordered start has the whole time; steps that only wait keep the deadline.
    return replace(step, state=replace(step.state, deadline_seconds=fresh_deadline))


def set_wake_up(policy: MembershipPolicy, step: Step, now: Moment) -> State:
    """Set the time of the next action for empty places."""
    starting = [record for record in step.state.nodes.joining if record.state is NodeState.STARTING]
    times = [record.since_seconds + policy.start_timeout_seconds for record in starting]
    times += [record.not_before_seconds for record in step.state.nodes.records if record.is_wanted]
    due = min((at for at in times if at > now.arrived_seconds), default=None)
    # An order leaves the next step to a tick, which may be due at once.
    wake_up = due if step.decision is Decision.WAIT else now.arrived_seconds
    return replace(step.state, wake_up_seconds=wake_up)


def _ready(state: State) -> list[int]:
    ready = [record.node for record in state.nodes.joining if record.state is NodeState.READY]
    return ready[: len(lost_places(state))]


def _coming(policy: MembershipPolicy, state: State) -> frozenset[int]:
    wanted = {node for node in state.nodes.wanted if not state.nodes.is_member(node)}
    return state.nodes.waiting | wanted | _expected(policy, state)


def _expected(policy: MembershipPolicy, state: State) -> frozenset[int]:
    return frozenset(node for node in range(policy.most_nodes) if state.nodes[node].agent is AgentState.UNKNOWN)


def _returning(policy: MembershipPolicy, state: State) -> frozenset[int]:
    if not policy.restart_lost_nodes:
        return frozenset()
    coming = _coming(policy, state)
    away = [state.nodes[node] for node in range(policy.most_nodes) if node not in coming]
    able = {r.node for r in away if not state.nodes.is_member(r.node) and _may_start(policy, state, r)}
    own = able & set(state.members)
    is_short = len(coming) + len(own) < len(lost_places(state))
    return frozenset(able if is_short else own)


def _may_start(policy: MembershipPolicy, state: State, record: NodeRecord) -> bool:
    is_uncounted = record.node in state.members and not record.is_counted
    return (1 if is_uncounted else max(1, record.num_losses)) <= policy.max_node_restarts
