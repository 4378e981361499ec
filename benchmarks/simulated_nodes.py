"""Simulates the nodes of a job under a virtual clock: their agents, and messages that are late, repeated, or lost and
sent again."""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable

from megatron_ft.control.membership.events import MachineEvent, NodeJoined, NodeLost
from megatron_ft.control.membership.state import MembershipPolicy

HEARTBEAT_SECONDS = 10.0
LOST_CONTROLLER_SECONDS = 5.0


class Nodes:
    """Virtual clock, and the agent process and network connection of each node."""

    def __init__(self, policy: MembershipPolicy, chance: random.Random) -> None:
        self.policy = policy
        self.random = chance
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.counts: Counter[str] = Counter()
        most = policy.most_nodes
        self.sessions = [-1] * most
        """Number of earlier agent processes of each node."""
        self.is_over = [True] * most
        """Whether the controller treats the newest agent process of each node as lost."""
        self.has_agent = [False] * most
        """Whether the agent of each node is alive."""
        self.starts: dict[int, int] = {}
        """Number of the start (``Ranks.begin``) that started the current ranks of each node."""
        self.words, self.orders = [0.0] * most, [0.0] * most
        """Arrival times of the last message from and to each node, because messages arrive in order."""
        self.cut_until = [0.0] * most
        """End of each node's network partition, in which it neither receives nor sends messages."""

    def controller_takes(self, event: MachineEvent) -> None:
        """Give the controller's state machine one event."""
        raise NotImplementedError

    def end_ranks(self, node: int) -> None:
        """Kill all ranks of a node without any notice."""
        raise NotImplementedError

    # -- time and messages --------------------------------------------------------------------------------

    def later(self, seconds: float, happens: Callable[[], None]) -> None:
        """Schedule a call after ``seconds`` of virtual time."""
        heapq.heappush(self.events, (self.now + max(0.0, seconds), next(self.numbers), happens))

    def delay(self) -> float:
        """Return the random delay of a message or of a piece of work, which is occasionally long."""
        return self.random.choice((0.001, 0.01, 0.05, 0.2)) * self.random.random() + (
            1.5 * self.random.random() if self.random.random() < 0.05 else 0.0
        )

    def tell(self, node: int, event: MachineEvent, start: int | None = None) -> None:
        """Send a message from a node to the controller. Messages arrive late and in order, perhaps twice; lost ones are
        sent again."""
        arrives = max(self.words[node], self.cut_until[node], self.now + self.delay())
        while self.random.random() < 0.05:
            arrives += self.random.uniform(0.1, 1.0)
            self.counts["sent again"] += 1
        self.words[node] = arrives
        session = self.sessions[node]
        for _ in range(2 if self.random.random() < 0.05 else 1):
            self.later(arrives - self.now, lambda: self.hear(node, session, event, start))

    def hear(self, node: int, session: int, event: MachineEvent, start: int | None) -> None:
        """Check a message as the controller does: refuse one from an earlier process, and ignore one from earlier
        ranks."""
        if session != self.sessions[node] or self.is_over[node]:
            self.counts["refused"] += 1
        elif start is not None and start != self.starts[node]:
            self.counts["ignored"] += 1
        else:
            self.controller_takes(event)

    def reach(self, node: int, carry_out: Callable[[], None]) -> None:
        """Send an order to a node. Orders arrive in order, after the end of a partition, and only if the process is
        alive then."""
        arrives = self.orders[node] = max(self.orders[node], self.cut_until[node], self.now + self.delay())
        session = self.sessions[node]

        def arrive() -> None:
            if session == self.sessions[node] and self.has_agent[node] and not self.is_over[node]:
                carry_out()

        self.later(arrives - self.now, arrive)

    # -- agents -------------------------------------------------------------------------------------------

    def begin_agent(self, node: int) -> None:
        """Start a node's agent process. If the node still has an agent, that agent ends first, and its end is reported
        first."""
        self.end_agent(node)
        self.later(0.0, lambda: self.lose_agent(node))
        self.later(0.0, lambda: self._begin(node))

    def _begin(self, node: int) -> None:
        self.sessions[node] += 1
        self.is_over[node], self.has_agent[node] = False, True
        self.words[node] = self.orders[node] = self.cut_until[node] = self.now
        self.tell(node, NodeJoined(node))

    def end_agent(self, node: int) -> None:
        """End a node's agent process together with its ranks."""
        self.has_agent[node] = False
        self.end_ranks(node)

    def lose_agent(self, node: int) -> None:
        """Report to the controller that a node's process has ended, unless this was already reported."""
        is_news, self.is_over[node] = not self.is_over[node], True
        if self.sessions[node] >= 0 and is_news:
            self.controller_takes(NodeLost(node, self.now))

    def crash_agent(self, node: int) -> None:
        """Kill a node's agent process. The launcher detects this soon."""
        self.end_agent(node)
        self._unless_begun_again(self.delay(), node, lambda: self.lose_agent(node))

    def cut_off(self, node: int, seconds: float) -> None:
        """Cut off a node for a time. Its agent process ends by itself. If it hangs instead, the controller counts it as
        lost."""
        self.cut_until[node] = self.now + seconds
        if seconds >= LOST_CONTROLLER_SECONDS and self.random.random() < 0.5:
            self._unless_begun_again(LOST_CONTROLLER_SECONDS, node, lambda: self.end_agent(node))
        self._unless_begun_again(HEARTBEAT_SECONDS, node, lambda: self._look_for(node))
        self._unless_begun_again(seconds + 0.1, node, lambda: self._wake(node))

    def _look_for(self, node: int) -> None:
        if not self.is_over[node] and (self.cut_until[node] > self.now or not self.has_agent[node]):
            self.counts["silent nodes"] += 1
            self.lose_agent(node)

    def _wake(self, node: int) -> None:
        """End the node's process if the controller refuses it."""
        if self.is_over[node]:
            self.end_agent(node)

    def _unless_begun_again(self, seconds: float, node: int, happens: Callable[[], None]) -> None:
        session = self.sessions[node]
        self.later(seconds, lambda: happens() if session == self.sessions[node] else None)
