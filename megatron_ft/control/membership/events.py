"""Machine events: everything that can happen to a job, as input of the state machine.

Ranks have the number ``node * ranks_per_node + local_rank`` during the whole job, whatever number memberships give
them. ``at_seconds`` is the wall clock of the machine that saw the event, in seconds since 1970.
"""

from dataclasses import dataclass

from megatron_ft.planning.recovery.target import Position


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node's agent registered: at the start, or to join the running job."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node's agent has ended, and its ranks with it."""

    node: int
    # Clocks of nodes differ. These times order deaths for reports; deadlines use the controller's clock.
    at_seconds: float
    detail: str = ""
    process_id: int | None = None
    """Process id of the agent, if known: the loss of an earlier agent is stale."""


@dataclass(frozen=True, slots=True)
class RankReported:
    """A rank has connected to its agent."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankRaised:
    """A rank is about to end with an exception in ``iteration``; ``final``: another attempt would fail in the same
    way."""

    rank: int
    at_seconds: float
    iteration: int = 0
    final: bool = False


@dataclass(frozen=True, slots=True)
class RankBroken:
    """A rank's iteration ended with an error, probably because other ranks are gone; the rank waits for the next
    membership. ``final``: another attempt would fail in the same way. ``planned``: there is no error; the rank waits at
    the boundary at which the membership changes."""

    rank: int
    position: Position
    at_seconds: float
    iteration: int = 0
    final: bool = False
    planned: bool = False


@dataclass(frozen=True, slots=True)
class RankExited:
    """A rank's process ended; ``returncode`` is negative for a signal; ``done``: its work was finished. ``iteration``
    is the last one that it reached, 0 before the first."""

    rank: int
    returncode: int
    at_seconds: float
    done: bool
    iteration: int = 0
    last_line: str = ""
    """End of its log, if it did not end as planned."""


@dataclass(frozen=True, slots=True)
class RankHung:
    """A rank lives but does not answer and must be killed. ``detail`` names the evidence."""

    rank: int
    at_seconds: float
    detail: str
    iteration: int = 0


@dataclass(frozen=True, slots=True)
class JobHung:
    """No rank makes progress, and none is behind the others."""

    at_seconds: float
    detail: str


@dataclass(frozen=True, slots=True)
class AddRequested:
    """An operator requests that a node that is not a member is started and joins."""

    node: int


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """An operator requests that a member leaves the job at the next iteration boundary."""

    node: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The job must stop after the iteration."""


@dataclass(frozen=True, slots=True)
class KillRequested:
    """The job must end at once."""


@dataclass(frozen=True, slots=True)
# The machine reads no clock: a deadline passes only with an event. So a second reading of the journal meets the same
# deadlines.
class Tick:
    """Time passed."""


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
