"""``LossCost``: the strategy by which a job recovers from a loss of nodes, and the cost of the recovery."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from megatron_ft.operators import OperatorId
from megatron_ft.planning.recovery.replicas import Declined

Rung = Literal["replicas", "localized", "memory", "persisted", "checkpoint", "nothing"]
RUNGS: tuple[Rung, ...] = ("replicas", "localized", "memory", "persisted", "checkpoint", "nothing")
"""Recovery strategies in the order in which they are tried; ``localized`` only with ``recovery.keep_layout``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCost:
    """Strategy by which a job recovers after several nodes are lost at the same time, and the cost of the recovery."""

    lost_nodes: tuple[int, ...]
    is_gone: bool
    """Whether the nodes are lost with their memory; otherwise only their ranks have died."""
    rung: Rung
    """Strategy that recovers the job."""
    is_automatic: bool
    """Whether the job continues without intervention, in its present processes or new ones. Otherwise the job ends; it
    can be started on all nodes with ``run.resume=auto``."""
    declined: tuple[Declined, ...]
    """Strategies that are tried before the one that recovers, each with the reason why it cannot be used."""
    lost_operators: tuple[OperatorId, ...]
    """Operators whose state is not complete on the surviving ranks."""
    max_iterations: int | None
    """Largest possible number of committed iterations that run again; None if the size of a window is not measured."""
    moved_bytes: int | None
    """Bytes of expert state that surviving ranks send; None if they were not computed or no state is sent."""
    is_bitwise: bool
    """Whether the run gives the same results as a run without failures, bit by bit. Otherwise sums are computed in
    another order, and results agree within a tolerance."""
    stages: tuple[int, ...] = ()
    """Pipeline stages that replay while other stages keep their state; empty if all stages replay or none does."""
    restarted_by: str = "hand"
    """Agent that starts the job again after its end: ``hand`` (the user) or ``Slurm``."""
    max_windows: int = 2
    """Largest possible number of windows that run again, used if ``max_iterations`` is None."""

    @property
    def is_recoverable(self) -> bool:
        """Whether the job can continue from some state; otherwise it starts again at iteration 0."""
        return self.rung != "nothing"

    def validate(self) -> None:
        """Assert that the fields are consistent."""
        assert self.rung in RUNGS, f"unknown strategy {self.rung}"
        earlier = RUNGS[: RUNGS.index(self.rung)]
        found = tuple(declined.rung for declined in self.declined)
        # Jobs without ``recovery.keep_layout`` never try this strategy.
        without = tuple(rung for rung in earlier if rung != "localized")
        assert found in (earlier, without), f"strategy {self.rung}: {found} are declined instead of {earlier}"
        if self.rung == "replicas":
            assert self.is_automatic and not self.lost_operators and self.max_iterations == 0, (
                "a recovery from replicas must be automatic, and must lose no operators and no iterations"
            )
        assert not (self.is_gone and self.rung == "memory"), "windows in the memory of lost nodes cannot be loaded"

    def summary(self) -> str:
        nodes = ", ".join(map(str, self.lost_nodes))
        what = "loss of" if self.is_gone else "death of all ranks of"
        noun = "node" if len(self.lost_nodes) == 1 else "nodes"
        return f"{what} {noun} {nodes}: {self.source}; iterations run again: {self.iterations}; {self.result}"

    @property
    def source(self) -> str:
        """Return a text that names the state from which the job recovers."""
        if self.rung == "nothing":
            return "starts over" if self.is_automatic else f"starts over, by {self.restarted_by}"
        where = f" (stage {', '.join(map(str, self.stages))})" if self.stages else ""
        return f"{self.rung}{where}" if self.is_automatic else f"{self.rung}, by {self.restarted_by}"

    @property
    def iterations(self) -> str:
        """Return ``max_iterations`` as text."""
        if self.max_iterations is None:
            return f"<= {self.max_windows} windows"
        return "0" if self.max_iterations == 0 else f"<= {self.max_iterations}"

    @property
    def result(self) -> str:
        """Return ``is_bitwise`` as text."""
        return "bitwise" if self.is_bitwise else "tolerance"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
