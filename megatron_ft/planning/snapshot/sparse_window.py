"""Sparse windows: each iteration captures one slice of the state. A window has the fewest slices without stalls."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megatron_ft.errors import ConfigError
from megatron_ft.operators import OperatorId
from megatron_ft.planning.snapshot.demand import Demand, Matrix, UnitBytes
from megatron_ft.planning.snapshot.orders import HardCount, OperatorOrder
from megatron_ft.planning.snapshot.plan import ReorderTrigger, Unit, WindowPlan
from megatron_ft.planning.snapshot.policy import SnapshotContext, make_plan

Rows = npt.NDArray[np.intp]

_BLOCK = 256
"""Number of units that ``_fill`` first tries to add to a slice together, and only then one by one."""
_RESOLUTION = 1024
"""Reciprocal of the relative error at which the search for the smallest budget stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packing:
    """Units of each slice, and the budget of bytes that no slice exceeds on any rank."""

    slices: tuple[tuple[int, ...], ...]
    budget_bytes: int

    @classmethod
    def of(cls, table: UnitBytes, budget_bytes: int, max_slices: int) -> "_Packing | None":
        """Pack the units of ``table`` into at most ``max_slices`` slices; return None if this is not possible.

        Every slice contains the compute weights (frozen bytes) of all units of later slices. The remaining units are
        tried in order, and each one that fits the budget on all ranks is added. So a unit may be added after an earlier
        one did not fit.
        """
        extra = table.full - table.frozen
        remaining: Rows = np.arange(len(extra))
        room: Matrix = budget_bytes - table.frozen.sum(axis=0)
        slices: list[tuple[int, ...]] = []
        while len(remaining):
            taken = _fill(extra, remaining, room.copy())
            if not len(taken) or len(slices) == max_slices:
                return None
            slices.append(tuple(taken.tolist()))
            # Later slices do not contain the compute weights of units that this slice captures in full.
            room += table.frozen[taken].sum(axis=0)
            remaining = np.setdiff1d(remaining, taken, assume_unique=True)
        return cls(slices=tuple(slices), budget_bytes=budget_bytes)

    @classmethod
    def smallest(cls, table: UnitBytes, low_bytes: int, high: "_Packing", max_slices: int) -> "_Packing":
        """Find the packing into at most ``max_slices`` slices with the smallest budget above ``low_bytes``, by
        bisection.

        ``high`` is a known packing, and the result is never worse than ``high``. The search stops at a relative error
        of 1 / 1024. The search may miss the optimum, because a larger budget can give a worse packing.
        """
        low = low_bytes
        # Bandwidth and iteration time are measured less exactly than this relative error, so finer steps are useless.
        while high.budget_bytes - low > max(1, high.budget_bytes // _RESOLUTION):
            middle = (low + high.budget_bytes) // 2
            found = _Packing.of(table, middle, max_slices)
            if found is None:
                low = middle
            else:
                high = found
        return high


def _fill(extra: Matrix, remaining: Rows, room: Matrix) -> Rows:
    if (room < 0).any():
        return remaining[:0]
    taken = []
    for first in range(0, len(remaining), _BLOCK):
        block = remaining[first : first + _BLOCK]
        block = block[(extra[block] <= room).all(axis=1)]
        total = extra[block].sum(axis=0)
        # Most blocks fit as a whole. Units of other blocks are tried one by one.
        if not (total <= room).all():
            block = _fill_singly(extra, block, room)
            total = extra[block].sum(axis=0)
        room -= total
        taken.append(block)
    return np.concatenate(taken)


def _fill_singly(extra: Matrix, block: Rows, room: Matrix) -> Rows:
    left = room.copy()
    taken = []
    for unit in block:
        if (extra[unit] <= left).all():
            left -= extra[unit]
            taken.append(unit)
    return np.array(taken, dtype=np.intp)


def _least_peak_bytes(table: UnitBytes, num_slices: int) -> int:
    """Return a lower bound for the bytes of the largest of ``num_slices`` slices: the compute weights of all units, or
    the full state of all units divided by ``num_slices``, whichever is larger."""
    even = -(-table.full.sum(axis=0) // num_slices)
    return int(max(table.frozen.sum(axis=0).max(), even.max()))


def _num_parts(table: UnitBytes, rounding_bytes: Matrix, budget_bytes: int, max_parts: int) -> list[int]:
    """Return into how many equal parts each unit is split, so that one part fits into a slice with all compute weights.

    The size limit of a part is the budget minus the frozen bytes (compute weights of all units), but at least an eighth
    of the frozen bytes. With less room, training stalls anyway, and smaller parts would only make the window longer.

    Args:
        rounding_bytes: largest number of bytes by which a part of a unit exceeds an equal share, ``[units, ranks]``.
    """
    frozen, extra = table.frozen.sum(axis=0), table.full - table.frozen
    room = np.maximum(np.maximum(budget_bytes - frozen, -(-frozen // 8)), 1)
    parts = -(-extra // np.maximum(room - rounding_bytes, -(-room // 2)))
    return [int(count) for count in np.clip(np.where(extra <= room, 1, parts).max(axis=1), 1, max_parts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseWindow:
    """Consecutive windows, each of which captures every operator once (MoEvement, sections 3.2 and 3.5).

    Algorithm 1 of the paper assumes operators of equal size on one rank. This policy fills slices by the bytes on all
    ranks, so all ranks have the same slices. Operators that do not fit into a slice are split into equal parts. If an
    iteration is too short to capture the compute weights, training stalls. The plan then makes the largest slice as
    small as possible, and its ``reason`` states the stall.
    """

    order: OperatorOrder = field(default_factory=HardCount)
    """Order in which operators are captured."""
    balance: bool = True
    """Whether all slices get about the same size; otherwise early slices are filled up to the budget."""
    min_window_iterations: int = 1
    """Smallest number of slices. A window has fewer slices only if it has fewer operators or parts of operators."""
    max_window_iterations: int = 32
    """Largest number of slices. If the budget requires more, slices exceed the budget and training stalls."""
    max_parts: int = 64
    """Largest number of parts into which one operator is split."""
    replan_drift: float = 0.2
    """Relative change above which a new plan is made: the change of the bytes that an iteration can capture, or of the
    bytes of the largest slice."""
    reorder: ReorderTrigger = field(default_factory=ReorderTrigger)
    """Change of the token counts of experts that requires a new plan."""

    @property
    def trigger(self) -> ReorderTrigger | None:
        """Change of token counts that requires a new plan: ``reorder``, or None if ``order`` uses no token counts."""
        return self.reorder if self.order.uses_activations else None

    def plan(self, demand: Demand, context: SnapshotContext) -> WindowPlan:
        """Plan the window with the fewest slices that does not stall training.

        Raises:
            ConfigError: a field of the policy or a measurement is out of range.
        """
        self._check()
        context.validate()
        # Measurements are already reduced over the job: with values of its own, each rank would make another plan.
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

    def _pack(self, table: UnitBytes, budget: int) -> _Packing:
        found = _Packing.of(table, budget, self.max_window_iterations)
        # The budget cannot be kept, so training will wait: the largest slice is made as small as possible instead.
        if found is None:
            low = max(budget, _least_peak_bytes(table, self.max_window_iterations) - 1)
            return _Packing.smallest(table, low, _dense(table), self.max_window_iterations)
        num_slices = max(len(found.slices), self.min_window_iterations)
        # Without balance, early slices fill the budget, and any variation of the bandwidth stalls training.
        if self.balance or num_slices > len(found.slices):
            return _Packing.smallest(table, _least_peak_bytes(table, num_slices) - 1, found, num_slices)
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
    parts = _num_parts(demand.operator_bytes, demand.rounding_bytes, budget, max_parts)
    return [
        Unit(operator=operator, part=part, num_parts=parts[row_of[operator]])
        for operator in ordered
        for part in range(parts[row_of[operator]])
    ]


def _dense(table: UnitBytes) -> _Packing:
    whole = int(table.full.sum(axis=0).max())
    return _Packing(slices=(tuple(range(len(table.full))),), budget_bytes=whole)
