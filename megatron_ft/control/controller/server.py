"""Where agents and the console reach the controller: calls wait here until its thread has done with them."""

import json
import threading
import time
from collections.abc import Callable, Mapping

from megatron_ft.control.certificates import Certificates
from megatron_ft.control.controller.inbox import Inbox, Item, Origin, Posted
from megatron_ft.control.controller.messages import Members, check_item
from megatron_ft.control.controller.sessions import Session, Sessions
from megatron_ft.control.membership.events import Fact, NodeLost, to_json
from megatron_ft.control.membership.state import MembershipPolicy
from megatron_ft.control.node.store_endpoint import StorePlace
from megatron_ft.control.rpc import Method, RpcServer
from megatron_ft.errors import ControlError
from megatron_ft.framing import Message

MAX_JOIN_BYTES = 64 * 1024
"""Of what a node's process says when it registers: all nodes are told of it."""
_MAX_POLL_SECONDS = 30.0
_ACCEPT_SECONDS = 20.0
_FAREWELL_SECONDS = 5.0


class FrontDesk:
    """Takes calls in gRPC's threads; hands what they bring to one other thread, in order, and orders to agents."""

    def __init__(
        self,
        policy: MembershipPolicy,
        members: Members,
        *,
        hear: Callable[[int], None],
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
            others: further calls that are answered, by name.
            hear: called with the node of each call, and again while the call waits; safe in any thread.
            clock: the controller's; it gives what comes here the time of its arrival.
            sign_seconds: between two signs of life of a node whose call waits.
            epoch: every answer bears it.
        """
        self._policy, self._members, self._epoch = policy, members, epoch
        self._sessions = Sessions()
        self._hear, self._sign_seconds = hear, sign_seconds
        self._inbox = Inbox(clock)
        self._orders: list[Message] = []
        self._encoded_orders: list[bytes] = []
        """The same as JSON: a large one is encoded once, not for every agent."""
        self._new_order = threading.Condition()
        """For calls that wait for orders alone: an order is for all of them."""
        self._farewell = threading.Condition()
        self._has_ended = False
        calls = {"join": self._join, "deliver": self._deliver, **others}
        methods: dict[str, Method] = {name: self._with_epoch(method) for name, method in calls.items()}
        methods["poll"] = self._poll
        num_threads = 4 * policy.most_nodes + 4
        self._server = RpcServer(
            "Controller",
            methods,
            interface=interface,
            token=token,
            port=port,
            num_threads=num_threads,
            certificates=certificates,
        )
        self.address = self._server.address

    def open(self) -> None:
        """Begin to serve: also processes of nodes that an earlier controller has taken in."""
        for node in self._sessions.inherit():
            self._hear(node)
        self._server.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.stop()

    # --- the controller's thread -----------------------------------------------------------------------------------

    def post(self, fact: Fact, number: int | None = None) -> None:
        """Hand in a fact; safe in any thread and in signal handlers."""
        self._inbox.post(fact, number)

    def ask(self, fact: Fact) -> None:
        """Hand in what somebody asks for, and wait until it is known, also to a controller that takes over.

        Raises:
            TimeoutError: it is not in time.
        """
        asked = Item(None, {"op": "asked", "fact": to_json(fact)})
        self._inbox.put([asked])
        if not asked.has_effect.wait(_ACCEPT_SECONDS):
            raise TimeoutError("the controller is busy")

    def take(self, until_seconds: float) -> Item | Posted:
        """What is next, or that time went on, see ``Inbox.take``."""
        return self._inbox.take(until_seconds)

    def admit(self, node: int, process_id: int) -> bool:
        """Take in a node's process, in the place of an earlier one; whether it is a new one."""
        return self._sessions.admit(node, process_id, num_orders=len(self._orders))

    def end(self, node: int, process_id: int | None) -> bool:
        """A node's process is gone or given up: its later calls are refused. Whether that one had its place."""
        return self._sessions.end(node, process_id)

    def expects(self, origin: Origin) -> bool:
        """Whether an item is of a node's present process and was not taken in yet."""
        session = self._sessions.newest(origin.node)
        return session is not None and session.number == origin.session and origin.number >= session.next_item

    def count(self, origin: Origin) -> None:
        """An item is taken in."""
        session = self._sessions.newest(origin.node)
        assert session is not None, "it has registered before it hands anything in"
        session.next_item = origin.number + 1

    def done(self, item: Item) -> None:
        """An item has had its effect: the call that handed it in may hear of it."""
        item.has_effect.set()

    def give(self, order: Message) -> None:
        """Let agents fetch an order."""
        with self._new_order:
            self._orders.append(order)
            self._encoded_orders.append(json.dumps(order).encode())
            self._new_order.notify_all()

    def let_go(self) -> None:
        """What is still handed in at the job's end says nothing that matters.

        Nodes that nobody started have fetched their last order when this returns, or have had the time: nobody else
        sees them end.
        """
        self._has_ended = True
        self._inbox.close()
        if not self._policy.starts_nodes:
            with self._farewell:
                self._farewell.wait_for(self._all_are_told, timeout=_FAREWELL_SECONDS)

    def _all_are_told(self) -> bool:
        return all(session.num_told >= len(self._orders) for session in self._sessions.living())

    # --- calls, in gRPC's threads ----------------------------------------------------------------------------------

    def _with_epoch(self, method: Callable[[Message], Message]) -> Method:
        return lambda request: {**method(request), "epoch": self._epoch}

    def _join(self, request: Message) -> Message:
        """A node's process registers, also with a controller that takes over: its session, and the orders before it."""
        node, process_id = self._known(request), int(request["process_id"])
        if (num_bytes := len(json.dumps(request))) > MAX_JOIN_BYTES:
            raise ControlError(f"node {node} registers with {num_bytes} bytes: at most {MAX_JOIN_BYTES} are taken")
        services = {name: str(about["address"]) for name, about in dict(request.get("services", {})).items()}
        self._hear(node)
        replaced = self._sessions.replaced(node, process_id)
        if replaced is not None:
            self.post(NodeLost(node, time.time(), "another process has taken its place", replaced))
        joined: Message = {"op": "joined", "node": node, "process_id": process_id, "services": services}
        if request.get("store") is not None:
            joined["store"] = StorePlace.from_json(dict(request["store"])).to_json()
        item = Item(None, joined)
        self._inbox.put([item])
        if not item.wait(_ACCEPT_SECONDS, self._sign_seconds, lambda: self._hear(node)):
            raise TimeoutError(f"node {node}: the controller is busy")
        session = self._sessions.of_process(node, process_id)
        return {"session": session.number, "after": session.first_order}

    def _poll(self, request: Message) -> bytes:
        node, after = self._known(request), int(request["after"])
        session = self._session(node, request)
        wait_seconds = min(float(request["wait_seconds"]), _MAX_POLL_SECONDS)
        with self._new_order:
            self._new_order.wait_for(lambda: len(self._orders) > after, timeout=wait_seconds)
            orders = self._encoded_orders[after:]
        with self._farewell:
            session.num_told = after + len(orders)
            if self._has_ended:
                self._farewell.notify_all()
        return b'{"node":%d,"epoch":%d,"orders":[%b]}' % (node, self._epoch, b",".join(orders))

    def _deliver(self, request: Message) -> Message:
        """Take items not taken before; says which one is expected next: all before it have had their effect."""
        node, first = self._known(request), int(request["first"])
        session = self._session(node, request)
        with session.delivery:
            expected = max(session.next_item, session.next_arrival)
            if first > expected and request["items"] and not session.is_inherited:
                raise ControlError(f"item {first} of node {node}: must be at most {expected}, the next")
            items = []
            for number, content in enumerate(list(request["items"]), start=first):
                if number >= expected:
                    check_item(self._policy, self._members, node, content)
                    items.append(Item(Origin(node, session.number, number), content))
            if items:
                session.newest_item, session.next_arrival = items[-1], first + len(request["items"])
                session.is_inherited = False
                self._inbox.put(items)
            if session.newest_item is not None and request["items"]:
                sign = lambda: None if session.is_over else self._hear(node)  # noqa: E731
                session.newest_item.wait(_ACCEPT_SECONDS, self._sign_seconds, sign)
            return {"next": session.next_item}

    def _session(self, node: int, request: Message) -> Session:
        """The present session of a node; a call of an earlier one is refused, so that its process ends its ranks."""
        session = self._sessions.find(node, int(request["session"]))
        self._hear(node)
        return session

    def _known(self, request: Message) -> int:
        node = int(request["node"])
        if not 0 <= node < self._policy.most_nodes:
            raise ControlError(f"node {node}: the job has nodes 0 to {self._policy.most_nodes - 1}")
        return node
