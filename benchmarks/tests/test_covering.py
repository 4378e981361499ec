"""Covering arrays cover what they promise, with few rows."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import resume_bitwise
from benchmarks.covering import Row, combinations_of, covering_array
from megatron_ft.errors import ConfigError


def wanted(factors: dict[str, list[int]], strength: int) -> set[object]:
    rows = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    return set().union(*(combinations_of(row, strength) for row in rows))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(1, 3))
def test_every_combination_is_covered(sizes: list[int], strength: int) -> None:
    strength = min(strength, len(sizes))
    factors = {f"f{number}": list(range(size)) for number, size in enumerate(sizes)}
    array = covering_array(factors, strength=strength)
    assert set().union(*(combinations_of(row, strength) for row in array)) == wanted(factors, strength)


def test_pairs_of_six_factors_need_few_rows() -> None:
    factors = {f"f{number}": [0, 1, 2] for number in range(6)}
    array = covering_array(factors)
    assert len(array) <= 20
    assert array == covering_array(factors)


def test_forbidden_rows_are_left_out_and_the_rest_is_covered() -> None:
    factors = {"action": ["kill", "stop"], "rank": [0, 1, 2], "phase": ["forward", "update"]}

    def allowed(row: Row) -> bool:
        return not (row["action"] == "stop" and row["rank"] == 0)

    array = covering_array(factors, allowed=allowed)
    assert all(allowed(row) for row in array)
    pairs = set().union(*(combinations_of(row, 2) for row in array))
    assert (("action", "stop"), ("rank", 1)) in pairs
    assert (("action", "stop"), ("rank", 0)) not in pairs
    assert len(pairs) == len(wanted({name: list(values) for name, values in factors.items()}, 2)) - 1  # type: ignore[arg-type]


@pytest.mark.parametrize("strength", [0, 3])
def test_strength_beyond_the_factors_is_refused(strength: int) -> None:
    with pytest.raises(ConfigError, match="strength="):
        covering_array({"a": [1], "b": [2]}, strength=strength)


def test_a_product_beyond_the_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match="factors="):
        covering_array({f"f{number}": list(range(10)) for number in range(6)})


def test_resume_bitwise_kills_either_rank_in_every_phase() -> None:
    killed = {
        (row["stop"], row["killed_rank"])
        for row in covering_array(resume_bitwise.FACTORS, allowed=resume_bitwise.allowed)
        if row["stop"] in resume_bitwise.KILLED_IN
    }
    assert killed == set(itertools.product(resume_bitwise.KILLED_IN, (0, 1)))
