"""Types of all messages between agents and the controller. A message of another type is refused.

An agent registers (``Join``), fetches orders (``Poll`` -> ``Order``) and delivers reports of its ranks (``Deliver`` ->
``Report``). On the wire and in the journal, a message is a JSON object whose entry ``op`` names its kind. Messages name
a rank by the number with which it was started. The rank's number in a membership is not used, because it can change.
"""

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from megatron_ft.control.membership import events
from megatron_ft.control.ports import StoreEndpoint
from megatron_ft.control.presence import PresenceEndpoint
from megatron_ft.errors import FINAL_EXIT_CODES, ControlError
from megatron_ft.framing import MAX_FRAME_BYTES, Message
from megatron_ft.planning.recovery.membership import NextMembership, Position
from megatron_ft.serde import Between, decode, encode

# A record is sent inside a larger message, which needs the rest of the frame.
MAX_RECORD_BYTES = MAX_FRAME_BYTES - 64 * 1024
"""Largest size of a ``RecordWritten`` report as JSON, in bytes. The report must fit in one message to the launcher."""
MAX_REPORT_BYTES = 1024 * 1024
"""Largest size of a report of any other kind as JSON, in bytes. These reports are written to the journal. Details
of a rank's end are also forwarded to the launcher."""
MAX_JOIN_BYTES = 64 * 1024
"""Largest size of a registration (``Join``) as JSON, in bytes. The sidecar addresses in it are sent to every node."""
_LAST_LINE_CHARACTERS = 500
# JSON permits integers of any size: without this limit, a returncode of 10**30 would reach the journal.
_MAX_INTEGER = 2**63 - 1

Integer = Annotated[int, Between(-_MAX_INTEGER, _MAX_INTEGER)]
Count = Annotated[int, Between(0, _MAX_INTEGER)]
Seconds = Annotated[float, Between(0.0, float(_MAX_INTEGER))]
Kind = TypeVar("Kind")


# --- calls of an agent -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarAddress:
    """Address of a sidecar, a process that a node runs beside its ranks."""

    address: str
    socket: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Call by which an agent registers with the controller."""

    node: Integer
    process_id: Integer
    sidecars: dict[str, SidecarAddress] = field(default_factory=dict)
    store: StoreEndpoint | None = None
    presence: PresenceEndpoint | None = None
    """Port that the controller probes to find out whether the agent's machine is alive; None: no probes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """Call by which an agent fetches new orders. The call returns after ``wait_seconds`` if there is no new order."""

    node: Integer
    session: Count
    after: Count
    """Count of the orders to skip: those that the agent already has, and those that were given before it registered."""
    wait_seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    """Call by which an agent delivers reports of its ranks, in order."""

    node: Integer
    session: Count
    first: Count
    """Index of the first report in ``items``; an agent counts its reports from 0."""
    items: list[Any]


# --- reports ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A report of an agent about one of its ranks."""

    op: ClassVar[str] = ""
    rank: Count
    start: Count
    """Index of the ``Start`` order that created the rank's process. Reports from ranks of older orders are dropped."""
    generation: Count

    @classmethod
    def decode(cls, content: object) -> "Report":
        """Read a report.

        Raises:
            ControlError: the report is malformed or too large, or its kind is unknown.
        """
        kind, rest = _kind_of(_REPORTS, content, "report")
        report = _decode(kind, rest, f"malformed report {kind.op}")
        most_bytes = MAX_RECORD_BYTES if kind is RecordWritten else MAX_REPORT_BYTES
        num_bytes = len(json.dumps(content, separators=(",", ":")))
        if num_bytes > most_bytes:
            raise ControlError(
                f"report {kind.op} of rank {report.rank} has {num_bytes} bytes: must have at most {most_bytes}"
            )
        return report


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordWritten(Report):
    """A metrics or event record for the sinks. The controller only forwards the record, and changes no state."""

    op: ClassVar[str] = "record"
    record: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Report):
    """Progress of a rank within an iteration; only the hang detector uses it."""

    op: ClassVar[str] = "progress"
    iteration: Count
    phase: str
    step: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported(Report):
    """A rank has connected to its agent."""

    op: ClassVar[str] = "reported"

    def event(self) -> events.MachineEvent:
        return events.RankReported(self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndReport(Report):
    """A report of how a rank failed or ended. A field is null if its value is unknown."""

    at_seconds: Seconds
    node: Count | None = None
    iteration: Count | None = None
    phase: str | None = None
    error: str | None = None
    traceback: str | None = None
    exit_code: Integer | None = None
    """Exit code of the raised error's class if this project defines the class; null for other errors."""
    log: str | None = None
    log_tail: str | None = None

    @property
    def is_final(self) -> bool:
        """Whether another attempt of the job would fail in the same way."""
        return self.exit_code in FINAL_EXIT_CODES

    def event(self) -> events.MachineEvent:
        """Return the event for the state machine."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Raised(EndReport):
    """A rank is about to end with an exception."""

    op: ClassVar[str] = "raised"

    def event(self) -> events.MachineEvent:
        return events.RankRaised(self.rank, self.at_seconds, self.iteration or 0, self.is_final)


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken(EndReport):
    """A rank has stopped because of an error, or by order (``planned``). It waits for the next membership."""

    op: ClassVar[str] = "broken"
    position: Position
    planned: bool = False

    def event(self) -> events.MachineEvent:
        """Return the event for the state machine."""
        about = (self.at_seconds, self.iteration or 0, self.is_final, self.planned)
        return events.RankBroken(self.rank, self.position, *about)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exited(EndReport):
    """A rank's process has ended."""

    op: ClassVar[str] = "exited"
    returncode: Integer
    done: bool
    is_complete: bool = False
    """Whether the rank has reported that the run is complete. Journals of earlier versions lack this field."""

    def event(self) -> events.MachineEvent:
        lines = [line for line in (self.log_tail or "").splitlines() if line.strip()]
        last_line = lines[-1].strip()[:_LAST_LINE_CHARACTERS] if lines and not self.done else ""
        return events.RankExited(self.rank, self.returncode, self.at_seconds, self.done, self.iteration or 0, last_line)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hung(EndReport):
    """A rank is unresponsive (it exists but does not answer); its agent kills it."""

    op: ClassVar[str] = "hung"
    hung: str = "was unresponsive"

    def event(self) -> events.MachineEvent:
        return events.RankHung(self.rank, self.at_seconds, self.hung, self.iteration or 0)


_REPORTS: dict[object, type[Report]] = {
    kind.op: kind for kind in (RecordWritten, Progress, Reported, _Raised, Broken, _Exited, _Hung)
}


# --- orders ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)  # no slots: two bases of ``Start`` cannot both have them
class LaunchSpec:
    """Part of a rank's specification that all ranks of one ``Start`` order share."""

    entry: str
    """Function that each rank runs, as ``package.module:function``."""
    config: dict[str, Any]
    """JSON of ``JobConfig``."""
    run_dir: str
    working_dir: str
    world_size: Count
    num_nodes: Count
    can_survive: bool
    """Whether ranks continue in their processes when nodes are lost, leave or join."""
    master_addr: str
    master_port: Count
    resume_from: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An order of the controller; every agent fetches every order."""

    op: ClassVar[str] = ""
    reason: str = ""

    @classmethod
    def decode(cls, content: Message) -> "Order":
        """Read an order.

        Raises:
            ControlError: the order is malformed or of an unknown kind, because the controller has another version.
        """
        kind, rest = _kind_of(_ORDERS, content, "order")
        return _decode(kind, rest, f"malformed order {kind.op}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Order, LaunchSpec):
    """Start the ranks of some nodes."""

    op: ClassVar[str] = "start"
    start: Count
    generation: Count
    ranks: dict[str, list[Count]]
    """Maps each node number (as text) to the numbers of the ranks that are started on the node."""
    nodes: list[Count]
    """Node of each rank in the membership, in rank order."""
    local_ranks: list[Count]
    """Index of each rank's process on its node, in rank order. Further processes of members are hot spares."""
    members: list[Count]
    """Nodes of the membership, including nodes without a rank."""
    is_joining: bool
    sidecars: dict[str, dict[str, str]]
    """Maps each sidecar's name to the sidecar's addresses by node number (as text)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Break(Order):
    """End the membership: kill the ranks of ``lost`` nodes; all other ranks stop and report their progress."""

    op: ClassVar[str] = "break"
    generation: Count
    lost: list[Count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Order):
    """Order ranks to stop at the next iteration boundary and report their progress, because nodes join or leave."""

    op: ClassVar[str] = "change"
    generation: Count
    leaving: list[Count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reform(Order):
    """Begin the next membership."""

    op: ClassVar[str] = "reform"
    next: NextMembership
    lost: list[Count]
    leaving: list[Count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Order):
    """Request ranks to stop. If ``survivors_end`` is true, this includes ranks that wait for the next membership."""

    op: ClassVar[str] = "stop"
    survivors_end: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(Order):
    """Kill the ranks of ``nodes``."""

    op: ClassVar[str] = "kill"
    nodes: list[Count]


@dataclass(frozen=True, slots=True, kw_only=True)
class End(Order):
    """Order agents to end, because the job has ended."""

    op: ClassVar[str] = "end"
    has_finished: bool = False
    """Whether the run is complete. If so, the run's windows (snapshots in memory) are not needed any more."""


_ORDERS: dict[object, type[Order]] = {kind.op: kind for kind in (Start, Break, Change, Reform, Stop, Kill, End)}


# --- codecs ----------------------------------------------------------------------------------------------------------


def to_message(value: Report | Order) -> Message:
    """Return the JSON object of a report or order. Fields that are null are left out."""
    # This keeps messages small: most fields of most reports are null, and every order is sent to every node.
    return {"op": value.op, **{name: item for name, item in encode(value).items() if item is not None}}


def decode_call(kind: type[Kind], content: Message) -> Kind:
    """Read a call of an agent.

    Raises:
        ControlError: the call is malformed.
    """
    return _decode(kind, content, f"malformed {kind.__name__.lower()}")


def _kind_of(kinds: dict[object, type[Kind]], content: object, what: str) -> tuple[type[Kind], Message]:
    if not isinstance(content, dict):
        raise ControlError(f"malformed {what} {content!r:.100}: must be a JSON object")
    op = content.get("op")
    kind = kinds.get(op) if isinstance(op, str) else None
    if kind is None:
        raise ControlError(f"unknown {what} {op!r:.100}")
    return kind, {name: value for name, value in content.items() if name != "op"}


def _decode(kind: type[Kind], content: Message, where: str) -> Kind:
    try:
        found: Kind = decode(kind, content)
    except ValueError as error:
        raise ControlError(f"{where}: {error}") from None
    return found


_EVENTS = {kind.__name__: kind for kind in get_args(events.MachineEvent)}


def event_to_json(event: events.MachineEvent) -> Message:
    """Return a machine event as JSON for the launcher and the journal, with its class name as ``event``."""
    return {"event": type(event).__name__, **encode(event)}


def event_from_json(content: Message) -> events.MachineEvent:
    """Read a machine event from the JSON that ``event_to_json`` has made.

    Raises:
        ControlError: the event is unknown or malformed.
    """
    fields = {name: value for name, value in content.items() if name != "event"}
    name = content.get("event")
    kind = _EVENTS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ControlError(f"unknown machine event {name!r:.100}")
    found: events.MachineEvent = _decode(kind, fields, f"malformed machine event {name}")
    return found
