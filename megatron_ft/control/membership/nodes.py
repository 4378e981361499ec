"""One record per node with everything that is known of it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any


class NodeState(Enum):
    """Relation of a node to the job."""

    ABSENT = "absent"
    """Its ranks are not in the membership and do not wait to join it."""
    STARTING = "starting"
    """Its ranks are being started and will join."""
    READY = "ready"
    """All its ranks have connected and wait to join."""
    MEMBER = "member"
    DRAINING = "draining"
    """It is a member and leaves at the next change."""
    LOST = "lost"
    """The job continues without it."""
    LEFT = "left"
    """It has left on request."""


class AgentState(Enum):
    """State of a node's agent."""

    UNKNOWN = "unknown"
    """The agent has not registered yet; it may have been started with the job."""
    STARTING = "starting"
    """The agent is being started while the job runs."""
    REGISTERED = "registered"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node, identified by a number that never changes."""

    node: int
    state: NodeState = NodeState.ABSENT
    agent: AgentState = AgentState.UNKNOWN
    was_registered: bool = False
    """Its agent has registered at some time."""
    is_wanted: bool = False
    """Whether the node shall be started and join."""
    is_dismissed: bool = False
    """Whether the start of the node has failed, so that its remaining ranks must be killed."""
    has_ranks: bool = False
    """Its ranks were started; they may have ended since."""
    since_seconds: float = 0.0
    """Time at which its ranks were started (``STARTING``) or became ready (``READY``), on the controller's clock."""
    queue_number: int = 0
    """Position among joining nodes; increases when a node is started and when it becomes ready."""
    is_announced: bool = False
    """The other ranks were informed of its loss."""
    is_counted: bool = False
    """``num_losses`` includes its loss in this generation."""
    was_draining: bool = False
    """It was to leave when it was lost."""
    leaves_now: bool = False
    """It leaves by the change that was ordered in this generation."""
    joined_iteration: int = 0
    """Iteration after which it last joined."""
    agent_since_seconds: float = 0.0
    """Time on the controller's clock at which the start of its agent was ordered."""
    has_unregistered_agent: bool = False
    """Whether an agent that did not register in time may still run."""
    not_before_seconds: float = 0.0
    """Time on the controller's clock before which it is not started again after a failed start."""
    num_losses: int = 0
    """Losses and failed starts in a row; ``SETTLED_ITERATIONS`` iterations of training reset the count."""


_JOINING = (NodeState.STARTING, NodeState.READY)
_ALIVE = (NodeState.MEMBER, NodeState.DRAINING)


# No slots: ``cached_property`` keeps its values in the dictionary of the instance.
@dataclass(frozen=True)
class Nodes:
    """The records of all nodes, and which of them are members. Immutable; derived values are cached."""

    members: tuple[int, ...] = ()
    """Nodes of this generation: ascending, or by place in a job that keeps its layout. A lost member stays in the
    list until the next membership; if it is ``STARTING`` or ``READY``, its ranks were started again to take its own
    place."""
    records: tuple[NodeRecord, ...] = ()
    """Records by node number; nodes beyond the last record are ``ABSENT``."""

    @staticmethod
    def of(members: Iterable[int]) -> "Nodes":
        """Return the nodes of a job that begins with ``members``."""
        chosen = tuple(members)
        return Nodes(members=chosen).change(chosen, state=NodeState.MEMBER)

    def __getitem__(self, node: int) -> NodeRecord:
        return self.records[node] if node < len(self.records) else NodeRecord(node)

    def change(self, nodes: int | Iterable[int], **changes: Any) -> "Nodes":
        """Return the nodes with other fields in the records of ``nodes``."""
        numbers = (nodes,) if isinstance(nodes, int) else tuple(nodes)
        records = list(self.records)
        records += [NodeRecord(node) for node in range(len(records), max(numbers, default=-1) + 1)]
        for node in numbers:
            records[node] = replace(records[node], **changes)
        return Nodes(self.members, tuple(records))

    def lose(self, nodes: Iterable[int]) -> "Nodes":
        """Return the nodes with the living members among ``nodes`` marked as lost."""
        found = self
        for node in nodes:
            record = found[node]
            # A member whose ranks were started again is lost already; LOST would take it out of the queue.
            if record.state in _ALIVE:
                was_draining = record.state is NodeState.DRAINING
                found = found.change(node, state=NodeState.LOST, was_draining=was_draining)
        return found

    def restore_members(self) -> "Nodes":
        """Return the nodes with lost members counted as living again."""
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
        """Return the joining nodes in the order in which they were started, then in which they became ready."""
        return tuple(sorted([r for r in self.records if r.state in _JOINING], key=lambda record: record.queue_number))

    @cached_property
    def waiting(self) -> frozenset[int]:
        """Return the nodes that are ``STARTING`` or ``READY``."""
        return frozenset({record.node for record in self.joining})

    @cached_property
    def lost(self) -> frozenset[int]:
        """Return the lost nodes, also members whose ranks were started again since."""
        lost = {record.node for record in self.records if record.state is NodeState.LOST}
        return frozenset(lost | (self.waiting & set(self.members)))

    @cached_property
    def announced(self) -> frozenset[int]:
        """Return the lost nodes whose loss the other ranks were informed of."""
        return frozenset({node for node in self.lost if self.records[node].is_announced})

    @cached_property
    def draining(self) -> frozenset[int]:
        """Return the members that have to leave."""
        return frozenset({record.node for record in self.records if record.state is NodeState.DRAINING})

    @cached_property
    def registered(self) -> frozenset[int]:
        """Return the nodes whose agent lives."""
        return frozenset({record.node for record in self.records if record.agent is AgentState.REGISTERED})

    @cached_property
    def wanted(self) -> frozenset[int]:
        """Return the nodes that shall be started and join."""
        return frozenset({record.node for record in self.records if record.is_wanted})

    @cached_property
    def dismissed(self) -> frozenset[int]:
        """Return the nodes whose remaining ranks must be killed."""
        return frozenset({record.node for record in self.records if record.is_dismissed})

    @cached_property
    def with_ranks(self) -> frozenset[int]:
        """Return the nodes whose ranks were started."""
        return frozenset({record.node for record in self.records if record.has_ranks})
