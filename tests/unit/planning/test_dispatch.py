"""Compares the dispatch schedule with its required properties, and even shares with the same rule applied token by
token."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.config.placement import SHARES
from megatron_ft.errors import ConfigError
from megatron_ft.planning.dispatch import quotas, receives, schedule, sends

Matrix = npt.NDArray[np.int64]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Matrix, Matrix]:
    num_experts, num_ranks = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    grid = st.lists(st.integers(0, 40), min_size=num_experts * num_ranks, max_size=num_experts * num_ranks)
    copies = st.lists(st.integers(0, 3), min_size=num_experts * num_ranks, max_size=num_experts * num_ranks)
    tokens = np.array(draw(grid)).reshape(num_experts, num_ranks)
    replicas = np.array(draw(copies)).reshape(num_experts, num_ranks)
    replicas[replicas.sum(axis=1) == 0, draw(st.integers(0, num_ranks - 1))] = 1
    return tokens, replicas


def token_by_token(tokens: Matrix, replicas: Matrix) -> Matrix:
    """Compute the same rule with lists of single tokens and places, without a common formula."""
    num_experts, num_ranks = tokens.shape
    result = np.zeros((num_experts, num_ranks, num_ranks), dtype=np.int64)
    dealt = 0
    for expert in range(num_experts):
        seats = [rank for rank in range(num_ranks) for _ in range(replicas[expert, rank])]
        share, rest = divmod(int(tokens[expert].sum()), len(seats))
        room = [share * int(replicas[expert, rank]) for rank in range(num_ranks)]
        for extra in range(rest):
            room[seats[(dealt % len(seats) + extra) % len(seats)]] += 1
        dealt += rest
        waiting = []
        for rank in range(num_ranks):
            for _ in range(tokens[expert, rank]):
                if room[rank]:
                    room[rank] -= 1
                    result[expert, rank, rank] += 1
                else:
                    waiting.append(rank)
        places = [rank for rank in range(num_ranks) for _ in range(room[rank])]
        for source, target in zip(waiting, places, strict=True):
            result[expert, source, target] += 1
    return result


@settings(deadline=None)
@given(problem=problems())
def test_equals_the_rule_token_by_token(problem: tuple[Matrix, Matrix]) -> None:
    assert (schedule(*problem, "even") == token_by_token(*problem)).all()


@pytest.mark.parametrize("shares", SHARES)
@settings(deadline=None)
@given(problem=problems())
def test_every_token_is_sent_once_and_local_tokens_first(problem: tuple[Matrix, Matrix], shares: str) -> None:
    tokens, replicas = problem
    result, quota = schedule(tokens, replicas, shares), quotas(tokens, replicas, shares)
    assert (result >= 0).all()
    assert (result.sum(axis=2) == tokens).all()
    assert (result.sum(axis=1) == quota).all()
    assert (quota[replicas == 0] == 0).all()
    ranks = range(tokens.shape[1])
    assert all((result[:, rank, rank] == np.minimum(tokens[:, rank], quota[:, rank])).all() for rank in ranks)
    assert all((sends(tokens, quota, rank) == result[:, rank]).all() for rank in ranks)
    assert all((receives(tokens, quota, rank) == result[:, :, rank]).all() for rank in ranks)


@settings(deadline=None)
@given(problem=problems())
def test_even_shares_of_replicas_differ_by_one_token_at_most(problem: tuple[Matrix, Matrix]) -> None:
    tokens, replicas = problem
    quota = quotas(tokens, replicas, "even")
    totals, counts = tokens.sum(axis=1), replicas.sum(axis=1)
    low, high = totals // counts, -(-totals // counts)
    assert (quota >= low[:, None] * replicas).all()
    assert (quota <= high[:, None] * replicas).all()


def test_remainders_go_round() -> None:
    tokens = np.zeros((8, 4), dtype=np.int64)
    tokens[:, 0] = 5
    assert quotas(tokens, np.ones((8, 4), dtype=np.int64), "even").sum(axis=0).tolist() == [10, 10, 10, 10]


def test_by_hand() -> None:
    # 7 tokens, replicas on rank 0 (one) and 1 (two): shares 3, 2, 2; rank 0 keeps 3 of 6, rank 1 has its own and 3.
    result = schedule(np.array([[6, 1, 0]]), np.array([[1, 2, 0]]), "even")
    assert result.tolist() == [[[3, 3, 0], [0, 1, 0], [0, 0, 0]]]


def test_large_counts_do_not_overflow() -> None:
    tokens = np.array([[2**40 + 1, 0], [3, 2**40]])
    result = schedule(tokens, np.array([[1, 2], [2, 1]]), "even")
    assert (result.sum(axis=2) == tokens).all()
    with pytest.raises(ConfigError, match="below 2147483648 with balanced shares"):
        quotas(tokens, np.array([[1, 2], [2, 1]]))


@pytest.mark.parametrize(
    ("tokens", "replicas", "message"),
    [
        ([[1, 2]], [[0, 0]], "replicas of expert 0=0"),
        ([[-1, 2]], [[1, 0]], "tokens=-1"),
        ([[1.5, 2]], [[1, 0]], "tokens=float64"),
        ([[1, 2]], [[1], [1]], "replicas="),
        ([1, 2], [[1, 1]], "tokens=int64"),
    ],
)
def test_refused(tokens: list[list[float]], replicas: list[list[int]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quotas(np.array(tokens), np.array(replicas))
