"""Compares replica counts with equation 1 computed by hand, and tests their limits."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.allocation import allocate, integer_loads


def test_equation_by_hand() -> None:
    # 10 slots; 1 of 20 tokens: floor(0.5) -> 2; 4 of 19: floor(4/19*8) = 1 -> 2; 15 of 15: the 6 left.
    assert allocate([4, 15, 1], 10, 2).replica_counts == (2, 6, 2)


def test_exact_division_is_not_lost_to_rounding() -> None:
    loads = [3 * 10**15] * 49
    assert allocate(loads, 49 * 7, 1).replica_counts == (7,) * 49


def test_a_layer_without_tokens_is_shared_evenly() -> None:
    assert allocate([0, 0, 0], 10, 2).replica_counts == (3, 3, 4)


def test_one_expert_may_have_more_replicas_than_nodes() -> None:
    assert allocate([1, 1000], 12, 2, num_domains=3).replica_counts == (2, 10)


def test_floor_is_lowered_and_said_so() -> None:
    allocation = allocate([1, 1, 1, 5], 7, 2)
    assert allocation.min_replicas == 1
    assert allocation.lowered
    assert "lowered from 2" in allocation.summary()


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20), st.integers(0, 60), st.integers(1, 4))
def test_promises_of_the_paper(loads: list[int], extra: int, floor: int) -> None:
    num_slots = len(loads) + extra
    allocation = allocate(loads, num_slots, floor)
    allocation.validate()
    counts = allocation.replica_counts
    assert sum(counts) == num_slots
    assert min(counts) >= min(floor, num_slots // len(loads))
    in_order = [counts[e] for e in sorted(range(len(loads)), key=lambda e: (loads[e], e))]
    assert in_order == sorted(in_order)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=10))
def test_fractions_are_taken_exactly(loads: list[float]) -> None:
    exact = integer_loads(loads)
    assert all(
        Fraction(a) * y == Fraction(b) * x
        for a, x in zip(loads, exact, strict=True)
        for b, y in zip(loads, exact, strict=True)
    )


@pytest.mark.parametrize(
    ("loads", "num_slots", "floor", "domains", "message"),
    [
        ([1.0, math.nan], 4, 1, None, r"loads\[1\]=nan"),
        ([1.0, math.inf], 4, 1, None, r"loads\[1\]=inf"),
        ([-1, 2], 4, 1, None, r"loads\[0\]=-1"),
        ([1, 2, 3], 2, 1, None, "num_experts=3: must be at most 2, the number of slots"),
        ([1, 2], 8, 5, 4, "min_replicas=5: must be at most 4, the number of failure domains"),
        ([1, 2], 8, 0, None, "min_replicas=0"),
        ([], 8, 1, None, "num_experts=0"),
    ],
)
def test_refused(loads: list[float], num_slots: int, floor: int, domains: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        allocate(loads, num_slots, floor, num_domains=domains)
