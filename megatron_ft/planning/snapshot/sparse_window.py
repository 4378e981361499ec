"""Sparse windows: every iteration captures one slice of the operators, with the fewest slices that cause no stall."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_ft.errors import ConfigError
from megatron_ft.operators import OperatorId
from megatron_ft.planning.snapshot.activations import ReorderTrigger
from megatron_ft.planning.snapshot.demand import Demand, UnitBytes
from megatron_ft.planning.snapshot.orders import HardCount, OperatorOrder
from megatron_ft.planning.snapshot.packing import Packing, least_peak_bytes, num_parts
from megatron_ft.planning.snapshot.plan import Unit, WindowPlan
from megatron_ft.planning.snapshot.policy import SnapshotContext, make_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseWindow:
    """Consecutive windows, each of which captures every operator once (MoEvement, sections 3.2 and 3.5).

    Algorithm 1 of the paper assumes operators of equal size on one rank. This policy packs slices by their bytes on all
    ranks together, so that all ranks have the same number of slices. Operators that do not fit into a slice are split
    into equal parts. If an iteration is too short to capture the compute weights, training stalls. The plan then makes
    the largest slice as small as possible, and its ``reason`` states the stall.
    """

    order: OperatorOrder = field(default_factory=HardCount)
    """Order in which operators are captured."""
    balance: bool = True
    """Whether all slices get about the same size; otherwise early slices are filled up to the budget."""
    min_window_iterations: int = 1
    """Smallest number of slices, unless there are fewer units."""
    max_window_iterations: int = 32
    """Largest number of slices. If the budget requires more, slices exceed the budget and training stalls."""
    max_parts: int = 64
    """Largest number of parts into which one operator is split."""
    replan_drift: float = 0.2
    """Relative change of the bytes that an iteration can capture, or of the largest slice, above which a new plan is
    made."""
    reorder: ReorderTrigger = field(default_factory=ReorderTrigger)
    """Change of expert activations that requires a new plan."""

    @property
    def trigger(self) -> ReorderTrigger | None:
        """``reorder``, or None if the order does not depend on activations."""
        return self.reorder if self.order.uses_activations else None

    def plan(self, demand: Demand, context: SnapshotContext) -> WindowPlan:
        """Plan the window with the fewest slices that does not stall training.

        Raises:
            ConfigError: a field of the policy or a measurement is out of range.
        """
        self._check()
        context.validate()
        # Measurements are already reduced over the job: with local values, every rank would make a different plan.
        budget = context.budget_bytes
        ordered = self.order.order(demand.operators, context.activations)
        units = _cut(demand, ordered, budget, self.max_parts)
        packing = self._pack(demand.bytes_of(units).distinct_ranks(), budget)
        num_cut = len({unit.operator for unit in units if unit.num_parts > 1})
        return make_plan(
            demand,
            context,
            [[units[row] for row in rows] for rows in packing.slices],
            interval_iterations=len(packing.slices),
            reason=f"{type(self.order).__name__} order, operators split into parts: {num_cut}",
            activations=context.activations if self.order.uses_activations else None,
        )

    def _pack(self, table: UnitBytes, budget: int) -> Packing:
        found = Packing.of(table, budget, self.max_window_iterations)
        # The budget cannot be kept, so training will wait: the largest slice is made as small as possible instead.
        if found is None:
            low = max(budget, least_peak_bytes(table, self.max_window_iterations) - 1)
            return Packing.smallest(table, low, _dense(table), self.max_window_iterations)
        num_slices = max(len(found.slices), self.min_window_iterations)
        # Otherwise early slices would fill the budget, and any variation of bandwidth would stall training.
        if self.balance or num_slices > len(found.slices):
            return Packing.smallest(table, least_peak_bytes(table, num_slices) - 1, found, num_slices)
        return found

    def _check(self) -> None:
        for name in ("min_window_iterations", "max_window_iterations", "max_parts"):
            if getattr(self, name) < 1:
                raise ConfigError.of(f"snapshot.policy.{name}", getattr(self, name), "must be at least 1")
        if self.min_window_iterations > self.max_window_iterations:
            raise ConfigError.of(
                "snapshot.policy.min_window_iterations",
                self.min_window_iterations,
                f"must be at most max_window_iterations={self.max_window_iterations}",
            )
        if self.replan_drift < 0:
            raise ConfigError.of("snapshot.policy.replan_drift", self.replan_drift, "must be at least 0")


def _cut(demand: Demand, ordered: Iterable[OperatorId], budget: int, max_parts: int) -> list[Unit]:
    row_of = {operator: row for row, operator in enumerate(demand.operators)}
    parts = num_parts(demand.operator_bytes, demand.rounding_bytes, budget, max_parts)
    return [
        Unit(operator=operator, part=part, num_parts=parts[row_of[operator]])
        for operator in ordered
        for part in range(parts[row_of[operator]])
    ]


def _dense(table: UnitBytes) -> Packing:
    whole = int(table.full.sum(axis=0).max())
    return Packing(slices=(tuple(range(len(table.full))),), budget_bytes=whole)
