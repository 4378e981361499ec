"""The job's controller: receives reports of agents, decides with the state machine in ``membership``, and gives orders.

``server`` receives calls. One thread, in ``run``, processes the calls in order: it calls the state machine and writes
orders, which agents fetch. An input that can affect decisions is written to the journal first. A new controller
processes the same inputs again, and so reaches the same state.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from megatron_ft.control import messages
from megatron_ft.control.certificates import Certificates
from megatron_ft.control.controller.admin_service import AdminService
from megatron_ft.control.controller.journal import CannotDecide, Journal
from megatron_ft.control.controller.server import ControllerServer, Item, Origin, Posted
from megatron_ft.control.detector import Detector, DetectorPolicy, Place
from megatron_ft.control.membership import machine
from megatron_ft.control.membership.events import MachineEvent, NodeJoined, NodeLost, RankHung, Tick
from megatron_ft.control.membership.state import (
    Decision,
    MembershipPolicy,
    Phase,
    State,
    Step,
    keeps_layout,
    layout_of,
)
from megatron_ft.control.messages import EndReport, LaunchSpec, Order, Progress, RecordWritten, Report, to_message
from megatron_ft.control.node.sidecars import by_name
from megatron_ft.control.ports import StoreEndpoint
from megatron_ft.control.presence import PresenceWatch
from megatron_ft.control.report import JobResult, add_failure_report
from megatron_ft.framing import Message
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.serde import encode

RecordSink = Callable[[Message, Origin], None]
"""Function that receives a record (metrics or event) of a rank, and the ``Origin`` that identifies the record."""

StepSink = Callable[[Step], None]

BuildLaunchSpec = Callable[[int, Sequence[int], Mapping[int, StoreEndpoint]], LaunchSpec]
"""Function that makes the launch spec of ranks. Its arguments are the generation, the node of each rank of this
generation, and the endpoint of each node's rendezvous store."""

RecordDecision = Callable[[Message], None]
"""Function that records a decision, and returns when the record is on disk."""


class Controller:
    """Controls one job from its start to its end, also when the membership (the ranks that train together) changes."""

    def __init__(
        self,
        policy: MembershipPolicy,
        *,
        interface: str,
        token: str,
        launch_spec: BuildLaunchSpec,
        record_decision: RecordDecision,
        journal: Journal | None = None,
        epoch: int = 1,
        port: int = 0,
        certificates: Certificates | None = None,
        detection: DetectorPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bind the controller's service to its address. The service answers no calls before ``run`` is called.

        Args:
            launch_spec: makes the spec of ranks for each start and each next membership, in the thread of ``run``.
            detection: limits of the failure detector; default: ``DetectorPolicy()``.
            record_decision: called before ranks are ordered to begin the next membership, or to stop because the job
                cannot continue after a loss.
            journal: inputs of earlier controllers; this controller processes them again. None means no journal.
            epoch: number of this controller, which every answer contains; earlier controllers have lower numbers.
            port: port of the service; 0 chooses a free one.
            certificates: certificates for the channel to agents; with None, the channel is not encrypted.
            clock: monotonic clock, which must not show a time before the last time in ``journal``.
        """
        self._policy = policy
        self._clock = clock
        self._journal = journal
        self._known_orders: deque[Message] = deque()
        """Orders in the journal, which earlier controllers gave. When this controller repeats their decisions, it gives
        the same orders and removes each from this queue."""
        self._num_posted = 0
        """Count of the launcher's events that have been processed."""
        self._past_deadline: float | None = None
        self._unix_seconds = 0.0
        """Arrival time of the event that is being processed, in seconds since 1970."""
        self._launch_spec = launch_spec
        self._record_decision = record_decision
        # The time of the start is in the journal, so that every controller of the job computes the same deadlines.
        begin_seconds = clock() if journal is None else journal.first("begin_seconds", clock())
        self._state = machine.initial(policy, begin_seconds)
        # All generations are kept: late reports are checked against the membership of their own generation.
        self._layouts = {0: layout_of(policy, self._state)}
        self._num_starts = 0
        self._starts: dict[int, int] = {}
        """Maps each node to the index of its newest ``Start`` order. Reports from ranks of older orders are dropped."""
        detection = detection or DetectorPolicy()
        self._check_seconds = detection.heartbeat_interval_seconds
        self._detector = Detector(policy, detection)
        self._check_at = clock()
        self._found: deque[MachineEvent] = deque()
        self._details: dict[int, Message] = {}
        self._sidecars: dict[int, dict[str, str]] = {}
        self._stores: dict[int, StoreEndpoint] = {}
        admin = AdminService(
            policy,
            read_state=lambda: self._state,
            detector=self._detector,
            ask=lambda event: self._server.ask(event),
            clock=clock,
        )
        self._server = ControllerServer(
            policy,
            self._layouts,
            sign_of_life=lambda node: self._detector.hear(node, self._clock()),
            clock=clock,
            sign_seconds=detection.heartbeat_interval_seconds,
            others=admin.methods,
            interface=interface,
            token=token,
            epoch=epoch,
            port=port,
            certificates=certificates,
        )
        self.address = self._server.address
        self._presence = None
        if detection.vanished_seconds is not None:
            self._presence = PresenceWatch(interface, detection.vanished_seconds, self._vanished)

    @property
    def state(self) -> State:
        """State of the job."""
        return self._state

    @property
    def details(self) -> dict[int, Message]:
        """Maps each rank that has ended in this generation to details of the rank's end (see ``JobResult.details``)."""
        return self._details

    def post(self, event: MachineEvent, number: int | None = None) -> None:
        """Queue an event for the thread of ``run``. May be called in any thread and in signal handlers.

        Args:
            number: position of the event among all events of the launcher, from 0. A launcher repeats its events when
                it starts a new controller. None if the event is not from the launcher.
        """
        self._server.post(event, number)

    def run(self, on_record: RecordSink, on_step: StepSink) -> JobResult:
        """Serve until the job has ended; call ``on_record`` for records of ranks and ``on_step`` for decisions.

        When ``on_step`` is called for a restart or the next membership, the property ``details`` still describes the
        ended ranks of the old generation.
        A new controller first repeats the decisions of earlier controllers, and passes these decisions to ``on_step``.
        """
        try:
            # No call is served before the state is rebuilt: until then, sessions and numbers of reports are wrong.
            step = self._take_over(on_step)
            self._server.open()
            if self._presence is not None:
                self._presence.start()
            while step is None or step.decision is not Decision.END:
                step = self._serve(on_record, on_step)
            result = JobResult.of(step.state, step.reason, self._details)
        except CannotDecide as error:
            # This order cannot be written to the journal. Agents end when they have fetched the order.
            self._server.give(to_message(messages.End(reason=str(error))))
            self._server.open()
            result = JobResult(error.outcome, str(error), None, self._details)
        self._server.finish()
        return result

    def close(self) -> None:
        """Stop serving."""
        if self._presence is not None:
            self._presence.stop()
        self._server.close()

    # --- inputs --------------------------------------------------------------------------------------------------

    def _take_over(self, on_step: StepSink) -> Step | None:
        entries = [] if self._journal is None else self._journal.entries
        # The journal has the orders in the sequence of the decisions, so each decision takes the next order.
        self._known_orders.extend(entry["order"] for entry in entries if "order" in entry)
        step = None
        for entry in entries:
            if "now" in entry:
                step = self._take_in(entry, on_step)
        return step

    def _serve(self, on_record: RecordSink, on_step: StepSink) -> Step | None:
        match self._take():
            case Item() as item:
                return self._serve_item(item, on_record, on_step)
            case Posted(event, arrived_seconds, number):
                about = messages.event_to_json(event) | ({} if number is None else {"posted": number})
                # The launcher sends all its events again to a new controller; events with lower numbers are in the
                # journal.
                if number is None or number == self._num_posted:
                    return self._take_in(self._journalled(about, arrived_seconds, event), on_step)
        return None

    def _serve_item(self, item: Item, on_record: RecordSink, on_step: StepSink) -> Step | None:
        # Process an item, unless it was processed before. Then let the call that delivered the item return.
        step, origin = None, item.origin
        if origin is None:
            step = self._take_in(self._journalled({"item": item.content}, item.arrived_seconds), on_step)
        elif self._server.expects(origin) and isinstance(item.report, (RecordWritten, Progress)):
            # Records and progress are not in the journal: no decision depends on them, and each iteration has many.
            self._pass_on(item.report, origin, on_record)
            self._server.count(origin)
        elif self._server.expects(origin):
            about = {"item": item.content, "origin": origin}
            # ``_take_in`` counts this report, so that a new controller that reads the journal counts it, too.
            entry = self._journalled(about, item.arrived_seconds)
            step = self._take_in(entry, on_step, item.report)
        self._server.done(item)
        return step

    def _pass_on(self, report: Report, origin: Origin, on_record: RecordSink) -> None:
        # Process a report that causes no decision; it is not in the journal.
        match report:
            case RecordWritten(record=record):
                on_record(record, origin)
            case Progress(rank=rank, start=start) if start == self._starts.get(origin.node):
                place = Place(report.iteration, report.phase, report.step)
                self._detector.progress(rank, place, self._clock())

    def _journalled(self, about: Message, arrived_seconds: float, event: MachineEvent | None = None) -> Message:
        # Write an entry with its times to the journal; a tick is written only if it has an effect.
        entry = {"now": self._clock(), "arrived": arrived_seconds, "unix": time.time(), **about}
        if isinstance(event, Tick):
            # The tick is first tried on the pure state machine, because ticks without effect would fill the journal.
            step = machine.advance(self._policy, self._state, event, entry["now"], arrived_seconds)
            if step.decision is Decision.WAIT and step.state == self._state:
                return entry
        if self._journal is not None:
            # The entry survives this process without a sync. ``_settled`` syncs it before any order follows from it.
            self._journal.append(entry)
        return entry

    def _take_in(self, entry: Message, on_step: StepSink, report: Report | None = None) -> Step:
        """Process one entry of the journal: make a decision, and carry it out. A controller that reads the journal
        again makes the same decision.

        Args:
            report: the report in the entry, if it was parsed already; None if it must still be parsed.
        """
        if "posted" in entry:
            self._num_posted = entry["posted"] + 1
        if "origin" in entry:
            self._server.count(Origin(*entry["origin"]))
        # Decisions contain the entry's time, not the present time, so a new controller writes the same lines.
        before, self._unix_seconds = self._state, entry["unix"]
        event = self._event_of(entry, report)
        step = machine.advance(self._policy, before, event, entry["now"], entry.get("arrived"))
        self._state = step.state
        self._layouts[step.state.generation] = layout_of(self._policy, step.state)
        if step.decision is not Decision.WAIT or step.state.failed_starts:
            # ``on_step`` comes first: it needs the details of the generation that ends, which ``_execute`` clears.
            on_step(step)
            self._execute(before, step)
        return step

    def _take(self) -> Item | Posted:
        self._check()
        while self._found:
            found = self._found.popleft()
            if not isinstance(found, NodeLost) or self._detector.seconds_since_word(found.node, self._clock()) is None:
                return Posted(found, self._clock())  # a node that has called since its loss was found is not lost
        deadline = self._state.wake_seconds
        # The state keeps a deadline whose tick changed nothing. Such a deadline must not cause ticks without end.
        if deadline is None or deadline == self._past_deadline or deadline > self._check_at:
            return self._server.take(self._check_at)
        taken = self._server.take(deadline)
        if isinstance(taken, Posted) and isinstance(taken.event, Tick):
            self._past_deadline = deadline
        return taken

    def _check(self) -> None:
        now = self._clock()
        if now >= self._check_at:
            self._check_at = now + self._check_seconds
            self._found.extend(self._detector.look(self._state, now, time.time()))

    # --- machine events ------------------------------------------------------------------------------------------

    def _event_of(self, entry: Message, report: Report | None) -> MachineEvent:
        # Return the machine event of an entry, or a tick if the entry is about a process that was replaced.
        item = entry.get("item")
        if item is None:
            return self._posted(messages.event_from_json({k: v for k, v in entry.items() if k not in _ABOUT_ENTRY}))
        match item["op"]:
            case "asked":
                return messages.event_from_json(item["event"])
            case "joined":
                return self._joined(messages.decode_call(messages.Join, item["join"]))
        report = messages.Report.decode(item) if report is None else report
        if report.start != self._starts.get(self._policy.node_of(report.rank)):
            # Each entry yields an event, even one without effect, so every reading of the journal makes the same steps.
            return Tick()  # the report is from a process of an older start
        if isinstance(report, EndReport) and not (isinstance(report, messages.Broken) and report.planned):
            self._note(report.rank, report.generation, to_message(report))
        assert isinstance(report, (EndReport, messages.Reported)), "unexpected kind of report"
        return report.event()

    def _posted(self, event: MachineEvent) -> MachineEvent:
        match event:
            case NodeLost(node, process_id=process_id):
                # The end of a replaced process may be reported late and must not end the session of the process that
                # replaced it.
                if not self._server.end(node, process_id):
                    return Tick()
                self._detector.forget(node)
                if self._presence is not None:
                    self._presence.forget(node)
            case RankHung(rank, at_seconds, detail):
                about = {"at_seconds": at_seconds, "node": self._policy.node_of(rank), "hung": detail}
                self._note(rank, self._state.generation, about)
        return event

    def _joined(self, join: messages.Join) -> MachineEvent:
        # An agent repeats this call if it did not receive the answer.
        if not self._server.admit(join.node, join.process_id):
            return Tick()  # the agent was registered by its earlier call
        self._sidecars[join.node] = {name: sidecar.address for name, sidecar in join.sidecars.items()}
        if join.store is not None:
            self._stores[join.node] = join.store
        if self._presence is not None and join.presence is not None:
            self._presence.watch(join.node, join.process_id, join.presence)
        return NodeJoined(join.node)

    def _vanished(self, node: int, process_id: int, reason: str) -> None:
        self._server.post(NodeLost(node, time.time(), reason, process_id))

    def _note(self, rank: int, generation: int, report: Message) -> None:
        node, layout = self._policy.node_of(rank), self._layouts[generation]
        if node not in self._state.members or node in self._state.nodes.waiting:
            return
        # Use the present layout if the node was no member in ``generation``, or may have had another position then.
        if node not in layout.nodes or keeps_layout(self._policy, self._state):
            layout = layout_of(self._policy, self._state)
        number = layout.rank_of(rank)
        about = self._details.setdefault(rank, {} if number is None else {"number": number})
        killed_by_us = self._state.phase is Phase.KILLING or node in self._state.nodes.lost
        add_failure_report(about, report, caused_by_us=killed_by_us)

    # --- orders --------------------------------------------------------------------------------------------------

    def _execute(self, before: State, step: Step) -> None:
        generation, nodes, reason = step.state.generation, list(step.nodes), step.reason
        match step.decision:
            case Decision.START | Decision.RESTART:
                self._details = {}
                self._start(step.state.members, is_joining=False)
            case Decision.START_NODES:
                self._start(step.nodes, is_joining=True)
            case Decision.CHANGE:
                self._order(messages.Change(generation=generation, leaving=nodes, reason=reason))
            case Decision.KILL_NODES:
                self._order(messages.Kill(nodes=nodes, reason=reason))
            case Decision.BREAK:
                self._order(messages.Break(generation=generation, lost=nodes, reason=reason))
            case Decision.REFORM:
                self._details = {}
                self._reform(before, step)
            case Decision.STOP:
                declines = self._policy.may_lose_nodes and bool(step.state.failures)
                if declines:
                    self._record(before, step, {"declined": reason, "lost_nodes": sorted(before.nodes.lost)})
                self._order(messages.Stop(survivors_end=declines, reason=reason))
            case Decision.KILL:
                # The order names all nodes, because joining nodes have ranks, too, although they are not members.
                self._order(messages.Kill(nodes=list(range(self._policy.most_nodes)), reason=reason))
            case Decision.END:
                is_complete = JobResult.of(step.state, reason, self._details).is_complete
                self._order(messages.End(reason=reason, has_finished=is_complete))

    def _reform(self, before: State, step: Step) -> None:
        assert step.reform is not None, "the step has no reform plan"
        spec = self._launch_spec(step.state.generation, step.reform.layout.rank_nodes, self._stores)
        following = NextMembership(
            generation=step.state.generation,
            previous_ranks=step.reform.previous_ranks,
            nodes=step.reform.layout.rank_nodes,
            local_ranks=step.reform.layout.local_ranks,
            members=step.reform.layout.nodes,
            keeps_layout=step.reform.keeps_layout,
            target=step.reform.target,
            master_addr=spec.master_addr,
            master_port=spec.master_port,
            reason=step.reason,
        )
        following.validate()
        lost, left, joined = step.reform.lost, step.reform.leaving, step.reform.joining
        order = messages.Reform(next=following, lost=list(step.nodes), leaving=list(left), reason=step.reason)
        # If the journal has this order, the recorded order is used: its port is random, and an earlier controller may
        # have given it to ranks. The decision is on disk before any agent can fetch the order.
        settled = self._settled(order)
        nodes = {"lost_nodes": list(lost), "left_nodes": list(left), "joined_nodes": list(joined)}
        self._record(before, step, {"next": settled["next"], **nodes})
        self._server.give(settled)

    def _record(self, before: State, step: Step, decision: Message) -> None:
        positions = [event.position for event in before.broken] if step.reform is None else step.reform.positions
        about = {"generation": before.generation, "time_unix_seconds": self._unix_seconds, "reason": step.reason}
        self._record_decision({**about, "positions": encode(list(positions)), **decision})

    def _start(self, nodes: Sequence[int], *, is_joining: bool) -> None:
        # Start the ranks of ``nodes``; each receives the addresses of every node's sidecars.
        state, policy = self._state, self._policy
        self._starts |= dict.fromkeys(nodes, self._num_starts)
        layout = layout_of(policy, state)
        spec = self._launch_spec(state.generation, layout.rank_nodes, self._stores)
        order = messages.Start(
            **vars(spec),
            start=self._num_starts,
            generation=state.generation,
            ranks={str(node): list(policy.ranks_of(node)) for node in nodes},
            nodes=list(layout.rank_nodes),
            local_ranks=list(layout.local_ranks),
            members=list(state.members),
            is_joining=is_joining,
            # Lost nodes are left out, because ranks would wait for answers of the snapshot servers of lost nodes.
            sidecars=by_name({n: found for n, found in self._sidecars.items() if n in state.nodes.registered}),
        )
        self._num_starts += 1
        self._order(order)

    def _order(self, order: Order) -> None:
        self._server.give(self._settled(order))

    def _settled(self, order: Order) -> Message:
        # Return the order as the journal contains it, so that every controller of the job gives the same order.
        if self._known_orders:
            return self._known_orders.popleft()
        message = to_message(order)
        if self._journal is not None:
            self._journal.append({"order": message})
            # The order is on disk before an agent can fetch it, so a power failure undoes no order that ranks follow.
            self._journal.sync()
        return message


_ABOUT_ENTRY = ("now", "arrived", "unix", "posted")
"""Journal fields that contain the times and number of an event. All other fields are the event itself as JSON."""
