"""The job's controller: agents report to it, it decides by ``membership`` and gives orders.

Calls of agents arrive in gRPC's threads and only enqueue; one thread, in ``run``, takes facts in order, asks the state
machine and writes orders, which agents fetch by long polls.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_ft.control import membership
from megatron_ft.control.facts import Fact, NodeJoined, RankExited, RankRaised, RankReported, Tick
from megatron_ft.control.membership_state import (
    Decision,
    Failure,
    MembershipPolicy,
    Outcome,
    Phase,
    State,
    Step,
    first_of,
)
from megatron_ft.control.rpc import RpcServer
from megatron_ft.errors import (
    CheckpointError,
    ConfigError,
    ControlError,
    DataError,
    SoftwareError,
    TrainingStopped,
)
from megatron_ft.framing import Message

RecordSink = Callable[[Message], None]
StepSink = Callable[[Step], None]

StartOrder = Callable[[int], Message]
"""Generation to those fields of the order ``start`` that the controller does not know."""

FINAL_ERRORS = (ConfigError, DataError, SoftwareError, CheckpointError, TrainingStopped)
"""Errors that come again when the ranks are started again."""
_FINAL_EXIT_CODES = frozenset(error.exit_code for error in FINAL_ERRORS)

MAX_WAITING_ITEMS = 4096
_MAX_POLL_SECONDS = 30.0
_ACCEPT_SECONDS = 20.0


@dataclass
class JobEnd:
    """How the job, or a generation of it, ended, and what is known of every rank that did not end well."""

    outcome: Outcome
    reason: str
    first_failure: Failure | None
    details: dict[int, Message] = field(default_factory=dict)
    """Rank to what was said of its end: ``node, returncode, at_seconds, traceback, error, exit_code, iteration, phase,
    log, log_tail``, as far as known."""
    survived: tuple[str, ...] = ()
    """Why each earlier generation ended."""


class Controller:
    """One job, one membership."""

    def __init__(
        self,
        policy: MembershipPolicy,
        *,
        interface: str,
        token: str,
        start_order: StartOrder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bind the service.

        Args:
            start_order: called at each start, in the thread of ``run``.
        """
        self._policy = policy
        self._clock = clock
        self._start_order = start_order
        self._state = membership.initial(policy, clock())
        self._inbox: queue.SimpleQueue[Message | Fact] = queue.SimpleQueue()
        self._room = threading.BoundedSemaphore(MAX_WAITING_ITEMS)
        self._orders: list[Message] = []
        self._changed = threading.Condition()
        self._next_item = dict.fromkeys(range(policy.num_nodes), 0)
        self._delivery = {node: threading.Lock() for node in range(policy.num_nodes)}
        self._details: dict[int, Message] = {}
        self._services: dict[int, dict[str, str]] = {}
        methods = {"join": self._join, "poll": self._poll, "deliver": self._deliver}
        num_threads = 4 * policy.num_nodes + 4
        self._server = RpcServer("Controller", methods, interface=interface, token=token, num_threads=num_threads)
        self.address = self._server.address

    @property
    def state(self) -> State:
        """Where the job stands."""
        return self._state

    @property
    def details(self) -> dict[int, Message]:
        """What is known of the ends of this generation's ranks, see ``JobEnd``."""
        return self._details

    def post(self, fact: Fact) -> None:
        """Tell a fact; safe in any thread and in signal handlers."""
        self._inbox.put(fact)

    def run(self, on_record: RecordSink, on_step: StepSink) -> JobEnd:
        """Serve until the job has ended; records of ranks and decisions go to the callbacks, in this thread.

        At a restart ``details`` are still those of the generation that failed.
        """
        self._server.start()
        while True:
            fact = self._fact_of(self._take(), on_record)
            step = membership.advance(self._policy, self._state, fact, self._clock())
            self._state = step.state
            if step.decision is not Decision.WAIT:
                on_step(step)
            if self._execute(step):
                return self._end_of(step)

    def _end_of(self, step: Step) -> JobEnd:
        firsts = [first_of(failures) for failures in step.state.survived]
        survived = tuple(first.detail for first in firsts if first is not None)
        return JobEnd(step.state.outcome, step.reason, step.state.first_failure, self._details, survived)

    def close(self) -> None:
        """Stop serving."""
        self._server.stop()

    def _take(self) -> Message | Fact:
        deadline = self._state.deadline_seconds
        try:
            if deadline is None:
                return self._inbox.get()
            return self._inbox.get(timeout=max(0.0, deadline - self._clock()))
        except queue.Empty:
            return Tick()

    def _fact_of(self, item: Message | Fact, on_record: RecordSink) -> Fact:
        if not isinstance(item, dict):
            return item
        self._room.release()
        match item["op"]:
            case "record":
                on_record(item["record"])
                return Tick()
            case "reported":
                return RankReported(item["rank"])
            case "raised":
                self._note(item)
                final = item.get("exit_code") in _FINAL_EXIT_CODES
                return RankRaised(item["rank"], item["at_seconds"], item.get("iteration", 0), final)
            case "exited":
                self._note(item)
                how = (item["returncode"], item["at_seconds"], item["done"], item.get("iteration", 0))
                return RankExited(item["rank"], *how)
        raise ControlError(f"unknown item {item['op']!r}")

    def _note(self, item: Message) -> None:
        details = self._details.setdefault(item["rank"], {})
        failed_at_seconds = min(item["at_seconds"], details.get("at_seconds", item["at_seconds"]))
        details.update({name: value for name, value in item.items() if name not in ("op", "rank")})
        details["at_seconds"] = failed_at_seconds
        details["caused_by_us"] = details.get("caused_by_us", self._state.phase is Phase.KILLING)

    def _execute(self, step: Step) -> bool:
        """Carry a decision out; whether the job has ended."""
        match step.decision:
            case Decision.START | Decision.RESTART:
                self._details = {}
                self._start(step.state.generation)
            case Decision.STOP:
                self._order({"op": "stop", "reason": step.reason})
            case Decision.KILL:
                self._order({"op": "kill", "reason": step.reason})
            case Decision.END:
                self._order({"op": "end", "reason": step.reason})
                return True
        return False

    def _start(self, generation: int) -> None:
        """Start the ranks of all nodes; each learns where every node's services listen."""
        ranks = {str(node): list(self._policy.ranks_of(node)) for node in range(self._policy.num_nodes)}
        services: dict[str, dict[str, str]] = {}
        for node, addresses in sorted(self._services.items()):
            for name, address in addresses.items():
                services.setdefault(name, {})[str(node)] = address
        order = {"op": "start", "generation": generation, "ranks": ranks, "services": services}
        self._order({**self._start_order(generation), **order})

    def _order(self, order: Message) -> None:
        with self._changed:
            self._orders.append(order)
            self._changed.notify_all()

    # --- what agents call, in gRPC's threads -----------------------------------------------------------------------

    def _join(self, request: Message) -> Message:
        node = self._known(request)
        services = request.get("services", {})
        self._services[node] = {name: str(about["address"]) for name, about in dict(services).items()}
        self.post(NodeJoined(node))
        return {}

    def _poll(self, request: Message) -> Message:
        node, after = self._known(request), int(request["after"])
        wait_seconds = min(float(request["wait_seconds"]), _MAX_POLL_SECONDS)
        with self._changed:
            self._changed.wait_for(lambda: len(self._orders) > after, timeout=wait_seconds)
            return {"node": node, "orders": self._orders[after:]}

    def _deliver(self, request: Message) -> Message:
        """Take items not taken before; says which one is expected next."""
        node, first = self._known(request), int(request["first"])
        deadline = time.monotonic() + _ACCEPT_SECONDS
        with self._delivery[node]:
            for number, item in enumerate(request["items"], start=first):
                if number < self._next_item[node]:
                    continue
                self._check(node, item)
                if not self._room.acquire(timeout=max(0.0, deadline - time.monotonic())):
                    break
                self._inbox.put(item)
                self._next_item[node] = number + 1
            return {"next": self._next_item[node]}

    def _known(self, request: Message) -> int:
        node = int(request["node"])
        if not 0 <= node < self._policy.num_nodes:
            raise ControlError(f"node {node}: the job has nodes 0 to {self._policy.num_nodes - 1}")
        return node

    def _check(self, node: int, item: Message) -> None:
        """Refuse items that are malformed or speak for another node's ranks."""
        if item["op"] not in ("record", "reported", "raised", "exited"):
            raise ControlError(f"unknown item {item['op']!r}")
        if int(item["rank"]) not in self._policy.ranks_of(node):
            raise ControlError(f"rank {item['rank']} is not of node {node}")
        if item["op"] in ("raised", "exited"):
            float(item["at_seconds"]), int(item.get("iteration", 0))
        if item["op"] == "exited":
            int(item["returncode"]), bool(item["done"])
