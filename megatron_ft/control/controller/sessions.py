"""Registrations of agents at the controller, for each node one after the other."""

import threading
from dataclasses import dataclass, field

from megatron_ft.control.controller.inbox import Item
from megatron_ft.errors import ControlError


@dataclass
class AgentSession:
    """One agent process of a node, from its registration on."""

    number: int
    process_id: int
    first_order: int
    """Number of orders given before the registration; they are not for this agent."""
    is_over: bool = False
    """The agent was lost and may not register again."""
    next_item: int = 0
    """Number of the first item that has not been processed."""
    next_arrival: int = 0
    """Number of the first item that has not arrived; items from ``next_item`` to it wait for the controller."""
    num_fetched: int = 0
    """Number of orders when the agent last fetched some."""
    is_inherited: bool = False
    """An earlier controller may have forwarded records of this agent that this controller does not know."""
    newest_item: Item | None = None
    """The item that arrived last."""
    delivery: threading.Lock = field(default_factory=threading.Lock)


class AgentSessions:
    """The newest session of each node. One thread changes them, any thread may read them."""

    def __init__(self) -> None:
        # Without a lock: one thread replaces whole entries, and readers use the entry that they found.
        self._sessions: dict[int, AgentSession] = {}

    # --- the thread that changes them ------------------------------------------------------------------------------

    def admit(self, node: int, process_id: int, *, num_orders: int) -> bool:
        """Register an agent process; return whether it is new."""
        earlier = self._sessions.get(node)
        if earlier is not None and earlier.process_id == process_id:
            return False
        # The number fences: calls of the process before carry a lower one and are refused.
        number = 0 if earlier is None else earlier.number + 1
        self._sessions[node] = AgentSession(number, process_id, num_orders)
        return True

    def end(self, node: int, process_id: int | None) -> bool:
        """End the session of a node's agent process: its later calls are refused.

        Returns:
            Whether this changes anything. It does if the process is the newest of its node and its session has not
            ended, if the node has no session, or if ``process_id`` is None. If the newest session has ended, another
            process id belongs to a process that has not registered, which counts too.
        """
        session = self._sessions.get(node)
        if session is None:
            return True
        is_newest = process_id in (None, session.process_id)
        was_over, session.is_over = session.is_over, session.is_over or is_newest
        return not was_over if process_id == session.process_id else is_newest or was_over

    def inherit(self) -> list[int]:
        """Take over the sessions of the previous controller; return their nodes."""
        for session in self._sessions.values():
            session.is_inherited = True
        return [node for node, session in self._sessions.items() if not session.is_over]

    # --- any thread ------------------------------------------------------------------------------------------------

    def newest(self, node: int) -> AgentSession | None:
        """Return the newest session of a node."""
        return self._sessions.get(node)

    def living(self) -> list[AgentSession]:
        """Return the sessions of agents that are not lost."""
        return [session for session in list(self._sessions.values()) if not session.is_over]

    def replaced(self, node: int, process_id: int) -> int | None:
        """Return the process id of the living agent that this process replaces when it registers."""
        session = self._sessions.get(node)
        if session is None or session.process_id == process_id or session.is_over:
            return None
        return session.process_id

    def of_process(self, node: int, process_id: int) -> AgentSession:
        """Return the session of a registered process.

        Raises:
            ControlError: the session has ended, or another process has replaced it.
        """
        session = self._sessions.get(node)
        if session is None or session.process_id != process_id or session.is_over:
            raise ControlError(f"node {node} was lost: this process may not register again")
        return session

    def find(self, node: int, number: int) -> AgentSession:
        """Return the session of a call.

        Raises:
            ControlError: the session has ended; the process then ends its ranks.
        """
        session = self._sessions.get(node)
        if session is None or session.number != number or session.is_over:
            raise ControlError(f"node {node}: stale session {number}: another process has replaced it, or it was lost")
        return session
