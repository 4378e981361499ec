"""Claim ``sparse-bitwise``: state restored from sparse snapshots equals, in every bit, the state that was lost.

There is one job per row of a covering array, and one fault per generation of the job. All ranks are killed at a random
iteration and phase and are started again; they find their windows in the memory of the nodes, replay them and continue.
All losses, and the digests of every rank's whole state after every iteration, are compared with ``atol=0`` with two
undisturbed runs, one without snapshots and one with snapshots. A few jobs also lose their nodes, and continue from
windows on disk. A trial is a fault. It counts only if the run's own record shows that the fault happened, that windows
had three slices or more, and from which source the job continued.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.campaign import Outcome, Trial, run_campaign
from benchmarks.covering import Row
from benchmarks.generations import Generation, generations_of, missing
from benchmarks.report import finish, parse_arguments
from benchmarks.sparse_faults import (
    FACTORS,
    MEMORY,
    MIN_WINDOW_ITERATIONS,
    NUM_ITERATIONS,
    PERSISTED,
    QUICK_ITERATIONS,
    QUICK_ROWS,
    REPLAY,
    configuration,
    failpoints,
    faults_of,
    num_ranks,
    rows,
    sparse_snapshots,
)
from megatron_ft.testing.jobs import REPOSITORY, JobResult, forkserver, run_job, start, wait

ID = "sparse-bitwise"
NUM_FAULTS, QUICK_FAULTS = 5, 2
MIN_TRIALS = 60
DISK_ROWS = (0, 2, 6, 9, 12)
"""Rows of the covering array whose job also loses all nodes."""
DISK_ITERATIONS = (12, 17, 23, 14, 20)
"""Iteration in which each of these jobs loses its nodes."""
TIMEOUT_SECONDS = 300.0
HELD_SECONDS = 60.0
"""Time for which a failpoint delays the iteration in which the job's nodes are lost."""
ANY_BYTES = 1 << 40
"""Arbitrary bandwidth for ``dry_run``, whose figure for the whole state does not depend on the bandwidth."""
HUNG = -1
"""Exit code of a job that was killed because it took too long. It counts as a failure."""
WARM = "megatron_ft.mcore.rank_main:warm"


@dataclass(frozen=True, slots=True)
class Reference:
    """Undisturbed runs of a configuration: their records, and the differences between them."""

    recorded: Generation
    snapshots: Sequence[str]
    """Overrides with which the disturbed runs take snapshots."""
    problems: Sequence[str]


@dataclass(slots=True)
class Bench:
    """Runs jobs with ranks from one fork server, and stores undisturbed runs for later trials."""

    folder: Path
    socket: str
    faults: dict[str, list[Row]]
    """Faults of each row, by the row's text."""
    quick: bool = False
    """Whether one undisturbed run is enough."""
    references: dict[str, Reference] = field(default_factory=dict)
    num_jobs: int = 0

    def execute(self, trials: Sequence[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        """Execute trials and yield their outcomes. The faults of a row share one job, even if only some of them are
        missing."""
        waiting: dict[str, list[Trial]] = {}
        for trial in trials:
            waiting.setdefault(text_of(trial.parameters), []).append(trial)
        for text, mine in waiting.items():
            row = {name: mine[0].parameters[name] for name in FACTORS}
            reference = self.reference(row)
            in_memory = [trial for trial in mine if trial.parameters["source"] != PERSISTED]
            outcomes = self.killed_in_memory(row, self.faults[text], reference) if in_memory else []
            for trial in mine:
                if trial.parameters["source"] == PERSISTED:
                    yield trial, self.killed_with_nodes(row, trial.parameters, reference)
                else:
                    yield trial, outcomes[int(str(trial.parameters["fault"]))]

    def reference(self, row: Row) -> Reference:
        """Return the undisturbed runs of a row's configuration. They run at the first call."""
        overrides = configuration(row, self.num_iterations)
        key = text_of(row)
        if key not in self.references:
            snapshots = sparse_snapshots(row, self.dense_bytes(row, overrides))
            runs = [self.run("reference", [*overrides, *more]) for more in ([], *([] if self.quick else [snapshots]))]
            recorded = [generations_of(run)[0] for run in runs]
            problems = [text for text in map(ended, runs) if text]
            for generation in recorded:
                problems += [*missing([generation], self.num_iterations), *generation.differences(recorded[0])]
            self.references[key] = Reference(recorded[0], snapshots, problems)
            self.forget(runs)
        return self.references[key]

    def dense_bytes(self, row: Row, overrides: Sequence[str]) -> int:
        """Return the size of the whole state on the rank with most state, as ``dry_run`` computes it."""
        words = [*overrides, *sparse_snapshots(row, ANY_BYTES), "dry_run=true", "dry_run_format=json"]
        words.append(f"data.cache_dir={self.folder / 'cache'}")
        command = [sys.executable, str(REPOSITORY / "pretrain_moe.py"), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
        assert done.returncode == 0, f"dry_run failed: {done.stderr}"
        return int(json.loads(done.stdout)["snapshot"]["dense_bytes"])

    @property
    def num_iterations(self) -> int:
        """Return the number of iterations of every run."""
        return QUICK_ITERATIONS if self.quick else NUM_ITERATIONS

    def killed_in_memory(self, row: Row, faults: Sequence[Row], reference: Reference) -> list[Outcome]:
        """Run one job with all faults of a row. Return an outcome for each fault."""
        if reference.problems:
            return [undisturbed_problems(reference)] * len(faults)
        restarts = f"recovery.max_restarts={len(faults) + 1}"
        words = [*configuration(row, self.num_iterations), *reference.snapshots, restarts, failpoints(faults)]
        run = self.run("killed", words)
        generations = generations_of(run)
        lasting = [*filter(None, [ended(run)]), *missing(generations, self.num_iterations)]
        outcomes = [outcome_of(fault, number, generations, lasting, reference) for number, fault in enumerate(faults)]
        self.forget([run])
        return outcomes

    def killed_with_nodes(self, row: Row, fault: Row, reference: Reference) -> Outcome:
        """Kill a job with all its nodes after it has written a window to disk, and start it again."""
        if reference.problems:
            return undisturbed_problems(reference)
        at, name = int(str(fault["iteration"])), self.next_name("lost")
        words = [*configuration(row, self.num_iterations), *reference.snapshots]
        words += ["snapshot.persist_interval_windows=1", "snapshot.keep_persisted=2"]
        held = f"testing.failpoints=['delay(seconds={HELD_SECONDS},at_iteration={at},phase=\"{fault['phase']}\")']"
        process = start(self.command(name, [*words, held]))
        lost = self.wait_for_windows(process, self.folder / name, num_ranks(row))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        output = wait(process, TIMEOUT_SECONDS)
        if not lost:
            return Outcome(proven=False, passed=False, num_compared=0, details={"output": output[-2000:]})
        started_again = time.time()
        run = self.run(name, [*words, "run.resume=auto"], name=name)
        generations = generations_of(run, [started_again])
        lasting = [*filter(None, [ended(run)]), *missing(generations, self.num_iterations)]
        outcome = outcome_of(fault, 0, generations, lasting, reference)
        self.forget([run])
        return outcome

    def wait_for_windows(self, process: Any, run_dir: Path, world_size: int) -> bool:
        """Wait until the iteration to be lost is delayed and a window is on disk. Return False if the job ends before
        that."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            hits = JobResult(0, run_dir, "").records("failpoints.jsonl")
            windows = [len(list(path.glob("*.window"))) for path in (run_dir / "windows").glob("window_*")]
            if len(hits) >= 1 and world_size in windows:
                return True
            time.sleep(0.05)
        return False

    def run(self, kind: str, overrides: Sequence[str], *, name: str | None = None) -> JobResult:
        """Run one job until it ends. A job that does not end in time has failed."""
        name = name or self.next_name(kind)
        words = [*overrides, f"run.name={name}", f"data.cache_dir={self.folder / 'cache'}"]
        try:
            return run_job(words, forkserver=self.socket, runs=self.folder, timeout_seconds=TIMEOUT_SECONDS)
        except AssertionError as error:
            return JobResult(HUNG, self.folder / name, str(error))

    def command(self, name: str, overrides: Sequence[str]) -> list[str]:
        """Return the command line of the job."""
        places = [f"run.name={name}", f"run.dir={self.folder}", f"data.cache_dir={self.folder / 'cache'}"]
        socket = f"launch.forkserver_socket={self.socket}"
        return [sys.executable, str(REPOSITORY / "pretrain_moe.py"), *overrides, *places, socket]

    def next_name(self, kind: str) -> str:
        """Name of the next run."""
        self.num_jobs += 1
        return f"{kind}-{self.num_jobs:03d}"

    def forget(self, runs: Sequence[JobResult]) -> None:
        """Remove the folders of runs whose records have been read."""
        for run in runs:
            shutil.rmtree(run.run_dir, ignore_errors=True)


def outcome_of(
    fault: Row, number: int, generations: Sequence[Generation], lasting: Sequence[str], reference: Reference
) -> Outcome:
    """Judge the fault of generation ``number``.

    Args:
        lasting: Problems of the whole job.
    """
    after = generations[number + 1 :]
    chosen = after[0].newest("recovery_started") if after else None
    unproven = why_unproven(fault, number, generations)
    # If the next fault hits the replay of a recovery, no iteration is trained. The bits are then compared after the
    # next recovery that trains.
    place, trained = next(
        ((place, later) for place, later in enumerate(after) if later.digests or later.losses), (0, None)
    )
    until = number + 2 + place
    differences = [text for generation in generations[:until] for text in generation.differences(reference.recorded)]
    problems = [*differences, *lasting]
    details = {
        "unproven": unproven,
        "continued_from": None if chosen is None else chosen["iteration"],
        "declined": [] if chosen is None else chosen["declined"],
        "window_iterations": window_iterations(generations[: number + 2]),
        "num_replayed": sum(e["num_iterations"] for e in (after[0].events if after else ()) if is_replay(e)),
        "num_digests": 0 if trained is None else sum(len(digests) for _, digests in trained.digests),
        "num_losses": 0 if trained is None else len(trained.losses),
        "differences": problems[:5],
    }
    num_compared = details["num_digests"] + details["num_losses"]
    return Outcome(proven=not unproven, passed=not problems, num_compared=num_compared, details=details)


def why_unproven(fault: Row, number: int, generations: Sequence[Generation]) -> list[str]:
    """Return what is missing in the run's record to prove that a fault happened as planned; empty if it is proven."""
    if len(generations) <= number + 1:
        return ["the ranks were not started again"]
    own, after = generations[number], generations[number + 1]
    found = []
    hits = [hit for hit in own.hits if hit["phase"] == fault["phase"]]
    if fault["iteration"] == REPLAY:
        resumed = own.newest("recovery_started") or {"strategy": None, "iteration": 0}
        if source_of(resumed) != MEMORY or any(hit["iteration"] > resumed["iteration"] for hit in hits):
            found.append(f"the fault came after the replay: {hits[:1]}")
    else:
        hits = [hit for hit in hits if hit["iteration"] == fault["iteration"]]
    found += [] if hits else [f"no rank recorded the fault in generation {number}"]
    source = source_of(after.newest("recovery_started") or {"strategy": None})
    if source != fault["source"]:
        found.append(f"the job continued from {source}, not from {fault['source']}")
    least = min(window_iterations(generations[: number + 2]), default=0)
    if least < MIN_WINDOW_ITERATIONS:
        found.append(f"windows have only {least} iterations")
    return found


def source_of(started: Mapping[str, Any]) -> Any:
    """Return the source of the state: the place of a window, or the strategy if there was no window."""
    return started.get("source", started["strategy"])


def window_iterations(generations: Sequence[Generation]) -> list[int]:
    """Return the number of slices of the windows planned in these generations."""
    events = [event for generation in generations for event in generation.events]
    return sorted({event["window_iterations"] for event in events if event["kind"] == "snapshot_planned"})


def is_replay(event: Any) -> bool:
    """Return whether an event reports that a window was replayed."""
    return bool(event["kind"] == "window_replayed")


def undisturbed_problems(reference: Reference) -> Outcome:
    """Return the outcome of all faults if the undisturbed runs already differ."""
    return Outcome(
        proven=True, passed=False, num_compared=0, details={"undisturbed runs": list(reference.problems[:5])}
    )


def text_of(parameters: Row) -> str:
    """Return the text of a row."""
    return json.dumps({name: parameters[name] for name in FACTORS})


def ended(run: JobResult) -> str:
    """Return the problem of how the job ended; empty if it ended as planned."""
    return "" if run.exit_code == 0 else f"exit code {run.exit_code}: {run.output[-1500:]}"


def planned_trials(*, quick: bool) -> tuple[dict[str, list[Row]], list[Row]]:
    """Return the faults of each row by the row's text, and all trials."""
    chosen = list(QUICK_ROWS) if quick else rows()
    num_faults = QUICK_FAULTS if quick else NUM_FAULTS
    faults = {text_of(row): faults_of(row, number, num_faults) for number, row in enumerate(chosen, start=int(quick))}
    trials = [{**row, **fault} for row in chosen for fault in faults[text_of(row)]]
    lost = [] if quick else zip(DISK_ROWS, DISK_ITERATIONS, strict=True)
    phases = ("data", "backward", "update", "vote_after", "gather")
    for (number, at), phase in zip(lost, phases, strict=False):
        trials.append({**chosen[number], "fault": 0, "phase": phase, "iteration": at, "source": PERSISTED})
    return faults, trials


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign and judge its result."""
    arguments = parse_arguments(__doc__, argv)
    faults, trials = planned_trials(quick=arguments.quick)
    with tempfile.TemporaryDirectory(prefix="sparse-bitwise-") as folder, forkserver(WARM) as socket:
        bench = Bench(Path(folder), socket, faults, arguments.quick)
        counts, outcomes = run_campaign(ID, trials, bench.execute, script=Path(__file__), quick=arguments.quick)
    details = [outcome.details for _, outcome in outcomes if outcome.passed and outcome.proven]
    totals = {name: sum(detail[name] for detail in details) for name in ("num_digests", "num_losses", "num_replayed")}
    sources = [trial.parameters["source"] for trial, outcome in outcomes if outcome.passed and outcome.proven]
    windows = sorted({size for detail in details for size in detail["window_iterations"]})
    figure = (
        f"{counts.passed} of {counts.planned} kills of all ranks ({sources.count(MEMORY)} continued from memory, "
        f"{sources.count(PERSISTED)} from disk) in {len(faults)} configurations equal in every bit; windows of "
        f"{', '.join(map(str, windows))} iterations, {totals['num_replayed']} iterations replayed"
    )
    enough = arguments.quick or counts.passed >= MIN_TRIALS
    return finish(
        arguments.out,
        ID,
        passed=counts.complete and enough,
        figure=figure + counts.again if counts.complete else counts.summary(),
        threshold="at least 60 recoveries, all with equal bits (atol=0); windows of 3 iterations or more",
        counts={
            **counts.to_counts(),
            "configurations": len(faults),
            "from_memory": sources.count(MEMORY),
            "from_disk": sources.count(PERSISTED),
            "iterations_replayed": totals["num_replayed"],
            "rank_states_compared": totals["num_digests"],
            "losses_compared": totals["num_losses"],
        },
        details={
            "window_iterations": windows,
            "failures": [{**t.parameters, **o.details} for t, o in outcomes if not (o.passed and o.proven)],
        },
    )


if __name__ == "__main__":
    sys.exit(main())
