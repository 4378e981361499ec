"""Balanced shares have the smallest possible maximum, which is found by enumeration for small instances."""

from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.planning import balanced_shares
from megatron_ft.planning.balanced_shares import balanced_quotas

Matrix = npt.NDArray[np.int64]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Matrix, Matrix]:
    num_experts, num_ranks = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    size = num_experts * num_ranks
    largest = draw(st.sampled_from([3, 40, 5000, 40_000_000]))
    tokens = np.array(draw(st.lists(st.integers(0, largest), min_size=size, max_size=size)), dtype=np.int64)
    held = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=np.int64)
    tokens, held = tokens.reshape(num_experts, num_ranks), held.reshape(num_experts, num_ranks)
    held[np.arange(num_experts), draw(st.integers(0, num_ranks - 1))] = 1
    return tokens, held


def least_maximum(tokens: Matrix, held: Matrix) -> int:
    """Return the largest mean load, rounded up, of any set of experts on its holders: the minimum cut of the flow."""
    experts = range(len(tokens))
    sets = [list(chosen) for size in experts for chosen in combinations(experts, size + 1)]
    return max(-(-int(tokens[chosen].sum()) // int((held[chosen].sum(axis=0) > 0).sum())) for chosen in sets)


@settings(deadline=None, max_examples=300)
@given(problem=problems())
def test_the_largest_load_is_as_small_as_possible(problem: tuple[Matrix, Matrix]) -> None:
    tokens, held = problem
    quota = balanced_quotas(tokens, held)
    assert (quota >= 0).all()
    assert (quota[held == 0] == 0).all()
    assert (quota.sum(axis=1) == tokens.sum(axis=1)).all()
    assert quota.sum(axis=0).max() == max(least_maximum(tokens, held), 0)


def test_two_copies_on_one_rank_are_one_holder() -> None:
    tokens = np.array([[9, 0], [3, 0]])
    assert (balanced_quotas(tokens, np.array([[3, 1], [2, 2]])) == balanced_quotas(tokens, np.ones((2, 2), int))).all()


def test_own_tokens_stay_if_none_has_to_move() -> None:
    tokens = np.array([[5, 0, 1], [1, 5, 0], [0, 1, 5]])
    held = np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1]])
    assert balanced_quotas(tokens, held).sum(axis=0).tolist() == [6, 6, 6]
    assert np.minimum(tokens, balanced_quotas(tokens, held)).sum() == 15


def test_tokens_pass_over_several_ranks() -> None:
    # Expert 0 fills rank 0. The others connect neighbours in a chain: tokens of each must move to the next rank.
    tokens = np.array([[4, 0, 0, 0], [4, 0, 0, 0], [0, 4, 0, 0], [0, 0, 4, 0]])
    held = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]])
    assert balanced_quotas(tokens, held).sum(axis=0).tolist() == [4, 4, 4, 4]


def test_a_closed_group_does_not_raise_the_load_of_other_ranks() -> None:
    # Ranks 0 and 1 hold only experts 0 and 1. Their mean load of 10 is above the mean of all ranks.
    tokens = np.array([[14, 0, 0, 0], [6, 0, 0, 0], [0, 0, 1, 3], [0, 0, 2, 0]])
    held = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]])
    loads = balanced_quotas(tokens, held).sum(axis=0)
    assert loads[:2].tolist() == [10, 10] and loads[2:].sum() == 6


def chain(num_ranks: int) -> tuple[Matrix, Matrix]:
    """Return four experts for each rank, each on two neighbours, with random loads from a fixed seed."""
    num_experts = 4 * num_ranks
    held = np.zeros((num_experts, num_ranks), dtype=np.int64)
    first = np.arange(num_experts) * (num_ranks - 1) // num_experts
    held[np.arange(num_experts), first] = held[np.arange(num_experts), first + 1] = 1
    return np.random.default_rng(1).multinomial(4096, [1 / num_experts] * num_experts, num_ranks).T, held


def test_rounds_stop_at_the_largest_number(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, held = chain(24)
    best = balanced_quotas(tokens, held).sum(axis=0).max()
    monkeypatch.setattr(balanced_shares, "MAX_ROUNDS", 2)
    quota = balanced_quotas(tokens, held)
    assert (quota.sum(axis=1) == tokens.sum(axis=1)).all() and (quota >= 0).all()
    assert best < quota.sum(axis=0).max(), "two rounds are too few for this chain"
