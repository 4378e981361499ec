"""``WindowPlan``: units of state that each iteration of a window captures in full. ``WindowKey``: id of a window."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_ft.operator_state import StateShard
from megatron_ft.operators import OperatorId
from megatron_ft.planning.snapshot.activations import Activations


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class WindowKey:
    """Identity of a captured window, the same on every rank of the job."""

    start_iteration: int
    generation: int
    """Generation of the membership that captured the window. Windows of two generations are never mixed."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Unit:
    """An operator, or one of ``num_parts`` equal ranges of each of its shards, that is captured in one slice."""

    operator: OperatorId
    part: int = 0
    num_parts: int = 1

    def range_of(self, shard: StateShard) -> tuple[int, int]:
        """Return the elements (start, stop) of ``shard`` that belong to this unit."""
        return (
            # The end of one part is computed as the start of the next: no gap and no overlap, whatever the rounding.
            shard.start + shard.num_elements * self.part // self.num_parts,
            shard.start + shard.num_elements * (self.part + 1) // self.num_parts,
        )

    def __str__(self) -> str:
        return str(self.operator) + ("" if self.num_parts == 1 else f"[{self.part + 1}/{self.num_parts}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBasis:
    """Inputs from which a plan was made; a new plan is made if the present values differ too much from them."""

    budget_bytes: int
    """Bytes that a rank can capture within one iteration."""
    peak_bytes: int
    """Bytes of the largest slice on any rank."""
    activations: Activations | None = None
    """Activations as one record; None if the order does not depend on them."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "PlanBasis":
        activations = content["activations"]
        given = None if activations is None else Activations.from_json(activations)
        return cls(budget_bytes=content["budget_bytes"], peak_bytes=content["peak_bytes"], activations=given)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """Plan of a window of the whole job. Slice i is captured from the state after iteration ``start + i``.

    Slice i contains its own units in full, the units of later slices as compute weights only, and nothing of the units
    of earlier slices (MoEvement, section 3.2). A window of one slice is a dense snapshot.
    """

    slices: tuple[tuple[Unit, ...], ...]
    interval_iterations: int
    """Iterations from the start of a window to the start of the next; at least the number of slices."""
    reason: str = ""
    """Reason for the number of slices and the order of units."""
    basis: PlanBasis | None = None
    """Inputs from which the plan was made; None for a plan that was not made by a policy."""

    @property
    def num_iterations(self) -> int:
        """Number of slices, which is the number of iterations of a window (W)."""
        return len(self.slices)

    def active(self, index: int) -> tuple[Unit, ...]:
        """Return the units that have their full state after slices 0 to ``index`` are loaded."""
        return tuple(unit for units in self.slices[: index + 1] for unit in units)

    def frozen(self, index: int) -> tuple[Unit, ...]:
        """Return the units that have only compute weights after slices 0 to ``index`` are loaded."""
        return tuple(unit for units in self.slices[index + 1 :] for unit in units)

    def validate(self, operators: Iterable[OperatorId]) -> None:
        """Assert that every part of every operator is captured exactly once, and that windows do not overlap."""
        assert self.slices and all(self.slices), "a slice captures nothing, or the window has no slice"
        # A rank fills one window at a time: the snapshot server drops an incomplete window when the next one begins.
        assert self.interval_iterations >= self.num_iterations, (
            f"windows of {self.num_iterations} slices overlap at an interval of {self.interval_iterations} iterations"
        )
        parts: dict[OperatorId, list[Unit]] = {}
        for unit in self.active(self.num_iterations - 1):
            parts.setdefault(unit.operator, []).append(unit)
        for operator, units in parts.items():
            found = sorted((unit.part, unit.num_parts) for unit in units)
            wanted = [(part, len(units)) for part in range(len(units))]
            assert found == wanted, f"(part, num_parts) captured of {operator}: {found} instead of {wanted}"
        missing = set(operators) ^ set(parts)
        assert not missing, f"operators are not captured, or are unknown: {sorted(map(str, missing))[:5]}"

    def summary(self) -> str:
        sizes = " ".join(str(len(units)) for units in self.slices)
        return (
            f"window of {self.num_iterations} iterations every {self.interval_iterations} iterations: "
            f"operators or parts in each slice: {sizes}; {self.reason}"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "WindowPlan":
        slices = tuple(
            tuple(Unit(**{**unit, "operator": OperatorId(**unit["operator"])}) for unit in units)
            for units in content["slices"]
        )
        basis = content.get("basis")
        return cls(
            slices=slices,
            interval_iterations=content["interval_iterations"],
            reason=content["reason"],
            basis=None if basis is None else PlanBasis.from_json(basis),
        )
