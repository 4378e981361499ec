"""The job's controller: agents report to it, it decides by ``membership`` and gives orders.

Calls arrive at the ``front_desk``; one thread, in ``run``, takes in order what came there, asks the state machine and
writes orders, which agents fetch. What it takes in is in the journal before anything follows from it, and a controller
that takes over does the same again: this class depends on nothing else.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from megatron_ft.control.certificates import Certificates
from megatron_ft.control.controller.admin_service import OperatorCalls
from megatron_ft.control.controller.essential_writes import CannotDecide
from megatron_ft.control.controller.inbox import Item, Origin, Posted
from megatron_ft.control.controller.job_result import JobEnd, add_words, end_of
from megatron_ft.control.controller.journal import Journal
from megatron_ft.control.controller.server import FrontDesk
from megatron_ft.control.detector import Detector, DetectorPolicy, Place
from megatron_ft.control.membership.events import (
    Fact,
    NodeJoined,
    NodeLost,
    RankBroken,
    RankExited,
    RankHung,
    RankRaised,
    RankReported,
    Tick,
)
from megatron_ft.control.membership import events as facts
from megatron_ft.control.membership import machine as membership
from megatron_ft.control.membership.state import Decision, MembershipPolicy, Phase, State, Step
from megatron_ft.control.node.sidecars import by_name
from megatron_ft.control.node.store_endpoint import StorePlace
from megatron_ft.errors import FINAL_EXIT_CODES, ControlError
from megatron_ft.framing import Message
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.planning.recovery.target import Position

RecordSink = Callable[[Message, Origin], None]
"""Takes a record and where it comes from, by which a second delivery is known."""

StepSink = Callable[[Step], None]

StartOrder = Callable[[int, Sequence[int], Mapping[int, StorePlace]], Message]
"""Generation, its nodes and where each can serve a store to fields of ``start`` that the controller lacks."""

RecordDecision = Callable[[Message], None]
"""Returns when the decision is on disk."""

_PASSING = ("record", "progress")
"""Items that change nothing: they are in no journal."""


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
        journal: Journal | None = None,
        epoch: int = 1,
        port: int = 0,
        certificates: Certificates | None = None,
        detection: DetectorPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bind the service.

        Args:
            start_order: called at each start and each next membership, in the thread of ``run``.
            detection: when silence and standstill are taken for a loss; default: as its class has it.
            record_decision: called before ranks are told how they go on without lost nodes, or that they do not.
            journal: what an earlier controller of this job took in; it is continued.
            epoch: this controller's, see ``epochs``; every answer bears it.
            port: to serve at; 0 takes a free one.
            certificates: of the channel to agents, see ``certificates``.
            clock: goes on from the last time in ``journal``.
        """
        self._policy = policy
        self._clock = clock
        self._journal = journal
        self._known_orders: deque[Message] = deque()
        """Orders in the journal that are to be given again."""
        self._num_console_facts = 0
        self._past_deadline: float | None = None
        self._unix_seconds = 0.0
        """When what is being taken in came."""
        self._start_order = start_order
        self._record_decision = record_decision
        begin_seconds = clock() if journal is None else journal.first("begin_seconds", clock())
        self._state = membership.initial(policy, begin_seconds)
        self._members = {0: self._state.members}
        self._num_starts = 0
        self._starts: dict[int, int] = {}
        """For each node the start that made its present ranks; what those of an earlier one say is ignored."""
        detection = detection or DetectorPolicy()
        self._look_seconds = detection.heartbeat_interval_seconds
        self._silence_seconds = detection.heartbeat_timeout_seconds
        self._detector = Detector(policy, detection)
        self._look_at = clock()
        self._found: deque[Fact] = deque()
        self._details: dict[int, Message] = {}
        self._services: dict[int, dict[str, str]] = {}
        self._stores: dict[int, StorePlace] = {}
        operators = OperatorCalls(
            policy,
            read_state=lambda: self._state,
            detector=self._detector,
            ask=lambda fact: self._desk.ask(fact),
            clock=clock,
        )
        self._desk = FrontDesk(
            policy,
            self._members,
            hear=lambda node: self._detector.hear(node, self._clock()),
            clock=clock,
            sign_seconds=detection.heartbeat_interval_seconds,
            others=operators.methods,
            interface=interface,
            token=token,
            epoch=epoch,
            port=port,
            certificates=certificates,
        )
        self.address = self._desk.address

    @property
    def state(self) -> State:
        """Where the job stands."""
        return self._state

    @property
    def details(self) -> dict[int, Message]:
        """What is known of the ends of this generation's ranks, see ``JobEnd``."""
        return self._details

    def post(self, fact: Fact, number: int | None = None) -> None:
        """Tell a fact; safe in any thread and in signal handlers. Those that may be told again to a controller that
        takes over have a ``number``, from 0, without gaps."""
        self._desk.post(fact, number)

    def run(self, on_record: RecordSink, on_step: StepSink) -> JobEnd:
        """Serve until the job has ended; records of ranks and decisions go to the callbacks, in this thread.

        At a restart, and when a next membership begins, ``details`` are still those of the generation before. A
        controller that takes over makes its predecessors' decisions again first, for ``on_step`` to see.
        """
        step = self._take_over(on_step)
        self._desk.open()
        try:
            while step is None or step.decision is not Decision.END:
                step = self._serve(on_record, on_step)
        except CannotDecide as error:
            self._desk.give({"op": "end", "reason": str(error)})
            return JobEnd(error.outcome, str(error), None, self._details)
        self._desk.let_go()
        return end_of(step.state, step.reason, self._details)

    def _take_over(self, on_step: StepSink) -> Step | None:
        """Take in again what the journal has; the last decision."""
        entries = [] if self._journal is None else self._journal.entries
        self._known_orders.extend(entry["order"] for entry in entries if "order" in entry)
        step = None
        for entry in entries:
            if "now" in entry:
                step = self._take_in(entry, on_step)
        return step

    def _serve(self, on_record: RecordSink, on_step: StepSink) -> Step | None:
        """Take the next thing there is; the step that followed."""
        match self._take():
            case Item() as item:
                return self._serve_item(item, on_record, on_step)
            case Posted(fact, arrived_seconds, number):
                about = {"fact": facts.to_json(fact), **({} if number is None else {"console": number})}
                if number is None or number == self._num_console_facts:
                    return self._take_in(self._journalled(about, arrived_seconds, fact), on_step)
        return None

    def _serve_item(self, item: Item, on_record: RecordSink, on_step: StepSink) -> Step | None:
        """Take in what a node handed in, unless that was done already; only then it hears that it is done."""
        step = None
        if item.origin is None:
            step = self._take_in(self._journalled({"item": item.content}, item.arrived_seconds), on_step)
        elif self._desk.expects(item.origin) and item.content["op"] in _PASSING:
            self._pass_on(item.content, item.origin, on_record)
            self._desk.count(item.origin)
        elif self._desk.expects(item.origin):
            about = {"item": item.content, "origin": item.origin}
            step = self._take_in(self._journalled(about, item.arrived_seconds), on_step)
        self._desk.done(item)
        return step

    def _pass_on(self, item: Message, origin: Origin, on_record: RecordSink) -> None:
        """Take in what no decision follows from."""
        if item["op"] == "record":
            on_record(item["record"], origin)
        elif item["start"] == self._starts.get(origin.node):
            place = Place(item["iteration"], item["phase"], item["step"])
            self._detector.progress(item["rank"], place, self._clock())

    def _journalled(self, about: Message, arrived_seconds: float, fact: Fact | None = None) -> Message:
        """An entry with its times, in the journal; time alone is an entry only where something follows from it."""
        entry = {"now": self._clock(), "arrived": arrived_seconds, "unix": time.time(), **about}
        if isinstance(fact, Tick):
            step = membership.advance(self._policy, self._state, fact, entry["now"], arrived_seconds)
            if step.decision is Decision.WAIT and step.state == self._state:
                return entry
        if self._journal is not None:
            self._journal.append(entry)
        return entry

    def _take_in(self, entry: Message, on_step: StepSink) -> Step:
        """Decide upon an entry of the journal and carry the decision out: the same again at every reading."""
        if "console" in entry:
            self._num_console_facts = entry["console"] + 1
        if "origin" in entry:
            self._desk.count(Origin(*entry["origin"]))
        before, self._unix_seconds = self._state, entry["unix"]
        fact = self._told(facts.from_json(entry["fact"])) if "fact" in entry else self._fact_of(entry["item"])
        step = membership.advance(self._policy, before, fact, entry["now"], entry.get("arrived"))
        self._state = step.state
        self._members[step.state.generation] = step.state.members
        if step.decision is not Decision.WAIT or step.state.failed_starts:
            on_step(step)
            self._execute(before, step)
        return step

    def close(self) -> None:
        """Stop serving."""
        self._desk.close()

    def _take(self) -> Item | Posted:
        """What is next. That a deadline has passed is said once, when all that came before it has been taken in."""
        self._look()
        while self._found:
            found = self._found.popleft()
            if not isinstance(found, NodeLost) or self._detector.seconds_since_word(found.node, self._clock()) is None:
                return Posted(found, self._clock())  # else it has called meanwhile
        deadline = self._state.wake_seconds
        if deadline is None or deadline == self._past_deadline or deadline > self._look_at:
            return self._desk.take(self._look_at)
        taken = self._desk.take(deadline)
        if isinstance(taken, Posted) and isinstance(taken.fact, Tick):
            self._past_deadline = deadline
        return taken

    def _look(self) -> None:
        """Find out, now and then, who is lost without having ended."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + self._look_seconds
            self._found.extend(self._detector.look(self._state, now, time.time()))

    def _told(self, fact: Fact) -> Fact:
        """A fact from elsewhere; nothing where it is of a process whose place another has taken."""
        match fact:
            case NodeLost(node, process_id=process_id):
                if not self._desk.end(node, process_id):
                    return Tick()
                self._detector.forget(node)
            case RankHung(rank, at_seconds, detail):
                about = {"rank": rank, "generation": self._state.generation, "at_seconds": at_seconds}
                self._note({**about, "node": self._policy.node_of(rank), "hung": detail})
        return fact

    def _fact_of(self, item: Message) -> Fact:
        match item["op"]:
            case "asked":
                return facts.from_json(item["fact"])
            case "joined":
                if not self._desk.admit(item["node"], item["process_id"]):
                    return Tick()  # it has asked again
                self._services[item["node"]] = item["services"]
                self._stores |= {item["node"]: StorePlace.from_json(item["store"])} if "store" in item else {}
                return NodeJoined(item["node"])
            case _ if item["start"] != self._starts.get(self._policy.node_of(item["rank"])):
                return Tick()  # of a process that ended before the present ones were started
            case "reported":
                return RankReported(item["rank"])
            case "raised":
                self._note(item)
                final = item.get("exit_code") in FINAL_EXIT_CODES
                return RankRaised(item["rank"], item["at_seconds"], item.get("iteration", 0), final)
            case "broken":
                if not item.get("planned", False):
                    self._note(item)
                final = item.get("exit_code") in FINAL_EXIT_CODES
                about = (item["at_seconds"], item.get("iteration", 0), final, item.get("planned", False))
                return RankBroken(item["rank"], Position.from_json(item["position"]), *about)
            case "hung":
                detail = f"gave no sign for {self._silence_seconds:g} s (detector.heartbeat_timeout_seconds)"
                self._note({**item, "hung": detail})
                return RankHung(item["rank"], item["at_seconds"], detail, item.get("iteration", 0))
            case "exited":
                self._note(item)
                how = (item["returncode"], item["at_seconds"], item["done"], item.get("iteration", 0))
                return RankExited(item["rank"], *how)
        raise ControlError(f"unknown item {item['op']!r}")

    def _note(self, item: Message) -> None:
        """Keep what is said of an end."""
        node, members = self._policy.node_of(item["rank"]), self._members[item["generation"]]
        if node not in self._state.members or node in self._state.waiting:
            return
        # Said before it heard of its first membership; a node that is back may have had another place before.
        if node not in members or self._policy.keeps_layout:
            members = self._state.members
        about = self._details.setdefault(item["rank"], {"number": self._policy.number_among(members, item["rank"])})
        killed_by_us = self._state.phase is Phase.KILLING or node in self._state.lost
        add_words(about, item, caused_by_us=killed_by_us)

    def _execute(self, before: State, step: Step) -> None:
        """Carry a decision made in the state ``before`` out."""
        match step.decision:
            case Decision.START | Decision.RESTART:
                self._details = {}
                self._start(step.state.members, is_newcomer=False)
            case Decision.START_NODES:
                self._start(step.nodes, is_newcomer=True)
            case Decision.CHANGE:
                about = {"generation": step.state.generation, "leaving": list(step.nodes)}
                self._order({"op": "change", "reason": step.reason, **about})
            case Decision.KILL_NODES:
                self._order({"op": "kill", "reason": step.reason, "nodes": list(step.nodes)})
            case Decision.BREAK:
                about = {"generation": step.state.generation, "lost": list(step.nodes)}
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
                self._order({"op": "kill", "reason": step.reason, "nodes": list(range(self._policy.most_nodes))})
            case Decision.END:
                self._order({"op": "end", "reason": step.reason})

    def _reform(self, before: State, step: Step) -> None:
        """Begin the next membership, once the decision and all that it rests on are on disk."""
        assert step.reform is not None, "a decision to reform"
        order = self._start_order(step.state.generation, step.state.members, self._stores)
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
        about = {"lost": list(step.nodes), "leaving": list(step.reform.leaving), "reason": step.reason}
        reform = self._settled({"op": "reform", "next": following.to_json(), **about})
        lost, left, joined = step.reform.lost, step.reform.leaving, step.reform.joining
        nodes = {"lost_nodes": list(lost), "left_nodes": list(left), "joined_nodes": list(joined)}
        self._record(before, step, {"next": reform["next"], **nodes})
        self._desk.give(reform)

    def _record(self, before: State, step: Step, decision: Message) -> None:
        positions = [fact.position for fact in before.broken] if step.reform is None else step.reform.positions
        about = {"generation": before.generation, "time_unix_seconds": self._unix_seconds, "reason": step.reason}
        self._record_decision({**about, "positions": [position.to_json() for position in positions], **decision})

    def _start(self, nodes: Sequence[int], *, is_newcomer: bool) -> None:
        """Start the ranks of ``nodes``; each learns where every node's services listen."""
        state, policy = self._state, self._policy
        self._starts |= dict.fromkeys(nodes, self._num_starts)
        order = {
            "op": "start",
            "start": self._num_starts,
            "generation": state.generation,
            "ranks": {str(node): list(policy.ranks_of(node)) for node in nodes},
            "nodes": [node for node in state.members for _ in range(policy.ranks_per_node)],
            "is_newcomer": is_newcomer,
            "services": by_name(self._services),
        }
        self._num_starts += 1
        self._order({**self._start_order(state.generation, state.members, self._stores), **order})

    def _order(self, order: Message) -> None:
        self._desk.give(self._settled(order))

    def _settled(self, order: Message) -> Message:
        """The order as it will always be read: from the journal if it is there, else it is now."""
        if self._known_orders:
            return self._known_orders.popleft()
        if self._journal is not None:
            self._journal.append({"order": order})
            self._journal.sync()
        return order
