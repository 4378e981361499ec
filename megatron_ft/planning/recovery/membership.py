"""``NextMembership``: the ranks of the next membership, their order, and the iteration after which they continue.

The job continues after the newest iteration of which at least one survivor has the complete vote.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ft.errors import RecoveryError
from megatron_ft.planning.iteration import Vote

# A vote is complete only after every rank has contributed. So if one survivor has the complete vote of an iteration,
# every survivor still has its reduced gradients and can finish the iteration with the values of this vote. If no
# survivor has the complete vote, all survivors return to the state before the iteration.


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Progress of a rank at the end of a membership; the rank has the complete state after iteration ``completed``."""

    rank: int
    """Rank number in the old membership."""
    generation: int
    completed: int
    """Newest iteration that this rank has committed or skipped; 0 if there is none."""
    contributed: int
    """Newest iteration on which this rank has voted: ``completed`` or ``completed + 1``. The rank still has the
    gradients of this iteration."""
    vote: Vote | None
    """Newest commit vote of which this rank has received all parts. It is about iteration ``completed`` or ``completed
    + 1``; None before the first vote."""
    has_state: bool = True
    """False for a joining rank that had not received its state when the membership ended."""
    is_formed: bool = True
    """Whether the rank had received its state in this membership, even if the membership has committed no iteration."""

    def validate(self) -> None:
        """Check that the fields are consistent.

        Raises:
            RecoveryError: the fields contradict each other.
        """
        settled = 0 if self.vote is None else self.vote.iteration
        in_order = self.completed <= self.contributed <= self.completed + 1 and settled <= self.contributed
        if not in_order or (self.vote is not None and settled < self.completed):
            vote = "no complete vote" if self.vote is None else f"the complete vote of iteration {settled}"
            raise RecoveryError(
                f"rank {self.rank} reports impossible progress: it has completed iteration {self.completed}, has voted "
                f"on iteration {self.contributed} (sent its results to all ranks), and has {vote}. It can only vote on "
                "the completed iteration and the next one, and has a complete vote only if it has voted itself"
            )

    def to_json(self) -> dict[str, Any]:
        content = {name: getattr(self, name) for name in self.__slots__}
        return {**content, "vote": None if self.vote is None else self.vote.to_record()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Position":
        vote = content["vote"]
        return cls(**{**content, "vote": None if vote is None else Vote.from_record(vote)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Iteration after which every survivor continues."""

    iteration: int
    vote: Vote | None
    """Vote with which survivors finish ``iteration``; None if all survivors have already completed it."""

    def validate(self) -> None:
        """Assert that ``vote`` is the vote of ``iteration``."""
        assert self.vote is None or self.vote.iteration == self.iteration, "the vote is of another iteration"

    def summary(self) -> str:
        how = "all ranks completed it" if self.vote is None else "its vote was complete"
        return f"continue after iteration {self.iteration}: {how}"

    def to_json(self) -> dict[str, Any]:
        return {"iteration": self.iteration, "vote": None if self.vote is None else self.vote.to_record()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Target":
        vote = content["vote"]
        return cls(iteration=content["iteration"], vote=None if vote is None else Vote.from_record(vote))


def choose_target(positions: Sequence[Position]) -> Target:
    """Choose the iteration after which the survivors of one generation continue.

    Raises:
        RecoveryError: no rank with state survives, or the reports of ranks contradict each other.
    """
    if not positions:
        raise RecoveryError("no rank survives")
    if not any(position.has_state for position in positions):
        raise RecoveryError("no surviving rank has the model state: all ranks that had it are lost")
    for position in positions:
        position.validate()
    _check_alike("generation", [position.generation for position in positions])
    # A complete vote proves that every rank has contributed, including lost ranks. So no survivor is more than one
    # iteration behind, and every survivor still has the gradients to finish the iteration.
    settled = {position.vote.iteration: position.vote for position in positions if position.vote is not None}
    target = max([position.completed for position in positions] + list(settled))
    for position in positions:
        # If a position contradicts this, the ranks have not run the same iterations: their states must not be mixed.
        if position.completed < target and position.contributed != target:
            raise RecoveryError(
                f"another rank knows the results of all ranks for iteration {target}, but rank {position.rank} has "
                f"completed iteration {position.completed} and has no gradients of iteration {target} to finish it"
            )
    votes = [p.vote for p in positions if p.vote is not None and p.vote.iteration == target]
    # Votes are compared as text: this is exact for floats, and NaN equals NaN.
    _check_alike(f"results of iteration {target}", [repr(vote) for vote in votes])
    if all(position.completed == target for position in positions):
        return Target(iteration=target, vote=None)
    return Target(iteration=target, vote=votes[0])


def _check_alike(name: str, values: Sequence[object]) -> None:
    if any(value != values[0] for value in values):
        found = ", ".join(sorted(set(map(str, values))))
        raise RecoveryError(f"all surviving ranks must report the same {name}, but they report {found}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NextMembership:
    """Next membership: the ranks that train together, numbered without gaps in Megatron's order (``layout.py``).

    With ``keeps_layout``, joining ranks get the numbers of the ranks that they replace. Processes on ``members`` that
    have no rank are *hot spares*: they wait for the next membership.
    """

    generation: int
    previous_ranks: tuple[int | None, ...]
    """Rank that each rank had in the previous membership; None for a *joining* rank, which has no state."""
    nodes: tuple[int, ...]
    """Node of each rank. Node numbers never change."""
    local_ranks: tuple[int, ...] = ()
    """Index of each rank's process on its node, from 0. If empty, the ranks of a node are its first processes, in
    order."""
    members: tuple[int, ...] = ()
    """All nodes of the membership. An empty tuple stands for the nodes of the ranks."""
    keeps_layout: bool = False
    """Whether the ranks keep the layout of the previous membership, so that surviving ranks keep their numbers and
    their state in place. Otherwise every rank determines which state it needs in the new layout."""
    target: Target
    master_addr: str
    master_port: int
    """Port of the TCP store of this generation (membership). The store runs on rank 0."""
    reason: str
    """Reason for the end of the previous membership."""

    def __post_init__(self) -> None:
        if not self.local_ranks:
            counts: Counter[int] = Counter()
            local_ranks = []
            for node in self.nodes:
                local_ranks.append(counts[node])
                counts[node] += 1
            object.__setattr__(self, "local_ranks", tuple(local_ranks))
        if not self.members:
            object.__setattr__(self, "members", tuple(dict.fromkeys(self.nodes)))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.previous_ranks)

    @property
    def newcomers(self) -> tuple[int, ...]:
        """Joining ranks, which have no state of the run."""
        return tuple(rank for rank, previous in enumerate(self.previous_ranks) if previous is None)

    def validate(self) -> None:
        """Assert that ranks have separate processes on nodes of the membership, and that at least one has state."""
        staying = [previous for previous in self.previous_ranks if previous is not None]
        assert staying, "no rank has state"
        assert len(staying) == len(set(staying)), "two ranks had the same number"
        assert len(self.nodes) == len(self.local_ranks) == self.world_size, "not every rank has a node"
        assert len(set(zip(self.nodes, self.local_ranks, strict=True))) == self.world_size, "ranks share a process"
        assert len(self.members) == len(set(self.members)), "a node is listed twice"
        assert set(self.nodes) <= set(self.members), "a rank is on a node that is not a member"
        self.target.validate()

    def rank_on(self, node: int, local_rank: int) -> int | None:
        """Return the rank of the process ``local_rank`` (from 0) on ``node``; None if the process has no rank."""
        processes = zip(self.nodes, self.local_ranks, strict=True)
        return next((rank for rank, process in enumerate(processes) if process == (node, local_rank)), None)

    def summary(self) -> str:
        nodes = list(self.members)
        joining = f", {len(self.newcomers)} of them new" if self.newcomers else ""
        size = f"{self.world_size} ranks{joining} on nodes {nodes}"
        return f"generation {self.generation}: {size}; {self.target.summary()}"

    def to_json(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "previous_ranks": list(self.previous_ranks),
            "nodes": list(self.nodes),
            "local_ranks": list(self.local_ranks),
            "members": list(self.members),
            "keeps_layout": self.keeps_layout,
            "target": self.target.to_json(),
            "master_addr": self.master_addr,
            "master_port": self.master_port,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "NextMembership":
        names = ("previous_ranks", "nodes", "local_ranks", "members")
        # Decisions that an older version of the program recorded lack ``local_ranks`` and ``members``.
        lists: dict[str, Sequence[int | None]] = {name: tuple(content.get(name, ())) for name in names}
        found = cls(**{**content, **lists, "target": Target.from_json(content["target"])})
        found.validate()
        return found
