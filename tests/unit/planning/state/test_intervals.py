import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.planning.state.intervals import expand, split, union

Intervals = list[tuple[int, int]]
INTERVALS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 9)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=8
)


def columns(intervals: Intervals) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(intervals, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def elements(starts: np.ndarray, stops: np.ndarray) -> list[int]:
    return [e for start, stop in zip(starts.tolist(), stops.tolist(), strict=True) for e in range(start, stop)]


def test_expand_counts_rows_and_places() -> None:
    rows, places = expand(np.array([2, 0, 3]))
    assert rows.tolist() == [0, 0, 2, 2, 2]
    assert places.tolist() == [0, 1, 0, 1, 2]


@given(INTERVALS)
def test_union_has_every_element_once_in_order(intervals: Intervals) -> None:
    found = elements(*union(*columns(intervals)))
    assert found == sorted({e for start, stop in intervals for e in range(start, stop)})


@given(INTERVALS, INTERVALS)
def test_split_divides_every_row_by_the_cover(intervals: Intervals, cover: Intervals) -> None:
    covered = {e for start, stop in cover for e in range(start, stop)}
    inside, outside = split(*columns(intervals), *union(*columns(cover)))
    for part, is_covered in ((inside, True), (outside, False)):
        for row, (start, stop) in enumerate(intervals):
            mine = part[0] == row
            found = elements(part[1][mine], part[2][mine])
            assert found == [e for e in range(start, stop) if (e in covered) == is_covered]
