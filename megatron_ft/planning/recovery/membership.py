"""``NextMembership``: the ranks of the next membership, their order, and the iteration after which they continue."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron_ft.planning.recovery.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class NextMembership:
    """The membership of ``generation``. Ranks are renumbered, without gaps, in the order of their nodes.

    With ``recovery.keep_layout`` surviving ranks keep their numbers, and joining ranks take the numbers of those that
    they replace.
    """

    generation: int
    previous_ranks: tuple[int | None, ...]
    """Previous rank of each new rank, in order; None for a *joining* rank, which has no state of the run."""
    nodes: tuple[int, ...]
    """Node of each new rank: ascending, or in the order of the kept layout. Ranks of a node are adjacent, in the order
    of local ranks. Node numbers never change."""
    target: Target
    master_addr: str
    master_port: int
    """Port of the store of this generation, on its rank 0."""
    reason: str
    """Reason for the end of the previous membership."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.previous_ranks)

    @property
    def newcomers(self) -> tuple[int, ...]:
        """New ranks that have no state of the run."""
        return tuple(rank for rank, previous in enumerate(self.previous_ranks) if previous is None)

    def validate(self) -> None:
        """Assert that ranks and nodes are in order and that at least one rank has state."""
        staying = [previous for previous in self.previous_ranks if previous is not None]
        assert staying, "no rank has state"
        # Sums are taken in rank order: a scheduled history repeats one of failures only if nodes decide that order.
        assert staying == sorted(set(staying)), "ranks changed their order"
        assert len(self.nodes) == self.world_size, "not every rank has a node"
        together = [node for node, _ in groupby(self.nodes)]
        assert len(together) == len(set(together)), "ranks of a node are not adjacent"
        keeps_ranks = all(previous in (None, rank) for rank, previous in enumerate(self.previous_ranks))
        assert keeps_ranks or together == sorted(together), (
            "nodes are not ascending, although ranks change their numbers"
        )
        self.target.validate()

    def new_rank(self, previous: int) -> int | None:
        """New number of a rank of the previous membership; None if it is not a member."""
        return self.previous_ranks.index(previous) if previous in self.previous_ranks else None

    def rank_on(self, node: int, local_rank: int) -> int | None:
        """Rank of the process ``local_rank`` (from 0) of a node; None if it is not a member."""
        # Ranks of a node are adjacent, which ``validate`` asserts.
        rank = self.nodes.index(node) + local_rank if node in self.nodes else self.world_size
        return rank if rank < self.world_size and self.nodes[rank] == node else None

    def summary(self) -> str:
        nodes = list(dict.fromkeys(self.nodes))
        joining = f", {len(self.newcomers)} of them new" if self.newcomers else ""
        size = f"{self.world_size} ranks{joining} on nodes {nodes}"
        return f"generation {self.generation}: {size}; {self.target.summary()}"

    def to_json(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "previous_ranks": list(self.previous_ranks),
            "nodes": list(self.nodes),
            "target": self.target.to_json(),
            "master_addr": self.master_addr,
            "master_port": self.master_port,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "NextMembership":
        lists: dict[str, Sequence[int | None]] = {name: tuple(content[name]) for name in ("previous_ranks", "nodes")}
        found = cls(**{**content, **lists, "target": Target.from_json(content["target"])})
        found.validate()
        return found
