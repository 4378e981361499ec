"""Runs campaigns of many trials, which can be resumed. A trial counts only if its event is proven and its result was
compared.

An executor is a generator that runs trials and yields the outcome of each trial as soon as it is known; it may inject
many faults into one job. Every outcome is written to disk before the next trial starts, under a key that contains the
trial's parameters and the digest of the files that the campaign uses. So a stopped campaign continues where it stopped,
and it starts again if these files change. Journals are stored beside the results and are committed with them. Earlier
outcomes of the same source stay in the journal and are counted, so that a failure is shown even if a later attempt
passed. Outcomes of other sources are removed when a campaign starts.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.covering import Row, Scalar
from benchmarks.source import ROOT, source_digest
from megatron_ft.durable import replace_file

JOURNAL_DIR = ROOT / "benchmarks" / "results" / "journals"
QUICK_JOURNAL_DIR = ROOT / ".cache" / "campaigns"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Trial of a campaign: the campaign's name, and a value for each factor."""

    campaign: str
    parameters: Row

    def key(self, source: str) -> str:
        """Return the key of this trial's outcome for one digest of the source."""
        text = json.dumps([self.campaign, self.parameters, source], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of a trial."""

    proven: bool
    """Whether the run's own record shows that the event happened."""
    passed: bool
    """Whether no problem was found."""
    num_compared: int
    """Number of values (losses, digests of states) that were compared with a reference. A trial that compared none
    never counts as passed."""
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Totals of a campaign by the newest outcome of each trial, and the number of earlier outcomes."""

    planned: int
    passed: int
    """Trials that are proven and compared with a reference, without a problem."""
    failed: int
    """Trials that are proven and have a problem."""
    uncompared: int
    """Trials that are proven and have no problem, but were not compared with anything."""
    unproven: int
    resumed: int
    """Trials whose outcome was already in the journal."""
    failed_before: int
    """Earlier outcomes that failed or compared nothing, and whose trial was run again."""
    unproven_before: int
    """Earlier outcomes without proof, whose trial was run again."""

    @property
    def complete(self) -> bool:
        """Return whether every planned trial was proven, was compared, and passed."""
        return self.passed == self.planned

    @property
    def again(self) -> str:
        """Return the last part of the figure: how many outcomes were replaced by later ones. Empty if none was
        replaced."""
        parts = [
            f"{count} {what}"
            for count, what in ((self.failed_before, "failed"), (self.unproven_before, "unproven"))
            if count
        ]
        return f"; trials run again: {', '.join(parts)} before" if parts else ""

    def summary(self) -> str:
        """Return the totals as one line for a log."""
        return (
            f"{self.planned} trials: {self.passed} passed, {self.failed} failed, {self.uncompared} compared with "
            f"nothing, {self.unproven} not proven ({self.resumed} from the journal){self.again}"
        )

    def to_counts(self) -> dict[str, int]:
        """Return the totals as the counts of a claim's result."""
        counts = dataclasses.asdict(self)
        return {"trials": counts.pop("planned"), **counts}


Executor = Callable[[Sequence[Trial]], Iterator[tuple[Trial, Outcome]]]


def in_threads(run: Callable[[Trial], Outcome], num_parallel: int) -> Executor:
    """Return an executor that calls ``run`` for each trial, for ``num_parallel`` trials at the same time."""

    def execute(trials: Sequence[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        with ThreadPoolExecutor(num_parallel) as pool:
            begun = {pool.submit(run, trial): trial for trial in trials}
            for done in as_completed(begun):
                yield begun[done], done.result()

    return execute


def execute_jobs(trials: Sequence[Trial], run: Callable[[int], Sequence[Outcome]]) -> Iterator[tuple[Trial, Outcome]]:
    """Run trials that have the factors ``job`` and ``fault``. A job runs with all its faults, even if only some of them
    have no outcome yet.

    Args:
        run: Runs the job with this number, and returns an outcome for each of its faults.
    """
    by_job: dict[int, list[Trial]] = {}
    for trial in trials:
        by_job.setdefault(int(str(trial.parameters["job"])), []).append(trial)
    for number, mine in by_job.items():
        outcomes = run(number)
        for trial in mine:
            yield trial, outcomes[int(str(trial.parameters["fault"]))]


class Journal:
    """Outcomes of trials in an append-only JSONL file. An incomplete last line is removed.

    Args:
        source: Digest of the source. Outcomes of other sources are removed from the file.
    """

    def __init__(self, path: Path, source: str) -> None:
        self.path, self._source = path, source
        self.outcomes: dict[str, Outcome] = {}
        """Newest outcome of each key."""
        self.replaced: dict[str, list[Outcome]] = {}
        """Earlier outcomes of each key, oldest first."""
        if path.exists():
            self._load(path.read_bytes())

    def _load(self, data: bytes) -> None:
        lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line).get("source") == self._source]
        if b"".join(kept) != data:
            replace_file(self.path, b"".join(kept))
        for record in map(json.loads, kept):
            fields = {field.name: record[field.name] for field in dataclasses.fields(Outcome)}
            self._keep(record["key"], Outcome(**fields))

    def _keep(self, key: str, outcome: Outcome) -> None:
        if key in self.outcomes:
            self.replaced.setdefault(key, []).append(self.outcomes[key])
        self.outcomes[key] = outcome

    def append(self, key: str, trial: Trial, outcome: Outcome) -> None:
        """Append an outcome to the file and force it to disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        record = {"key": key, "source": self._source, "parameters": trial.parameters, **dataclasses.asdict(outcome)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._keep(key, outcome)


def run_campaign(
    name: str,
    rows: Iterable[Mapping[str, Scalar]],
    execute: Executor,
    *,
    script: Path,
    quick: bool = False,
    journal_dir: Path | None = None,
    num_attempts: int = 2,
    report: Callable[[str], None] = print,
) -> tuple[Counts, list[tuple[Trial, Outcome]]]:
    """Run every trial that has no proven and passed outcome in the journal. Return totals and outcomes.

    Args:
        script: File of the campaign. The source is this file and the files that it uses.
        quick: Whether the journal is stored outside the repository, under a different name.
        journal_dir: Folder of the journal; None for the default.

    A trial whose event did not happen is run again, up to ``num_attempts`` times in total. Failed trials of an earlier
    call run again; their failures stay in the totals (``Counts.failed_before``).
    """
    name = f"{name}-quick" if quick else name
    journal_dir = journal_dir or (QUICK_JOURNAL_DIR if quick else JOURNAL_DIR)
    source = source_digest(script)
    trials = {trial.key(source): trial for trial in (Trial(campaign=name, parameters=dict(row)) for row in rows)}
    journal = Journal(journal_dir / f"{name}.jsonl", source)
    done = {key: journal.outcomes[key] for key in trials if _good(journal.outcomes.get(key))}
    num_resumed = len(done)
    for _ in range(num_attempts):
        waiting = [trial for key, trial in trials.items() if key not in done or not done[key].proven]
        for trial, outcome in execute(waiting) if waiting else ():
            key = trial.key(source)
            journal.append(key, trial, outcome)
            done[key] = outcome
            report(f"{name}: {len(done)}/{len(trials)} {_word(outcome)} {_text(trial.parameters)}")
    counts = _count(trials, done, journal, num_resumed)
    report(f"{name}: {counts.summary()}")
    return counts, [(trial, done[key]) for key, trial in trials.items() if key in done]


def _good(outcome: Outcome | None) -> bool:
    return outcome is not None and outcome.proven and outcome.passed and outcome.num_compared > 0


def _count(trials: Mapping[str, Trial], done: Mapping[str, Outcome], journal: Journal, num_resumed: int) -> Counts:
    proven = [outcome for outcome in done.values() if outcome.proven]
    before = [outcome for key in trials for outcome in journal.replaced.get(key, ())]
    return Counts(
        planned=len(trials),
        passed=sum(map(_good, proven)),
        failed=sum(not outcome.passed for outcome in proven),
        uncompared=sum(outcome.passed and not outcome.num_compared for outcome in proven),
        unproven=len(trials) - len(proven),
        resumed=num_resumed,
        failed_before=sum(outcome.proven and not _good(outcome) for outcome in before),
        unproven_before=sum(not outcome.proven for outcome in before),
    )


def _word(outcome: Outcome) -> str:
    if not outcome.proven:
        return "not proven"
    if not outcome.passed:
        return "FAILED"
    return "passed" if outcome.num_compared else "compared with nothing"


def _text(parameters: Mapping[str, Scalar]) -> str:
    return " ".join(f"{name}={value}" for name, value in parameters.items())
