"""Campaigns resume, count only proven trials, and start anew when the source changes."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.campaign import Counts, Journal, Outcome, Trial, run_campaign

ROWS = [{"rank": rank, "phase": phase} for rank in (0, 1) for phase in ("forward", "update")]


class Executor:
    """Yields scripted outcomes and remembers what it was asked for."""

    def __init__(self, unproven: set[int] = frozenset(), failing: set[int] = frozenset(), stop_after: int = 99) -> None:  # type: ignore[assignment]
        self.unproven, self.failing, self.stop_after = unproven, failing, stop_after
        self.asked: list[int] = []

    def __call__(self, trials: Sequence[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        for number, trial in enumerate(trials):
            if number == self.stop_after:
                raise KeyboardInterrupt
            index = ROWS.index(trial.parameters)
            self.asked.append(index)
            yield trial, Outcome(proven=index not in self.unproven, passed=index not in self.failing)


def run(executor: Executor, folder: Path, source: str = "a") -> Counts:
    counts, _ = run_campaign("faults", ROWS, executor, journal_dir=folder, source=source, report=lambda line: None)
    return counts


def test_all_trials_run_once_and_are_counted(tmp_path: Path) -> None:
    executor = Executor()
    counts = run(executor, tmp_path)
    assert executor.asked == [0, 1, 2, 3]
    assert counts.complete
    assert counts.summary() == "4 trials: 4 passed, 0 failed, 0 not proven (0 from the journal)"


def test_a_stopped_campaign_goes_on_where_it_stopped(tmp_path: Path) -> None:
    try:
        run(Executor(stop_after=2), tmp_path)
    except KeyboardInterrupt:
        stopped = True
    executor = Executor()
    counts = run(executor, tmp_path)
    assert stopped
    assert executor.asked == [2, 3]
    assert (counts.resumed, counts.complete) == (2, True)


def test_other_source_starts_anew(tmp_path: Path) -> None:
    run(Executor(), tmp_path)
    executor = Executor()
    run(executor, tmp_path, source="b")
    assert executor.asked == [0, 1, 2, 3]


def test_unproven_trials_are_tried_again_and_never_count_as_passed(tmp_path: Path) -> None:
    executor = Executor(unproven={1})
    counts = run(executor, tmp_path)
    assert executor.asked == [0, 1, 2, 3, 1]
    assert (counts.passed, counts.failed, counts.unproven, counts.complete) == (3, 0, 1, False)


def test_failed_trials_run_again_the_next_time(tmp_path: Path) -> None:
    counts = run(Executor(failing={2}), tmp_path)
    assert (counts.passed, counts.failed, counts.complete) == (3, 1, False)
    executor = Executor()
    assert run(executor, tmp_path).complete
    assert executor.asked == [2]


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    run(Executor(), tmp_path)
    path = tmp_path / "faults.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    assert len(Journal(path).outcomes) == 3
    assert run(Executor(), tmp_path).resumed == 3
    assert len(Journal(path).outcomes) == 4
