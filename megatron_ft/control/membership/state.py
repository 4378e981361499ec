"""What the state machine of ``membership`` knows and decides: phases, decisions, knobs, deaths."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from megatron_ft.control.membership.events import RankBroken
from megatron_ft.planning.recovery.target import Position, Target

SAME_TIME_SECONDS = 1.0
SETTLED_ITERATIONS = 10
"""A node that was a member for so many has settled: an earlier loss of it does not count any more."""


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
    """Begin the next membership, of the nodes that are left and those that join."""
    CHANGE = "change"
    """Have the members stop at the next iteration boundary and say how far they are: nodes join or leave there."""
    START_NODES = "start_nodes"
    """Start the ranks of nodes that are no members (``Step.nodes``); they wait to be named in a membership."""
    START_AGENTS = "start_agents"
    """Start the processes of nodes (``Step.nodes``) that have none, or await them where nobody starts any."""
    KILL_NODES = "kill_nodes"
    """Kill what is left of the ranks of nodes that will not join (``Step.nodes``)."""
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
    position_timeout_seconds: float = 10.0
    """Longest wait for a rank to say how far it is while others have; then its node is lost, too."""
    reform_timeout_seconds: float = 60.0
    """Longest wait for ranks to say how far they are."""
    max_nodes: int | None = None
    """Nodes that there can be, members or not: they are numbered from 0 to below it; null: ``num_nodes`` and spares."""
    num_spare_nodes: int = 0
    """Of them, those that are not members as long as the others are."""
    join_window_seconds: float = 5.0
    """From the first node that is ready to join until the change is ordered: others may join with it."""
    max_node_restarts: int = 3
    """Times in a row that a lost node is started again without having settled."""
    restart_lost_nodes: bool = False
    """Whether a lost node is started again, to join."""
    keeps_layout: bool = False
    """Whether every membership has ``num_nodes`` nodes, and others take the places of lost ones."""
    starts_nodes: bool = True
    """Whether somebody starts the processes of nodes that are to be started; else they come by themselves or not."""

    @property
    def fewest_nodes(self) -> int:
        """Nodes the job goes on with, at least."""
        return self.num_nodes if self.min_nodes is None else self.min_nodes

    @property
    def most_nodes(self) -> int:
        """Nodes that there can be, members or not."""
        return self.num_nodes + self.num_spare_nodes if self.max_nodes is None else self.max_nodes

    @property
    def most_members(self) -> int:
        """Nodes that a membership can have."""
        return self.most_nodes - self.num_spare_nodes

    @property
    def may_lose_nodes(self) -> bool:
        """Whether memberships change while ranks live: nodes are lost, leave and join."""
        return self.keeps_layout or self.fewest_nodes < self.most_nodes

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
        """Number of ``rank`` in a membership of the nodes ``members``: dense, in their order."""
        return members.index(self.node_of(rank)) * self.ranks_per_node + rank % self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One death: of a rank, or of a node (``rank`` is ``None``), or of nobody (both ``None``: start timed out)."""

    at_seconds: float
    rank: int | None = None
    node: int | None = None
    number: int | None = None
    """Number of the rank in the membership that it failed in, where nothing else says it."""
    iteration: int = 0
    """Last iteration the rank reached, 0 before the first."""
    sudden: bool = False
    """A lost node, or a signal that no lost peer brings about: not an error that a rank saw, nor an abort."""
    final: bool = False
    """Another try cannot mend it."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A node outside of the membership whose ranks were started to join it."""

    node: int
    since_seconds: float
    """On the controller's clock: since when its ranks are being started, then since when they are ready."""
    is_ready: bool = False


@dataclass(frozen=True, slots=True)
class Return:
    """A node that comes and goes."""

    node: int
    iteration: int
    """After which it has joined last."""
    num_losses: int
    """In a row without having settled in between."""


@dataclass(frozen=True, slots=True)
class FailedStart:
    """A node that was started to join came to nothing: its process or a rank ended, or was late, before it joined."""

    node: int
    reason: str
    starts_again: bool
    """Whether the node is started once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the controller knows. ``deadline_seconds`` is on the controller's clock, ``at_seconds`` on the agents'.

    Ranks go by the number that ``facts`` gives them, whatever number memberships give them.
    """

    phase: Phase = Phase.FORMING
    generation: int = 0
    deadline_seconds: float | None = None
    reform_by_seconds: float | None = None
    """Until then all ranks have to have said how far they are; None where nothing is awaited of ranks."""
    look_at_seconds: float | None = None
    """When something is to be decided about nodes outside of the membership, or ones that leave it."""
    joined: frozenset[int] = frozenset()
    """Nodes whose process has registered."""
    members: tuple[int, ...] = ()
    """Nodes of this generation: rising, or by place in a job that keeps its layout."""
    lost: frozenset[int] = frozenset()
    """Nodes that the job goes on without: dead members, until the next membership, and all before. The ranks of a dead
    member can be started again before the next membership: it is a newcomer, too, then."""
    announced: frozenset[int] = frozenset()
    """Those of ``lost`` that the other ranks have been told of."""
    agents_lost: frozenset[int] = frozenset()
    """Nodes whose own process is gone."""
    started: frozenset[int] = frozenset()
    """Nodes whose ranks were started, members or not."""
    wanted: frozenset[int] = frozenset()
    """Nodes outside of the membership that are to be started."""
    agents_starting: frozenset[int] = frozenset()
    """Those of ``wanted`` whose own process is being started."""
    newcomers: tuple[Newcomer, ...] = ()
    """In the order in which they were started, then became ready."""
    dismissed: frozenset[int] = frozenset()
    """Nodes that have been newcomers and whose ranks are to be killed."""
    draining: frozenset[int] = frozenset()
    """Members that are to leave."""
    left: frozenset[int] = frozenset()
    """Nodes that have left as asked."""
    returns: tuple[Return, ...] = ()
    """Nodes that were lost or have joined, rising."""
    failed_starts: tuple[FailedStart, ...] = ()
    """Of the last step alone."""
    counted: frozenset[int] = frozenset()
    """Dead members whose loss is in ``returns`` already."""
    change: frozenset[int] | None = None
    """The nodes that leave by the change that was ordered in this generation; null: none was ordered."""
    broken: tuple[RankBroken, ...] = ()
    """What living ranks of this generation, which is at its end, have said."""
    spoke: frozenset[int] = frozenset()
    """Ranks of ``broken``."""
    has_errors: bool = False
    """Whether one of ``broken`` is not planned."""
    reported: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()
    failures: tuple[Failure, ...] = ()
    """Deaths of this generation."""
    survived: tuple[tuple[Failure, ...], ...] = ()
    """Deaths of each earlier generation; none where it ended by a change as asked."""
    num_reforms: int = 0
    """Generations that went on in living processes, without a start."""
    interrupted: bool = False
    furthest_iteration: int = 0
    """Furthest iteration in which an earlier generation failed."""
    num_restarts: int = 0
    """Restarts since the job last got further."""

    @property
    def waiting(self) -> frozenset[int]:
        """Nodes that are newcomers, ready or not."""
        return frozenset(newcomer.node for newcomer in self.newcomers)

    @property
    def wake_seconds(self) -> float | None:
        """When there is something to decide even if nothing happens, on the controller's clock."""
        times = [at for at in (self.deadline_seconds, self.look_at_seconds) if at is not None]
        return min(times, default=None)

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
    """Nodes that are left behind, or whose ranks are new where they are among those ``joining``, too."""
    leaving: tuple[int, ...]
    """Nodes that leave as asked; their ranks have spoken, too."""
    joining: tuple[int, ...]
    """Nodes whose ranks were not of the membership before."""
    positions: tuple[Position, ...]
    """How far each rank that has spoken is, in rank order."""
    target: Target
    previous_ranks: tuple[int | None, ...]
    """For each new rank its number in the membership before; None for a newcomer."""
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
    nodes: tuple[int, ...] = ()
    """That the decision is about: those that leave by a ``CHANGE``, those to start or to kill. Of ``BREAK`` and
    ``REFORM`` lost ones with ranks to kill, if any live: not those whose ranks were started again meanwhile."""


def ranks_of_all(policy: MembershipPolicy, nodes: tuple[int, ...] | frozenset[int]) -> frozenset[int]:
    """Global ranks of ``nodes``. Computed once for nodes that are asked about again and again, fact by fact."""
    return _ranks_of_all(policy.ranks_per_node, nodes, frozenset())


def left_ranks(policy: MembershipPolicy, state: State) -> frozenset[int]:
    """Ranks of the members that are not lost."""
    return _ranks_of_all(policy.ranks_per_node, state.members, state.lost)


@functools.lru_cache(maxsize=32)
def _ranks_of_all(ranks_per_node: int, nodes: Iterable[int], lost: frozenset[int]) -> frozenset[int]:
    firsts = (node * ranks_per_node for node in nodes if node not in lost)
    return frozenset(rank for first in firsts for rank in range(first, first + ranks_per_node))


class Moment(NamedTuple):
    """The two times of a fact, both on the controller's clock.

    A controller that is behind takes a fact in long after it came. Whether something is late is decided by when the
    fact came, or nodes would be lost for the controller's own backlog. A limit that begins with a decision counts from
    the decision itself: nobody can act on it earlier.
    """

    seconds: float
    """When the fact is taken in."""
    arrived_seconds: float
    """When it came. Of a ``Tick``: everything that came before has been taken in."""


def is_late(state: State, now: Moment) -> bool:
    """Whether the phase has taken too long."""
    return state.deadline_seconds is not None and now.arrived_seconds >= state.deadline_seconds
