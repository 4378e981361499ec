"""``LossCost``: what follows when nodes are lost, in words and as plain values."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from megatron_ft.operators import OperatorId
from megatron_ft.planning.recovery.replicas import Declined

Rung = Literal["replicas", "localized", "memory", "persisted", "checkpoint", "nothing"]
RUNGS: tuple[Rung, ...] = ("replicas", "localized", "memory", "persisted", "checkpoint", "nothing")
"""In order. Only jobs that keep their layout have the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCost:
    """What follows when nodes are lost together."""

    lost_nodes: tuple[int, ...]
    is_gone: bool
    """Whether the nodes with their memory are gone, or only their ranks have died."""
    rung: Rung
    is_automatic: bool
    """Whether the job goes on by itself, in its processes or in new ones; else it ends, and ``run.resume=auto``
    continues it on all nodes."""
    declined: tuple[Declined, ...]
    """Why earlier rungs do not serve, in order."""
    lost_operators: tuple[OperatorId, ...]
    """Of whose present state not all is on a living rank."""
    max_iterations: int | None
    """Committed iterations that are run again, at most; None where the size of a window is measured first."""
    moved_bytes: int | None
    """Experts' state that goes from living ranks to others; None where it was not planned or nothing is moved."""
    is_bitwise: bool
    """Whether the run ends with the bits of one left alone; else sums have another order: it agrees to a tolerance."""
    stages: tuple[int, ...] = ()
    """Pipeline stages that go back where the others keep their state; empty where all or none do."""
    restarted_by: str = "hand"
    """Who starts a job again that has ended: ``hand``, or ``Slurm`` where its batch job does."""
    max_windows: int = 2
    """Windows of iterations that are run again, at most, where ``max_iterations`` is not known."""

    @property
    def is_recoverable(self) -> bool:
        """Whether any state is left to continue from."""
        return self.rung != "nothing"

    def validate(self) -> None:
        """Assert that what is said fits together."""
        assert self.rung in RUNGS, f"{self.rung} is no rung"
        earlier = RUNGS[: RUNGS.index(self.rung)]
        found = tuple(declined.rung for declined in self.declined)
        without = tuple(rung for rung in earlier if rung != "localized")
        assert found in (earlier, without), f"{self.rung} after {found}: every earlier rung declines, in order"
        if self.rung == "replicas":
            assert self.is_automatic and not self.lost_operators and self.max_iterations == 0, "replicas lose nothing"
        assert not (self.is_gone and self.rung == "memory"), "memory of nodes that are gone"

    def summary(self) -> str:
        """One log line."""
        nodes = ", ".join(map(str, self.lost_nodes))
        what = "loss of" if self.is_gone else "death of all ranks of"
        return f"{what} nodes {nodes}: {self.source}; iterations run again: {self.iterations}; {self.result}"

    @property
    def source(self) -> str:
        """What is continued from, in words."""
        if self.rung == "nothing":
            return "starts over" if self.is_automatic else f"starts over, by {self.restarted_by}"
        where = f" (stage {', '.join(map(str, self.stages))})" if self.stages else ""
        return f"{self.rung}{where}" if self.is_automatic else f"{self.rung}, by {self.restarted_by}"

    @property
    def iterations(self) -> str:
        """``max_iterations`` in words."""
        if self.max_iterations is None:
            return f"<= {self.max_windows} windows"
        return "0" if self.max_iterations == 0 else f"<= {self.max_iterations}"

    @property
    def result(self) -> str:
        """``is_bitwise`` in words."""
        return "bitwise" if self.is_bitwise else "tolerance"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

