"""Machine events: inputs that report to the state machine what has happened to a job.

A rank has the number ``node * ranks_per_node + local_rank`` during the whole job, even if it has another number in a
membership. ``at_seconds`` is the time of the event in seconds since 1970, on the machine that observed the event.
"""

from dataclasses import dataclass
from typing import NamedTuple

from megatron_ft.planning.recovery.membership import Position


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node's agent registered with the controller. This happens when the job starts or when the node joins later."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node's agent has ended or does not answer, so the node and its ranks are lost."""

    node: int
    # Clocks of nodes differ, so this time only orders failures in reports. Deadlines use the controller's clock.
    at_seconds: float
    detail: str = ""
    process_id: int | None = None
    """Process id of the agent, if known. The event is ignored if the node has a newer agent."""


@dataclass(frozen=True, slots=True)
class RankReported:
    """A rank has connected to its agent."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankRaised:
    """A rank is about to end with an exception in ``iteration``. ``final``: another attempt would fail, too."""

    rank: int
    at_seconds: float
    iteration: int = 0
    final: bool = False


@dataclass(frozen=True, slots=True)
class RankBroken:
    """A rank's iteration ended with an error, probably because other ranks are gone; the rank waits for the next
    membership. ``final`` means that another attempt would fail in the same way. ``planned`` means that there is no
    error: the rank waits at the boundary where the membership changes."""

    rank: int
    position: Position
    at_seconds: float
    iteration: int = 0
    final: bool = False
    planned: bool = False


@dataclass(frozen=True, slots=True)
class RankExited:
    """A rank's process ended. ``returncode`` is negative if a signal killed the process. ``done`` means that the rank
    had finished its work. ``iteration`` is the last iteration that the rank reached (0 if none). ``last_line``
    is the last line of the rank's log; it is empty if this line is unknown or the rank had finished its work."""

    rank: int
    returncode: int
    at_seconds: float
    done: bool
    iteration: int = 0
    last_line: str = ""


@dataclass(frozen=True, slots=True)
class RankHung:
    """A rank's process exists but is unresponsive and must be killed. ``detail`` describes what was observed."""

    rank: int
    at_seconds: float
    detail: str
    iteration: int = 0


@dataclass(frozen=True, slots=True)
class JobHung:
    """No rank of the job makes progress, and all ranks are in the same phase of the same iteration."""

    at_seconds: float
    detail: str


@dataclass(frozen=True, slots=True)
class AddRequested:
    """An administrator asks the job to start a node that is not a member, so that the node joins."""

    node: int


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """An administrator requests that a member leaves the job at the next iteration boundary."""

    node: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The job must stop after the present iteration."""


@dataclass(frozen=True, slots=True)
class KillRequested:
    """The job must end at once."""


@dataclass(frozen=True, slots=True)
# The state machine reads no clock, so a deadline takes effect only with an event. A new controller that reads the
# journal therefore applies each deadline at the same event.
class Tick:
    """Time has passed, so the state machine checks its deadlines."""


MachineEvent = (
    NodeJoined
    | NodeLost
    | RankReported
    | RankRaised
    | RankBroken
    | RankExited
    | RankHung
    | JobHung
    | AddRequested
    | DrainRequested
    | StopRequested
    | KillRequested
    | Tick
)


class Moment(NamedTuple):
    """The times at which an event arrived and is processed, both on the controller's clock.

    A controller with a backlog processes an event long after its arrival. Deadlines are compared with the time of
    arrival; otherwise a slow controller would lose healthy nodes. If the event causes a decision that sets a deadline,
    this deadline counts from the time of processing.
    """

    seconds: float
    """Time at which the event is processed."""
    arrived_seconds: float
    """Time of arrival. For a ``Tick``, all events that arrived before this time have been processed."""
