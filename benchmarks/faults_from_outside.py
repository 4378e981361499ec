"""Claim ``faults-from-outside``: a job survives every fault from outside that ``can_recover`` predicts it to survive.

Running jobs of two to four nodes, with expert replicas or with a kept layout, receive signals at random moments. The
targets are a rank, an agent, a snapshot server, the controller, all processes of one node or of two at one instant, and
a second node while the job recovers from the first. Processes are killed, or stopped and continued. Some faults come in
the first iteration after a join or while a checkpoint is written. Lost nodes come back before the next fault. Before
each fault ``can_recover`` is called for exactly this loss, and its result is written to disk. At the end of some jobs
the launcher is killed too.

A trial is a fault. It counts only if ``/proc`` has shown that the fault happened. A fault that the job is predicted to
survive passes if the job survived, lost no other node, got every lost node back, and left nothing behind. The next
membership must form within three seconds after the last fault was detected (without the time of replayed iterations).
Every loss and state digest must equal the reference's. With replicas, the reference is a run in which nodes leave and
join by a script made from the controller's orders; with a kept layout, it is an undisturbed run. A fault that is
predicted to be fatal passes if it ended the job, or if the job restarted from the predicted state. Jobs that fail are
counted even if they pass in another run.
"""

import contextlib
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.campaign import Counts, Outcome, Trial, execute_jobs, run_campaign
from benchmarks.covering import Row
from benchmarks.elastic_jobs import Bench, Recorded
from benchmarks.histories import scripted
from benchmarks.kill_peers import percentile
from benchmarks.localized_jobs import Followed
from benchmarks.outside_driver import OUTSIDE_FILE, LivingJob
from benchmarks.outside_jobs import OutsideJob, jobs_of
from benchmarks.outside_records import MAX_FORMING_SECONDS, FaultRecord, read_faults
from benchmarks.report import finish, parse_arguments
from benchmarks.source import ROOT
from megatron_ft.failures.processes import all_processes_of
from megatron_ft.testing import leftovers
from megatron_ft.testing.jobs import JobResult, forkserver

ID = "faults-from-outside"
SEED = 20261122
MIN_FAULTS = 200
MIN_FORETOLD = 0.85
WARM = "megatron_ft.mcore.rank_main:warm"
END_SECONDS = 120.0
GONE_SECONDS = 15.0
"""Longest time that processes may continue after their launcher was killed."""
_TORCH_CACHE = {"TORCHINDUCTOR_CACHE_DIR": str(ROOT / ".cache" / "torch")}
"""Cache folder of torch, which torch creates when it is imported. It is outside the jobs' folders, so that it remains
after a job."""
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(slots=True)
class Ended:
    """Job that has ended, and what it left behind."""

    run: JobResult
    seen: list[dict[str, Any]]
    left: list[str]
    """Processes, shared memory files and runtime folders that remained after the job."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of a run with its reference."""

    until: int
    """Newest iteration up to which nothing differs."""
    num_compared: Mapping[int, int]
    """Number of compared values by iteration."""
    last: int
    """Newest iteration that could be compared."""
    difference: str
    """First difference; empty if all values are equal."""

    @classmethod
    def of(cls, found: Any, reference: Any, last: int) -> "Comparison":
        """Compare the iterations 1 to ``last``."""
        num_compared: dict[int, int] = {}
        for iteration in range(1, last + 1):
            if differences := found.differences(reference, iteration, iteration):
                return cls(until=iteration - 1, num_compared=num_compared, last=last, difference=differences[0])
            num_compared[iteration] = found.num_compared(reference, iteration, iteration)
        return cls(until=max(last, 0), num_compared=num_compared, last=last, difference="")


@dataclass(slots=True)
class Campaign:
    """Executes trials. The faults of a job share one run of the job."""

    bench: Bench
    jobs: Sequence[OutsideJob]
    max_forming_seconds: float
    undisturbed: dict[str, Followed] = field(default_factory=dict)
    """Longest undisturbed run so far, by layout."""

    def execute(self, trials: Sequence[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        """Execute trials and yield their outcomes."""
        return execute_jobs(trials, lambda number: self.run(self.jobs[number]))

    def run(self, job: OutsideJob) -> list[Outcome]:
        """Run the job with its faults, then its reference. Return an outcome for each fault."""
        with self._ended(job) as ended:
            run = ended.run
            files = run.records(), run.records("decisions.jsonl")
            records = read_faults(job.faults, ended.seen, *files, max_forming_seconds=self.max_forming_seconds)
            compare = self._compare_replicas if job.kind == "replicas" else self._compare_kept
            problems, compared = compare(job, run, ended.seen)
        problems += [f"left behind: {text}" for text in ended.left]
        ends = ends_of(records, compared)
        return [_outcome(job, record, problems, end, compared) for record, end in zip(records, ends, strict=True)]

    def _compare_replicas(self, job: OutsideJob, run: JobResult, seen: Sequence[Any]) -> tuple[list[str], Comparison]:
        """Compare a job with replicas with its scripted reference. Return (problems of the whole job, comparison)."""
        killed = Recorded.of(run, expected_exit=_expected_exit(job, seen))
        last = killed.last_iteration - (0 if run.exit_code == 130 else 1)
        words = [*job.reference_words, *scripted(killed.changes, killed.orders, job.num_nodes)]
        reference = self.bench.run([*words, f"training.exit_at_iteration={max(last, 1)}"])
        problems = [*killed.problems, *(f"scripted: {text}" for text in reference.problems)]
        return problems, Comparison.of(killed, reference, last - 1)

    def _compare_kept(self, job: OutsideJob, run: JobResult, seen: Sequence[Any]) -> tuple[list[str], Comparison]:
        """Compare a job with a kept layout with its undisturbed reference. Return the same as ``_compare_replicas``."""
        found = Followed.of(run, expected_exit=_expected_exit(job, seen))
        reference = self._undisturbed(job, found.last_iteration)
        problems = [*found.problems, *(f"undisturbed: {text}" for text in reference.problems)]
        return problems, Comparison.of(found, reference, found.last_iteration)

    def _undisturbed(self, job: OutsideJob, last: int) -> Followed:
        known = self.undisturbed.get(job.name)
        if known is None or known.last_iteration < last:
            with self.bench.running([*job.words, f"training.exit_at_iteration={last + 20}"]) as run:
                self.undisturbed[job.name] = Followed.of(run)
        return self.undisturbed[job.name]

    @contextlib.contextmanager
    def _ended(self, job: OutsideJob) -> Iterator[Ended]:
        """Run a job with its faults until it ends. Its folder exists within the block."""
        run_dir = self.bench.next_run_dir
        self.bench.num_jobs += 1
        runtime = Path(tempfile.mkdtemp(prefix="ffo-"))
        mark, environment = leftovers.mark()
        known = _shared_memory()
        words = [*job.words, f"run.dir={run_dir.parent}", f"run.name={run_dir.name}"]
        words.append(f"data.cache_dir={self.bench.folder / 'cache'}")
        if not job.kills_launcher:  # jobs whose launcher is killed have their own fork server, which must also end
            words.append(f"launch.forkserver_socket={self.bench.socket}")
        output = run_dir.with_suffix(".log")
        with output.open("wb") as log:
            console = subprocess.Popen(
                [sys.executable, "pretrain_moe.py", *words],
                cwd=ROOT,
                env={**environment, "TMPDIR": str(runtime), **_TORCH_CACHE},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                living = LivingJob(job, run_dir, console, random.Random(f"{SEED} moments {job.number}"))
                seen = living.suffer()
            finally:
                code = _end(console, kills=job.kills_launcher)
        left = [*_left(run_dir, mark), *(f"/dev/shm/{name}" for name in _held_by_nobody(_shared_memory() - known))]
        left += [f"in the runtime folder: {path.relative_to(runtime)}" for path in sorted(runtime.rglob("*"))]
        for name in ("events.jsonl", "metrics.jsonl", "decisions.jsonl", OUTSIDE_FILE):
            _cut(run_dir / name)
        try:
            yield Ended(JobResult(code, run_dir, output.read_text(errors="replace")), seen, left)
        finally:
            for folder in (runtime, run_dir):
                shutil.rmtree(folder, ignore_errors=True)


def _expected_exit(job: OutsideJob, seen: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the exit code of a job that ended as planned. None stands for the exit code of a requested stop."""
    if seen and "ended" in seen[-1]:
        return int(seen[-1]["ended"])
    return -signal.SIGKILL if job.kills_launcher else None


def _end(console: "subprocess.Popen[bytes]", *, kills: bool) -> int:
    """End a launcher that still runs, by SIGKILL or as Ctrl-C does. Return its exit code."""
    if console.poll() is None:
        console.send_signal(signal.SIGKILL if kills else signal.SIGINT)
    try:
        return console.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        console.kill()
        return console.wait()


def _left(run_dir: Path, mark: str) -> list[str]:
    """Return the processes that remained after a job, and kill them."""
    deadline = time.monotonic() + GONE_SECONDS
    while True:
        with all_processes_of(run_dir) as found:
            if not found:
                break
            if time.monotonic() > deadline:
                left = [f"process of {process.log}" for process in found]
                for process in found:
                    process.send(signal.SIGKILL)
                return left
        time.sleep(0.05)
    return leftovers.outlive(mark, grace_seconds=GONE_SECONDS)


def _shared_memory() -> set[str]:
    return {path.name for path in _SHARED_MEMORY.iterdir()} if _SHARED_MEMORY.is_dir() else set()


def _held_by_nobody(names: set[str]) -> list[str]:
    """Return the names of the shared memory files in ``names`` that no living process has mapped. Another job may run
    at the same time, and its files are not leftovers."""
    mapped = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped |= {line.rpartition("/dev/shm/")[2] for line in path.read_text().splitlines() if "/dev/shm/" in line}
    return sorted(names - mapped)


def _cut(path: Path) -> None:
    """Remove a last line that a killed process did not complete."""
    if path.exists():
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)


def ends_of(records: Sequence[FaultRecord], compared: Comparison) -> list[tuple[int, int, bool]]:
    """Return for each fault the first and the last iteration that are compared for it, and whether all of them are
    equal."""
    begins = [record.seen.get("iteration") for record in records]
    found = []
    for index, begin in enumerate(begins):
        later = [each for each in begins[index + 1 :] if each is not None]
        last = later[0] if later else None
        # The last iterations of a job that a later fault ended could not be compared.
        wanted = 0 if begin is None else begin + 1 if last is None else min(last, compared.last)
        is_equal = begin is not None and compared.until >= wanted
        found.append((begin or 0, last if last is not None else compared.until, is_equal))
    return found


def _outcome(
    job: OutsideJob,
    record: FaultRecord,
    common: Sequence[str],
    end: tuple[int, int, bool],
    compared: Comparison,
) -> Outcome:
    """Judge one fault."""
    first, last, is_equal = end
    problems = [*record.problems, *common]
    # A job that was predicted to end has no iteration after the fault. Earlier iterations were compared for earlier
    # faults.
    is_over = bool(record.seen.get("answer")) and not record.is_foretold
    if not is_equal and not is_over and not record.problems:
        found = f": {compared.difference}" if compared.difference else ""
        problems.append(f"differs from the reference between iterations {first} and {last}{found}")
    window = range(1, last + 1) if is_over else range(first, last + 1)
    details = {
        "job": job.number,
        "name": job.name,
        "kind": record.fault["kind"],
        "targets": record.seen.get("targets", []),
        "moment": record.fault["moment"],
        "answer": record.seen.get("answer"),
        "is_foretold": record.is_foretold,
        "processes": sorted(record.seen.get("processes", {})),
        "iteration": record.seen.get("iteration"),
        "forming_seconds": record.forming_seconds,
        "seconds_until_whole": _seconds_until_whole(record),
        "healthy_lost": list(record.healthy_lost),
        "strategies": list(record.strategies),
        "problems": problems[:6],
    }
    num_compared = sum(compared.num_compared.get(iteration, 0) for iteration in window)
    return Outcome(proven=record.is_proven, passed=not problems, num_compared=num_compared, details=details)


def _seconds_until_whole(record: FaultRecord) -> float | None:
    whole = record.seen.get("whole_at")
    return None if whole is None else float(whole - record.seen["injected_at"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign and judge its result."""
    arguments = parse_arguments(__doc__, argv, takes_jobs=True)
    jobs = jobs_of(SEED, quick=arguments.quick)
    chosen = [job for job in jobs if arguments.jobs is None or job.number in arguments.jobs]
    trials: list[Row] = [{"job": job.number, **fault} for job in chosen for fault in job.faults]
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, forkserver(WARM) as socket:
        # Times of a test that runs beside other tests are not meaningful.
        longest = math.inf if arguments.quick else MAX_FORMING_SECONDS
        campaign = Campaign(Bench(Path(folder), socket, ()), jobs, longest)
        counts, found = run_campaign(
            ID, trials, campaign.execute, script=Path(__file__), quick=arguments.quick, num_attempts=1
        )
    outcomes = [replace(outcome, details={**t.parameters, **outcome.details}) for t, outcome in found]
    return judge(arguments.out, chosen, counts, outcomes, quick=arguments.quick)


def judge(
    out: Path | None, jobs: Sequence[OutsideJob], counts: Counts, outcomes: Sequence[Outcome], *, quick: bool
) -> int:
    """Write the result. A failure counts even if a later attempt passed, because all faults must be survived."""
    proven = [outcome for outcome in outcomes if outcome.proven]
    foretold = [outcome for outcome in proven if outcome.details["is_foretold"]]
    survived = [outcome for outcome in foretold if outcome.passed and outcome.num_compared]
    forming = [o.details["forming_seconds"] for o in foretold if o.details["forming_seconds"] is not None]
    whole = [o.details["seconds_until_whole"] for o in foretold if o.details["seconds_until_whole"] is not None]
    healthy = sum(len(outcome.details["healthy_lost"]) for outcome in foretold)
    share = len(foretold) / len(proven) if proven else 0.0
    kinds = sorted({str(outcome.details["kind"]) for outcome in proven})
    enough = quick or (len(proven) >= MIN_FAULTS and share >= MIN_FORETOLD)
    passed = counts.complete and enough and healthy == 0 and counts.failed_before == 0
    times = (
        f"forming p50 {percentile(forming, 50):.2f} s, max {max(forming):.2f} s; whole again p50 "
        f"{percentile(whole, 50):.1f} s, max {max(whole):.1f} s"
        if forming and whole
        else "nothing formed"
    )
    figure = (
        f"{len(proven)} faults in {len(jobs)} running jobs: {len(survived)} of {len(foretold)} survived that "
        f"can_recover predicted ({100 * share:.0f} %), {healthy} healthy nodes lost; {times}; "
        f"{len(proven) - len(foretold)} predicted fatal; {sum(job.kills_launcher for job in jobs)} launchers killed"
    )
    return finish(
        out,
        ID,
        passed=passed,
        figure=(figure if counts.complete else f"{figure}; {counts.summary()}") + counts.again * counts.complete,
        threshold=f"of at least {MIN_FAULTS} faults {100 * MIN_FORETOLD:.0f} % predicted to be survived: all survived, "
        "atol=0, 0 healthy nodes lost, forming <= 3 s, every node back, nothing left behind",
        counts={
            **counts.to_counts(),
            "foretold": len(foretold),
            "survived": len(survived),
            "healthy_lost": healthy,
            "jobs": len(jobs),
            "launchers_killed": sum(job.kills_launcher for job in jobs),
            "values_compared": sum(outcome.num_compared for outcome in outcomes),
            **{f"kind: {kind}": sum(o.details["kind"] == kind for o in proven) for kind in kinds},
        },
        details={"faults": [{"passed": o.passed, "proven": o.proven, **o.details} for o in outcomes]},
    )


if __name__ == "__main__":
    sys.exit(main())
