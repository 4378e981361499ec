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
from megatron_ft.control.facts import Fact, NodeJoined, RankBroken, RankExited, RankRaised, RankReported, Tick
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
    RecoveryError,
    SoftwareError,
    TrainingStopped,
)
from megatron_ft.framing import Message
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.planning.recovery.target import Position

RecordSink = Callable[[Message], None]
StepSink = Callable[[Step], None]

StartOrder = Callable[[int], Message]
"""Generation to those fields of the order ``start`` that the controller does not know."""

RecordDecision = Callable[[Message], None]
"""Returns when the decision is on disk."""

FINAL_ERRORS = (ConfigError, DataError, SoftwareError, CheckpointError, TrainingStopped)
"""Errors that come again when the ranks are started again."""
_FINAL_EXIT_CODES = frozenset(error.exit_code for error in FINAL_ERRORS)

MAX_WAITING_ITEMS = 4096
_ITEMS = ("record", "reported", "raised", "broken", "exited")
_NOT_NOTED = ("op", "rank", "generation", "position")
_NUMBERS = (int, float, bool)
_FIRST_WORDS = ("error", "traceback", "exit_code")
_MAX_POLL_SECONDS = 30.0
_ACCEPT_SECONDS = 20.0


@dataclass
class JobEnd:
    """How the job, or a generation of it, ended, and what is known of every rank that did not end well."""

    outcome: Outcome
    reason: str
    first_failure: Failure | None
    details: dict[int, Message] = field(default_factory=dict)
    """Rank, by its number at the start, to what was said of its end: ``number`` (in its membership), ``node,
    returncode, at_seconds, traceback, error, exit_code, iteration, phase, log, log_tail``, as far as known."""
    survived: tuple[str, ...] = ()
    """Why each earlier generation ended."""
    num_reforms: int = 0
    """Those of them after which ranks went on in their processes."""


class Controller:
    """One job, one membership at a time."""

    def __init__(
        self,
        policy: MembershipPolicy,
        *,
        interface: str,
        token: str,
        start_order: StartOrder,
        record_decision: RecordDecision,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bind the service.

        Args:
            start_order: called at each start and each next membership, in the thread of ``run``.
            record_decision: called before ranks are told how they go on without lost nodes, or that they do not.
        """
        self._policy = policy
        self._clock = clock
        self._start_order = start_order
        self._record_decision = record_decision
        self._state = membership.initial(policy, clock())
        self._members = {0: self._state.members}
        self._started_generation = 0
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

        At a restart, and when a next membership begins, ``details`` are still those of the generation before.
        """
        self._server.start()
        while True:
            fact = self._fact_of(self._take(), on_record)
            before = self._state
            step = membership.advance(self._policy, before, fact, self._clock())
            self._state = step.state
            self._members[step.state.generation] = step.state.members
            if step.decision is not Decision.WAIT:
                on_step(step)
            if self._execute(before, step):
                return self._end_of(step)

    def _end_of(self, step: Step) -> JobEnd:
        firsts = [first_of(failures) for failures in step.state.survived]
        survived = tuple(first.detail for first in firsts if first is not None)
        state, details = step.state, self._details
        return JobEnd(state.outcome, step.reason, state.first_failure, details, survived, state.num_reforms)

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
            case _ if item["generation"] < self._started_generation:
                return Tick()  # of a process that ended before the present ones were started
            case "reported":
                return RankReported(item["rank"])
            case "raised":
                self._note(item)
                final = item.get("exit_code") in _FINAL_EXIT_CODES
                return RankRaised(item["rank"], item["at_seconds"], item.get("iteration", 0), final)
            case "broken":
                self._note(item)
                final = item.get("exit_code") in _FINAL_EXIT_CODES
                about = (item["at_seconds"], item.get("iteration", 0), final)
                return RankBroken(item["rank"], Position.from_json(item["position"]), *about)
            case "exited":
                self._note(item)
                how = (item["returncode"], item["at_seconds"], item["done"], item.get("iteration", 0))
                return RankExited(item["rank"], *how)
        raise ControlError(f"unknown item {item['op']!r}")

    def _note(self, item: Message) -> None:
        """Keep what is said of an end. The first error counts: a rank that could not survive raises another."""
        node, members = self._policy.node_of(item["rank"]), self._members[item["generation"]]
        if node not in self._state.members:
            return
        details = self._details.setdefault(item["rank"], {"number": self._policy.number_among(members, item["rank"])})
        if "error" in details:
            item = {name: value for name, value in item.items() if name not in _FIRST_WORDS}
        failed_at_seconds = min(item["at_seconds"], details.get("at_seconds", item["at_seconds"]))
        details.update({name: value for name, value in item.items() if name not in _NOT_NOTED})
        details["at_seconds"] = failed_at_seconds
        killed_by_us = self._state.phase is Phase.KILLING or node in self._state.lost
        details["caused_by_us"] = details.get("caused_by_us", killed_by_us)

    def _execute(self, before: State, step: Step) -> bool:
        """Carry a decision made in the state ``before`` out; whether the job has ended."""
        match step.decision:
            case Decision.START | Decision.RESTART:
                self._details = {}
                self._start(step.state.generation)
            case Decision.BREAK:
                about = {"generation": step.state.generation, "lost": sorted(step.state.announced)}
                self._order({"op": "break", "reason": step.reason, **about})
            case Decision.REFORM:
                self._details = {}
                self._reform(before, step)
            case Decision.STOP:
                declines = self._policy.may_lose_nodes and bool(step.state.failures)
                if declines:
                    self._record(before, step, {"declined": step.reason, "lost_nodes": sorted(before.lost)})
                self._order({"op": "stop", "reason": step.reason, "survivors_end": declines})
            case Decision.KILL:
                self._order({"op": "kill", "reason": step.reason})
            case Decision.END:
                self._order({"op": "end", "reason": step.reason})
                return True
        return False

    def _reform(self, before: State, step: Step) -> None:
        """Begin the next membership, once the decision and all that it rests on are on disk."""
        assert step.reform is not None, "a decision to reform"
        order = self._start_order(step.state.generation)
        following = NextMembership(
            generation=step.state.generation,
            previous_ranks=step.reform.previous_ranks,
            nodes=step.reform.nodes,
            target=step.reform.target,
            master_addr=order["master_addr"],
            master_port=order["master_port"],
            reason=step.reason,
        )
        following.validate()
        self._record(before, step, {"next": following.to_json(), "lost_nodes": list(step.reform.lost)})
        self._order({"op": "reform", "next": following.to_json()})

    def _record(self, before: State, step: Step, decision: Message) -> None:
        positions = [fact.position for fact in before.broken] if step.reform is None else step.reform.positions
        about = {"generation": before.generation, "time_unix_seconds": time.time(), "reason": step.reason}
        self._record_decision({**about, "positions": [position.to_json() for position in positions], **decision})

    def _start(self, generation: int) -> None:
        """Start the ranks of all nodes; each learns where every node's services listen."""
        self._started_generation = generation
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
        if item["op"] not in _ITEMS:
            raise ControlError(f"unknown item {item['op']!r}")
        if int(item["rank"]) not in self._policy.ranks_of(node):
            raise ControlError(f"rank {item['rank']} is not of node {node}")
        if node not in self._members.get(int(item["generation"]), ()):
            raise ControlError(f"rank {item['rank']}: node {node} is not of generation {item['generation']}")
        if item["op"] in ("raised", "broken", "exited"):
            float(item["at_seconds"]), int(item.get("iteration", 0))
        if item["op"] == "exited":
            int(item["returncode"]), bool(item["done"])
        if item["op"] == "broken":
            self._check_position(item)

    def _check_position(self, item: Message) -> None:
        """Refuse a position that is none, or another rank's."""
        generation, rank = int(item["generation"]), int(item["rank"])
        number = self._policy.number_among(self._members[generation], rank)
        try:
            position = Position.from_json(item["position"])
            whole = (position.rank, position.generation, position.completed, position.contributed)
            numbers = () if position.vote is None else tuple(position.vote.to_record().values())
            if any(type(value) is not int for value in whole) or any(type(n) not in _NUMBERS for n in numbers):
                raise TypeError(f"not all of {(*whole, *numbers)} are numbers")
            position.validate()
        except (KeyError, TypeError, ValueError, AttributeError, RecoveryError) as error:
            raise ControlError(f"rank {rank}: malformed position: {error!r}") from None
        if (position.rank, position.generation) != (number, generation):
            raise ControlError(f"rank {number} of generation {generation} speaks for {position}")
