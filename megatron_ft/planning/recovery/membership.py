"""Who goes on, who joins, in which order, from where: what every rank is told when a membership begins."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron_ft.planning.recovery.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class NextMembership:
    """The membership of ``generation``. Ranks are numbered anew, without gaps, in the order of their nodes.

    In a job that keeps its layout (``launch.keep_layout``) the order of nodes is that of their places: ranks that stay
    keep their numbers, and newcomers have those of the ranks whose places they take.
    """

    generation: int
    previous_ranks: tuple[int | None, ...]
    """For each new rank, in order, the rank it was in the membership before; None for a *newcomer*, which has no
    state of the run."""
    nodes: tuple[int, ...]
    """For each new rank its node, by the number it has had since the job began: rising, or by place. Ranks of a node
    stand together, in the order of their local ranks."""
    target: Target
    master_addr: str
    master_port: int
    """Where the store of this generation listens: in its rank 0."""
    reason: str
    """Why the one before ended."""

    @property
    def world_size(self) -> int:
        """Ranks."""
        return len(self.previous_ranks)

    @property
    def newcomers(self) -> tuple[int, ...]:
        """New ranks that have no state of the run."""
        return tuple(rank for rank, previous in enumerate(self.previous_ranks) if previous is None)


    def validate(self) -> None:
        """Assert order, and that somebody has state."""
        staying = [previous for previous in self.previous_ranks if previous is not None]
        assert staying, "no rank has state"
        assert staying == sorted(set(staying)), "ranks keep their order"
        assert len(self.nodes) == self.world_size, "a node for each rank"
        together = [node for node, _ in groupby(self.nodes)]
        assert len(together) == len(set(together)), "ranks of a node stand together"
        by_place = all(previous in (None, rank) for rank, previous in enumerate(self.previous_ranks))
        assert by_place or together == sorted(together), "nodes rise, or ranks keep their numbers"
        self.target.validate()

    def new_rank(self, previous: int) -> int | None:
        """The number of a rank of the membership before; None where it does not go on."""
        return self.previous_ranks.index(previous) if previous in self.previous_ranks else None

    def rank_on(self, node: int, local_rank: int) -> int | None:
        """The number of the process ``local_rank`` (from 0) of a node; None where it is not of this membership."""
        rank = self.nodes.index(node) + local_rank if node in self.nodes else self.world_size
        return rank if rank < self.world_size and self.nodes[rank] == node else None

    def summary(self) -> str:
        """One log line."""
        nodes = list(dict.fromkeys(self.nodes))
        joining = f", {len(self.newcomers)} of them new" if self.newcomers else ""
        size = f"{self.world_size} ranks{joining} on nodes {nodes}"
        return f"generation {self.generation}: {size}; {self.target.summary()}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
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
        """Inverse of ``to_json``; validated."""
        lists: dict[str, Sequence[int | None]] = {name: tuple(content[name]) for name in ("previous_ranks", "nodes")}
        found = cls(**{**content, **lists, "target": Target.from_json(content["target"])})
        found.validate()
        return found
