"""Nodes of a simulated job under a virtual clock: their agents, and messages that are late, lost or come twice."""

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
    """The clock, and between it and the controller what every node has one of: a process, and a wire."""

    def __init__(self, policy: MembershipPolicy, chance: random.Random) -> None:
        self.policy = policy
        self.random = chance
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.counts: Counter[str] = Counter()
        most = policy.most_nodes
        self.sessions = [-1] * most
        """Number of earlier processes of each node."""
        self.is_over = [True] * most
        """Whether the controller has given the newest of them up."""
        self.has_agent = [False] * most
        """Whether it lives."""
        self.starts: dict[int, int] = {}
        """Start that each node's present ranks belong to."""
        self.words, self.orders = [0.0] * most, [0.0] * most
        """Arrival time of the last message from and to each node: messages keep their order."""
        self.cut_until = [0.0] * most
        """End of each node's partition: nothing reaches it, nothing leaves it."""

    def controller_takes(self, event: MachineEvent) -> None:
        """One event reaches the state machine."""
        raise NotImplementedError

    def end_ranks(self, node: int) -> None:
        """Kill all ranks of a node without any notice."""
        raise NotImplementedError

    # -- time and messages --------------------------------------------------------------------------------

    def later(self, seconds: float, happens: Callable[[], None]) -> None:
        """Have something happen."""
        heapq.heappush(self.events, (self.now + max(0.0, seconds), next(self.numbers), happens))

    def delay(self) -> float:
        """Delay of one message or one piece of work; occasionally a long one."""
        return self.random.choice((0.001, 0.01, 0.05, 0.2)) * self.random.random() + (
            1.5 * self.random.random() if self.random.random() < 0.05 else 0.0
        )

    def tell(self, node: int, event: MachineEvent, start: int | None = None) -> None:
        """A message of a node to the controller: in order, late, perhaps twice; one that is lost is sent again."""
        arrives = max(self.words[node], self.cut_until[node], self.now + self.delay())
        while self.random.random() < 0.05:
            arrives += self.random.uniform(0.1, 1.0)
            self.counts["sent again"] += 1
        self.words[node] = arrives
        session = self.sessions[node]
        for _ in range(2 if self.random.random() < 0.05 else 1):
            self.later(arrives - self.now, lambda: self.hear(node, session, event, start))

    def hear(self, node: int, session: int, event: MachineEvent, start: int | None) -> None:
        """The controller's entry check: an earlier process is refused, words of earlier ranks are ignored."""
        if session != self.sessions[node] or self.is_over[node]:
            self.counts["refused"] += 1
        elif start is not None and start != self.starts[node]:
            self.counts["ignored"] += 1
        else:
            self.controller_takes(event)

    def reach(self, node: int, carry_out: Callable[[], None]) -> None:
        """An order reaches a node, in order, once it is not cut off and if its process lives then."""
        arrives = self.orders[node] = max(self.orders[node], self.cut_until[node], self.now + self.delay())
        session = self.sessions[node]

        def arrive() -> None:
            if session == self.sessions[node] and self.has_agent[node] and not self.is_over[node]:
                carry_out()

        self.later(arrives - self.now, arrive)

    # -- agents -------------------------------------------------------------------------------------------

    def begin_agent(self, node: int) -> None:
        """Start a node's process; one that it still has ends first, which is reported before."""
        self.end_agent(node)
        self.later(0.0, lambda: self.lose_agent(node))
        self.later(0.0, lambda: self._begin(node))

    def _begin(self, node: int) -> None:
        self.sessions[node] += 1
        self.is_over[node], self.has_agent[node] = False, True
        self.words[node] = self.orders[node] = self.cut_until[node] = self.now
        self.tell(node, NodeJoined(node))

    def end_agent(self, node: int) -> None:
        """A node's process dies, and its ranks with it."""
        self.has_agent[node] = False
        self.end_ranks(node)

    def lose_agent(self, node: int) -> None:
        """The controller learns that a node's process is gone, once."""
        is_news, self.is_over[node] = not self.is_over[node], True
        if self.sessions[node] >= 0 and is_news:
            self.controller_takes(NodeLost(node, self.now))

    def crash_agent(self, node: int) -> None:
        """A node's process dies; the launcher detects it soon."""
        self.end_agent(node)
        self._unless_begun_again(self.delay(), node, lambda: self.lose_agent(node))

    def cut_off(self, node: int, seconds: float) -> None:
        """Nothing reaches a node for a while. Its process gives up by itself, unless it hangs; then it is given up."""
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
        """A process that is refused ends."""
        if self.is_over[node]:
            self.end_agent(node)

    def _unless_begun_again(self, seconds: float, node: int, happens: Callable[[], None]) -> None:
        session = self.sessions[node]
        self.later(seconds, lambda: happens() if session == self.sessions[node] else None)
