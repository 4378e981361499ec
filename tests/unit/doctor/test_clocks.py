"""Tests the checks of clocks: each finding appears with its cause and disappears without it."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_ft.doctor.clocks import OBSERVED_SECONDS, ClockFacts, _understand
from tests.helpers.machines import CLOCKS, judged

CAUSES: dict[str, tuple[dict[str, Any], str, str]] = {
    "another age": ({"wall_unix_seconds": 1000.0}, "error", "the year 1970"),
    "a step ahead": ({"elapsed_wall_seconds": 0.2}, "warning", "+100.0 ms"),
    "a step back": ({"elapsed_wall_seconds": -1.0}, "warning", "-1100.0 ms"),
    "no service sets it": ({"is_synchronized": False}, "warning", "not synchronized (chronyc)"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_finding_appears_with_its_cause(cause: str) -> None:
    facts, level, what = CAUSES[cause]
    (finding,) = judged(replace(CLOCKS, **facts).check())
    assert (finding.level, what in finding.what) == (level, True), finding
    assert finding.fix


def test_and_goes_without() -> None:
    assert judged(CLOCKS.check()) == []


def test_what_nobody_says_is_reported() -> None:
    (finding,) = replace(CLOCKS, is_synchronized=None, source="no chronyc; no timedatectl").check()
    assert "synchronization unknown (no chronyc; no timedatectl)" in finding.what


def test_answers_of_the_tools() -> None:
    tracking = "C0A80101,192.168.1.1,3,1763781000.1,0.00001,0.00002,0.00003,-7.1,0.001,0.1,0.01,0.001,64.2,{}\n"
    assert _understand("chronyc", tracking.format("Normal")) is True
    assert _understand("chronyc", tracking.format("Not synchronised")) is False
    assert _understand("chronyc", "506 Cannot talk to daemon\n") is None
    assert [_understand("timedatectl", text) for text in ("yes\n", "no\n", "\n")] == [True, False, None]


def test_this_machines_clocks_are_watched_for_a_while() -> None:
    facts = ClockFacts.observe()
    assert facts.elapsed_monotonic_seconds >= OBSERVED_SECONDS
    assert facts.source
