"""Tests that campaigns resume, count only proven trials, and start again when the source changes."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks import campaign
from benchmarks.campaign import Counts, Journal, Outcome, Trial, run_campaign

ROWS = [{"rank": rank, "phase": phase} for rank in (0, 1) for phase in ("forward", "update")]


class Executor:
    """Executor that yields given outcomes and stores the trials that it received."""

    def __init__(
        self,
        unproven: Collection[int] = (),
        failing: Collection[int] = (),
        uncompared: Collection[int] = (),
        stop_after: int = 99,
    ) -> None:
        self.unproven, self.failing, self.uncompared, self.stop_after = unproven, failing, uncompared, stop_after
        self.asked: list[int] = []

    def __call__(self, trials: Sequence[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        for number, trial in enumerate(trials):
            if number == self.stop_after:
                raise KeyboardInterrupt
            index = ROWS.index(trial.parameters)
            self.asked.append(index)
            num_compared = 0 if index in self.uncompared else 7
            passed = index not in self.failing
            yield trial, Outcome(proven=index not in self.unproven, passed=passed, num_compared=num_compared)


@pytest.fixture(autouse=True)
def named_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the digest of a source by the name of the script."""
    monkeypatch.setattr(campaign, "source_digest", lambda script: script.name)


def run(executor: Executor, folder: Path, source: str = "a") -> Counts:
    counts, _ = run_campaign(
        "faults", ROWS, executor, script=Path(source), journal_dir=folder, report=lambda line: None
    )
    return counts


def test_all_trials_run_once_and_are_counted(tmp_path: Path) -> None:
    executor = Executor()
    counts = run(executor, tmp_path)
    assert executor.asked == [0, 1, 2, 3]
    assert counts.complete
    assert counts.summary() == (
        "4 trials: 4 passed, 0 failed, 0 compared with nothing, 0 not proven (0 from the journal)"
    )


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


def test_other_source_starts_from_the_beginning(tmp_path: Path) -> None:
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
    again = run(executor, tmp_path)
    assert again.complete and executor.asked == [2]
    assert again.failed_before == 1 and again.to_counts()["failed_before"] == 1
    assert again.again == "; trials run again: 1 failed before"


def test_failures_stay_in_the_totals_of_every_later_call(tmp_path: Path) -> None:
    for _ in range(2):
        run(Executor(failing={2}), tmp_path)
    assert run(Executor(), tmp_path).failed_before == 2
    assert run(Executor(), tmp_path).failed_before == 2
    assert run(Executor(), tmp_path, source="b").failed_before == 0
    assert run(Executor(), tmp_path).failed_before == 0, "outcomes of another source are removed"


def test_a_quick_campaign_has_a_journal_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "JOURNAL_DIR", tmp_path / "full")
    monkeypatch.setattr(campaign, "QUICK_JOURNAL_DIR", tmp_path / "quick")
    for quick in (False, True):
        run_campaign("faults", ROWS, Executor(), script=Path("a"), quick=quick, report=lambda line: None)
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*.jsonl"))] == [
        "full/faults.jsonl",
        "quick/faults-quick.jsonl",
    ]


def test_unproven_attempts_are_counted(tmp_path: Path) -> None:
    run(Executor(unproven={1}), tmp_path)
    counts = run(Executor(), tmp_path)
    assert (counts.complete, counts.unproven_before, counts.failed_before) == (True, 2, 0)
    assert counts.again == "; trials run again: 2 unproven before"


def test_a_trial_that_was_compared_with_nothing_is_no_passed_one(tmp_path: Path) -> None:
    counts = run(Executor(uncompared={0, 3}), tmp_path)
    assert (counts.passed, counts.failed, counts.uncompared, counts.complete) == (2, 0, 2, False)
    executor = Executor()
    assert run(executor, tmp_path).complete
    assert executor.asked == [0, 3]


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    run(Executor(), tmp_path)
    path = tmp_path / "faults.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    assert len(Journal(path, "a").outcomes) == 3
    assert run(Executor(), tmp_path).resumed == 3
    assert len(Journal(path, "a").outcomes) == 4
