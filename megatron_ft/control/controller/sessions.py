"""The processes of nodes that have registered with the controller, one after the other for each node."""

import threading
from dataclasses import dataclass, field

from megatron_ft.control.controller.inbox import Item
from megatron_ft.errors import ControlError


@dataclass
class AgentSession:
    """One process of a node, from the moment it registers."""

    number: int
    process_id: int
    first_order: int
    """Orders given before it: they are none of its."""
    is_over: bool = False
    """It was lost: it may not come back."""
    next_item: int = 0
    """Number of the first item that has not had its effect."""
    next_arrival: int = 0
    """Number of the first item that has not arrived: those between ``next_item`` and it wait for the controller."""
    num_fetched: int = 0
    """Orders that there were when it fetched some for the last time."""
    is_inherited: bool = False
    """It may have handed in more than this controller knows of: records that its predecessor has passed on."""
    newest_item: Item | None = None
    """The last that has arrived."""
    delivery: threading.Lock = field(default_factory=threading.Lock)


class AgentSessions:
    """The newest session of each node. One thread changes them, any may ask."""

    def __init__(self) -> None:
        # Without a lock: one thread replaces whole entries, and readers use the entry that they found.
        self._sessions: dict[int, AgentSession] = {}

    # --- the thread that changes them ------------------------------------------------------------------------------

    def admit(self, node: int, process_id: int, *, num_orders: int) -> bool:
        """A process registers; whether it is a new one."""
        earlier = self._sessions.get(node)
        if earlier is not None and earlier.process_id == process_id:
            return False
        # The number fences: calls of the process before carry a lower one and are refused.
        number = 0 if earlier is None else earlier.number + 1
        self._sessions[node] = AgentSession(number, process_id, num_orders)
        return True

    def end(self, node: int, process_id: int | None) -> bool:
        """A node's process is given up: its later calls are refused.

        Returns:
            Whether that is news: of the newest of its node, unless that was given up before, of a node that has none,
            or where it is unknown which one is meant. Another than the newest is one that has not registered
            where the newest was given up before.
        """
        session = self._sessions.get(node)
        if session is None:
            return True
        is_newest = process_id in (None, session.process_id)
        was_over, session.is_over = session.is_over, session.is_over or is_newest
        return not was_over if process_id == session.process_id else is_newest or was_over

    def inherit(self) -> list[int]:
        """A controller takes over: the nodes whose processes its predecessor has taken in."""
        for session in self._sessions.values():
            session.is_inherited = True
        return [node for node, session in self._sessions.items() if not session.is_over]

    # --- any thread ------------------------------------------------------------------------------------------------

    def newest(self, node: int) -> AgentSession | None:
        """The newest session of a node."""
        return self._sessions.get(node)

    def living(self) -> list[AgentSession]:
        """Sessions of agents that are not lost."""
        return [session for session in list(self._sessions.values()) if not session.is_over]

    def replaced(self, node: int, process_id: int) -> int | None:
        """The living agent that a process replaces by registering."""
        session = self._sessions.get(node)
        if session is None or session.process_id == process_id or session.is_over:
            return None
        return session.process_id

    def of_process(self, node: int, process_id: int) -> AgentSession:
        """The session of a process that has registered.

        Raises:
            ControlError: it was given up, or another has its place.
        """
        session = self._sessions.get(node)
        if session is None or session.process_id != process_id or session.is_over:
            raise ControlError(f"node {node} was lost: this process may not register again")
        return session

    def find(self, node: int, number: int) -> AgentSession:
        """The session in which a process calls.

        Raises:
            ControlError: it is over, so that the process ends its ranks.
        """
        session = self._sessions.get(node)
        if session is None or session.number != number or session.is_over:
            raise ControlError(f"node {node}: stale session {number}: another process has replaced it, or it was lost")
        return session
