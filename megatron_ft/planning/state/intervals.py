"""Arithmetic on many intervals [start, stop) of integers at once: columns in, columns out, no loop over rows."""

import numpy as np
import numpy.typing as npt

from megatron_ft.planning.state.tensors import Column

Rows = npt.NDArray[np.intp]


def expand(counts: Column) -> tuple[Rows, Column]:
    """Return row number and position inside the row of ``counts[row]`` entries for each row, in order."""
    rows = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(counts)
    return rows, np.arange(len(rows), dtype=np.int64) - np.repeat(ends - counts, counts)


def distinct(values: Column) -> Column:
    """Return the distinct values, ascending."""
    values = np.sort(values)
    is_first = np.ones(len(values), dtype=np.bool_)
    is_first[1:] = values[1:] != values[:-1]
    return values[is_first]


def union(starts: Column, stops: Column) -> tuple[Column, Column]:
    """Return the elements that any interval has, as disjoint intervals in order. Adjacent intervals are not joined."""
    starts, stops = np.sort(starts), np.sort(stops)
    # The i-th start begins an interval where the i intervals that start before it have all ended.
    is_first = np.ones(len(starts), dtype=np.bool_)
    is_first[1:] = starts[1:] >= stops[:-1]
    is_last = np.ones(len(stops), dtype=np.bool_)
    is_last[:-1] = is_first[1:]
    return starts[is_first], stops[is_last]


def split(
    starts: Column, stops: Column, cover_starts: Column, cover_stops: Column
) -> tuple[tuple[Rows, Column, Column], tuple[Rows, Column, Column]]:
    """Cut intervals by a cover: (row, start, stop) of the parts inside of it, and of the parts outside.

    Args:
        cover_starts: starts of disjoint intervals in order, as ``union`` returns them.
    """
    first = np.searchsorted(cover_stops, starts, side="right")
    last = np.maximum(np.searchsorted(cover_starts, stops, side="left"), first)
    rows, places = expand(last - first)
    covers = first[rows] + places
    inside = rows, np.maximum(starts[rows], cover_starts[covers]), np.minimum(stops[rows], cover_stops[covers])
    # Of a row with n covers the n + 1 gaps: from its start or a cover's end, to the next cover's start or its end.
    gap_rows, gap_places = expand(last - first + 1)
    at = first[gap_rows] + gap_places
    bounded_stops = np.concatenate([cover_stops, np.zeros(1, dtype=np.int64)])
    bounded_starts = np.concatenate([cover_starts, np.zeros(1, dtype=np.int64)])
    gap_starts = np.where(gap_places == 0, starts[gap_rows], bounded_stops[at - 1])
    gap_stops = np.where(at == last[gap_rows], stops[gap_rows], bounded_starts[at])
    gap_starts = np.maximum(gap_starts, starts[gap_rows])
    kept = gap_starts < gap_stops
    return inside, (gap_rows[kept], gap_starts[kept], gap_stops[kept])
