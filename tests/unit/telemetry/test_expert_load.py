"""Tests figures of how even expert loads are, and their bars."""

import math

import pytest

from megatron_ft.events import ExpertLoad
from megatron_ft.telemetry.expert_load import (
    _herfindahl_over_even,
    _percentile,
    bin_loads,
    load_figures,
    max_over_even_share,
    relative_load,
)
from megatron_ft.telemetry.sinks.terminal import ASCII, BLOCKS, _Symbols


def test_relative_load() -> None:
    assert relative_load([1, 1, 1, 1]) == [1.0] * 4
    assert relative_load([8, 0, 0, 0]) == [4.0, 0.0, 0.0, 0.0]
    assert relative_load([0, 0]) == [0.0, 0.0]
    assert max_over_even_share([3, 1]) == 1.5 and max_over_even_share([]) == 0.0


def test_binning_keeps_the_busiest() -> None:
    loads = [float(number) for number in range(160)]
    binned = bin_loads(loads, 30)
    assert len(binned) == 27 and binned == [min(159.0, 5.0 + 6.0 * number) for number in range(27)]
    assert len(bin_loads(loads, 160)) == 160 and len(bin_loads(loads, 159)) == 80
    assert bin_loads([1.0, 2.0], 30) == [1.0, 2.0]


@pytest.mark.parametrize("symbols", [BLOCKS, ASCII], ids=["blocks", "ascii"])
def test_bars_rise(symbols: _Symbols) -> None:
    bars = [symbols.heights.index(symbols.bar(value / 10, 2.0)) for value in range(31)]
    assert bars == sorted(bars) and bars[0] == 0 and bars[20] == bars[30] == len(symbols.heights) - 1
    assert symbols.bar(math.nan, 2.0) == " "


def test_chart_has_the_highest_on_top_and_blanks_where_nothing_is() -> None:
    assert BLOCKS.chart([3.0, 2.0, 1.0, None], num_rows=2) == ["█▁  ", "██▁ "]
    assert BLOCKS.chart([None, None], num_rows=1) == ["  "]
    assert BLOCKS.chart([2.0, 2.0], num_rows=1) == ["▁▁"]


@pytest.mark.parametrize(("share", "num_done"), [(0.0, 0), (0.5, 5), (1.0, 10), (1.7, 10)])
def test_progress_keeps_its_width(share: float, num_done: int) -> None:
    done, left = BLOCKS.progress(share, 10)
    assert len(done) == num_done and len(done) + len(left) == 10


def test_symbols_follow_the_encoding() -> None:
    assert _Symbols.of("utf-8") is BLOCKS
    assert _Symbols.of("ascii") is ASCII and _Symbols.of(None) is ASCII and _Symbols.of("no-such-code") is ASCII


def test_percentiles_lie_on_a_line_between_neighbours() -> None:
    assert _percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5 and _percentile([1.0, 3.0], 95) == pytest.approx(2.9)
    assert _percentile([7.0], 95) == 7.0 and _percentile([], 50) == 0.0


def test_skew_is_one_where_loads_are_even_and_the_number_of_experts_where_one_has_all() -> None:
    assert _herfindahl_over_even([5, 5, 5]) == pytest.approx(1.0) and _herfindahl_over_even([8, 0, 0, 0]) == 4.0
    assert (
        _herfindahl_over_even([3, 1]) == pytest.approx(2 * (0.75**2 + 0.25**2)) and _herfindahl_over_even([0, 0]) == 0.0
    )


def test_figures_of_layers_and_of_all_together() -> None:
    found = load_figures(ExpertLoad(iteration=1, layers=((1, 3), (4, 0)), layer_numbers=(2, 4)))
    assert found["expert_load/layer_2_p50_over_even"] == 1.0 and found["expert_load/layer_2_max_over_even"] == 1.5
    assert found["expert_load/layer_4_hhi_over_even"] == 2.0 and found["expert_load/max_over_even"] == 2.0
    assert found["expert_load/p50_over_even"] == 1.0  # of 0, 0.5, 1.5 and 2
    assert found["expert_load/hhi_over_even"] == pytest.approx((1.25 + 2.0) / 2)
    assert len(found) == 12 and load_figures(ExpertLoad(iteration=1, layers=())) == {}
