"""Who takes the places of lost nodes in a job that keeps its layout: rules of the state machine of ``membership``.

Every membership has a node at each place. When all ranks that are left have said how far they are, the next membership
begins if as many newcomers are ready as places were lost: spares, which have waited. Where there are too few, nodes are
started: lost ones whose old ranks are gone (``START_NODES``), their own processes first where those are gone, too
(``START_AGENTS``). What does not become ready in time, or ends, is killed and started again, as often as
``max_node_restarts`` allows. When nobody is left who could fill a place, the job goes the way of those that need all
nodes.
"""

from dataclasses import replace

from megatron_ft.control.membership.joining import count_returns, fail_start, is_member, kill_or_start
from megatron_ft.control.membership.state import Decision, MembershipPolicy, Moment, Phase, State, Step, is_late


def lost_places(state: State) -> tuple[int, ...]:
    """Places whose node is lost, rising."""
    return tuple(place for place, node in enumerate(state.members) if node in state.lost)


def are_filled(policy: MembershipPolicy, state: State) -> bool:
    """Whether somebody is ready for every place; always where places do not count."""
    return not policy.keeps_layout or len(_ready(state)) == len(lost_places(state))


def filled(state: State) -> tuple[int, ...]:
    """The node at each place of the next membership.

    Those that have waited longest come in: at the places that were theirs, then in order at the others.
    """
    ready = _ready(state)
    others = iter(node for node in ready if node not in state.members)
    stays = set(state.members) - state.lost | set(ready)
    return tuple(node if node in stays else next(others) for node in state.members)


def restartable(state: State) -> tuple[int, ...]:
    """The node at each place for a start of all ranks: another one where the process of the former is gone.

    Those that have waited to join come first. Fewer than all places where too few nodes live.
    """
    live = state.joined - state.agents_lost
    order = [newcomer.node for newcomer in state.newcomers] + sorted(live)
    others = iter([node for node in dict.fromkeys(order) if node in live and node not in state.members])
    found = [node if node in live else next(others, None) for node in state.members]
    return tuple(node for node in found if node is not None)


def obstacle(policy: MembershipPolicy, state: State) -> str | None:
    """Why a lost place stays empty; None as long as there is somebody for each."""
    places = lost_places(state)
    if len(places) == len(state.members):
        return "no node is left: the nodes of all places are lost"
    coming = _coming(policy, state) | _returning(policy, state)
    if len(coming) >= len(places):
        return None
    place = next(place for place in places if state.members[place] not in coming)
    node = state.members[place]
    why = "launch.restart_lost_nodes=false"
    if policy.restart_lost_nodes:
        why = f"it was lost or started in vain too often in a row (launch.max_node_restarts={policy.max_node_restarts})"
    return f"nobody can take place {place} of node {node}: no spare is there, and node {node} does not come back, {why}"


def count_losses(state: State, iteration: int) -> State:
    """Count the dead members of this generation, each once, when it is known after which iteration the job goes on."""
    lost = {node for node in state.members if node in state.lost} - state.counted
    returns = count_returns(state, iteration, lost=sorted(lost))
    return replace(state, returns=returns, counted=state.counted | lost)


def give_up_late(policy: MembershipPolicy, state: State, now: Moment) -> State:
    """Try no more what was to be started for a place and has not begun in time: a process that does not register, or
    one whose old ranks do not end."""
    if not _is_filling(policy, state) or not is_late(state, now):
        return state
    expected = _expected(policy, state)
    reason = f"it did not begin (launch.start_timeout_seconds={policy.start_timeout_seconds:g})"
    for node in sorted(state.wanted | expected):
        state = fail_start(policy, state, node, reason, num_losses=policy.max_node_restarts + 1)
    return replace(
        state,
        wanted=frozenset(),
        agents_starting=frozenset(),
        agents_lost=state.agents_lost | expected,
        deadline_seconds=now.seconds + policy.start_timeout_seconds,
    )


def fill(policy: MembershipPolicy, state: State, now: Moment) -> Step:
    """Have nodes start for the lost places, while those that are left wait."""
    deadline = state.deadline_seconds if _is_filling(policy, state) else now.seconds + policy.start_timeout_seconds
    wanted = state.wanted | _returning(policy, state)
    state = replace(state, wanted=wanted, reform_by_seconds=None, deadline_seconds=deadline)
    step = kill_or_start(policy, state, now)
    if step is None:
        return Step(state, Decision.WAIT, f"places {list(lost_places(state))} wait for nodes to be ready")
    if step.decision is Decision.KILL_NODES:
        return step
    return replace(step, state=replace(step.state, deadline_seconds=now.seconds + policy.start_timeout_seconds))


def look_again(policy: MembershipPolicy, step: Step, now: Moment) -> State:
    """Set when there is more to do about places that wait."""
    times = [newcomer.since_seconds + policy.start_timeout_seconds for newcomer in step.state.newcomers]
    late = [
        at
        for at, newcomer in zip(times, step.state.newcomers, strict=True)
        if not newcomer.is_ready and at > now.arrived_seconds
    ]
    look_at = min(late, default=None) if step.decision is Decision.WAIT else now.arrived_seconds
    return replace(step.state, look_at_seconds=look_at)


def _ready(state: State) -> list[int]:
    """As many ready newcomers as there are lost places, or fewer."""
    return [newcomer.node for newcomer in state.newcomers if newcomer.is_ready][: len(lost_places(state))]


def _is_filling(policy: MembershipPolicy, state: State) -> bool:
    """Whether ranks have said all that is awaited of them, and places wait."""
    return policy.keeps_layout and state.phase is Phase.REFORMING and state.reform_by_seconds is None


def _coming(policy: MembershipPolicy, state: State) -> frozenset[int]:
    """Nodes that are ready for a place, or on their way."""
    wanted = {node for node in state.wanted if not is_member(state, node)}
    return state.waiting | wanted | _expected(policy, state)


def _expected(policy: MembershipPolicy, state: State) -> frozenset[int]:
    """Spares whose processes were started with the job and have not registered yet."""
    return frozenset(range(policy.most_nodes)) - state.joined - state.agents_lost


def _returning(policy: MembershipPolicy, state: State) -> frozenset[int]:
    """Nodes that may be started for a lost place: dead members; where those are too few, spares that have died."""
    if not policy.restart_lost_nodes:
        return frozenset()
    away = set(range(policy.most_nodes)) - _coming(policy, state)
    hopeful = {node for node in away if not is_member(state, node) and _may_start(policy, state, node)}
    own = hopeful & set(state.members)
    is_short = len(_coming(policy, state)) + len(own) < len(lost_places(state))
    return frozenset(hopeful if is_short else own)


def _may_start(policy: MembershipPolicy, state: State, node: int) -> bool:
    """Whether a node has not been lost, or started in vain, too often in a row. A loss just now is counted later."""
    is_uncounted = node in state.members and node not in state.counted
    losses = next((found.num_losses for found in state.returns if found.node == node), 0)
    return (1 if is_uncounted else max(1, losses)) <= policy.max_node_restarts
