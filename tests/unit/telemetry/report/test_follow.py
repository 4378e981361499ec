"""Tests pages that follow a run: they are written only after new reports, and only for a limited time."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ft.telemetry.report.files import POLL_SECONDS, _sizes, follow
from megatron_ft.telemetry.report.page import render
from megatron_ft.testing.made_up_runs import MadeUpRun, localized


class Time:
    """Clock that advances while the code waits. Scheduled actions happen at their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, Callable[[], object]]] = []

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds
        while self.due and self.due[0][0] <= self.now:
            self.due.pop(0)[1]()


def follow_it(run_dir: Path, time: Time, ends_after: int, took: float = 0.0) -> tuple[bool, list[float]]:
    """Return whether the run ended, and the times at which pages were written."""
    written: list[float] = []

    def write() -> bool:
        written.append(time.now)
        time.now += took
        return len(written) == ends_after

    ended = follow(run_dir, write, every_seconds=5.0, patience_seconds=60.0, clock=time.clock, wait=time.wait)
    return ended, written


@pytest.fixture
def grow(run: MadeUpRun) -> Callable[[], None]:
    def more() -> None:
        run.line("metrics.jsonl", {"kind": "metrics"})

    return more


def test_it_is_written_again_when_the_files_have_grown(run: MadeUpRun, grow: Callable[[], None]) -> None:
    time = Time()
    time.due = [(2.0, grow), (30.0, grow), (31.0, grow)]
    ended, written = follow_it(run.path, time, ends_after=4)
    assert ended and written == [0.0, 5.0, 30.0, 35.0], "growth at 2 s waits, and that at 31 s, for their turn"


def test_it_gives_up_where_nothing_new_comes(run: MadeUpRun, grow: Callable[[], None]) -> None:
    time = Time()
    time.due = [(20.0, grow)]
    ended, written = follow_it(run.path, time, ends_after=3)
    assert not ended and written == [0.0, 20.0] and 80.0 <= time.now <= 80.0 + POLL_SECONDS


def test_pages_that_take_long_come_less_often(run: MadeUpRun, grow: Callable[[], None]) -> None:
    time = Time()
    time.due = [(0.6, grow)]
    ended, written = follow_it(run.path, time, ends_after=2, took=3.0)
    assert ended and written[1] == pytest.approx(3.0 + 27.0, abs=POLL_SECONDS)


def test_an_ended_run_is_written_once(run: MadeUpRun) -> None:
    assert follow_it(run.path, Time(), ends_after=1) == (True, [0.0])


def test_files_that_are_not_there_yet_have_no_size(tmp_path: Path) -> None:
    assert _sizes(tmp_path) == (0, 0)


def test_only_a_live_page_is_read_again(run: MadeUpRun) -> None:
    localized(run, ends=False)
    assert '<meta http-equiv="refresh" content="7"/>' in render(run.report(), refresh_seconds=7)
    assert "refresh" not in render(run.report())
