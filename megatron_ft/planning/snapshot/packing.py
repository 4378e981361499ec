"""Packing of units into the fewest slices within a budget of bytes on every rank, in integers."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ft.planning.snapshot.demand import Matrix, UnitBytes

Rows = npt.NDArray[np.intp]

_BLOCK = 256
"""Units that are tried together."""
_RESOLUTION = 1024
"""The search for the smallest budget stops at a relative error of one over this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Units of each slice, and the budget of the packing."""

    slices: tuple[tuple[int, ...], ...]
    budget_bytes: int


def pack(table: UnitBytes, budget_bytes: int, max_slices: int) -> Packing | None:
    """Pack the units of ``table``, in order; None if that takes more than ``max_slices`` or a unit does not fit.

    Every slice holds the frozen bytes of all units that are captured later. It takes each remaining unit with which
    every rank stays within the budget: the first ones in order, and later ones on ranks with budget left.
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
        # What is captured in full now is not among the compute weights of the slices that follow.
        room += table.frozen[taken].sum(axis=0)
        remaining = np.setdiff1d(remaining, taken, assume_unique=True)
    return Packing(slices=tuple(slices), budget_bytes=budget_bytes)


def _fill(extra: Matrix, remaining: Rows, room: Matrix) -> Rows:
    if (room < 0).any():
        return remaining[:0]
    taken = []
    for first in range(0, len(remaining), _BLOCK):
        block = remaining[first : first + _BLOCK]
        block = block[(extra[block] <= room).all(axis=1)]
        total = extra[block].sum(axis=0)
        # Most blocks fit as a whole; units are tried one by one only where that ends.
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


def smallest_packing(table: UnitBytes, low_bytes: int, high: Packing, max_slices: int) -> Packing:
    """Find the packing into at most ``max_slices`` with the smallest budget above ``low_bytes``, by bisection.

    ``high`` is a known packing. The search stops at a relative error of 1 / 1024. Packing in order is not monotone in
    the budget, so the result may not be the optimum, but it is never worse than ``high``.
    """
    low = low_bytes
    # Finer steps cannot pay: bandwidth and iteration time are measured less exactly.
    while high.budget_bytes - low > max(1, high.budget_bytes // _RESOLUTION):
        middle = (low + high.budget_bytes) // 2
        found = pack(table, middle, max_slices)
        if found is None:
            low = middle
        else:
            high = found
    return high


def least_peak_bytes(table: UnitBytes, num_slices: int) -> int:
    """Lower bound of the largest slice of ``num_slices``: frozen bytes of all units, or an even share of full bytes."""
    even = -(-table.full.sum(axis=0) // num_slices)
    return int(max(table.frozen.sum(axis=0).max(), even.max()))


def num_parts(table: UnitBytes, rounding_bytes: Matrix, budget_bytes: int, max_parts: int) -> list[int]:
    """Return the number of equal parts of each unit such that one part fits a slice with all other units frozen.

    If frozen bytes leave less room than an eighth of themselves, parts are sized for that eighth: such windows stall
    training anyway, and smaller parts would make them longer.

    Args:
        rounding_bytes: [units, ranks], largest excess of a part over an equal share.
    """
    frozen, extra = table.frozen.sum(axis=0), table.full - table.frozen
    room = np.maximum(np.maximum(budget_bytes - frozen, -(-frozen // 8)), 1)
    parts = -(-extra // np.maximum(room - rounding_bytes, -(-room // 2)))
    return [int(count) for count in np.clip(np.where(extra <= room, 1, parts).max(axis=1), 1, max_parts)]
