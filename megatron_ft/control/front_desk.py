"""Where agents and the console reach the controller: calls wait here until its thread has done with them."""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_ft.control.certificates import Certificates
from megatron_ft.control.facts import Fact, NodeLost, Tick, to_json
from megatron_ft.control.items import Members, check_item
from megatron_ft.control.membership_state import MembershipPolicy
from megatron_ft.control.rpc import Method, RpcServer
from megatron_ft.control.sessions import Session, Sessions
from megatron_ft.control.store_place import StorePlace
from megatron_ft.errors import ControlError
from megatron_ft.framing import Message

MAX_WAITING_ITEMS = 4096
_MAX_POLL_SECONDS = 30.0
_ACCEPT_SECONDS = 20.0
_FAREWELL_SECONDS = 5.0


class Origin(NamedTuple):
    """Which item of which node's process: later ones of a node are greater."""

    node: int
    session: int
    number: int


@dataclass(slots=True)
class Item:
    """Something that a node has handed in."""

    origin: Origin | None
    """None for what is not numbered: a second one says nothing new."""
    content: Message
    is_done: bool = False
    """It has had its effect."""


@dataclass(frozen=True, slots=True)
class Posted:
    """A fact from elsewhere; those of the console are numbered."""

    fact: Fact
    number: int | None = None


class FrontDesk:
    """Takes calls in gRPC's threads; hands what they bring to one other thread, in order, and orders to agents."""

    def __init__(
        self,
        policy: MembershipPolicy,
        members: Members,
        *,
        hear: Callable[[int], None],
        others: Mapping[str, Method],
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
            hear: called with the node of each call; safe in any thread.
            epoch: every answer bears it.
        """
        self._policy, self._members, self._epoch = policy, members, epoch
        self._sessions = Sessions()
        self._hear = hear
        self._inbox: queue.SimpleQueue[Item | Posted] = queue.SimpleQueue()
        self._room = threading.BoundedSemaphore(MAX_WAITING_ITEMS)
        self._orders: list[Message] = []
        self._changed = threading.Condition()
        self._has_ended = False
        calls = {"join": self._join, "poll": self._poll, "deliver": self._deliver, **others}
        methods = {name: self._with_epoch(method) for name, method in calls.items()}
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
        self._inbox.put(Posted(fact, number))

    def ask(self, fact: Fact) -> None:
        """Hand in what somebody asks for, and wait until it is known, also to a controller that takes over.

        Raises:
            TimeoutError: it is not in time.
        """
        if not self._hand_in([Item(None, {"op": "asked", "fact": to_json(fact)})]):
            raise TimeoutError("the controller is busy")

    def take(self, timeout_seconds: float | None = None) -> Item | Posted:
        """What is next, or that time went on."""
        try:
            found = self._inbox.get(timeout=timeout_seconds)
        except queue.Empty:
            return Posted(Tick())
        if isinstance(found, Item):
            self._room.release()
        return found

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
        """An item has had its effect: whoever handed it in may hear of it."""
        with self._changed:
            item.is_done = True
            self._changed.notify_all()

    def give(self, order: Message) -> None:
        """Let agents fetch an order."""
        with self._changed:
            self._orders.append(order)
            self._changed.notify_all()

    def let_go(self) -> None:
        """What is still handed in at the job's end says nothing that matters.

        Nodes that nobody started have fetched their last order when this returns, or have had the time: nobody else
        sees them end.
        """
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
            if not self._policy.starts_nodes:
                self._changed.wait_for(self._all_are_told, timeout=_FAREWELL_SECONDS)

    def _all_are_told(self) -> bool:
        return all(session.num_told >= len(self._orders) for session in self._sessions.living())

    # --- calls, in gRPC's threads ----------------------------------------------------------------------------------

    def _with_epoch(self, method: Method) -> Method:
        return lambda request: {**method(request), "epoch": self._epoch}

    def _join(self, request: Message) -> Message:
        """A node's process registers, also with a controller that takes over: its session, and the orders before it."""
        node, process_id = self._known(request), int(request["process_id"])
        services = {name: str(about["address"]) for name, about in dict(request.get("services", {})).items()}
        self._hear(node)
        replaced = self._sessions.replaced(node, process_id)
        if replaced is not None:
            self.post(NodeLost(node, time.time(), "another process has taken its place", replaced))
        joined: Message = {"op": "joined", "node": node, "process_id": process_id, "services": services}
        if request.get("store") is not None:
            joined["store"] = StorePlace.from_json(dict(request["store"])).to_json()
        if not self._hand_in([Item(None, joined)]):
            raise TimeoutError(f"node {node}: the controller is busy")
        session = self._sessions.of_process(node, process_id)
        return {"session": session.number, "after": session.first_order}

    def _poll(self, request: Message) -> Message:
        node, after = self._known(request), int(request["after"])
        session = self._session(node, request)
        wait_seconds = min(float(request["wait_seconds"]), _MAX_POLL_SECONDS)
        with self._changed:
            self._changed.wait_for(lambda: len(self._orders) > after, timeout=wait_seconds)
            session.num_told = len(self._orders)
            if self._has_ended:
                self._changed.notify_all()
            return {"node": node, "orders": self._orders[after:]}

    def _deliver(self, request: Message) -> Message:
        """Take items not taken before; says which one is expected next: all before it have had their effect."""
        node, first = self._known(request), int(request["first"])
        session = self._session(node, request)
        with session.delivery:
            if first > session.next_item and request["items"] and not session.is_inherited:
                raise ControlError(f"item {first} of node {node}: must be at most {session.next_item}, the next")
            items = []
            for number, content in enumerate(list(request["items"]), start=first):
                if number >= session.next_item:
                    check_item(self._policy, self._members, node, content)
                    items.append(Item(Origin(node, session.number, number), content))
            self._hand_in(items)
            session.is_inherited = session.is_inherited and not items
            return {"next": session.next_item}

    def _session(self, node: int, request: Message) -> Session:
        """The present session of a node; a call of an earlier one is refused, so that its process ends its ranks."""
        session = self._sessions.find(node, int(request["session"]))
        self._hear(node)
        return session

    def _hand_in(self, items: Sequence[Item]) -> bool:
        """Give items to the thread of ``run`` and wait until it has done with them; whether that was in time."""
        deadline = time.monotonic() + _ACCEPT_SECONDS
        for item in items:
            if not self._room.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return False
            self._inbox.put(item)
        with self._changed:
            timeout_seconds = max(0.0, deadline - time.monotonic())
            done = lambda: self._has_ended or all(item.is_done for item in items)  # noqa: E731
            return self._changed.wait_for(done, timeout=timeout_seconds)

    def _known(self, request: Message) -> int:
        node = int(request["node"])
        if not 0 <= node < self._policy.most_nodes:
            raise ControlError(f"node {node}: the job has nodes 0 to {self._policy.most_nodes - 1}")
        return node
