"""Tests a rank's report of its compute time: medians over iterations, and nothing before there are enough of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ft.config.telemetry import TelemetryConfig
from megatron_ft.events import ProfileRecorded, Record
from megatron_ft.mcore.training.reporting import MIN_ITERATIONS, NUM_ITERATIONS, ProfilerWindow, StragglerTimer


class TestClock:
    """Clock that the test advances."""

    __test__ = False

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, began: float, ended: float) -> float:
        return ended - began


class Work(torch.nn.Module):
    """Layer whose forward pass takes a given time."""

    def __init__(self, clock: TestClock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, seconds: float) -> float:
        if seconds < 0:
            raise ValueError("breaks")
        self.clock.now += seconds
        return seconds


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


@pytest.fixture
def work(clock: TestClock) -> Work:
    return Work(clock)


def timer_of(work: Work, clock: TestClock) -> StragglerTimer:
    pace = StragglerTimer(clock)
    pace.time(work)
    return pace


def passed(pace: StragglerTimer, work: Work, *seconds: float) -> float:
    """Return the report after an iteration with these forward passes and other work between them."""
    for took in seconds:
        work(took)
        work.clock.now += 100.0
    return pace.end_iteration()


def test_it_is_the_median_of_iterations_medians(clock: TestClock, work: Work) -> None:
    pace = timer_of(work, clock)
    iterations = [(9.0, 9.0), (1.0, 3.0), (2.0, 70.0, 1.0), (2.5, 1.5)] * (MIN_ITERATIONS // 4)
    output = [passed(pace, work, *passes) for passes in iterations]
    assert output == [0.0] * (MIN_ITERATIONS - 1) + [2.0]


def test_old_iterations_are_forgotten(clock: TestClock, work: Work) -> None:
    pace = timer_of(work, clock)
    for _ in range(NUM_ITERATIONS):
        passed(pace, work, 1.0)
    output = [passed(pace, work, 5.0) for _ in range(NUM_ITERATIONS)]
    assert output[NUM_ITERATIONS // 2 - 2] == 1.0 and output[-1] == 5.0
    assert sorted(output) == output


def test_iterations_without_a_pass_do_not_count(clock: TestClock, work: Work) -> None:
    pace = timer_of(work, clock)
    for _ in range(MIN_ITERATIONS):
        passed(pace, work, 2.0)
    assert [passed(pace, work) for _ in range(3 * NUM_ITERATIONS)] == [2.0] * 3 * NUM_ITERATIONS


def test_a_pass_that_breaks_is_none(clock: TestClock, work: Work) -> None:
    pace = timer_of(work, clock)
    for _ in range(MIN_ITERATIONS):
        with pytest.raises(ValueError, match="breaks"):
            work(-1.0)
        clock.now += 50.0
        passed(pace, work, 2.0)
    assert pace.end_iteration() == 2.0


def test_evaluations_do_not_count(clock: TestClock, work: Work) -> None:
    pace = timer_of(work, clock)
    for _ in range(MIN_ITERATIONS):
        passed(pace, work, 2.0)
    for _ in range(2 * NUM_ITERATIONS):
        passed(pace, work.eval(), 9.0, 9.0)
    assert pace.end_iteration() == 2.0
    assert passed(pace, work.train(), 2.0) == 2.0


def test_another_model_goes_on_with_what_is_known(clock: TestClock, work: Work) -> None:
    pace, other = timer_of(work, clock), Work(clock)
    for _ in range(MIN_ITERATIONS - 1):
        assert passed(pace, work, 2.0) == 0.0
    pace.time(other)
    assert passed(pace, other, 2.0) == 2.0


def window(folder: Path, reports: list[Record], **keys: Any) -> ProfilerWindow:
    return ProfilerWindow(TelemetryConfig(**{"profile_first_iteration": 3, **keys}), folder, reports.append)


def trained(profiler: ProfilerWindow, iterations: range, *, rank: int = 0, generation: int = 0) -> None:
    for iteration in iterations:
        profiler.begin(iteration, rank=rank, generation=generation)
        torch.ones(4, 4) @ torch.ones(4, 4)
        profiler.end(iteration)


def num_products(path: Path) -> int:
    return sum(event.get("name") == "aten::mm" for event in json.loads(path.read_text())["traceEvents"])


def test_the_profiler_records_its_window_and_only_its_ranks(tmp_path: Path) -> None:
    reports: list[Record] = []
    trained(window(tmp_path, reports), range(1, 8), rank=1)
    assert reports == [] and not (tmp_path / "profiles").exists()
    trained(window(tmp_path, reports, profile_ranks=[1], profile_iterations=2), range(1, 8), rank=1)
    (record,) = reports
    assert isinstance(record, ProfileRecorded) and record.error is None
    assert (record.rank, record.first_iteration, record.last_iteration) == (1, 3, 4)
    assert Path(record.path).parent == tmp_path / "profiles" and num_products(Path(record.path)) == 2


def test_a_new_membership_within_the_window_records_the_rest(tmp_path: Path) -> None:
    """Iteration 4 fails; the ranks form a new membership, in which this process has another rank that records, too."""
    reports: list[Any] = []
    profiler = window(tmp_path, reports, profile_ranks=[0, 1])
    trained(profiler, range(1, 4))
    profiler.begin(4, rank=0, generation=0)
    profiler.stop()
    profiler.stop()
    trained(profiler, range(4, 9), rank=1, generation=1)
    found = [(each.rank, each.first_iteration, each.last_iteration, num_products(Path(each.path))) for each in reports]
    assert found == [(0, 3, 4, 1), (1, 4, 5, 2)] and len({each.path for each in reports}) == 2


def test_a_trace_that_cannot_be_written_is_reported_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    reports: list[Any] = []
    trained(window(tmp_path, reports, profile_dir=str(tmp_path / "file")), range(3, 7))
    assert "FileExistsError" in reports[0].error and "could not be written" in reports[0].describe().text
