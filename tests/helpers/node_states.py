"""Selects nodes of a job by their records in the state machine."""

from megatron_ft.control.membership.state import AgentState, NodeState, State


def of_agents(state: State, agent: AgentState) -> set[int]:
    """Return the nodes whose agent is in this state."""
    return {record.node for record in state.nodes.records if record.agent is agent}


def left(state: State) -> set[int]:
    """Return the nodes that have left on request."""
    return {record.node for record in state.nodes.records if record.state is NodeState.LEFT}
