"""Which rank holds the others up."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from megatron_ft.planning.stragglers import Slowest, slowest


@pytest.mark.parametrize(
    ("seconds", "rank", "over_median"),
    [
        ((1.0, 1.0, 3.0, 1.0), 2, 3.0),
        ((2.0, 1.0), 0, 2.0),
        ((1.0, 1.0, 4.0, 4.0), 2, 4.0),
        ((0.0, 1.0, 0.0, 1.5), 3, 1.5),
        ((0.5, 0.5), 0, 1.0),
    ],
    ids=["one", "of two", "half of them", "not all are known", "none"],
)
def test_the_slowest_is_compared_with_the_median(seconds: tuple[float, ...], rank: int, over_median: float) -> None:
    assert slowest(seconds) == Slowest(rank=rank, over_median=over_median)


@pytest.mark.parametrize("seconds", [(), (1.0,), (0.0, 0.0), (0.0, 2.0)])
def test_nobody_is_compared_with_himself(seconds: tuple[float, ...]) -> None:
    assert slowest(seconds) is None


@given(some.lists(some.floats(1e-6, 1e3), min_size=2), some.floats(0.5, 2.0))
def test_it_is_the_longest_and_units_do_not_matter(seconds: list[float], factor: float) -> None:
    found, other = slowest(seconds), slowest([value * factor for value in seconds])
    assert found is not None and other is not None
    assert seconds[found.rank] == max(seconds) and found.over_median >= 1.0
    assert other.over_median == pytest.approx(found.over_median)
