"""Rules for nodes that join a running job, leave it on request, or replace lost nodes.

A node that is not a member becomes *wanted* (``is_wanted``) when its agent registers or an administrator adds it: the
job must let the node join. The ranks of the node are started (``START_NODES``). When all have connected, the node is
ready and waits. When the first ready node has waited for ``join_window_seconds``, or when a member has to leave, the
members are ordered to stop at an iteration boundary (``CHANGE``). When all members have stopped, the next membership
begins (``reconfigure``). Nodes beyond ``most_members`` wait as spares until a member is lost or leaves.

A *place* is the position of a node in the layout; a lost place is the place of a lost node. In a job that keeps its
layout (``recovery.keep_layout``), every membership has the same places, and other nodes take the lost places. After all
remaining ranks have reported their positions, the next membership begins if a joining node or spare is ready for each
lost place. If too few nodes are ready, lost nodes are started again: first the agent, if it has ended
(``START_AGENTS``), then the ranks, when the old ranks have ended (``START_NODES``). A node that ends or does not become
ready in time is killed and started again, at most ``max_node_restarts`` times in a row. If a place stays empty, the job
stops, or continues with fewer lanes (model replicas) if ``recovery.min_nodes`` allows it. All later changes then follow
the rules of a job that does not keep its layout (``State.has_changed_layout``).

All ranks of a job that keeps its layout may end, for example because they do not continue in their processes after a
loss (``keeps_processes``). The job then waits for agents instead of ranks (``REPLACING``). As soon as there is a node
with an agent for each place, all ranks start again.
"""

from dataclasses import dataclass, replace

from megatron_ft.control.membership.events import Moment
from megatron_ft.control.membership.state import (
    SETTLED_ITERATIONS,
    TRAINING,
    AgentState,
    Decision,
    FailedStart,
    MembershipPolicy,
    NodeRecord,
    Nodes,
    NodeState,
    Phase,
    State,
    Step,
    keeps_layout,
    layout_of,
)

FIRST_PAUSE_SECONDS = 0.5
"""Pause before a node is started again after a failed start; each further failed start in a row doubles the pause."""
LONGEST_PAUSE_SECONDS = 30.0
_NOT_ALIVE = {Phase.FORMING: "starting", Phase.STOPPING: "stopping", Phase.KILLING: "stopping", Phase.ENDED: "over"}


@dataclass(frozen=True, slots=True)
class NodeRules:
    """Rules of a job for nodes that join it, leave it, or replace lost nodes."""

    policy: MembershipPolicy

    def register(self, state: State, node: int) -> State:
        """Record that a node's agent has registered."""
        nodes = state.nodes.change(
            node,
            agent=AgentState.REGISTERED,
            was_registered=True,
            is_wanted=False,
            has_unregistered_agent=False,
            not_before_seconds=0.0,
        )
        return replace(state, nodes=self._want(nodes, node))

    def add(self, state: State, node: int) -> State:
        """Record that an administrator wants a node to join, regardless of how often the node was lost before."""
        # The administrator may have repaired the node: earlier losses no longer count against ``max_node_restarts``.
        nodes = state.nodes.change(node, joined_iteration=0, num_losses=0, not_before_seconds=0.0)
        return replace(state, nodes=self._want(nodes, node))

    def _want(self, nodes: Nodes, node: int) -> Nodes:
        if not self.policy.admits_nodes or nodes.is_member(node) or node in nodes.waiting:
            return nodes
        # If a loss restarts all ranks, a spare needs no ranks before the restart, so it has only an agent.
        if self.policy.replaces_by_restart and node in nodes.registered:
            return nodes
        # A restart of all ranks leaves out nodes that are ``LEFT``, until they register again or are added on request.
        has_left = nodes[node].state is NodeState.LEFT
        return nodes.change(node, is_wanted=True, **({"state": NodeState.ABSENT} if has_left else {}))

    def may_return(self, record: NodeRecord) -> bool:
        """Return whether the policy allows the job to start a lost node again."""
        return self.policy.restart_lost_nodes and record.num_losses <= self.policy.max_node_restarts

    def _may_start(self, state: State, record: NodeRecord) -> bool:
        is_uncounted = record.node in state.members and not record.is_counted
        return (1 if is_uncounted else max(1, record.num_losses)) <= self.policy.max_node_restarts

    def _fail_start(self, state: State, node: int, reason: str, now: Moment, *, num_losses: int = 1) -> State:
        """Record a failed start by adding ``num_losses`` to the node's losses. The node is started again after a pause,
        unless it was lost too often."""
        num_losses += state.nodes[node].num_losses
        # Without the pause, a disturbance of a few seconds would use up all starts, and the node would never return.
        pause_seconds = min(FIRST_PAUSE_SECONDS * 2.0 ** (num_losses - 1), LONGEST_PAUSE_SECONDS)
        not_before = now.arrived_seconds + pause_seconds
        nodes = state.nodes.change(node, num_losses=num_losses, not_before_seconds=not_before)
        starts_again = self.may_return(nodes[node])
        nodes = nodes.change(node, is_wanted=starts_again)
        return replace(
            state, nodes=nodes, failed_starts=(*state.failed_starts, FailedStart(node, reason, starts_again))
        )

    def _give_up_agent(self, state: State, node: int, now: Moment) -> State:
        """Count a failed start: the node's agent did not register in time. The node's next start ends this agent."""
        late = f"its agent did not register (launch.start_timeout_seconds={self.policy.start_timeout_seconds:g})"
        state = self._fail_start(state, node, late, now)
        return replace(state, nodes=state.nodes.change(node, agent=AgentState.LOST, has_unregistered_agent=True))

    def lose_agent(self, state: State, node: int, reason: str, now: Moment) -> State:
        """Record that a node's agent has ended, and its ranks with it."""
        record = state.nodes[node]
        if record.has_unregistered_agent:  # this agent was counted as a failed start when it did not register in time
            return replace(state, nodes=state.nodes.change(node, has_unregistered_agent=False))
        # If the node had not become a member, its start has failed. This failure is counted: otherwise, a node that
        # dies at each start would be started for ever.
        is_outside = not state.nodes.is_member(node)
        never_came = record.agent is AgentState.UNKNOWN and is_outside
        # If all ranks start again after a loss, a spare has only an agent, whose end counts as a failed start, too.
        was_spare = is_outside and (self.policy.replaces_by_restart or state.phase is Phase.REPLACING)
        if never_came or was_spare or record.agent is AgentState.STARTING or node in state.nodes.waiting:
            state = self._fail_start(state, node, reason, now)
        # If lost nodes must not return, ``is_wanted`` is cleared, because ``_start`` starts each wanted node.
        elif not self.policy.restart_lost_nodes:
            state = replace(state, nodes=state.nodes.change(node, is_wanted=False))
        nodes = _stop_joining(state.nodes, node).change(node, agent=AgentState.LOST, is_dismissed=False)
        # If the node is only cut off, its ranks may live. They count as gone: calls of their agent are refused, so they
        # can no longer report, and they end with their agent.
        return replace(state, nodes=nodes, gone=state.gone | set(self.policy.ranks_of(node)))

    def connect(self, state: State, rank: int, now: Moment) -> State:
        """Record that a rank has connected; a joining node is ready when all its ranks have connected."""
        state = replace(state, connected=state.connected | {rank})
        node = self.policy.node_of(rank)
        is_starting = state.nodes[node].state is NodeState.STARTING
        if not is_starting or not state.connected >= set(self.policy.ranks_of(node)):
            return state
        number = state.nodes.next_queue_number
        nodes = state.nodes.change(node, state=NodeState.READY, since_seconds=now.seconds, queue_number=number)
        return replace(state, nodes=nodes)

    def lose_rank(self, state: State, rank: int, reason: str, now: Moment) -> State:
        """Record that a rank has ended on a node that is not a member. The node cannot join with its present ranks."""
        node = self.policy.node_of(rank)
        state = replace(state, gone=state.gone | {rank})
        return self._dismiss(state, node, reason, now) if node in state.nodes.waiting else state

    def drain(self, state: State, node: int) -> State:
        """Record that a member has to leave. Do nothing if ``refuse_drain`` gives a reason against it."""
        if self.refuse_drain(state, node) is not None:
            return state
        return replace(state, nodes=state.nodes.change(node, state=NodeState.DRAINING))

    def refuse_drain(self, state: State, node: int) -> str | None:
        """Return the reason why a node cannot leave, or None if the node can leave."""
        if state.phase in _NOT_ALIVE or state.interrupted:
            return f"no node can leave: the job is {_NOT_ALIVE[Phase.STOPPING if state.interrupted else state.phase]}"
        if not state.nodes.is_member(node):
            return f"node {node} is not a member"
        if keeps_layout(self.policy, state):
            return "recovery.keep_layout=true: no node can leave on request, because the layout needs every node"
        if state.nodes[node].state is NodeState.DRAINING:
            return f"node {node} is leaving already"
        # Nodes that are leaving count as gone: several drains together must not go below the minimum.
        num_left = len(set(state.members) - state.nodes.lost - state.nodes.draining) - 1
        if num_left < self.policy.fewest_nodes:
            fewest = self.policy.fewest_nodes
            return f"the number of nodes that would remain is {num_left}, below recovery.min_nodes={fewest}"
        gone = {node, *state.nodes.draining, *state.nodes.lost}
        return self.policy.layouts.why_not_without(layout_of(self.policy, state), gone) or None

    def refuse_add(self, state: State, node: int) -> str | None:
        """Return the reason why a node cannot be added, or None if the node can be added."""
        if state.phase in _NOT_ALIVE or state.interrupted:
            return f"no node can join: the job is {_NOT_ALIVE[Phase.STOPPING if state.interrupted else state.phase]}"
        if not self.policy.admits_nodes:
            if self.policy.fewest_nodes < self.policy.most_nodes:
                return "no node can join: this job ends all processes after a loss (recovery.keep_processes)"
            return (
                f"no node can join: the number of nodes is fixed at {self.policy.most_nodes}; to let nodes join, start "
                "the job with recovery.min_nodes below or nodes.max_nodes above this number"
            )
        if state.nodes.is_member(node):
            return f"node {node} is a member already"
        is_spare = self.policy.replaces_by_restart and node in state.nodes.registered
        if node in state.nodes.waiting or state.nodes[node].is_wanted or is_spare:
            return f"node {node} is waiting to join already"
        if not self.policy.starts_nodes and node not in state.nodes.registered:
            return (
                f"node {node} has no agent, and launch.node_launcher=none cannot start one; "
                "start the node, and it joins"
            )
        return None

    def admitted(self, state: State, num_staying: int) -> tuple[int, ...]:
        """Return the ready nodes that the next membership can admit if ``num_staying`` members stay. Nodes that became
        ready first are preferred. The result is ascending."""
        ready = [record.node for record in state.nodes.joining if record.state is NodeState.READY]
        return tuple(sorted(ready[: max(0, self.policy.most_members - num_staying)]))

    def decide(self, state: State, now: Moment) -> Step | None:
        """Return the next step for nodes that join or leave while the members train; None if nothing is to do."""
        if state.phase not in TRAINING or state.failures or state.broken or state.interrupted:
            return None
        if not self.policy.admits_nodes or not self.policy.ranks_of_all(state.members).isdisjoint(state.gone):
            return None  # some ranks have finished, so the job is about to end
        return self._give_up_agents(state, now) or self._kill_or_start(state, now) or self._change(state, now)

    def set_wake_up(self, state: State, now: Moment) -> State:
        """Return the state with ``wake_up_seconds`` set: when to call ``decide`` next if no event arrives before."""
        if state.phase not in (*TRAINING, Phase.REPLACING):
            return state if state.wake_up_seconds is None else replace(state, wake_up_seconds=None)
        # Each event yields one step. If another step is due already, an immediate tick triggers it.
        if self.decide(state, now) is not None:
            return replace(state, wake_up_seconds=now.arrived_seconds)
        waits = {
            NodeState.STARTING: self.policy.start_timeout_seconds,
            NodeState.READY: self.policy.join_window_seconds,
        }
        times = [record.since_seconds + waits[record.state] for record in state.nodes.joining]
        times += [record.not_before_seconds for record in state.nodes.records if record.is_wanted]
        times += [
            record.agent_since_seconds + self.policy.start_timeout_seconds for record in self._unregistered(state)
        ]
        # Past times are left out, because ``decide`` has handled them and they would cause ticks without end.
        return replace(state, wake_up_seconds=min((at for at in times if at > now.arrived_seconds), default=None))

    def _kill_or_start(self, state: State, now: Moment) -> Step | None:
        """Return a step that kills or starts ranks of nodes that are not members, or None if there is nothing to do."""
        return self._kill(state, now) or self._start(state, now)

    def _unregistered(self, state: State) -> list[NodeRecord]:
        """Return the records of nodes whose agent was started by the job but has not registered. Return an empty list
        if nodes start by themselves."""
        return [r for r in state.nodes.records if r.agent is AgentState.STARTING] if self.policy.starts_nodes else []

    def _give_up_agents(self, state: State, now: Moment) -> Step | None:
        late = [
            record.node
            for record in self._unregistered(state)
            if now.arrived_seconds >= record.agent_since_seconds + self.policy.start_timeout_seconds
        ]
        if not late:
            return None
        for node in late:
            state = self._give_up_agent(state, node, now)
        return Step(state, Decision.WAIT, f"the agents of nodes {late} did not register in time")

    def _kill(self, state: State, now: Moment) -> Step | None:
        for record in state.nodes.joining:
            is_due = now.arrived_seconds >= record.since_seconds + self.policy.start_timeout_seconds
            if record.state is NodeState.STARTING and is_due:
                limit = self.policy.start_timeout_seconds
                late = f"not all ranks connected in time (launch.start_timeout_seconds={limit:g})"
                state = self._dismiss(state, record.node, late, now)
        dismissed = tuple(sorted(state.nodes.dismissed))
        if not dismissed:
            return None
        reason = f"nodes {list(dismissed)} do not join: a rank ended or did not connect in time"
        state = replace(state, nodes=state.nodes.change(dismissed, is_dismissed=False))
        return Step(state, Decision.KILL_NODES, reason, nodes=dismissed)

    def _start(self, state: State, now: Moment) -> Step | None:
        wanted = [state.nodes[node] for node in sorted(state.nodes.wanted) if not state.nodes.is_member(node)]
        # A node starts only when its old ranks have ended, so that no two processes have the same rank number.
        startable = [record for record in wanted if not self._has_living_rank(state, record)]
        startable = [record for record in startable if record.not_before_seconds <= now.arrived_seconds]
        present = tuple(record.node for record in startable if record.agent is AgentState.REGISTERED)
        if present:
            return Step(
                self._begin(state, present, now),
                Decision.START_NODES,
                f"start ranks on nodes {list(present)}, which are to join",
                nodes=present,
            )
        absent = tuple(record.node for record in startable if record.agent is not AgentState.STARTING)
        if absent:
            nodes = state.nodes.change(absent, agent=AgentState.STARTING, agent_since_seconds=now.seconds)
            state = replace(state, nodes=nodes)
            return Step(state, Decision.START_AGENTS, f"start nodes {list(absent)}, which are to join", nodes=absent)
        return None

    def _has_living_rank(self, state: State, record: NodeRecord) -> bool:
        return record.has_ranks and not state.gone >= set(self.policy.ranks_of(record.node))

    def _begin(self, state: State, started: tuple[int, ...], now: Moment) -> State:
        nodes = state.nodes
        for node in started:
            nodes = nodes.change(
                node,
                state=NodeState.STARTING,
                is_wanted=False,
                is_dismissed=False,
                has_ranks=True,
                since_seconds=now.seconds,
                queue_number=nodes.next_queue_number,
                # A lost member whose ranks start again stays lost for the other ranks until the next membership.
                is_announced=nodes[node].is_announced and node in nodes.members,
            )
        ranks = {rank for node in started for rank in self.policy.ranks_of(node)}
        return replace(state, nodes=nodes, gone=state.gone - ranks, connected=state.connected - ranks)

    def _change(self, state: State, now: Moment) -> Step | None:
        if state.phase is Phase.CHANGING:
            return None
        # If nodes were lost since the request and too few would remain, nodes leave only when others have joined.
        num_spare = len(state.members) - self.policy.fewest_nodes
        leaving = tuple(sorted(state.nodes.draining)[: max(0, num_spare)])
        joining = self.admitted(state, len(state.members) - len(leaving))
        # Each change interrupts training once, so nodes that become ready within the window join in one change. A node
        # that leaves does not wait for the window.
        since = [record.since_seconds for record in state.nodes.joining if record.node in joining]
        if not leaving and (not since or now.arrived_seconds < min(since) + self.policy.join_window_seconds):
            return None
        state = replace(state, phase=Phase.CHANGING, nodes=state.nodes.change(leaving, leaves_now=True))
        return Step(state, Decision.CHANGE, describe_change(joining, leaving), nodes=leaving)

    def _dismiss(self, state: State, node: int, reason: str, now: Moment) -> State:
        state = self._fail_start(state, node, reason, now)
        return replace(state, nodes=_stop_joining(state.nodes, node).change(node, is_dismissed=True))

    def can_fill_places(self, state: State) -> bool:
        """Whether ready nodes can replace all lost nodes; always true in a job that does not keep its layout."""
        return not keeps_layout(self.policy, state) or len(_ready(state)) == len(_lost_places(state))

    def why_place_stays_empty(self, state: State) -> str | None:
        """Return the reason why a lost node gets no replacement, or None if each lost node has or will get one."""
        lost = [state.members[place] for place in _lost_places(state)]
        if len(lost) == len(state.members):
            return "no node is left: every node of the job is lost"
        coming = self._coming(state) | self._returning(state)
        if len(coming) >= len(lost):
            return None
        return self._describe_empty(next(node for node in lost if node not in coming))

    def replacements(self, state: State) -> frozenset[int]:
        """Return the nodes that can take the place of a lost node; none in a job that does not keep its layout."""
        if not keeps_layout(self.policy, state):
            return frozenset()
        found = self._coming(state) | self._returning(state)
        if self.policy.restart_lost_nodes:
            away = [state.nodes[node] for node in range(self.policy.most_nodes) if not state.nodes.is_member(node)]
            found |= {record.node for record in away if self._may_start(state, record)}
        # If all ranks restart after a loss, a spare has only an agent, so a registered agent is sufficient.
        return (found | (state.nodes.registered if self.policy.replaces_by_restart else frozenset())) - {
            node for node in state.members if state.nodes.is_member(node)
        }

    def is_worn(self, state: State, node: int, iteration: int) -> bool:
        """Return whether a member was lost so often in a row that it would not be started again if it were lost once
        more, after ``iteration``."""
        # ``count_loss`` resets the count after ``SETTLED_ITERATIONS``, so losses that are far apart do not add up.
        return count_loss(state.nodes[node], iteration) > self.policy.max_node_restarts

    def _describe_empty(self, node: int) -> str:
        why = "nodes.restart_lost_nodes=false"
        if self.policy.restart_lost_nodes:
            most = self.policy.max_node_restarts
            why = f"it was lost, or failed to start, too often in a row (nodes.max_node_restarts={most})"
        lost = f"node {node} is lost and has no replacement"
        return f"{lost}: no spare is left, and the node is not started again, because {why}"

    def await_agents(self, state: State, now: Moment) -> Step | None:
        """Return the next step of a job that keeps its layout, after all ranks ended: start agents of lost nodes, or
        wait until each place in the layout has a node with an agent. Return None if too few nodes can register."""
        timeout_seconds = self.policy.start_timeout_seconds
        if state.phase is not Phase.REPLACING:
            # Without ranks, no node is a member. Each loss from here on counts as a failed start.
            nodes = state.nodes.change(state.members, state=NodeState.LOST)
            gone = [record.node for record in nodes.records if record.agent is AgentState.LOST]
            for node in gone:
                nodes = nodes.change(node, num_losses=max(1, nodes[node].num_losses))
            deadline = now.seconds + timeout_seconds
            state = replace(state, phase=Phase.REPLACING, nodes=nodes, deadline_seconds=deadline)
        able = [
            record.node
            for record in state.nodes.records
            if record.agent is AgentState.LOST and self.may_return(record) and record.state is not NodeState.LEFT
        ]
        nodes = state.nodes.change(state.nodes.registered, is_wanted=False).change(able, is_wanted=True)
        state = replace(state, nodes=nodes)
        step = self._give_up_agents(state, now) or self._start(state, now)
        if step is not None:
            # Each ordered start gets the whole time limit, also one that follows a failed start.
            return replace(step, state=replace(step.state, deadline_seconds=now.seconds + timeout_seconds))
        starting = {record.node for record in nodes.records if record.agent is AgentState.STARTING}
        pausing = nodes.wanted - starting
        if state.is_late(now):
            if not pausing:
                return None
            # The pause before a start must not use up the time limit of that start.
            state = replace(state, deadline_seconds=now.seconds + timeout_seconds)
        if len(pausing | starting | self._expected(state)) < self.policy.num_nodes - len(members_after_restart(state)):
            return None
        return Step(state, Decision.WAIT, "waiting for nodes that replace lost nodes")

    def why_agents_are_missing(self, state: State, now: Moment) -> str:
        """Return the reason why the job no longer waits for agents of nodes that replace lost nodes: a time limit has
        passed, or a lost node has no replacement."""
        lost = [node for node in state.members if node not in state.nodes.registered]
        if state.phase is Phase.REPLACING and state.is_late(now):
            limit = f"launch.start_timeout_seconds={self.policy.start_timeout_seconds:g}"
            return f"{limit}: timed out waiting for nodes that replace the lost nodes {lost}"
        return self._describe_empty(lost[0])

    def give_up_late_nodes(self, state: State, now: Moment) -> State:
        """Give up nodes that replace a lost node too late: their agent has not registered, or their old ranks
        have not ended."""
        if state.phase is not Phase.FILLING or not state.is_late(now):
            return state
        reason = f"it did not register in time (launch.start_timeout_seconds={self.policy.start_timeout_seconds:g})"
        expected = self._expected(state)
        for node in sorted(state.nodes.wanted | expected):
            if self.policy.starts_nodes and state.nodes[node].agent is AgentState.STARTING:
                state = self._give_up_agent(state, node, now)
            else:
                # The count exceeds the limit, so neither ``_returning`` nor ``may_return`` lets the node start again.
                state = self._fail_start(state, node, reason, now, num_losses=self.policy.max_node_restarts + 1)
        starting = {record.node for record in state.nodes.records if record.agent is AgentState.STARTING}
        nodes = state.nodes.change(expected | starting, agent=AgentState.LOST)
        return replace(state, nodes=nodes, deadline_seconds=now.seconds + self.policy.start_timeout_seconds)

    def fill_places(self, state: State, now: Moment) -> Step:
        """Return the next step that replaces lost nodes while ranks wait: start nodes, or wait for nodes."""
        fresh_deadline = now.seconds + self.policy.start_timeout_seconds
        deadline = state.deadline_seconds if state.phase is Phase.FILLING else fresh_deadline
        nodes = state.nodes.change(self._returning(state), is_wanted=True)
        state = replace(state, phase=Phase.FILLING, nodes=nodes, reform_by_seconds=None, deadline_seconds=deadline)
        step = self._kill_or_start(state, now)
        if step is None:
            lost = [state.members[place] for place in _lost_places(state)]
            return Step(state, Decision.WAIT, f"waiting for nodes that replace the lost nodes {lost}")
        if step.decision is Decision.KILL_NODES:
            return step
        # Each ordered start gets the whole time limit; steps that only wait keep the deadline.
        return replace(step, state=replace(step.state, deadline_seconds=fresh_deadline))

    def set_wake_up_of_filling(self, step: Step, now: Moment) -> State:
        """Return the state after ``step`` with ``wake_up_seconds`` set: when the job next checks whether other nodes
        can replace the lost nodes."""
        starting = [record for record in step.state.nodes.joining if record.state is NodeState.STARTING]
        times = [record.since_seconds + self.policy.start_timeout_seconds for record in starting]
        times += [record.not_before_seconds for record in step.state.nodes.records if record.is_wanted]
        due = min((at for at in times if at > now.arrived_seconds), default=None)
        # After an order, an immediate tick checks whether another step is due.
        wake_up = due if step.decision is Decision.WAIT else now.arrived_seconds
        return replace(step.state, wake_up_seconds=wake_up)

    def _coming(self, state: State) -> frozenset[int]:
        wanted = {node for node in state.nodes.wanted if not state.nodes.is_member(node)}
        return state.nodes.waiting | wanted | self._expected(state)

    def _expected(self, state: State) -> frozenset[int]:
        return frozenset(
            node for node in range(self.policy.most_nodes) if state.nodes[node].agent is AgentState.UNKNOWN
        )

    def _returning(self, state: State) -> frozenset[int]:
        if not self.policy.restart_lost_nodes:
            return frozenset()
        coming = self._coming(state)
        away = [state.nodes[node] for node in range(self.policy.most_nodes) if node not in coming]
        able = {r.node for r in away if not state.nodes.is_member(r.node) and self._may_start(state, r)}
        own = able & set(state.members)
        is_short = len(coming) + len(own) < len(_lost_places(state))
        return frozenset(able if is_short else own)


def count_loss(record: NodeRecord, iteration: int) -> int:
    """Return how often a node has been lost in a row, including the present loss. ``iteration`` is the iteration after
    which training continues."""
    # After ``SETTLED_ITERATIONS`` of training, earlier losses have probably another cause, so they no longer count.
    has_settled = iteration - record.joined_iteration >= SETTLED_ITERATIONS
    return 1 if has_settled else record.num_losses + 1


def describe_change(joining: tuple[int, ...], leaving: tuple[int, ...]) -> str:
    """Describe a change, e.g. ``nodes [3] join, nodes [1] leave``."""
    parts = [f"nodes {list(nodes)} {what}" for nodes, what in ((joining, "join"), (leaving, "leave")) if nodes]
    return ", ".join(parts) or "no node joins or leaves"


def _stop_joining(nodes: Nodes, node: int) -> Nodes:
    if node not in nodes.waiting:
        return nodes
    return nodes.change(node, state=NodeState.LOST if node in nodes.members else NodeState.ABSENT)


def _lost_places(state: State) -> tuple[int, ...]:
    """Return the places (positions in the layout) whose node is lost, ascending."""
    return tuple(place for place, node in enumerate(state.members) if node in state.nodes.lost)


def members_after_filling(policy: MembershipPolicy, state: State) -> tuple[int, ...]:
    """Return the node at each place (position in the layout) of the next membership.

    Of the nodes that are ready, those that have waited longest join. A node that had a place gets this place back. All
    other joining nodes fill empty places; if possible, a node gets a place whose model part it has built in advance.
    """
    ready = _ready(state)
    stays = set(state.members) - state.nodes.lost | set(ready)
    empty = [place for place, node in enumerate(state.members) if node not in stays]
    others = [node for node in _all_ready(state) if node not in state.members]
    # A node returns to its former place, because its snapshot server has kept the windows of this place.
    chosen = (
        dict(zip(empty, others, strict=False)) if policy.prebuilt is None else policy.prebuilt.assign(empty, others)
    )
    return tuple(chosen.get(place, node) for place, node in enumerate(state.members))


def members_after_restart(state: State) -> tuple[int, ...]:
    """Return the node at each place (position in the layout) for a restart of all ranks.

    A node whose agent has ended is replaced, first by nodes that wait to join. If too few nodes have a living agent,
    the result is shorter than the number of places.
    """
    live = state.nodes.registered
    order = [record.node for record in state.nodes.joining] + sorted(live)
    others = iter([node for node in dict.fromkeys(order) if node in live and node not in state.members])
    found = [node if node in live else next(others, None) for node in state.members]
    return tuple(node for node in found if node is not None)


def count_losses(state: State, iteration: int) -> State:
    """Add one to ``num_losses`` of each member that was lost in this generation and whose loss is not counted yet.
    ``iteration`` is the iteration after which training continues."""
    # Usually losses are counted when the next membership begins. While the job waits for nodes that replace lost nodes,
    # the rules need the counts earlier. ``is_counted`` then prevents a second count.
    nodes = state.nodes
    for node in state.members:
        record = nodes[node]
        if node in state.nodes.lost and not record.is_counted:
            nodes = nodes.change(node, num_losses=count_loss(record, iteration), is_counted=True)
    return replace(state, nodes=nodes)


def _ready(state: State) -> list[int]:
    return _all_ready(state)[: len(_lost_places(state))]


def _all_ready(state: State) -> list[int]:
    return [record.node for record in state.nodes.joining if record.state is NodeState.READY]
