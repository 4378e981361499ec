"""Who goes on, in which order, from where: what every survivor is told when a membership ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ft.planning.recovery.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class NextMembership:
    """The membership of ``generation``. Ranks are numbered anew, without gaps, in the old order."""

    generation: int
    previous_ranks: tuple[int, ...]
    """For each new rank, in order, the rank it was in the membership before."""
    nodes: tuple[int, ...]
    """For each new rank its node, by the number it has had since the job began."""
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

    def validate(self) -> None:
        """Assert order."""
        assert list(self.previous_ranks) == sorted(set(self.previous_ranks)), "ranks keep their order"
        assert len(self.nodes) == self.world_size and list(self.nodes) == sorted(self.nodes), "a node for each rank"
        self.target.validate()

    def new_rank(self, previous: int) -> int | None:
        """The number of a rank of the membership before; None where it does not go on."""
        return self.previous_ranks.index(previous) if previous in self.previous_ranks else None

    def summary(self) -> str:
        """One log line."""
        nodes = sorted(set(self.nodes))
        return f"generation {self.generation}: {self.world_size} ranks on nodes {nodes}; {self.target.summary()}"

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
        lists: dict[str, Sequence[int]] = {name: tuple(content[name]) for name in ("previous_ranks", "nodes")}
        found = cls(**{**content, **lists, "target": Target.from_json(content["target"])})
        found.validate()
        return found
