"""Nodes of a job by what the state machine knows of them."""

from megatron_ft.control.membership.state import AgentState, NodeState, State


def of_agents(state: State, agent: AgentState) -> set[int]:
    """Nodes whose agent is in this state."""
    return {record.node for record in state.nodes.records if record.agent is agent}


def left(state: State) -> set[int]:
    """Nodes that have left on request."""
    return {record.node for record in state.nodes.records if record.state is NodeState.LEFT}
