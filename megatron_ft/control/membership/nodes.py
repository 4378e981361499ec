"""Everything that is known of each node of a job: one record per node."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any


class NodeState(Enum):
    """Relation of a node to the job."""

    ABSENT = "absent"
    """Its ranks neither belong to the membership nor are on their way to it."""
    STARTING = "starting"
    """Its ranks are being started, to join."""
    READY = "ready"
    """All its ranks have reported and wait to join."""
    MEMBER = "member"
    DRAINING = "draining"
    """A member that is to leave at the next change."""
    LOST = "lost"
    """The job continues without it."""
    LEFT = "left"
    """It has left on request."""


class AgentState(Enum):
    """State of a node's own process."""

    UNKNOWN = "unknown"
    """It has not registered yet; it may have been started with the job."""
    STARTING = "starting"
    """It was ordered to be started while the job runs."""
    REGISTERED = "registered"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node, identified by its number as long as the job lives."""

    node: int
    state: NodeState = NodeState.ABSENT
    agent: AgentState = AgentState.UNKNOWN
    was_registered: bool = False
    """Its agent has registered at some time."""
    is_wanted: bool = False
    """It is to be started, to join."""
    is_dismissed: bool = False
    """Its start has failed: what is left of its ranks is to be killed."""
    has_ranks: bool = False
    """Ranks of it were started; they may have ended since."""
    since_seconds: float = 0.0
    """Time on the controller's clock at which its ranks were started (``STARTING``) or became ready (``READY``)."""
    queue_number: int = 0
    """Order of the nodes that join: rises with each start, and with each that becomes ready."""
    is_announced: bool = False
    """Its loss was announced to the other ranks."""
    is_counted: bool = False
    """Its loss in this generation is in ``num_losses``."""
    was_draining: bool = False
    """It was to leave when it was lost."""
    leaves_now: bool = False
    """It leaves by the change that was ordered in this generation."""
    joined_iteration: int = 0
    """Iteration after which it has joined last."""
    num_losses: int = 0
    """Losses and failed starts in a row; one that trained for ``SETTLED_ITERATIONS`` in between starts a new count."""


_JOINING = (NodeState.STARTING, NodeState.READY)
_ALIVE = (NodeState.MEMBER, NodeState.DRAINING)


# No slots: ``cached_property`` keeps its values in the dictionary of the instance.
@dataclass(frozen=True)
class Nodes:
    """The records of all nodes, and which of them are members. Immutable; what follows from them is computed once."""

    members: tuple[int, ...] = ()
    """Nodes of this generation: rising, or by place in a job that keeps its layout. A lost one stays until the next
    membership; where it is ``STARTING`` or ``READY``, its ranks were started again to take its own place."""
    records: tuple[NodeRecord, ...] = ()
    """Records by number; nodes beyond the last are ``ABSENT``."""

    @staticmethod
    def of(members: Iterable[int]) -> "Nodes":
        """The nodes of a job that begins with ``members``."""
        chosen = tuple(members)
        return Nodes(members=chosen).change(chosen, state=NodeState.MEMBER)

    def __getitem__(self, node: int) -> NodeRecord:
        return self.records[node] if node < len(self.records) else NodeRecord(node)

    def change(self, nodes: int | Iterable[int], **changes: Any) -> "Nodes":
        """The same with other fields in the records of ``nodes``."""
        numbers = (nodes,) if isinstance(nodes, int) else tuple(nodes)
        records = list(self.records)
        records += [NodeRecord(node) for node in range(len(records), max(numbers, default=-1) + 1)]
        for node in numbers:
            records[node] = replace(records[node], **changes)
        return Nodes(self.members, tuple(records))

    def lose(self, nodes: Iterable[int]) -> "Nodes":
        """The same without living members of these numbers: the job continues without them."""
        found = self
        for node in nodes:
            record = found[node]
            # A member whose ranks were started again is lost already; LOST would take it out of the queue.
            if record.state in _ALIVE:
                was_draining = record.state is NodeState.DRAINING
                found = found.change(node, state=NodeState.LOST, was_draining=was_draining)
        return found

    def restore_members(self) -> "Nodes":
        """The same with members that were lost counted as living again."""
        found = self
        for node in self.members:
            if node in self.lost:
                state = NodeState.DRAINING if found[node].was_draining else NodeState.MEMBER
                found = found.change(node, state=state, was_draining=False)
        return found

    @property
    def next_queue_number(self) -> int:
        """Number for the next node that joins the queue."""
        return max([record.queue_number for record in self.records], default=0) + 1

    def is_member(self, node: int) -> bool:
        """Whether a node is of the present membership and not lost."""
        return self[node].state in _ALIVE

    @cached_property
    def joining(self) -> tuple[NodeRecord, ...]:
        """Nodes whose ranks were started to join, in the order in which they were started, then became ready."""
        return tuple(sorted([r for r in self.records if r.state in _JOINING], key=lambda record: record.queue_number))

    @cached_property
    def waiting(self) -> frozenset[int]:
        """Nodes that are ``STARTING`` or ``READY``."""
        return frozenset({record.node for record in self.joining})

    @cached_property
    def lost(self) -> frozenset[int]:
        """Nodes that the job continues without: also members whose ranks were started again since."""
        lost = {record.node for record in self.records if record.state is NodeState.LOST}
        return frozenset(lost | (self.waiting & set(self.members)))

    @cached_property
    def announced(self) -> frozenset[int]:
        """Nodes of ``lost`` whose loss was announced to the other ranks."""
        return frozenset({node for node in self.lost if self.records[node].is_announced})

    @cached_property
    def draining(self) -> frozenset[int]:
        """Members that are to leave."""
        return frozenset({record.node for record in self.records if record.state is NodeState.DRAINING})

    @cached_property
    def registered(self) -> frozenset[int]:
        """Nodes whose agent lives."""
        return frozenset({record.node for record in self.records if record.agent is AgentState.REGISTERED})

    @cached_property
    def wanted(self) -> frozenset[int]:
        """Nodes that are to be started, to join."""
        return frozenset({record.node for record in self.records if record.is_wanted})

    @cached_property
    def dismissed(self) -> frozenset[int]:
        """Nodes of which the ranks that are left are to be killed."""
        return frozenset({record.node for record in self.records if record.is_dismissed})

    @cached_property
    def with_ranks(self) -> frozenset[int]:
        """Nodes whose ranks were started."""
        return frozenset({record.node for record in self.records if record.has_ranks})
