"""``LossCost``: the recovery from a loss of nodes, and its cost."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from megatron_ft.operators import OperatorId
from megatron_ft.planning.recovery.replicas import Declined

Rung = Literal["replicas", "localized", "memory", "persisted", "checkpoint", "nothing"]
RUNGS: tuple[Rung, ...] = ("replicas", "localized", "memory", "persisted", "checkpoint", "nothing")
"""Recovery strategies in the order in which they are tried; ``localized`` only with ``recovery.keep_layout``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCost:
    """Cost of losing nodes together."""

    lost_nodes: tuple[int, ...]
    is_gone: bool
    """Whether the nodes are lost with their memory; otherwise only their ranks have died."""
    rung: Rung
    """Strategy that recovers the job."""
    is_automatic: bool
    """Whether the job continues by itself, in its processes or new ones; otherwise it ends, and ``run.resume=auto``
    continues it on all nodes."""
    declined: tuple[Declined, ...]
    """Reasons why earlier strategies cannot recover, in order."""
    lost_operators: tuple[OperatorId, ...]
    """Operators whose state is not complete on the surviving ranks."""
    max_iterations: int | None
    """Upper bound of committed iterations that run again; None if the size of a window is not measured yet."""
    moved_bytes: int | None
    """Expert state that surviving ranks send; None if it was not planned or nothing moves."""
    is_bitwise: bool
    """Whether the run ends with the bits of an undisturbed run; otherwise sums have another order, and it agrees within
    a tolerance."""
    stages: tuple[int, ...] = ()
    """Pipeline stages that replay while the others keep their state; empty if all or none do."""
    restarted_by: str = "hand"
    """Restart of a job that has ended: by ``hand`` (the user) or by ``Slurm``."""
    max_windows: int = 2
    """Upper bound of windows of iterations that run again, where ``max_iterations`` is not known."""

    @property
    def is_recoverable(self) -> bool:
        """Whether there is any state from which to continue."""
        return self.rung != "nothing"

    def validate(self) -> None:
        """Assert that the fields are consistent."""
        assert self.rung in RUNGS, f"unknown strategy {self.rung}"
        earlier = RUNGS[: RUNGS.index(self.rung)]
        found = tuple(declined.rung for declined in self.declined)
        # Jobs that do not keep their layout never try this one.
        without = tuple(rung for rung in earlier if rung != "localized")
        assert found in (earlier, without), f"{self.rung}: the declined strategies before it are {found}"
        if self.rung == "replicas":
            assert self.is_automatic and not self.lost_operators and self.max_iterations == 0, (
                "recovery from replicas with a loss"
            )
        assert not (self.is_gone and self.rung == "memory"), "memory of lost nodes cannot be a source"

    def summary(self) -> str:
        nodes = ", ".join(map(str, self.lost_nodes))
        what = "loss of" if self.is_gone else "death of all ranks of"
        return f"{what} nodes {nodes}: {self.source}; iterations run again: {self.iterations}; {self.result}"

    @property
    def source(self) -> str:
        """Source of the state, as text."""
        if self.rung == "nothing":
            return "starts over" if self.is_automatic else f"starts over after {self.restarted_by}"
        where = f" (stage {', '.join(map(str, self.stages))})" if self.stages else ""
        return f"{self.rung}{where}" if self.is_automatic else f"{self.rung}, by {self.restarted_by}"

    @property
    def iterations(self) -> str:
        """``max_iterations`` as text."""
        if self.max_iterations is None:
            return f"<= {self.max_windows} windows"
        return "0" if self.max_iterations == 0 else f"<= {self.max_iterations}"

    @property
    def result(self) -> str:
        """``is_bitwise`` as text."""
        return "bitwise" if self.is_bitwise else "tolerance"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
