"""Campaigns: many trials, resumable, counted only when their event is proven to have happened.

An executor is a generator: it may start one job and put many faults into it, and yields each trial's
outcome as soon as it is known. Every outcome is on disk before the next trial goes on, under a key made
of the trial's parameters and the digest of the source, so that a campaign that was stopped goes on where
it stopped and a change of the code starts it anew.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.covering import Row, Scalar
from benchmarks.source import ROOT, source_digest

JOURNAL_DIR = ROOT / ".cache" / "campaigns"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One trial: a campaign's name and the values of its factors."""

    campaign: str
    parameters: Row

    def key(self, source: str) -> str:
        """Name of this trial's outcome for one state of the source."""
        text = json.dumps([self.campaign, self.parameters, source], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a trial. ``proven``: the run's own record shows that the event happened."""

    proven: bool
    passed: bool
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Totals of a campaign; ``passed`` and ``failed`` count proven trials only."""

    planned: int
    passed: int
    failed: int
    unproven: int
    resumed: int

    @property
    def complete(self) -> bool:
        """Whether every planned trial was proven and passed."""
        return self.passed == self.planned

    def summary(self) -> str:
        """One line for a log."""
        return (
            f"{self.planned} trials: {self.passed} passed, {self.failed} failed, {self.unproven} not proven"
            f" ({self.resumed} from the journal)"
        )


Executor = Callable[[Sequence[Trial]], Iterator[tuple[Trial, Outcome]]]


def execute_jobs(trials: Sequence[Trial], run: Callable[[int], Sequence[Outcome]]) -> Iterator[tuple[Trial, Outcome]]:
    """Trials that name ``job`` and ``fault``: a job runs with all its faults, whichever of them are waiting.

    Args:
        run: from the number of a job to an outcome for each of its faults.
    """
    by_job: dict[int, list[Trial]] = {}
    for trial in trials:
        by_job.setdefault(int(str(trial.parameters["job"])), []).append(trial)
    for number, mine in by_job.items():
        outcomes = run(number)
        for trial in mine:
            yield trial, outcomes[int(str(trial.parameters["fault"]))]


class Journal:
    """Outcomes of trials in an append-only JSONL file; a torn last line is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: dict[str, Outcome] = {}
        if path.exists():
            self._load(path.read_bytes())

    def _load(self, data: bytes) -> None:
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            os.truncate(self.path, len(whole))
        for line in whole.splitlines():
            record = json.loads(line)
            key = record.pop("key")
            record.pop("parameters")
            self.outcomes[key] = Outcome(**record)

    def append(self, key: str, trial: Trial, outcome: Outcome) -> None:
        """Keep an outcome durably."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        record = {"key": key, "parameters": trial.parameters, **dataclasses.asdict(outcome)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.outcomes[key] = outcome


def run_campaign(
    name: str,
    rows: Iterable[Mapping[str, Scalar]],
    execute: Executor,
    *,
    journal_dir: Path = JOURNAL_DIR,
    source: str | None = None,
    num_attempts: int = 2,
    report: Callable[[str], None] = print,
) -> tuple[Counts, list[tuple[Trial, Outcome]]]:
    """Run every trial that the journal does not hold as proven and passed; return totals and outcomes.

    A trial whose event did not happen is tried again, ``num_attempts`` times in all. Failed trials of an
    earlier call run again: a failure is a reason to look, not a result to keep.
    """
    source = source_digest() if source is None else source
    trials = {trial.key(source): trial for trial in (Trial(campaign=name, parameters=dict(row)) for row in rows)}
    journal = Journal(journal_dir / f"{name}.jsonl")
    done = {key: journal.outcomes[key] for key in trials if _good(journal.outcomes.get(key))}
    num_resumed = len(done)
    for _ in range(num_attempts):
        waiting = [trial for key, trial in trials.items() if key not in done or not done[key].proven]
        for trial, outcome in execute(waiting) if waiting else ():
            key = trial.key(source)
            journal.append(key, trial, outcome)
            done[key] = outcome
            report(f"{name}: {len(done)}/{len(trials)} {_word(outcome)} {_text(trial.parameters)}")
    counts = _count(trials, done, num_resumed)
    report(f"{name}: {counts.summary()}")
    return counts, [(trial, done[key]) for key, trial in trials.items() if key in done]


def _good(outcome: Outcome | None) -> bool:
    return outcome is not None and outcome.proven and outcome.passed


def _count(trials: Mapping[str, Trial], done: Mapping[str, Outcome], num_resumed: int) -> Counts:
    proven = [outcome for outcome in done.values() if outcome.proven]
    return Counts(
        planned=len(trials),
        passed=sum(outcome.passed for outcome in proven),
        failed=sum(not outcome.passed for outcome in proven),
        unproven=len(trials) - len(proven),
        resumed=num_resumed,
    )


def _word(outcome: Outcome) -> str:
    return ("passed" if outcome.passed else "FAILED") if outcome.proven else "not proven"


def _text(parameters: Mapping[str, Scalar]) -> str:
    return " ".join(f"{name}={value}" for name, value in parameters.items())
