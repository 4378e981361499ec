"""Tests the section of a page about goodput."""

import pytest

from megatron_ft.testing.made_up_runs import MadeUpRun, localized, restarted, started

from .conftest import drawing_of


def test_the_bar_is_as_long_as_the_wall_time(reported: MadeUpRun) -> None:
    bar = drawing_of(reported.page(), "Shares of the wall time")
    widths = [float(str(rect.get("width"))) for rect in bar.iter("rect")]
    assert len(widths) >= 3 and sum(widths) == pytest.approx(1000, abs=0.1)


def test_it_says_what_was_measured_and_what_the_formula_gives(run: MadeUpRun) -> None:
    localized(run)
    page, found = run.page(), run.report().goodput
    # 16 iterations of 0.5 s in 10.1 s, and 6.1 s to 8.1 s lost to one recovery: 1 / (1 + 2.0 / 8.1)
    assert found.ettr == pytest.approx(8.0 / 10.1, abs=1e-5)
    assert found.predicted_ettr == pytest.approx(8.1 / 10.1, abs=1e-5)
    assert "<dt>ETTR, measured</dt><dd>79.2 %</dd>" in page
    assert "<dt>ETTR, predicted by the formula</dt><dd>80.2 %</dd>" in page
    assert "<dt>interruptions</dt><dd>1</dd>" in page and "<dt>time lost per interruption</dt><dd>2.00 s</dd>" in page


def test_iterations_that_were_run_again_have_their_share(run: MadeUpRun) -> None:
    restarted(run)
    words = "".join(drawing_of(run.page(), "Shares of the wall time").itertext())
    # 12 iterations of 0.5 s count, 7 and 8 were lost, of 10.2 s in all
    assert "useful iterations: 58.8 %" in words and "iterations that were lost and run again: 9.8 %" in words
    assert "between jobs" not in words, "nothing of it"


def test_a_run_without_iterations_has_no_figures(run: MadeUpRun) -> None:
    run.say(0.0, started())
    run.say(5.0, started())
    assert "No iteration has been timed yet." in run.page()
