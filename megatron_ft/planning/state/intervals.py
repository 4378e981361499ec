"""Vectorized arithmetic on columns of integer intervals [start, stop), without loops over rows."""

import numpy as np
import numpy.typing as npt

from megatron_ft.planning.state.tensors import Column

Rows = npt.NDArray[np.intp]


def expand(counts: Column) -> tuple[Rows, Column]:
    """Return two columns. The first contains each index of ``counts``, repeated ``counts[index]`` times. The second
    numbers the repetitions of each index from 0."""
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
    """Return the union of the intervals as disjoint intervals, ascending. Adjacent intervals are not merged."""
    starts, stops = np.sort(starts), np.sort(stops)
    # Start i (from 0) begins a disjoint interval if all i intervals with earlier starts have ended by then.
    is_first = np.ones(len(starts), dtype=np.bool_)
    is_first[1:] = starts[1:] >= stops[:-1]
    is_last = np.ones(len(stops), dtype=np.bool_)
    is_last[:-1] = is_first[1:]
    return starts[is_first], stops[is_last]


def split(
    starts: Column, stops: Column, cover_starts: Column, cover_stops: Column
) -> tuple[tuple[Rows, Column, Column], tuple[Rows, Column, Column]]:
    """Split intervals into the parts inside and the parts outside of a cover, which is a set of disjoint intervals.

    Args:
        cover_starts: starts of the intervals of the cover, ascending, as ``union`` returns them.

    Returns:
        (row, start, stop) of the parts inside, and (row, start, stop) of the parts outside.
    """
    first = np.searchsorted(cover_stops, starts, side="right")
    last = np.maximum(np.searchsorted(cover_starts, stops, side="left"), first)
    rows, places = expand(last - first)
    covers = first[rows] + places
    inside = rows, np.maximum(starts[rows], cover_starts[covers]), np.minimum(stops[rows], cover_stops[covers])
    # A row that overlaps n covers has n + 1 gaps. A gap begins at the start of the row or the end of a cover, and it
    # ends at the start of the next cover or the end of the row.
    gap_rows, gap_places = expand(last - first + 1)
    at = first[gap_rows] + gap_places
    bounded_stops = np.concatenate([cover_stops, np.zeros(1, dtype=np.int64)])
    bounded_starts = np.concatenate([cover_starts, np.zeros(1, dtype=np.int64)])
    gap_starts = np.where(gap_places == 0, starts[gap_rows], bounded_stops[at - 1])
    gap_stops = np.where(at == last[gap_rows], stops[gap_rows], bounded_starts[at])
    gap_starts = np.maximum(gap_starts, starts[gap_rows])
    kept = gap_starts < gap_stops
    return inside, (gap_rows[kept], gap_starts[kept], gap_stops[kept])
