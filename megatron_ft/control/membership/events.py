"""What can happen to a job: the facts that the state machine of ``membership`` takes in.

Ranks go by ``node * ranks_per_node + local_rank`` as long as the job lives, whatever number memberships give them.
"""

from dataclasses import asdict, dataclass
from typing import Any, get_args

from megatron_ft.planning.recovery.target import Position


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node's agent registered: at the start, or to join the job that runs."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node's agent is gone, and its ranks with it."""

    node: int
    at_seconds: float
    detail: str = ""
    process_id: int | None = None
    """The agent's, where it is known: what is said of an earlier one comes too late."""


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

    ``final``: another try cannot mend its error. ``planned``: there is none, it stands at the boundary at which the
    membership is to change.
    """

    rank: int
    position: Position
    at_seconds: float
    iteration: int = 0
    final: bool = False
    planned: bool = False


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
class RankHung:
    """A rank lives and does nothing any more: it is to be killed. ``detail`` says how that is known."""

    rank: int
    at_seconds: float
    detail: str
    iteration: int = 0


@dataclass(frozen=True, slots=True)
class JobHung:
    """No rank gets any further, and none is behind the others."""

    at_seconds: float
    detail: str


@dataclass(frozen=True, slots=True)
class AddRequested:
    """Somebody asked for a node that is no member: its agent and ranks are to be started, and to join."""

    node: int


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Somebody asked for a member to leave the job at the next iteration boundary."""

    node: int


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

_KINDS = {kind.__name__: kind for kind in get_args(Fact)}


def to_json(fact: Fact) -> dict[str, Any]:
    """Plain values, the fact's name as ``fact``."""
    content = {"fact": type(fact).__name__, **asdict(fact)}
    position = getattr(fact, "position", None)
    return content if position is None else {**content, "position": position.to_json()}


def from_json(content: dict[str, Any]) -> Fact:
    """Inverse of ``to_json``.

    Raises:
        KeyError: there is no such fact.
        TypeError: it has other fields.
    """
    fields = dict(content)
    kind = _KINDS[fields.pop("fact")]
    if "position" in fields:
        fields["position"] = Position.from_json(fields["position"])
    fact: Fact = kind(**fields)
    return fact
