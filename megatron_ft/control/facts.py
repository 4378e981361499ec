"""What can happen to a job: the facts that the state machine of ``membership`` takes in.

Ranks go by the number they were started with, whatever number later memberships give them.
"""

from dataclasses import dataclass

from megatron_ft.planning.recovery.target import Position


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node's agent registered."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node's agent is gone, and its ranks with it."""

    node: int
    at_seconds: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RankReported:
    """A rank lives and speaks."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankRaised:
    """A rank is about to end with an exception in ``iteration``; ``final``: another try cannot mend it."""

    rank: int
    at_seconds: float
    iteration: int = 0
    final: bool = False


@dataclass(frozen=True, slots=True)
class RankBroken:
    """A rank's iteration ended with an error, probably because others are gone; it waits to be told how to go on.

    ``final``: another try cannot mend its error.
    """

    rank: int
    position: Position
    at_seconds: float
    iteration: int = 0
    final: bool = False


@dataclass(frozen=True, slots=True)
class RankExited:
    """A rank's process ended; ``returncode`` is negative for a signal, ``done`` says that its work was.

    ``iteration`` is the last it has reached, 0 before the first.
    """

    rank: int
    returncode: int
    at_seconds: float
    done: bool
    iteration: int = 0


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody asked the job to stop after the iteration."""


@dataclass(frozen=True, slots=True)
class KillRequested:
    """Somebody asked the job to end at once."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time went on."""


Fact = (
    NodeJoined | NodeLost | RankReported | RankRaised | RankBroken | RankExited | StopRequested | KillRequested | Tick
)
