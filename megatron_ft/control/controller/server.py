"""Serves calls of agents and administrators. A call that delivers an input returns only after the controller's thread
has processed the input."""

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_ft.control import messages
from megatron_ft.control.certificates import Certificates
from megatron_ft.control.membership.events import MachineEvent, NodeLost, Tick
from megatron_ft.control.membership.state import MembershipPolicy
from megatron_ft.control.messages import MAX_JOIN_BYTES, Deliver, Join, Poll, Report, decode_call
from megatron_ft.control.rpc import ACCEPT_SECONDS, Method, RpcServer
from megatron_ft.errors import ControlError, RecoveryError
from megatron_ft.framing import Message
from megatron_ft.planning.recovery.layout import MembershipLayout
from megatron_ft.serde import encode


class Origin(NamedTuple):
    """Identity of an item that an agent delivered: node, session of the agent, and index in this session."""

    node: int
    session: int
    number: int


@dataclass(slots=True)
class Item:
    """A report, registration or request that arrived in a call of an agent or an administrator."""

    origin: Origin | None
    """Origin of a report, by which a second delivery of the report is detected. None for a registration or request,
    because a second delivery of it has no further effect."""
    content: Message
    report: Report | None = None
    """The report that was parsed from ``content``; None if ``content`` is a registration or request."""
    arrived_seconds: float = 0.0
    """Arrival time on the controller's clock."""
    has_effect: threading.Event = field(default_factory=threading.Event)
    """Event that is set when the item has been processed. Each item has its own event, so only the call that waits for
    this item wakes up."""

    def wait(self, timeout_seconds: float, sign_seconds: float, sign: Callable[[], None]) -> bool:
        """Wait until this item and all earlier items have been processed; return False after ``timeout_seconds``.

        Args:
            sign: called every ``sign_seconds`` during the wait, to record that the waiting node is alive.
        """
        deadline = time.monotonic() + timeout_seconds
        # A node whose call waits for a busy controller is alive; without these signs it would count as lost.
        while not self.has_effect.wait(min(sign_seconds, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return False
            sign()
        return True


@dataclass(frozen=True, slots=True)
class Posted:
    """An event that no agent or administrator has sent. If the launcher has sent it, it has a ``number``."""

    event: MachineEvent
    arrived_seconds: float
    """Arrival time on the controller's clock. For a ``Tick``, all inputs that arrived earlier have been processed."""
    number: int | None = None


class _Inbox:
    """A queue from many threads to one thread. Items are queued in the order of their arrival times."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queue: queue.SimpleQueue[Item | Posted] = queue.SimpleQueue()
        # The lock covers reading the clock and adding to the queue, so that arrival times rise along the queue.
        self._arriving = threading.Lock()
        self._is_closed = False
        self._first: Item | Posted | None = None
        """Item that ``take`` has removed from ``_queue`` but has not returned yet; None if there is no such item."""

    # --- any thread ------------------------------------------------------------------------------------------------

    def post(self, event: MachineEvent, number: int | None = None) -> None:
        """Add an event. May also be called in signal handlers."""
        # The lock is not taken, because the interrupted thread may have it. ``SimpleQueue.put`` is reentrant.
        self._queue.put(Posted(event, self._clock(), number))

    def put(self, items: Sequence[Item]) -> None:
        """Add items. Items that are added after ``close`` count as processed."""
        with self._arriving:
            for item in items:
                item.arrived_seconds = self._clock()
                if self._is_closed:
                    item.has_effect.set()
                else:
                    self._queue.put(item)

    # --- the thread that takes ----------------------------------------------------------------------------------------

    def take(self, until_seconds: float) -> Item | Posted:
        """Return the next item if it arrived before ``until_seconds``. Otherwise wait until that time and return a
        ``Tick``.

        A ``Tick`` lets a deadline expire. All items that arrived before the deadline are returned first.
        """
        all_taken_seconds = until_seconds
        if self._first is None:
            self._first, all_taken_seconds = self._wait(until_seconds)
        # An item that arrived after the deadline stays in ``_first``, because the tick of the deadline comes first.
        if self._first is None or self._first.arrived_seconds >= until_seconds:
            return Posted(Tick(), all_taken_seconds if self._first is None else self._first.arrived_seconds)
        found, self._first = self._first, None
        return found

    def _wait(self, until_seconds: float) -> tuple[Item | Posted | None, float]:
        try:
            return self._queue.get(timeout=max(0.0, until_seconds - self._clock())), until_seconds
        except queue.Empty:
            pass
        with self._arriving:  # a thread may have set an item's arrival time but not queued it yet
            now = max(self._clock(), until_seconds)
            return (None if self._queue.empty() else self._queue.get()), now

    def close(self) -> None:
        """Close the queue; all present and future items then count as processed."""
        # With the lock, an item that arrives now is either found below or released by ``put``.
        with self._arriving:
            self._is_closed = True
        left, self._first = [self._first], None
        while not self._queue.empty():
            left.append(self._queue.get())
        for found in left:
            if isinstance(found, Item):
                found.has_effect.set()


@dataclass
class _AgentSession:
    """Session of one agent process, from the agent's registration until the agent is lost."""

    number: int
    process_id: int
    first_order: int
    """Count of the orders that were given before the agent registered. The agent does not receive these orders."""
    is_over: bool = False
    """Whether the agent was lost, so that its process may not register again."""
    next_item: int = 0
    """Index of the first report of this session that has not been processed."""
    next_arrival: int = 0
    """Index of the first report of this session that has not arrived. The reports from ``next_item`` on and before this
    index have arrived but are not processed yet."""
    num_fetched: int = 0
    """Count of the orders that the agent has fetched, plus the count of the orders before its registration."""
    is_inherited: bool = False
    """Whether the agent's next delivery may begin with a later report than ``next_item``. Records that an earlier
    controller forwarded are not in the journal, from which this controller has ``next_item``."""
    newest_item: Item | None = None
    """The item of this session that arrived last."""
    delivery: threading.Lock = field(default_factory=threading.Lock)


class _AgentSessions:
    """The newest session of each node's agent. Only one thread changes the sessions; any thread may read them."""

    def __init__(self) -> None:
        # No lock is needed: one thread replaces whole entries, and readers use the entry that they found.
        self._sessions: dict[int, _AgentSession] = {}

    # --- the thread that changes them ------------------------------------------------------------------------------

    def admit(self, node: int, process_id: int, *, num_orders: int) -> bool:
        """Register an agent process. Return False if this process was registered already."""
        earlier = self._sessions.get(node)
        if earlier is not None and earlier.process_id == process_id:
            return False
        # Calls of the earlier process contain a lower session number and are refused.
        number = 0 if earlier is None else earlier.number + 1
        self._sessions[node] = _AgentSession(number, process_id, num_orders)
        return True

    def end(self, node: int, process_id: int | None) -> bool:
        """End the session of a node's agent process. Later calls of this process are refused.

        Returns:
            False if nothing changes: this process was lost before, or the node's living session belongs to another
                process.
        """
        session = self._sessions.get(node)
        if session is None:
            return True
        is_newest = process_id in (None, session.process_id)
        was_over, session.is_over = session.is_over, session.is_over or is_newest
        return not was_over if process_id == session.process_id else is_newest or was_over

    def inherit(self) -> list[int]:
        """Take over the sessions of the previous controller. Return the nodes whose session has not ended."""
        for session in self._sessions.values():
            session.is_inherited = True
        return [node for node, session in self._sessions.items() if not session.is_over]

    # --- any thread ------------------------------------------------------------------------------------------------

    def newest(self, node: int) -> _AgentSession | None:
        """Return the newest session of a node."""
        return self._sessions.get(node)

    def living(self) -> list[_AgentSession]:
        """Return the sessions of agents that are not lost."""
        return [session for session in list(self._sessions.values()) if not session.is_over]

    def replaced(self, node: int, process_id: int) -> int | None:
        """Return the process id of the living agent that is replaced if the agent ``process_id`` registers.
        Return None if the node has no other living agent."""
        session = self._sessions.get(node)
        if session is None or session.process_id == process_id or session.is_over:
            return None
        return session.process_id

    def of_process(self, node: int, process_id: int) -> _AgentSession:
        """Return the session of a registered process.

        Raises:
            ControlError: the session has ended, or another process has replaced it.
        """
        session = self._sessions.get(node)
        if session is None or session.process_id != process_id or session.is_over:
            raise ControlError(f"node {node}: this agent cannot register: it was lost or replaced, or the job ended")
        return session

    def find(self, node: int, number: int) -> _AgentSession:
        """Return the session ``number`` of a node, if it is the node's present session.

        Raises:
            ControlError: the session has ended or was replaced; the calling agent then ends its ranks.
        """
        session = self._sessions.get(node)
        if session is None or session.number != number or session.is_over:
            raise ControlError(f"node {node}: session {number} of its agent has ended: the agent was lost or replaced")
        return session


_MAX_POLL_SECONDS = 30.0
_LAST_ORDER_SECONDS = 5.0

Layouts = Mapping[int, MembershipLayout]
"""Maps each generation to the layout of its membership."""


class ControllerServer:
    """Receives calls in gRPC's threads, queues them for the controller's thread, and gives agents their orders."""

    def __init__(
        self,
        policy: MembershipPolicy,
        layouts: Layouts,
        *,
        sign_of_life: Callable[[int], None],
        clock: Callable[[], float],
        sign_seconds: float,
        others: Mapping[str, Callable[[Message], Message]],
        interface: str,
        token: str,
        epoch: int,
        port: int,
        certificates: Certificates | None,
    ) -> None:
        """Bind the service; ``open`` begins to serve.

        Args:
            layouts: layout of each generation; the controller adds new generations.
            sign_of_life: called with the number of a node when a call of the node arrives, and again while the call
                waits. May be called in any thread.
            clock: the controller's clock, for arrival times.
            sign_seconds: interval between two calls of ``sign_of_life`` while a call waits.
            others: further methods of the service, by name.
            epoch: number of the controller, which every answer contains.
        """
        self._policy, self._layouts, self._epoch = policy, layouts, epoch
        self._sessions = _AgentSessions()
        self._sign_of_life, self._sign_seconds = sign_of_life, sign_seconds
        self._inbox = _Inbox(clock)
        self._orders: list[Message] = []
        self._encoded_orders: list[bytes] = []
        """All orders as JSON. An order is encoded once for all agents."""
        self._new_order = threading.Condition()
        """Notifies all calls that wait for orders."""
        self._last_fetch = threading.Condition()
        self._is_open = False
        self._has_ended = False
        calls = {"join": self._join, "deliver": self._deliver, **others}
        methods: dict[str, Method] = {name: self._with_epoch(method) for name, method in calls.items()}
        methods["poll"] = self._poll
        self._server = RpcServer(
            "Controller",
            methods,
            interface=interface,
            token=token,
            port=port,
            # Each node needs a thread for its poll, one for its delivery, and two for calls for which it waits no more.
            num_threads=4 * policy.most_nodes + 4,
            num_reserved_descriptors=policy.most_nodes,
            certificates=certificates,
        )
        self.address = self._server.address

    def open(self) -> None:
        """Begin to serve all agents, also those registered with an earlier controller. A second call does nothing."""
        if self._is_open:
            return
        self._is_open = True
        # The heartbeat timeout of every agent starts again, so agents have time to call the new controller.
        for node in self._sessions.inherit():
            self._sign_of_life(node)
        self._server.start()

    def close(self) -> None:
        """Stop serving calls."""
        self._server.stop()

    # --- the controller's thread -----------------------------------------------------------------------------------

    def post(self, event: MachineEvent, number: int | None = None) -> None:
        """Queue an event for the controller's thread. May be called in any thread and in signal handlers."""
        self._inbox.post(event, number)

    def ask(self, event: MachineEvent) -> None:
        """Queue a request, and wait until it is in the journal, so that it survives this controller.

        Raises:
            TimeoutError: the request is not in the journal in time.
        """
        asked = Item(None, {"op": "asked", "event": messages.event_to_json(event)})
        self._inbox.put([asked])
        if not asked.has_effect.wait(ACCEPT_SECONDS):
            raise TimeoutError(f"the controller did not process the request within {ACCEPT_SECONDS:g} s")

    def take(self, until_seconds: float) -> Item | Posted:
        """Return the next item if it arrived before ``until_seconds``. Otherwise wait until then and return a tick."""
        return self._inbox.take(until_seconds)

    def admit(self, node: int, process_id: int) -> bool:
        """Register an agent process in place of its node's earlier one. Return False if it was registered before."""
        return self._sessions.admit(node, process_id, num_orders=len(self._orders))

    def end(self, node: int, process_id: int | None) -> bool:
        """Refuse later calls of a lost agent. Return False if it was lost before, or if the node has a newer living
        agent."""
        return self._sessions.end(node, process_id)

    def expects(self, origin: Origin) -> bool:
        """Whether a report is from the present agent of its node and has not been processed yet."""
        session = self._sessions.newest(origin.node)
        return session is not None and session.number == origin.session and origin.number >= session.next_item

    def count(self, origin: Origin) -> None:
        """Count a report as processed."""
        session = self._sessions.newest(origin.node)
        assert session is not None, "the node delivers reports without a registration"
        session.next_item = origin.number + 1

    def done(self, item: Item) -> None:
        """Let the call that delivered ``item`` return, because the item has been processed."""
        item.has_effect.set()

    def give(self, order: Message) -> None:
        """Publish an order for all agents."""
        with self._new_order:
            # The lock covers both lists, which a poll reads together.
            self._orders.append(order)
            self._encoded_orders.append(json.dumps(order).encode())
            self._new_order.notify_all()

    def finish(self) -> None:
        """Accept no more items, because the job has ended.

        If nodes start by themselves (``launch.node_launcher=none``), no launcher ends their agents. In this
        case, wait until all agents have fetched the last order, but at most a few seconds.
        """
        self._has_ended = True
        self._inbox.close()
        if not self._policy.starts_nodes:
            with self._last_fetch:
                self._last_fetch.wait_for(self._all_have_fetched, timeout=_LAST_ORDER_SECONDS)

    def _all_have_fetched(self) -> bool:
        return all(session.num_fetched >= len(self._orders) for session in self._sessions.living())

    # --- calls, in gRPC's threads ----------------------------------------------------------------------------------

    def _with_epoch(self, method: Callable[[Message], Message]) -> Method:
        return lambda request: {**method(request), "epoch": self._epoch}

    def _join(self, request: Message) -> Message:
        # Register an agent, even if an earlier controller did. Return its session and the number of orders to skip.
        join = decode_call(Join, request)
        node, process_id = self._known(join.node), join.process_id
        # A registration that is too large must not reach the journal, because every node receives a part of it.
        if (num_bytes := len(json.dumps(request))) > MAX_JOIN_BYTES:
            raise ControlError(
                f"node {node}: its registration has {num_bytes} bytes: must have at most {MAX_JOIN_BYTES}"
            )
        self._sign_of_life(node)
        replaced = self._sessions.replaced(node, process_id)
        if replaced is not None:
            # The loss of the old process is queued before the registration, so it is processed first.
            self.post(NodeLost(node, time.time(), "another process has registered for this node", replaced))
        item = Item(None, {"op": "joined", "join": encode(join)})
        self._inbox.put([item])
        if not item.wait(ACCEPT_SECONDS, self._sign_seconds, lambda: self._sign_of_life(node)):
            raise TimeoutError(f"node {node}: the controller did not register it within {ACCEPT_SECONDS:g} s")
        session = self._sessions.of_process(node, process_id)
        return {"session": session.number, "after": session.first_order}

    def _poll(self, request: Message) -> bytes:
        poll = decode_call(Poll, request)
        node, session = self._known(poll.node), self._session(poll)
        with self._new_order:
            seconds = min(poll.wait_seconds, _MAX_POLL_SECONDS)
            self._new_order.wait_for(lambda: len(self._orders) > poll.after, timeout=seconds)
            orders = self._encoded_orders[poll.after :]
        with self._last_fetch:
            session.num_fetched = poll.after + len(orders)
            if self._has_ended:
                self._last_fetch.notify_all()
        return b'{"node":%d,"epoch":%d,"orders":[%b]}' % (node, self._epoch, b",".join(orders))

    def _deliver(self, request: Message) -> Message:
        # Add the new reports of a call. Return the number of the next report; all earlier ones have been processed.
        call = decode_call(Deliver, request)
        node, first, session = self._known(call.node), call.first, self._session(call)
        # If a connection broke, the agent delivers again while its first call still waits. The lock admits one call.
        with session.delivery:
            expected = max(session.next_item, session.next_arrival)
            # A gap means lost reports, unless an earlier controller has forwarded them: records are not in the journal.
            if first > expected and call.items and not session.is_inherited:
                raise ControlError(f"node {node} sent report {first} instead of report {expected}: reports are missing")
            items = []
            for number, content in enumerate(call.items, start=first):
                if number >= expected:
                    # The report is checked before it is in the journal: an entry that ends this controller would end
                    # every later one, too.
                    report = _check_report(self._policy, self._layouts, node, content)
                    items.append(Item(Origin(node, session.number, number), content, report))
            if items:
                session.newest_item, session.next_arrival = items[-1], first + len(call.items)
                session.is_inherited = False
                self._inbox.put(items)
            if session.newest_item is not None and call.items:
                # A lost node must not count as alive because its last call still waits.
                sign = lambda: None if session.is_over else self._sign_of_life(node)  # noqa: E731
                session.newest_item.wait(ACCEPT_SECONDS, self._sign_seconds, sign)
            return {"next": session.next_item}

    def _session(self, call: Poll | Deliver) -> _AgentSession:
        # Return the present session of a node. A call of an earlier session is refused, and its agent then ends its
        # ranks.
        session = self._sessions.find(self._known(call.node), call.session)
        self._sign_of_life(call.node)
        return session

    def _known(self, node: int) -> int:
        if not 0 <= node < self._policy.most_nodes:
            raise ControlError(f"node {node}: must be from 0 to {self._policy.most_nodes - 1}, the job's nodes")
        return node


def _check_report(policy: MembershipPolicy, layouts: Layouts, node: int, content: object) -> Report:
    """Parse a report of a node's agent.

    Raises:
        ControlError: the report is malformed, names a wrong rank or generation, or contains another rank's position.
    """
    report = Report.decode(content)
    rank, generation = report.rank, report.generation
    if rank not in policy.ranks_of(node):
        raise ControlError(f"rank {rank} does not belong to node {node}")
    # A rank that has not yet received its first membership reports the generation in which it was started.
    is_member = generation in layouts and node in layouts[generation].nodes
    if not is_member and (isinstance(report, messages.Broken) or generation not in layouts):
        raise ControlError(f"rank {rank}: its node {node} is not in generation {generation} of the job's membership")
    if isinstance(report, messages.Broken):
        number, position = layouts[generation].rank_of(rank), report.position
        try:
            position.validate()
        except RecoveryError as error:
            raise ControlError(f"rank {rank} sent a malformed training position: {error}") from None
        if (position.rank, position.generation) != (number, generation):
            raise ControlError(
                f"rank {number} of generation {generation} sent the training position of rank {position.rank} "
                f"of generation {position.generation} instead of its own"
            )
    return report
