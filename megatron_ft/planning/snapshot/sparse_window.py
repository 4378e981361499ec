"""Sparse windows: a slice of the operators every iteration, all operators in the fewest slices without a stall."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_ft.errors import ConfigError
from megatron_ft.operators import OperatorId
from megatron_ft.planning.snapshot.activations import ReorderTrigger
from megatron_ft.planning.snapshot.demand import Demand, UnitBytes
from megatron_ft.planning.snapshot.orders import HardCount, OperatorOrder
from megatron_ft.planning.snapshot.packing import Packing, least_peak_bytes, num_parts, pack, smallest_packing
from megatron_ft.planning.snapshot.plan import Unit, WindowPlan
from megatron_ft.planning.snapshot.policy import SnapshotContext, make_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseWindow:
    """Consecutive windows, each of which captures every operator once (MoEvement, sections 3.2 and 3.5).

    Algorithm 1 of the paper counts operators of equal size on one rank. Here slices are packed by bytes over all ranks
    together, so that the job has one number of slices; operators that do not fit are split into equal parts. If not
    even the compute weights fit an iteration, training stalls: the plan then has the smallest largest slice, and its
    reason states the stall.
    """

    order: OperatorOrder = field(default_factory=HardCount)
    """Order of operators."""
    balance: bool = True
    """Whether slices are made as even as their number allows; otherwise early ones are filled first."""
    min_window_iterations: int = 1
    """Fewest slices, if there are as many units."""
    max_window_iterations: int = 32
    """Most slices. If the budget would need more, slices are larger and training stalls."""
    max_parts: int = 64
    """Most parts of one operator."""
    replan_drift: float = 0.2
    """Relative change of bytes per iteration, or of the largest slice, above which another plan is made."""
    reorder: ReorderTrigger = field(default_factory=ReorderTrigger)
    """Change of activations upon which another plan is made."""

    @property
    def trigger(self) -> ReorderTrigger | None:
        """``reorder``, unless the order does not depend on activations."""
        return self.reorder if self.order.uses_activations else None

    def plan(self, demand: Demand, context: SnapshotContext) -> WindowPlan:
        """Plan the window with the fewest slices that does not stall training.

        Raises:
            ConfigError: fields or measurements out of range.
        """
        self._check()
        context.validate()
        # Measurements are reduced over the job before: with its own ones every rank would make another plan.
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
            reason=f"{type(self.order).__name__} order, {num_cut} operators split into parts",
            activations=context.activations if self.order.uses_activations else None,
        )

    def _pack(self, table: UnitBytes, budget: int) -> Packing:
        found = pack(table, budget, self.max_window_iterations)
        # The budget cannot be kept, so training will wait: the largest slice is made as small as possible instead.
        if found is None:
            low = max(budget, least_peak_bytes(table, self.max_window_iterations) - 1)
            return smallest_packing(table, low, _dense(table), self.max_window_iterations)
        num_slices = max(len(found.slices), self.min_window_iterations)
        # Early slices would be filled to the budget, and any variation of bandwidth would then stall training.
        if self.balance or num_slices > len(found.slices):
            return smallest_packing(table, least_peak_bytes(table, num_slices) - 1, found, num_slices)
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
