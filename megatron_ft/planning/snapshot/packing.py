"""Units into slices: the fewest whose bytes stay within a budget on every rank. Whole numbers throughout."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ft.planning.snapshot.demand import Matrix, UnitBytes

Rows = npt.NDArray[np.intp]

_BLOCK = 256
"""Units looked at together."""
_RESOLUTION = 1024
"""A searched budget is at most this part above the smallest one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Units by slice, and the budget that they were packed with."""

    slices: tuple[tuple[int, ...], ...]
    budget_bytes: int


def pack(table: UnitBytes, budget_bytes: int, max_slices: int) -> Packing | None:
    """Slices of ``table``'s units, which are in order; None where it takes more than ``max_slices`` or nothing fits.

    Every slice starts with the frozen bytes of all units not captured before it, then takes each remaining unit that
    leaves every rank within the budget: the first ones in order, and later ones on ranks that still have room.
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
        room += table.frozen[taken].sum(axis=0)
        remaining = np.setdiff1d(remaining, taken, assume_unique=True)
    return Packing(slices=tuple(slices), budget_bytes=budget_bytes)


def _fill(extra: Matrix, remaining: Rows, room: Matrix) -> Rows:
    """The units of one slice. ``room`` is what each rank has left, and is used up."""
    if (room < 0).any():
        return remaining[:0]
    taken = []
    for first in range(0, len(remaining), _BLOCK):
        block = remaining[first : first + _BLOCK]
        block = block[(extra[block] <= room).all(axis=1)]
        total = extra[block].sum(axis=0)
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
    """The packing into at most ``max_slices`` with the smallest budget above ``low_bytes``, by bisection.

    ``high`` is one that is known. Stops within a thousandth. Packing in order is not monotone, so a smaller budget
    may work in between; the result is never worse than ``high``.
    """
    low = low_bytes
    while high.budget_bytes - low > max(1, high.budget_bytes // _RESOLUTION):
        middle = (low + high.budget_bytes) // 2
        found = pack(table, middle, max_slices)
        if found is None:
            low = middle
        else:
            high = found
    return high


def least_peak_bytes(table: UnitBytes, num_slices: int) -> int:
    """Bytes below which no window of ``num_slices`` can stay: frozen bytes of all units, or an even share in full."""
    even = -(-table.full.sum(axis=0) // num_slices)
    return int(max(table.frozen.sum(axis=0).max(), even.max()))


def num_parts(table: UnitBytes, rounding_bytes: Matrix, budget_bytes: int, max_parts: int) -> list[int]:
    """Equal parts to cut each unit into, so that one part fits a slice in which all else is frozen.

    Where frozen bytes leave less room than an eighth of themselves (or none), an eighth is what parts are cut to:
    such windows stall anyway, and finer parts would make them longer rather than shorter.

    Args:
        rounding_bytes: [units, ranks], most that a part can have above its share.
    """
    frozen, extra = table.frozen.sum(axis=0), table.full - table.frozen
    room = np.maximum(np.maximum(budget_bytes - frozen, -(-frozen // 8)), 1)
    parts = -(-extra // np.maximum(room - rounding_bytes, -(-room // 2)))
    return [int(count) for count in np.clip(np.where(extra <= room, 1, parts).max(axis=1), 1, max_parts)]
