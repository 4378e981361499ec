from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.planning.state.holdings import STORAGE
from megatron_ft.planning.state.transfers import _Shares

RANKS = 6
SETS = st.lists(st.sets(st.integers(0, RANKS - 1), min_size=1), min_size=1, max_size=7)


def loads_of(shares: _Shares) -> list[int]:
    loads = [0] * RANKS
    for ranks, amounts in zip(shares.senders, shares.amounts, strict=True):
        for rank, amount in zip(ranks.tolist(), amounts.tolist(), strict=True):
            loads[rank] += amount
    return loads


def least_maximum(demands: list[int], sets: list[set[int]]) -> float:
    """Return the bytes of the busiest sender in the best assignment: the largest demand that only some ranks can meet,
    divided by their number (Hall)."""
    return max(
        sum(demand for demand, ranks in zip(demands, sets, strict=True) if ranks <= set(chosen)) / count
        for count in range(1, RANKS + 1)
        for chosen in combinations(range(RANKS), count)
    )


@settings(max_examples=300, deadline=None)
@given(SETS, st.data(), st.sampled_from([1, 10, 100]))
def test_the_busiest_sender_is_within_the_stated_bound(sets: list[set[int]], data: st.DataObject, piece: int) -> None:
    demands = data.draw(st.lists(st.integers(0, 1000), min_size=len(sets), max_size=len(sets)))
    shares = _Shares.of(demands, [np.array(sorted(ranks)) for ranks in sets], min_piece_bytes=piece)
    loads = loads_of(shares)
    for demand, ranks, senders, amounts in zip(demands, sets, shares.senders, shares.amounts, strict=True):
        assert set(senders.tolist()) <= ranks
        assert amounts.sum() == demand
        assert (amounts > 0).all()
        assert len(senders) <= max(1, demand // piece)
        for rank in senders.tolist():
            assert loads[rank] - min(loads[other] for other in ranks) <= shares.slack
    assert shares.slack <= max(2 * piece + 1, 0.01 * max(loads))
    assert max(loads) <= least_maximum(demands, sets) + (RANKS - 1) * shares.slack


def test_a_chain_of_sets_passes_work_on() -> None:
    """Only rank 0 has the first demand. The second one could be divided evenly, but rank 1 is better left to the
    third."""
    sets = [np.array([0]), np.array([0, 1]), np.array([1, 2]), np.array([2, 3])]
    shares = _Shares.of([400, 400, 400, 400], sets, min_piece_bytes=1)
    assert max(loads_of(shares)) - min(loads_of(shares)[:4]) <= 3 * shares.slack


def test_storage_is_no_rank_to_balance() -> None:
    shares = _Shares.of([10**9, 12], [np.array([STORAGE]), np.array([0, 1])], min_piece_bytes=1)
    assert [ranks.tolist() for ranks in shares.senders] == [[STORAGE], [0, 1]]
    assert [amounts.tolist() for amounts in shares.amounts] == [[10**9], [6, 6]]
    assert shares.slack == 3
