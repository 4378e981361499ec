import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.planning.state.holdings import STORAGE
from megatron_ft.planning.state.transfers import _cut_and_stage

TRANSFERS = st.lists(
    st.tuples(st.integers(STORAGE, 5), st.integers(0, 5), st.integers(1, 60), st.sampled_from([1, 2, 4])).filter(
        lambda row: row[0] != row[1]
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=300, deadline=None)
@given(TRANSFERS, st.integers(16, 100))
def test_rounds_keep_the_limit_and_their_number_the_stated_bound(
    transfers: list[tuple[int, int, int, int]], limit: int
) -> None:
    source, target, num_items, item = (np.array(column) for column in zip(*transfers, strict=True))
    rows, starts, stops, rounds = _cut_and_stage(source, target, num_items, item, limit)
    for row, (_, _, count, _) in enumerate(transfers):
        found = [(a, b) for a, b in zip(starts[rows == row], stops[rows == row], strict=True)]
        assert [e for a, b in found for e in range(a, b)] == list(range(count))
    totals = np.zeros(7, dtype=np.int64)
    for turn in range(int(rounds.max()) + 1):
        used = np.zeros(7, dtype=np.int64)
        for row, size in zip(rows[rounds == turn], (stops - starts)[rounds == turn], strict=True):
            for rank in {source[row], target[row]} - {STORAGE}:
                used[rank] += size * item[row]
        assert used.max() <= limit
        assert used.max() > 0, f"round {turn} is empty"
        totals += used
    two = np.sort(totals)[-2:].sum()
    assert int(rounds.max()) + 1 <= 1 + two / (limit - limit // 4)


def test_all_in_one_round_where_the_limit_allows() -> None:
    rounds = _cut_and_stage(np.array([0, 1]), np.array([1, 0]), np.array([5, 5]), np.array([1, 1]), 10)[3]
    assert set(rounds.tolist()) == {0}
