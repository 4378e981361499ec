"""By which placement a rank holds the state after an iteration, and how the job came from its commit to there."""

from dataclasses import dataclass
from typing import Any

from megatron_ft.mcore.loop.placing import PlacementState

Key = tuple[int, bool]
"""Generation, and whether experts have moved in it for the ranks that stay: later ones are greater."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A rank has all the state that ``placement`` gives it.

    A rank can have several holdings of one iteration: that of the membership that committed the iteration, one of each
    membership that has formed since and broke before it committed another, and one of an evacuation.
    """

    generation: int
    """Membership that the placement is of."""
    is_evacuation: bool = False
    """Whether the placement took over for the ranks that stay in the next membership."""
    rank: int
    """Number of the rank in that membership."""
    nodes: tuple[int, ...]
    """Node of each rank of that membership."""
    placement: PlacementState | None
    """None where experts stay where Megatron puts them."""
    changes: tuple[str, ...] = ()
    """The memberships since the commit that led here, as entries of ``launch.membership_schedule``."""

    @property
    def key(self) -> Key:
        """The same on all ranks that have it."""
        return self.generation, self.is_evacuation

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "generation": self.generation,
            "is_evacuation": self.is_evacuation,
            "rank": self.rank,
            "nodes": list(self.nodes),
            "placement": None if self.placement is None else self.placement.to_json(),
            "changes": list(self.changes),
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Holding":
        """Inverse of ``to_json``."""
        placement = content["placement"]
        lists = {name: tuple(content[name]) for name in ("nodes", "changes")}
        return cls(
            **{**content, **lists, "placement": None if placement is None else PlacementState.from_json(placement)}
        )
