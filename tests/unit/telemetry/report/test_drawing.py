"""Tests scales, ticks, and that text is always escaped."""

import math

import pytest

from megatron_ft.telemetry.report.drawing import Element, Scale, figure
from megatron_ft.telemetry.report.page import _badges, _sampled, _thinned


def test_figures_become_pixels_inside_the_drawing() -> None:
    scale = Scale(low=0.0, high=10.0, begin=100.0, end=200.0)
    assert [scale(value) for value in (0.0, 5.0, 10.0, -5.0, 99.0)] == [100.0, 150.0, 200.0, 100.0, 200.0]
    assert Scale(low=3.0, high=3.0, begin=0.0, end=10.0)(3.0) == 5.0


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 10.0, [0, 2, 4, 6, 8, 10]),
        (-0.3, 0.9, [-0.2, 0.0, 0.2, 0.4, 0.6, 0.8]),
        (1.0, 1.0, [1.0]),
        (0.0, 2.0**63, [0.0, 2e18, 4e18, 6e18, 8e18]),
    ],
)
def test_ticks_are_round_and_inside(low: float, high: float, ticks: list[float]) -> None:
    assert Scale(low=low, high=high, begin=0.0, end=1.0).ticks(6) == pytest.approx(ticks)


@pytest.mark.parametrize("span", [1e-9, 1e-3, 0.7, 13.0, 99_999.0, 1e20])
@pytest.mark.parametrize("low", [-1e6, -1.0, 0.0, 1e-3, 5e7])
def test_there_are_never_more_ticks_than_there_is_room_for(low: float, span: float) -> None:
    found = Scale(low=low, high=low + span, begin=0.0, end=1.0).ticks(8)
    assert 1 <= len(found) <= 9 or span < 1e-6 * abs(low)


def test_figures_are_short() -> None:
    assert [figure(value) for value in (0.0, 0.25, 12, 1200, 3e6, 1e-7)] == [
        "0",
        "0.25",
        "12",
        "1,200",
        "3e+06",
        "1e-07",
    ]


def test_a_long_curve_keeps_its_spikes() -> None:
    points = [(iteration, 9.0 if iteration == 5000 else math.sin(iteration)) for iteration in range(1, 20_001)]
    kept = _thinned(points, 100)
    assert len(kept) <= 100 and (5000, 9.0) in kept
    assert kept == sorted(kept)
    assert _thinned(points[:100], 100) == points[:100]


def test_numbers_that_would_overlap_share_a_badge() -> None:
    assert _badges([(10.0, 1), (200.0, 3), (204.0, 2), (400.0, 4)]) == [((1,), 10.0), ((2, 3), 202.0), ((4,), 400.0)]
    crowd = _badges([(float(place), place + 1) for place in range(300)])
    assert [number for numbers, _ in crowd for number in numbers] == list(range(1, 301))


def test_a_table_has_the_ends_of_a_curve() -> None:
    points = [(iteration, 1.0 / iteration) for iteration in range(1, 1001)]
    found = _sampled(points, 10)
    assert (len(found), found[0], found[-1]) == (10, points[0], points[-1])
    assert _sampled(points[:10], 10) == points[:10]


def test_text_and_attributes_are_escaped() -> None:
    found = Element.of("p", "<b>&\"'", title="\"><script>'&").render()
    assert found == '<p title="&quot;&gt;&lt;script&gt;&#x27;&amp;">&lt;b&gt;&amp;"\'</p>'


@pytest.mark.parametrize("character", ["\x00", "\x1b", "\ud800", "\u202e", "\u2066", "\uffff"])
def test_what_a_page_cannot_hold_or_what_turns_text_around_is_replaced(character: str) -> None:
    found = Element.of("p", f"a{character}b", title=character).render()
    assert found == '<p title="\ufffd">a\ufffdb</p>'
    found.encode("utf-8")


def test_names_of_attributes_and_what_is_left_out() -> None:
    found = Element.of("a", None, "x", class_="wide", aria_label=None, x1=1.0, y1=2.345, href="#a")
    assert found.render() == '<a class="wide" x1="1" y1="2.35" href="#a">x</a>'
    assert Element.of("meta", charset="utf-8").render() == '<meta charset="utf-8"/>'
