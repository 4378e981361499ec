"""How nodes join a job that runs, and leave it as asked: rules of the state machine of ``membership``.

A node outside of the membership is wanted when its process registers, or when somebody adds it. Its ranks are started
(``START_NODES``); when all have reported they wait. Once the first node has waited ``join_window_seconds``, or a
member is to leave, the members are told (``CHANGE``); when all stand at the boundary, the next membership begins
(``membership_reform``). Nodes beyond ``most_members`` wait as spares until a member is lost or leaves.
"""

from collections.abc import Iterable
from dataclasses import replace

from megatron_ft.control.membership.state import (
    SETTLED_ITERATIONS,
    Decision,
    FailedStart,
    MembershipPolicy,
    Moment,
    Newcomer,
    Phase,
    Return,
    State,
    Step,
    ranks_of_all,
)

_ALIVE = (Phase.STARTING, Phase.RUNNING, Phase.REFORMING)


def is_member(state: State, node: int) -> bool:
    """Whether a node is of the present membership and not lost."""
    return node in state.members and node not in state.lost


def join(policy: MembershipPolicy, state: State, node: int) -> State:
    """Take in that a node's process has registered."""
    state = replace(state, joined=state.joined | {node}, agents_lost=state.agents_lost - {node})
    return want(policy, replace(state, agents_starting=state.agents_starting - {node}), node)


def add(policy: MembershipPolicy, state: State, node: int) -> State:
    """Take in that somebody wants a node to join, however often it was lost before."""
    returns = tuple(found for found in state.returns if found.node != node)
    return want(policy, replace(state, returns=returns), node)


def count_returns(
    state: State, iteration: int, *, lost: Iterable[int], joining: Iterable[int] = ()
) -> tuple[Return, ...]:
    """How often nodes have come and gone, once those ``lost`` are left behind after ``iteration``."""
    known = {found.node: found for found in state.returns}
    for node in lost:
        before = known.get(node, Return(node, iteration=0, num_losses=0))
        has_settled = iteration - before.iteration >= SETTLED_ITERATIONS
        known[node] = replace(before, num_losses=1 if has_settled else before.num_losses + 1)
    for node in joining:
        known[node] = replace(known.get(node, Return(node, iteration, num_losses=0)), iteration=iteration)
    return tuple(known[node] for node in sorted(known))


def fail_start(policy: MembershipPolicy, state: State, node: int, reason: str, *, num_losses: int = 1) -> State:
    """Count a start that came to nothing like a loss, or several; the node is started again as often as is allowed."""
    known = {found.node: found for found in state.returns}
    before = known.get(node, Return(node, iteration=0, num_losses=0))
    known[node] = replace(before, num_losses=before.num_losses + num_losses)
    starts_again = bool(returning(policy, [node], known.values()))
    return replace(
        state,
        returns=tuple(known[number] for number in sorted(known)),
        wanted=state.wanted | {node} if starts_again else state.wanted - {node},
        failed_starts=(*state.failed_starts, FailedStart(node, reason, starts_again)),
    )


def returning(policy: MembershipPolicy, lost: Iterable[int], returns: Iterable[Return]) -> set[int]:
    """Those of the ``lost`` that are started again."""
    if not policy.restart_lost_nodes:
        return set()
    hopeless = {found.node for found in returns if found.num_losses > policy.max_node_restarts}
    return set(lost) - hopeless


def want(policy: MembershipPolicy, state: State, node: int) -> State:
    """Have a node that is no member start and join."""
    if not policy.may_lose_nodes or is_member(state, node) or _newcomer(state, node) is not None:
        return state
    return replace(state, wanted=state.wanted | {node}, left=state.left - {node})


def lose_agent(policy: MembershipPolicy, state: State, node: int, reason: str) -> State:
    """Take in that a node's process is gone, and its ranks with it."""
    is_new = node not in state.joined | state.agents_lost and not is_member(state, node)
    if is_new or node in state.agents_starting or node in state.waiting:
        state = fail_start(policy, state, node, reason)
    elif not policy.restart_lost_nodes:
        state = replace(state, wanted=state.wanted - {node})
    return replace(
        state,
        gone=state.gone | set(policy.ranks_of(node)),
        agents_lost=state.agents_lost | {node},
        agents_starting=state.agents_starting - {node},
        newcomers=_without(state, node),
        dismissed=state.dismissed - {node},
    )


def report(policy: MembershipPolicy, state: State, rank: int, now: Moment) -> State:
    """Take in that a rank lives; a newcomer whose ranks all do is ready."""
    state = replace(state, reported=state.reported | {rank})
    node = policy.node_of(rank)
    newcomer = _newcomer(state, node)
    if newcomer is None or newcomer.is_ready or not state.reported >= set(policy.ranks_of(node)):
        return state
    return replace(state, newcomers=(*_without(state, node), Newcomer(node, now.seconds, is_ready=True)))


def lose_rank(policy: MembershipPolicy, state: State, rank: int, reason: str) -> State:
    """Take in that a rank of a node that is no member has ended: as a newcomer it will not join."""
    node = policy.node_of(rank)
    state = replace(state, gone=state.gone | {rank})
    return state if _newcomer(state, node) is None else _dismiss(policy, state, node, reason)


def drain(policy: MembershipPolicy, state: State, node: int) -> State:
    """Take in that a member is to leave, unless it cannot."""
    if refuse_drain(policy, state, node) is not None:
        return state
    return replace(state, draining=state.draining | {node})


def refuse_drain(policy: MembershipPolicy, state: State, node: int) -> str | None:
    """Why a node cannot leave; None if it can."""
    if state.phase not in _ALIVE or state.interrupted:
        return f"the job is {'stopping' if state.interrupted else state.phase.value}"
    if not is_member(state, node):
        return f"node {node} is no member"
    if policy.keeps_layout:
        return "launch.keep_layout=true: every place of the layout is needed, and only a lost node is replaced"
    if node in state.draining:
        return f"node {node} is leaving already"
    num_left = len(set(state.members) - state.lost - state.draining) - 1
    if num_left < policy.fewest_nodes:
        return f"{num_left} nodes would be left, launch.min_nodes={policy.fewest_nodes}"
    return None


def refuse_add(policy: MembershipPolicy, state: State, node: int) -> str | None:
    """Why a node cannot be added; None if it can."""
    if state.phase not in _ALIVE or state.interrupted:
        return f"the job is {'stopping' if state.interrupted else state.phase.value}"
    if not policy.may_lose_nodes:
        return f"launch.min_nodes={policy.min_nodes} and launch.max_nodes={policy.max_nodes}: no node can join this job"
    if is_member(state, node):
        return f"node {node} is a member"
    if _newcomer(state, node) is not None or node in state.wanted:
        return f"node {node} is waiting to join already"
    if not policy.starts_nodes and node not in state.joined - state.agents_lost:
        return f"node {node} has no process, and launch.node_launcher=none starts none: it joins when it comes"
    return None


def admitted(policy: MembershipPolicy, state: State, num_staying: int) -> tuple[int, ...]:
    """Nodes that join the next membership beside ``num_staying`` members: those that have waited longest, rising."""
    ready = [newcomer.node for newcomer in state.newcomers if newcomer.is_ready]
    return tuple(sorted(ready[: max(0, policy.most_members - num_staying)]))


def decide(policy: MembershipPolicy, state: State, now: Moment) -> Step | None:
    """The next step about nodes that join or leave, while the members work."""
    if state.phase is not Phase.RUNNING or state.failures or state.broken or state.interrupted:
        return None
    if not policy.may_lose_nodes or not ranks_of_all(policy, state.members).isdisjoint(state.gone):
        return None  # ranks have done their work: the job is about to end
    return kill_or_start(policy, state, now) or _change(policy, state, now)


def look_again(policy: MembershipPolicy, state: State, now: Moment) -> State:
    """Set when ``decide`` has something to say next."""
    if state.phase is not Phase.RUNNING:
        return state if state.look_at_seconds is None else replace(state, look_at_seconds=None)
    if decide(policy, state, now) is not None:
        return replace(state, look_at_seconds=now.arrived_seconds)
    waits = {False: policy.start_timeout_seconds, True: policy.join_window_seconds}
    times = [newcomer.since_seconds + waits[newcomer.is_ready] for newcomer in state.newcomers]
    return replace(state, look_at_seconds=min((at for at in times if at > now.arrived_seconds), default=None))


def is_vacant(policy: MembershipPolicy, state: State, node: int) -> bool:
    """Whether a node has no rank that lives."""
    return node not in state.started or state.gone >= set(policy.ranks_of(node))


def begin(policy: MembershipPolicy, state: State, nodes: tuple[int, ...]) -> State:
    """Forget what is known of the earlier ranks of nodes whose ranks are started. A dead member stays lost."""
    ranks = {rank for node in nodes for rank in policy.ranks_of(node)}
    names, others = ("left", "wanted", "dismissed"), set(nodes) - set(state.members)
    return replace(
        state,
        lost=state.lost - others,
        announced=state.announced - others,
        started=state.started | set(nodes),
        gone=state.gone - ranks,
        reported=state.reported - ranks,
        **{name: getattr(state, name) - set(nodes) for name in names},
    )


def kill_or_start(policy: MembershipPolicy, state: State, now: Moment) -> Step | None:
    """The next step about nodes outside of the membership alone."""
    return _kill(policy, state, now) or _start(policy, state, now)


def _kill(policy: MembershipPolicy, state: State, now: Moment) -> Step | None:
    for newcomer in state.newcomers:
        if not newcomer.is_ready and now.arrived_seconds >= newcomer.since_seconds + policy.start_timeout_seconds:
            late = f"not all of its ranks reported (launch.start_timeout_seconds={policy.start_timeout_seconds:g})"
            state = _dismiss(policy, state, newcomer.node, late)
    nodes = tuple(sorted(state.dismissed))
    if not nodes:
        return None
    reason = f"nodes {list(nodes)} do not join: a rank has ended or did not report"
    return Step(replace(state, dismissed=frozenset()), Decision.KILL_NODES, reason, nodes=nodes)


def _start(policy: MembershipPolicy, state: State, now: Moment) -> Step | None:
    startable = {node for node in state.wanted if not is_member(state, node) and is_vacant(policy, state, node)}
    absent = startable - (state.joined - state.agents_lost)
    nodes = tuple(sorted(startable - absent))
    if nodes:
        state = begin(policy, state, nodes)
        newcomers = (*state.newcomers, *(Newcomer(node, now.seconds) for node in nodes))
        reason = f"nodes {list(nodes)} are to join"
        return Step(replace(state, newcomers=newcomers), Decision.START_NODES, reason, nodes=nodes)
    nodes = tuple(sorted(absent - state.agents_starting))
    if nodes:
        state = replace(state, agents_starting=state.agents_starting | set(nodes))
        return Step(state, Decision.START_AGENTS, f"nodes {list(nodes)} are to join", nodes=nodes)
    return None


def _change(policy: MembershipPolicy, state: State, now: Moment) -> Step | None:
    if state.change is not None:
        return None
    num_spare = len(state.members) - policy.fewest_nodes
    leaving = tuple(sorted(state.draining)[: max(0, num_spare)])
    joining = admitted(policy, state, len(state.members) - len(leaving))
    since = [newcomer.since_seconds for newcomer in state.newcomers if newcomer.node in joining]
    if not leaving and (not since or now.arrived_seconds < min(since) + policy.join_window_seconds):
        return None
    reason = describe_change(joining, leaving)
    return Step(replace(state, change=frozenset(leaving)), Decision.CHANGE, reason, nodes=leaving)


def describe_change(joining: tuple[int, ...], leaving: tuple[int, ...]) -> str:
    """``nodes [3] join, nodes [1] leave``."""
    parts = [f"nodes {list(nodes)} {what}" for nodes, what in ((joining, "join"), (leaving, "leave")) if nodes]
    return ", ".join(parts) or "nobody joins or leaves after all"


def _newcomer(state: State, node: int) -> Newcomer | None:
    return next((newcomer for newcomer in state.newcomers if newcomer.node == node), None)


def _without(state: State, node: int) -> tuple[Newcomer, ...]:
    return tuple(newcomer for newcomer in state.newcomers if newcomer.node != node)


def _dismiss(policy: MembershipPolicy, state: State, node: int, reason: str) -> State:
    state = fail_start(policy, state, node, reason)
    return replace(state, newcomers=_without(state, node), dismissed=state.dismissed | {node})
