"""What the state machine of ``membership`` knows and decides: phases, decisions, knobs, deaths."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from megatron_ft.control.facts import RankBroken
from megatron_ft.planning.recovery.target import Position, Target

SAME_TIME_SECONDS = 1.0


class Phase(Enum):
    """Where the job stands."""

    FORMING = "forming"
    STARTING = "starting"
    RUNNING = "running"
    REFORMING = "reforming"
    """Nodes were lost; ranks of the others say how far they are."""
    STOPPING = "stopping"
    KILLING = "killing"
    ENDED = "ended"


class Decision(Enum):
    """What the controller has to do now."""

    WAIT = "wait"
    START = "start"
    RESTART = "restart"
    BREAK = "break"
    """End the membership: kill what is left of lost nodes, have the other ranks stop and say how far they are."""
    REFORM = "reform"
    """Begin the next membership, of the nodes that are left."""
    STOP = "stop"
    KILL = "kill"
    END = "end"


class Outcome(Enum):
    """How the job ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipPolicy:
    """Knobs of the decisions."""

    num_nodes: int
    ranks_per_node: int
    start_timeout_seconds: float
    stop_timeout_seconds: float
    failure_grace_seconds: float = 2.0
    """After the first death the others may say why they end, too, for so long."""
    kill_timeout_seconds: float = 10.0
    """Killed ranks nobody reports for so long are given up."""
    max_restarts: int = 0
    """Times in a row that all ranks are started again without the job getting further than before."""
    min_nodes: int | None = None
    """Fewest nodes that the job goes on with when nodes are lost; null needs all of them."""
    reform_timeout_seconds: float = 60.0
    """Longest wait for ranks to say how far they are."""

    @property
    def fewest_nodes(self) -> int:
        """Nodes the job goes on with, at least."""
        return self.num_nodes if self.min_nodes is None else self.min_nodes

    @property
    def may_lose_nodes(self) -> bool:
        """Whether the job goes on without nodes that it loses."""
        return self.fewest_nodes < self.num_nodes

    @property
    def world_size(self) -> int:
        """Ranks the job starts with."""
        return self.num_nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        """Node of a global rank."""
        return rank // self.ranks_per_node

    def ranks_of(self, node: int) -> range:
        """Global ranks of ``node``."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def number_among(self, members: Sequence[int], rank: int) -> int:
        """Number of ``rank`` in a membership of the nodes ``members``: dense, in node order."""
        return members.index(self.node_of(rank)) * self.ranks_per_node + rank % self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One death: of a rank, or of a node (``rank`` is ``None``), or of nobody (both ``None``: start timed out)."""

    at_seconds: float
    rank: int | None = None
    node: int | None = None
    iteration: int = 0
    """Last iteration the rank reached, 0 before the first."""
    sudden: bool = False
    """A lost node, or a signal that no lost peer brings about: not an error that a rank saw, nor an abort."""
    final: bool = False
    """Another try cannot mend it."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the controller knows. ``deadline_seconds`` is on the controller's clock, ``at_seconds`` on the agents'.

    Ranks go by the number they were started with, whatever number later memberships give them.
    """

    phase: Phase = Phase.FORMING
    generation: int = 0
    deadline_seconds: float | None = None
    joined: frozenset[int] = frozenset()
    members: tuple[int, ...] = ()
    """Nodes of this generation, rising."""
    lost: frozenset[int] = frozenset()
    """Nodes that the job goes on without: dead members, until the next membership, and all before."""
    announced: frozenset[int] = frozenset()
    """Those of ``lost`` that the other ranks have been told of."""
    agents_lost: frozenset[int] = frozenset()
    """Nodes whose own process is gone."""
    broken: tuple[RankBroken, ...] = ()
    """What living ranks of this generation, which is at its end, have said."""
    reported: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()
    failures: tuple[Failure, ...] = ()
    """Deaths of this generation."""
    survived: tuple[tuple[Failure, ...], ...] = ()
    """Deaths of each earlier generation."""
    num_reforms: int = 0
    """Generations that went on in living processes, without a start."""
    interrupted: bool = False
    furthest_iteration: int = 0
    """Furthest iteration in which an earlier generation failed."""
    num_restarts: int = 0
    """Restarts since the job last got further."""

    @property
    def first_failure(self) -> Failure | None:
        """The earliest death of this generation, see ``first_of``."""
        return first_of(self.failures)

    @property
    def num_fruitless_restarts(self) -> int:
        """Restarts in a row that got the job no further than where it had failed before.

        The first rank to fail tells: what fails at the same place each time fails in the same iteration of that rank.
        """
        first = self.first_failure
        return 0 if first is not None and first.iteration > self.furthest_iteration else self.num_restarts

    @property
    def outcome(self) -> Outcome:
        """How the job ended, or would if it ended now."""
        if self.failures:
            return Outcome.FAILED
        return Outcome.INTERRUPTED if self.interrupted else Outcome.FINISHED


def first_of(failures: Sequence[Failure]) -> Failure | None:
    """The earliest death; later ones may only be its consequences.

    On a busy machine peers can speak of a killed rank before its exit is seen: a sudden death comes first among
    those within ``SAME_TIME_SECONDS`` of the earliest.
    """
    earliest = min((failure.at_seconds for failure in failures), default=0.0)
    close = [failure for failure in failures if failure.at_seconds <= earliest + SAME_TIME_SECONDS]
    return min(close, key=lambda failure: (not failure.sudden, failure.at_seconds), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reform:
    """From one membership to the next, as ``NextMembership`` has it."""

    lost: tuple[int, ...]
    """Nodes that are left behind."""
    positions: tuple[Position, ...]
    """How far each rank that goes on is, in rank order."""
    target: Target
    previous_ranks: tuple[int, ...]
    """For each new rank its number in the membership before."""
    nodes: tuple[int, ...]
    """For each new rank its node."""


@dataclass(frozen=True, slots=True)
class Step:
    """One move of the state machine."""

    state: State
    decision: Decision
    reason: str
    reform: Reform | None = None
    """Of the decision ``REFORM``."""


def is_late(state: State, now_seconds: float) -> bool:
    """Whether the phase has taken too long."""
    return state.deadline_seconds is not None and now_seconds >= state.deadline_seconds
