"""Serves the calls of agents and administrators: a call waits until the controller's thread has processed it."""

import json
import threading
import time
from collections.abc import Callable, Mapping

from megatron_ft.control import messages
from megatron_ft.control.certificates import Certificates
from megatron_ft.control.controller.inbox import Inbox, Item, Origin, Posted
from megatron_ft.control.controller.sessions import AgentSession, AgentSessions
from megatron_ft.control.membership.events import MachineEvent, NodeLost
from megatron_ft.control.membership.state import MembershipPolicy
from megatron_ft.control.messages import MAX_JOIN_BYTES, Deliver, Join, Poll, Report, decode_call, decode_report
from megatron_ft.control.rpc import ACCEPT_SECONDS, Method, RpcServer
from megatron_ft.errors import ControlError, RecoveryError
from megatron_ft.framing import Message
from megatron_ft.serde import encode

_MAX_POLL_SECONDS = 30.0
_LAST_ORDER_SECONDS = 5.0

Members = Mapping[int, tuple[int, ...]]
"""Generation to the nodes of its membership."""


class ControllerServer:
    """Receives calls in gRPC's threads, passes their content to one other thread in order, and passes orders to
    agents."""

    def __init__(
        self,
        policy: MembershipPolicy,
        members: Members,
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
            members: nodes of each generation; the controller adds to it.
            sign_of_life: called with the node of each call, and again while the call waits; safe in any thread.
            clock: the controller's clock, for arrival times.
            sign_seconds: interval between two calls of ``sign_of_life`` while a call waits.
            others: further methods, by name.
            epoch: every answer contains it.
        """
        self._policy, self._members, self._epoch = policy, members, epoch
        self._sessions = AgentSessions()
        self._sign_of_life, self._sign_seconds = sign_of_life, sign_seconds
        self._inbox = Inbox(clock)
        self._orders: list[Message] = []
        self._encoded_orders: list[bytes] = []
        """The orders as JSON: a large one is encoded once, not for every agent."""
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
            # A long poll and a delivery of each node hold a thread each, and so do calls that their agent has given up.
            num_threads=4 * policy.most_nodes + 4,
            certificates=certificates,
        )
        self.address = self._server.address

    def open(self) -> None:
        """Begin to serve, also agents that an earlier controller has admitted. A second call does nothing."""
        if self._is_open:
            return
        self._is_open = True
        # Agents have the whole timeout to call the new controller.
        for node in self._sessions.inherit():
            self._sign_of_life(node)
        self._server.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.stop()

    # --- the controller's thread -----------------------------------------------------------------------------------

    def post(self, event: MachineEvent, number: int | None = None) -> None:
        """Post an event; safe in any thread and in signal handlers."""
        self._inbox.post(event, number)

    def ask(self, event: MachineEvent) -> None:
        """Post a request, and wait until it is in the journal, so that it survives this controller.

        Raises:
            TimeoutError: it is not in the journal in time.
        """
        asked = Item(None, {"op": "asked", "event": messages.event_to_json(event)})
        self._inbox.put([asked])
        if not asked.has_effect.wait(ACCEPT_SECONDS):
            raise TimeoutError("the controller is busy")

    def take(self, until_seconds: float) -> Item | Posted:
        """Return the next item, or a tick, see ``Inbox.take``."""
        return self._inbox.take(until_seconds)

    def admit(self, node: int, process_id: int) -> bool:
        """Admit an agent in place of an earlier one of its node; return whether it is new."""
        return self._sessions.admit(node, process_id, num_orders=len(self._orders))

    def end(self, node: int, process_id: int | None) -> bool:
        """Refuse later calls of a lost agent; return whether it was the present agent of its node."""
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
        """Let the call that delivered an item return."""
        item.has_effect.set()

    def give(self, order: Message) -> None:
        """Publish an order for all agents."""
        with self._new_order:
            # The lock covers both lists, which a poll reads together.
            self._orders.append(order)
            self._encoded_orders.append(json.dumps(order).encode())
            self._new_order.notify_all()

    def finish(self) -> None:
        """Accept no more items: the job has ended.

        Agents that the job did not start have no launcher that sees them end. When this returns, they have fetched
        their last order, or had the time to.
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
        # Register an agent, also one that an earlier controller has admitted; return session and earlier orders.
        join = decode_call(Join, request)
        node, process_id = self._known(join.node), join.process_id
        # Refused before the journal has it: what is there reaches every node and every later controller.
        if (num_bytes := len(json.dumps(request))) > MAX_JOIN_BYTES:
            raise ControlError(
                f"node {node}: its registration has {num_bytes} bytes: must have at most {MAX_JOIN_BYTES}"
            )
        self._sign_of_life(node)
        replaced = self._sessions.replaced(node, process_id)
        if replaced is not None:
            # Into the queue before the registration: the old process is lost first.
            self.post(NodeLost(node, time.time(), "another process has registered for this node", replaced))
        item = Item(None, {"op": "joined", "join": encode(join)})
        self._inbox.put([item])
        if not item.wait(ACCEPT_SECONDS, self._sign_seconds, lambda: self._sign_of_life(node)):
            raise TimeoutError(f"node {node}: the controller is busy")
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
        # Add the new reports of a call and return the number of the next; all reports before it are in the journal.
        call = decode_call(Deliver, request)
        node, first, session = self._known(call.node), call.first, self._session(call)
        # An agent whose connection broke delivers again while its first call still waits: one call at a time numbers.
        with session.delivery:
            expected = max(session.next_item, session.next_arrival)
            # A gap means that reports are lost, except records that a predecessor passed on: they are in no journal.
            if first > expected and call.items and not session.is_inherited:
                raise ControlError(
                    f"node {node} sends report {first}, but report {expected} is next: reports are missing"
                )
            items = []
            for number, content in enumerate(call.items, start=first):
                if number >= expected:
                    # Checked before the journal has it: what ends this controller there would end each of its
                    # successors.
                    report = check_report(self._policy, self._members, node, content)
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

    def _session(self, call: Poll | Deliver) -> AgentSession:
        # Return the present session of a node; a call of an earlier session is refused, so that its agent ends its
        # ranks.
        session = self._sessions.find(self._known(call.node), call.session)
        self._sign_of_life(call.node)
        return session

    def _known(self, node: int) -> int:
        if not 0 <= node < self._policy.most_nodes:
            raise ControlError(f"node {node}: the job has nodes 0 to {self._policy.most_nodes - 1}")
        return node


def check_report(policy: MembershipPolicy, members: Members, node: int, content: object) -> Report:
    """Parse a report of a node's agent.

    Raises:
        ControlError: it is malformed, or about a rank of another node.
    """
    report = decode_report(content)
    rank, generation = report.rank, report.generation
    if rank not in policy.ranks_of(node):
        raise ControlError(f"rank {rank} does not belong to node {node}")
    # Before a rank's first membership is announced to it, it reports the generation in which it was started.
    is_member = node in members.get(generation, ())
    if not is_member and (isinstance(report, messages.Broken) or generation not in members):
        raise ControlError(f"rank {rank}: node {node} is not a member of generation {generation}")
    if isinstance(report, messages.Broken):
        number, position = policy.number_among(members[generation], rank), report.position
        try:
            position.validate()
        except RecoveryError as error:
            raise ControlError(f"rank {rank}: malformed position: {error}") from None
        if (position.rank, position.generation) != (number, generation):
            raise ControlError(
                f"rank {number} of generation {generation} sends the position of another rank or generation: {position}"
            )
    return report
