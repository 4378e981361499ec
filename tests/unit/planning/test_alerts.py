"""Tests the comparison of figures with their limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from megatron_ft.planning.iteration import ALERT_NAMES, AlertFigures, AlertLimits, Slowest, windows_behind

LIMITS = AlertLimits(
    single_loss_survival=1.0,
    stall_share=0.05,
    windows_behind=3.0,
    free_disk_share=0.1,
    slowest_rank_over_median=2.0,
    lost_token_share=0.0375,
)


@pytest.mark.parametrize(
    ("name", "in_order", "beyond"),
    [
        ("single_loss_survival", 1.0, 0.999),
        ("stall_share", 0.05, 0.051),
        ("windows_behind", 3.0, 3.1),
        ("free_disk_share", 0.1, 0.09),
        ("slowest_rank_over_median", 2.0, 2.1),
        ("lost_token_share", 0.0375, 0.0376),
    ],
)
def test_each_figure_has_its_side(name: str, in_order: float, beyond: float) -> None:
    (calm,) = LIMITS.judge(AlertFigures(**{name: in_order}))
    (alert,) = LIMITS.judge(AlertFigures(**{name: beyond}))
    assert not calm.is_beyond and alert.is_beyond
    assert (alert.name, alert.value, alert.limit) == (name, beyond, getattr(LIMITS, name))


@given(some.builds(AlertFigures, **{name: some.none() | some.floats(0.0, 9.0) for name in ALERT_NAMES}))
def test_what_is_not_known_or_not_watched_is_not_judged(figures: AlertFigures) -> None:
    known = {name for name in ALERT_NAMES if getattr(figures, name) is not None}
    assert {alert.name for alert in LIMITS.judge(figures)} == known
    assert list(AlertLimits().judge(figures)) == []


def test_windows_that_are_due() -> None:
    # a window every 5 iterations, one committed in iteration 12: in iteration 17 the next is due, in 32 four are
    assert windows_behind(17, since_iteration=12, interval_iterations=5) == 1.0
    assert windows_behind(32, since_iteration=12, interval_iterations=5) == 4.0
    assert windows_behind(8, since_iteration=12, interval_iterations=5) == 0.0, "after a recovery"


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
    assert Slowest.of(seconds) == Slowest(rank=rank, over_median=over_median)


@pytest.mark.parametrize("seconds", [(), (1.0,), (0.0, 0.0), (0.0, 2.0)])
def test_fewer_than_two_known_times_have_no_slowest_rank(seconds: tuple[float, ...]) -> None:
    assert Slowest.of(seconds) is None


@given(some.lists(some.floats(1e-6, 1e3), min_size=2), some.floats(0.5, 2.0))
def test_it_is_the_longest_and_units_do_not_matter(seconds: list[float], factor: float) -> None:
    found, other = Slowest.of(seconds), Slowest.of([value * factor for value in seconds])
    assert found is not None and other is not None
    assert seconds[found.rank] == max(seconds) and found.over_median >= 1.0
    assert other.over_median == pytest.approx(found.over_median)
