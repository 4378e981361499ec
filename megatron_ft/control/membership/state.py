"""The state of the state machine in ``machine``, its decisions and its policy (settings)."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megatron_ft.config.job import JobConfig
from megatron_ft.control.membership.events import Moment, RankBroken
from megatron_ft.errors import RecoveryError
from megatron_ft.planning.recovery.membership import Position, Target

if TYPE_CHECKING:
    from megatron_ft.planning.recovery.layout import JobLayouts, MembershipLayout
    from megatron_ft.planning.recovery.prebuild import PrebuildPlan


class NodeState(Enum):
    """Relation of a node to the job."""

    ABSENT = "absent"
    """The node's ranks are not in the membership and do not wait to join it."""
    STARTING = "starting"
    """The node's ranks are being started and will join."""
    READY = "ready"
    """All ranks of the node have connected and wait to join."""
    MEMBER = "member"
    DRAINING = "draining"
    """The node is a member and leaves at the next change of the membership."""
    LOST = "lost"
    """The node was lost, and has not joined again."""
    LEFT = "left"
    """The node has left on request."""


class AgentState(Enum):
    """State of a node's agent."""

    UNKNOWN = "unknown"
    """The agent has not registered yet. The launcher may have started it together with the job."""
    STARTING = "starting"
    """The agent is being started while the job runs."""
    REGISTERED = "registered"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """State of a node, whose number never changes."""

    node: int
    state: NodeState = NodeState.ABSENT
    agent: AgentState = AgentState.UNKNOWN
    was_registered: bool = False
    """Whether the node's agent has ever registered."""
    is_wanted: bool = False
    """Whether the job must start the node's ranks and let the node join."""
    is_dismissed: bool = False
    """Whether the start of the node has failed, so that its remaining ranks must be killed."""
    has_ranks: bool = False
    """Whether the node's ranks were started; they may have ended since."""
    since_seconds: float = 0.0
    """Time on the controller's clock at which ranks were started (``STARTING``) or became ready (``READY``)."""
    queue_number: int = 0
    """Position in the queue of joining nodes; a node moves to the end when it is started and when it is ready."""
    is_announced: bool = False
    """Whether the ranks of other nodes were informed that this node is lost."""
    is_counted: bool = False
    """Whether ``num_losses`` includes the node's loss in this generation."""
    was_draining: bool = False
    """Whether the node was ``DRAINING`` when it was lost."""
    leaves_now: bool = False
    """Whether the node leaves at the change of the membership that was ordered in this generation."""
    joined_iteration: int = 0
    """Iteration after which the node joined the job most recently."""
    agent_since_seconds: float = 0.0
    """Time on the controller's clock at which the start of the node's agent was ordered."""
    has_unregistered_agent: bool = False
    """Whether an agent that did not register in time may still run."""
    not_before_seconds: float = 0.0
    """Earliest time on the controller's clock at which the node may be started again after a failed start."""
    num_losses: int = 0
    """Number of losses and failed starts in a row; ``SETTLED_ITERATIONS`` iterations of training reset it."""


_JOINING = (NodeState.STARTING, NodeState.READY)
_ALIVE = (NodeState.MEMBER, NodeState.DRAINING)


# No slots: ``cached_property`` keeps its values in the dictionary of the instance.
@dataclass(frozen=True)
class Nodes:
    """The records of all nodes, and which of them are members. Immutable; derived values are cached."""

    members: tuple[int, ...] = ()
    """Nodes of this generation, ascending; if the job keeps its layout, in the order of their places in the layout. A
    lost member stays in the list until the next membership, even if its ranks have been started again."""
    records: tuple[NodeRecord, ...] = ()
    """Records, indexed by node number. A node without a record counts as ``ABSENT``."""

    @staticmethod
    def of(members: Iterable[int]) -> "Nodes":
        """Return the nodes of a job that begins with ``members``."""
        chosen = tuple(members)
        return Nodes(members=chosen).change(chosen, state=NodeState.MEMBER)

    def __getitem__(self, node: int) -> NodeRecord:
        return self.records[node] if node < len(self.records) else NodeRecord(node)

    def change(self, nodes: int | Iterable[int], **changes: Any) -> "Nodes":
        """Return a copy in which the fields named in ``changes`` have new values in the records of ``nodes``."""
        numbers = (nodes,) if isinstance(nodes, int) else tuple(nodes)
        records = list(self.records)
        records += [NodeRecord(node) for node in range(len(records), max(numbers, default=-1) + 1)]
        for node in numbers:
            records[node] = replace(records[node], **changes)
        return Nodes(self.members, tuple(records))

    def lose(self, nodes: Iterable[int]) -> "Nodes":
        """Return a copy in which all members among ``nodes`` are marked as lost."""
        found = self
        for node in nodes:
            record = found[node]
            # A lost member whose ranks were started again stays ``STARTING`` or ``READY``, and so in the queue.
            if record.state in _ALIVE:
                was_draining = record.state is NodeState.DRAINING
                found = found.change(node, state=NodeState.LOST, was_draining=was_draining)
        return found

    def restore_members(self) -> "Nodes":
        """Return a copy in which lost members are no longer marked as lost."""
        found = self
        for node in self.members:
            if node in self.lost:
                state = NodeState.DRAINING if found[node].was_draining else NodeState.MEMBER
                found = found.change(node, state=state, was_draining=False)
        return found

    @property
    def next_queue_number(self) -> int:
        """Return the queue number for the next joining node."""
        return max([record.queue_number for record in self.records], default=0) + 1

    def is_member(self, node: int) -> bool:
        """Whether a node is in the present membership and not lost."""
        return self[node].state in _ALIVE

    @cached_property
    def joining(self) -> tuple[NodeRecord, ...]:
        """Return the joining nodes in the order of their queue numbers."""
        return tuple(sorted([r for r in self.records if r.state in _JOINING], key=lambda record: record.queue_number))

    @cached_property
    def waiting(self) -> frozenset[int]:
        """Return the nodes that are ``STARTING`` or ``READY``."""
        return frozenset({record.node for record in self.joining})

    @cached_property
    def lost(self) -> frozenset[int]:
        """Return the lost nodes, including members whose ranks have been started again since they were lost."""
        lost = {record.node for record in self.records if record.state is NodeState.LOST}
        return frozenset(lost | (self.waiting & set(self.members)))

    @cached_property
    def announced(self) -> frozenset[int]:
        """Return the lost nodes whose loss was announced to the ranks of other nodes."""
        return frozenset({node for node in self.lost if self.records[node].is_announced})

    @cached_property
    def draining(self) -> frozenset[int]:
        """Return the members that have to leave."""
        return frozenset({record.node for record in self.records if record.state is NodeState.DRAINING})

    @cached_property
    def registered(self) -> frozenset[int]:
        """Return the nodes whose agent has registered and is not lost."""
        return frozenset({record.node for record in self.records if record.agent is AgentState.REGISTERED})

    @cached_property
    def wanted(self) -> frozenset[int]:
        """Return the nodes that the job must start and let join."""
        return frozenset({record.node for record in self.records if record.is_wanted})

    @cached_property
    def dismissed(self) -> frozenset[int]:
        """Return the nodes whose remaining ranks must be killed."""
        return frozenset({record.node for record in self.records if record.is_dismissed})

    @cached_property
    def with_ranks(self) -> frozenset[int]:
        """Return the nodes whose ranks were started."""
        return frozenset({record.node for record in self.records if record.has_ranks})


# The order of failures within this time is unknown: their times are from clocks of several nodes, and a peer can report
# its error before the exit of the rank that caused this error is detected.
SAME_TIME_SECONDS = 1.0
SETTLED_ITERATIONS = 10
"""Number of iterations that a member must train before its earlier losses no longer count."""


class Phase(Enum):
    """Phase of the job."""

    FORMING = "forming"
    """The job waits until all agents have registered."""
    STARTING = "starting"
    """Ranks are being started; some have not connected yet."""
    RUNNING = "running"
    CHANGING = "changing"
    """Ranks train until the next iteration boundary, where nodes join or leave."""
    REFORMING = "reforming"
    """Nodes were lost; the ranks of the remaining nodes report their positions (their progress)."""
    FILLING = "filling"
    """All remaining ranks have reported their positions; the job waits for nodes that replace lost nodes."""
    STOPPING = "stopping"
    KILLING = "killing"
    REPLACING = "replacing"
    """All ranks have ended after a failure; they start again as soon as other nodes have replaced the lost nodes."""
    ENDED = "ended"


TRAINING = (Phase.RUNNING, Phase.CHANGING)
"""Phases in which ranks train."""
# ``STARTING`` is left out: before all ranks have connected, they have no common state to continue from.
BREAKABLE = (*TRAINING, Phase.REFORMING, Phase.FILLING)
"""Phases in which the job can continue without a node that is lost."""


class Decision(Enum):
    """A decision of the state machine, which the controller carries out."""

    WAIT = "wait"
    START = "start"
    RESTART = "restart"
    BREAK = "break"
    """End the membership: kill ranks of lost nodes, and order all other ranks to stop and report their progress."""
    REFORM = "reform"
    """Begin the next membership, which consists of the remaining and the joining nodes."""
    CHANGE = "change"
    """Order the members to stop and report their progress at the next iteration boundary, where nodes join or leave."""
    START_NODES = "start_nodes"
    """Start the ranks of nodes that are not members (``Step.nodes``). These ranks wait for the next membership."""
    START_AGENTS = "start_agents"
    """Start the missing agents of ``Step.nodes``. If nodes start by themselves, wait for these agents instead."""
    KILL_NODES = "kill_nodes"
    """Kill the remaining ranks of nodes that will not join (``Step.nodes``)."""
    STOP = "stop"
    KILL = "kill"
    END = "end"


class Outcome(Enum):
    """Result of the job."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


# No slots: ``cached_property`` keeps its values in the dictionary of the instance.
@dataclass(frozen=True, kw_only=True)
class MembershipPolicy:
    """Settings of the state machine. Fields without a docstring are keys of ``launch``, ``recovery`` or ``nodes``."""

    num_nodes: int
    ranks_per_node: int
    start_timeout_seconds: float
    stop_timeout_seconds: float
    failure_grace_seconds: float = 2.0
    """After a rank's failure, the time in which all other ranks can report their errors."""
    death_grace_seconds: float = 2.0
    """After a rank's error, the longest wait for the end of another rank or node that may have caused the error."""
    kill_timeout_seconds: float = 10.0
    """Longest wait for the exit of killed ranks."""
    max_restarts: int = 0
    min_nodes: int | None = None
    position_timeout_seconds: float = 10.0
    reconfigure_timeout_seconds: float = 60.0
    max_nodes: int | None = None
    num_spare_nodes: int = 0
    join_window_seconds: float = 5.0
    max_node_restarts: int = 3
    restart_lost_nodes: bool = False
    keeps_layout: bool = False
    """Whether other nodes take the places of lost nodes, so that the layout stays the same. If a place stays empty, the
    layout changes or the job stops, depending on ``min_nodes``."""
    keeps_processes: bool = True
    """Whether the remaining ranks continue in their processes after a loss. If not, all ranks are restarted."""
    starts_nodes: bool = True
    """Whether the job starts agents. If not, nodes start by themselves."""
    job_layouts: "JobLayouts | None" = None
    """Computes the parallel layout of a set of nodes. None means that each process of each member has a rank."""
    prebuilt: "PrebuildPlan | None" = None
    """Parts of the model that spares build in advance; None if they build nothing."""

    @staticmethod
    def of(config: JobConfig, *, starts_nodes: bool) -> "MembershipPolicy":
        """Make the policy from a configuration."""
        # Imported here, because agents import this module, and do not need numpy.
        from megatron_ft.planning.recovery.layout import JobLayouts
        from megatron_ft.planning.recovery.prebuild import PrebuildPlan, can_prebuild

        launch, recovery, nodes, detector = config.launch, config.recovery, config.nodes, config.detector
        # No launcher waits for the end of nodes that start by themselves: only missing heartbeats reveal this end.
        found_seconds = detector.heartbeat_timeout_seconds + detector.heartbeat_interval_seconds + 1.0
        found_seconds = 0.0 if starts_nodes else found_seconds
        return MembershipPolicy(
            num_nodes=launch.num_nodes,
            ranks_per_node=launch.ranks_per_node,
            start_timeout_seconds=launch.start_timeout_seconds,
            stop_timeout_seconds=launch.stop_timeout_seconds,
            death_grace_seconds=max(MembershipPolicy.death_grace_seconds, found_seconds),
            kill_timeout_seconds=max(MembershipPolicy.kill_timeout_seconds, found_seconds),
            max_restarts=recovery.max_restarts,
            min_nodes=recovery.min_nodes,
            position_timeout_seconds=recovery.position_timeout_seconds,
            reconfigure_timeout_seconds=recovery.reconfigure_timeout_seconds,
            max_nodes=nodes.max_nodes,
            num_spare_nodes=nodes.num_spare_nodes,
            join_window_seconds=nodes.join_window_seconds,
            max_node_restarts=nodes.max_node_restarts,
            restart_lost_nodes=nodes.restart_lost_nodes,
            keeps_layout=recovery.keep_layout,
            keeps_processes=config.keeps_processes,
            starts_nodes=starts_nodes,
            job_layouts=JobLayouts.of(config),
            prebuilt=PrebuildPlan.of(config) if can_prebuild(config) else None,
        )

    @property
    def fewest_nodes(self) -> int:
        """Smallest number of nodes with which the job continues after a loss."""
        return self.num_nodes if self.min_nodes is None else self.min_nodes

    @property
    def most_nodes(self) -> int:
        """Largest number of nodes of the job, spares included."""
        return self.num_nodes + self.num_spare_nodes if self.max_nodes is None else self.max_nodes

    @property
    def most_members(self) -> int:
        """Largest number of nodes of a membership."""
        return self.most_nodes - self.num_spare_nodes

    @property
    def replaces_by_restart(self) -> bool:
        """Whether a loss of nodes restarts all ranks, as soon as other nodes have replaced the lost nodes."""
        return self.keeps_layout and not self.keeps_processes

    @property
    def admits_nodes(self) -> bool:
        """Whether nodes can join the running job, as members or as spares."""
        return self.keeps_layout or self.may_lose_nodes

    @property
    def may_lose_nodes(self) -> bool:
        """Whether the job continues with the living ranks when nodes are lost, leave or join."""
        return self.keeps_processes and (self.keeps_layout or self.fewest_nodes < self.most_nodes)

    @property
    def world_size(self) -> int:
        """Number of ranks at the start of the job."""
        return self.num_nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        """Return the node of a rank. Ranks are numbered as in ``events``: by node, for the whole job."""
        return rank // self.ranks_per_node

    def ranks_of(self, node: int) -> range:
        """Return the ranks of ``node``. Ranks are numbered as in ``events``: by node, for the whole job."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    @cached_property
    def layouts(self) -> "JobLayouts":
        """Return ``job_layouts``; if it is None, layouts in which each process of each member has a rank."""
        from megatron_ft.planning.recovery.layout import JobLayouts

        default = JobLayouts(
            num_nodes=self.num_nodes, ranks_per_node=self.ranks_per_node, keeps_layout=self.keeps_layout
        )
        return self.job_layouts or default

    def layout_on(
        self, nodes: Sequence[int], base: "MembershipLayout | None" = None, *, in_place: bool | None = None
    ) -> "MembershipLayout":
        """Return the layout of a membership of ``nodes``. For ``base`` and ``in_place``, see ``JobLayouts.on``.

        Raises:
            RecoveryError: the nodes are too few for the layout.
        """
        from megatron_ft.planning.state.declined import Declined

        found = self.layouts.on(nodes, base, in_place=in_place)
        if isinstance(found, Declined):
            raise RecoveryError(f"the job cannot continue on nodes {list(nodes)}: {found.reason}")
        return found

    def ranks_of_all(self, nodes: tuple[int, ...] | frozenset[int]) -> frozenset[int]:
        """Return the ranks of ``nodes``, numbered as in ``events``. Cached, because it is called for every event."""
        return _ranks_of_all(self.ranks_per_node, nodes, frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Failure of a rank (``rank``), loss of a node (``node``), or failure of the job (both fields are None)."""

    at_seconds: float
    """Time of the failure, on the clock of the machine that observed it."""
    rank: int | None = None
    node: int | None = None
    number: int | None = None
    """Number of the failed rank in its membership; None if ``JobResult.details`` contains it, or no rank failed."""
    iteration: int = 0
    """Last iteration that the rank reached; 0 if it has reached none."""
    sudden: bool = False
    """Whether this failure is no consequence of another: a node was lost, or a rank hung or was killed by a signal."""
    final: bool = False
    """Whether another attempt of the job would fail in the same way."""
    detail: str = ""

    @classmethod
    def first_of(cls, failures: "Sequence[Failure]") -> "Failure | None":
        """Return the failure that happened first. Later failures may be its consequences.

        On a busy machine, errors of peers can be seen before the exit of a killed rank is seen. Among failures within
        ``SAME_TIME_SECONDS`` of the earliest one, a ``sudden`` failure therefore counts as the first.
        """
        earliest = min((failure.at_seconds for failure in failures), default=0.0)
        close = [failure for failure in failures if failure.at_seconds <= earliest + SAME_TIME_SECONDS]
        return min(close, key=lambda failure: (not failure.sudden, failure.at_seconds), default=None)


@dataclass(frozen=True, slots=True)
class FailedStart:
    """A failed attempt to start a node: its agent or one of its ranks has ended, or did not report in time."""

    node: int
    reason: str
    starts_again: bool
    """Whether the node is started again."""


@dataclass(frozen=True, kw_only=True)
class State:
    """State of the job as the controller knows it. Times are on the controller's clock.

    Ranks are numbered as in ``events``: these numbers never change, unlike the numbers in a membership.
    """

    phase: Phase = Phase.FORMING
    generation: int = 0
    nodes: Nodes = field(default_factory=Nodes)
    layout: "MembershipLayout | None" = None
    """Layout of this generation; None if the layout has not changed since all ranks were started."""
    base: "MembershipLayout | None" = None
    """Layout of the newest earlier membership that has committed an iteration, or whose surviving ranks have all
    reported that they had received their state. None means the layout at the start."""
    begun_iteration: int = 0
    """Iteration after which this generation began."""
    has_changed_layout: bool = False
    """Whether a membership since the newest start of all ranks had another layout than the job's first membership. If
    so, nodes join and leave as in a job that does not keep its layout."""
    deadline_seconds: float | None = None
    """Time at which the present phase exceeds its time limit; None if the phase has no limit."""
    reform_by_seconds: float | None = None
    """Latest end of the phase ``REFORMING``. Ranks without a report count as lost earlier, at ``deadline_seconds``."""
    wake_up_seconds: float | None = None
    """Time at which the state machine must next decide about nodes that join or leave; None means never."""
    failed_starts: tuple[FailedStart, ...] = ()
    """Failed starts of nodes that were detected while the last event was processed."""
    broken: tuple[RankBroken, ...] = ()
    """Reports of living ranks that have stopped and wait for the next membership."""
    # If this set were built from ``broken`` for each report, a loss would cost the square of the number of ranks.
    has_reported: frozenset[int] = frozenset()
    """Ranks that have reported that they have stopped: those of the reports in ``broken``."""
    has_errors: bool = False
    """Whether a rank has stopped because of an error: ``broken`` contains a report with ``planned`` false."""
    connected: frozenset[int] = frozenset()
    """Ranks that have connected to their agent."""
    gone: frozenset[int] = frozenset()
    """Ranks whose process has ended."""
    failures: tuple[Failure, ...] = ()
    """Failures in this generation."""
    survived: tuple[tuple[Failure, ...], ...] = ()
    """Failures of each earlier generation; empty for a generation that ended because nodes joined or left."""
    num_reforms: int = 0
    """Number of earlier generations whose surviving ranks continued in their processes, without a restart."""
    interrupted: bool = False
    stop_by_seconds: float | None = None
    """Time after which the job no longer waits for nodes that replace lost nodes, because it was asked to stop."""
    reached_iteration: int = 0
    """Latest iteration of this generation that any ended rank had reached."""
    furthest_iteration: int = 0
    """Latest iteration in which an earlier generation failed."""
    num_restarts: int = 0
    """Count of restarts of all ranks between the job's last progress and the start of this generation."""

    @property
    def members(self) -> tuple[int, ...]:
        """Nodes of this generation, including its lost nodes, in the order of ``Nodes.members``."""
        return self.nodes.members

    @property
    def wake_seconds(self) -> float | None:
        """Time at which the state machine must decide even if no event arrives; None means never."""
        stop_by = self.stop_by_seconds if self.phase is Phase.FILLING else None
        times = (self.deadline_seconds, self.wake_up_seconds, stop_by)
        return min((at for at in times if at is not None), default=None)

    @property
    def first_failure(self) -> Failure | None:
        """First failure of this generation, see ``Failure.first_of``."""
        return Failure.first_of(self.failures)

    @property
    def num_restarts_without_progress(self) -> int:
        """Count of restarts of all ranks since the job's last progress; 0 if this generation failed in a later
        iteration than all earlier generations."""
        return 0 if self.failed_iteration > self.furthest_iteration else self.num_restarts

    @property
    def failed_iteration(self) -> int:
        """Iteration in which this generation failed; 0 if it has not failed, or failed before its first iteration."""
        # The first failed rank's iteration counts, because a recurring fault occurs in the same iteration. A lost node
        # reports no iteration, so the latest iteration of the other ranks counts instead.
        first = self.first_failure
        if first is None:
            return 0
        return self.reached_iteration if first.rank is None else first.iteration

    @property
    def outcome(self) -> Outcome:
        """Result of the job. While the job runs, the result that it would have if it ended now."""
        if self.failures:
            return Outcome.FAILED
        return Outcome.INTERRUPTED if self.interrupted else Outcome.FINISHED

    def is_late(self, now: Moment) -> bool:
        """Whether the present phase has exceeded its time limit."""
        return self.deadline_seconds is not None and now.arrived_seconds >= self.deadline_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Reform:
    """Transition from one membership to the next, from which ``NextMembership`` is made."""

    lost: tuple[int, ...]
    """Nodes that are lost; a node that is also in ``joining`` returns with new ranks."""
    leaving: tuple[int, ...]
    """Nodes that leave on request. Their ranks have reported their positions, like the ranks that stay."""
    joining: tuple[int, ...]
    """Nodes whose ranks were not in the membership before."""
    positions: tuple[Position, ...]
    """Position of each rank that has reported, in rank order."""
    target: Target
    previous_ranks: tuple[int | None, ...]
    """Number that each rank of the next membership had in the previous one; None for a rank of a joining node."""
    layout: "MembershipLayout"
    """Ranks and hot spares of the next membership."""
    base: "MembershipLayout | None"
    """``State.base`` of the next membership: last layout whose ranks received their state; None: the initial layout."""
    keeps_layout: bool = False
    """Whether the next membership has the layout of the present one."""


@dataclass(frozen=True, slots=True)
class Step:
    """One transition of the state machine."""

    state: State
    decision: Decision
    reason: str
    reform: Reform | None = None
    """Next membership, for the decision ``REFORM``."""
    nodes: tuple[int, ...] = ()
    """Nodes to which the decision applies: nodes that leave (``CHANGE``), are started or are killed. For ``BREAK`` and
    ``REFORM``, the nodes are lost nodes whose old ranks must be killed."""


def keeps_layout(policy: MembershipPolicy, state: State) -> bool:
    """Return whether the job still keeps its layout: other nodes take the places of lost nodes."""
    return policy.keeps_layout and not state.has_changed_layout


def layout_of(policy: MembershipPolicy, state: State) -> "MembershipLayout":
    """Return the layout of the present membership."""
    if state.layout is not None:
        return state.layout
    return policy.layout_on(state.members, in_place=not state.has_changed_layout)


# Cached, because the sets change only with memberships. Without the cache, a loss among 8,192 ranks took minutes.
@functools.lru_cache(maxsize=32)
def _ranks_of_all(ranks_per_node: int, nodes: Iterable[int], lost: frozenset[int]) -> frozenset[int]:
    firsts = (node * ranks_per_node for node in nodes if node not in lost)
    return frozenset(rank for first in firsts for rank in range(first, first + ranks_per_node))
