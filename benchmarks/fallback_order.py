"""Claim ``fallback-order``: ``can_recover`` predicts which strategies recover from losses of growing size.

Jobs of two kinds lose a rank, a node, two nodes, and then more. Jobs with expert replicas and copies of optimizer
shards lose all copies of an expert or of a shard at the end. Jobs that keep their layout lose a pipeline stage, all
ranks, and all processes of the job except the snapshot servers. Processes are killed from outside at one instant.
Before each loss ``can_recover`` names the strategy, and predicts the seconds until the ranks train again after the
newest committed iteration.

A trial is a loss. It counts only if all of its processes were alive and were killed. It passes if the job used the
named strategy, and if losses and digests of the state equal those of a reference, with ``atol=0``. The reference of a
job that keeps its layout is an undisturbed run. Other jobs are compared with a run of the same history of memberships
and, after a checkpoint was loaded, with a run that loads it on the remaining nodes. Times are judged only in jobs that
start at a machine load of at most 2: nine of ten must be within a factor of 1.5 of the prediction.
"""

import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.campaign import Outcome, Trial, execute_jobs, run_campaign
from benchmarks.covering import Row
from benchmarks.elastic_jobs import ABOUT_NODES, Bench, Event, Recorded
from benchmarks.fallback_jobs import Driver, FallbackJob
from benchmarks.histories import scripted
from benchmarks.localized_jobs import Followed, Layout
from benchmarks.report import finish, parse_arguments
from megatron_ft.testing.jobs import JobResult, forkserver

ID = "fallback-order"
SEED = 20261124
WARM = "megatron_ft.mcore.rank_main:warm"
MIN_TRIALS = 40
MIN_JUDGED = 20
"""Smallest number of losses whose predicted time is judged."""
FACTOR = 1.5
MIN_SHARE = 0.9
MOST_LOAD = 2.0
_QUIET_SECONDS = 300.0
"""Longest wait for a load of at most ``MOST_LOAD`` before a job."""
JOB_TIMEOUT_SECONDS = 600.0
_GROWING = ("rank", "node", "two nodes")
_REPLICATED: tuple[Sequence[str], ...] = (
    (*_GROWING, "all copies of an expert"),
    (*_GROWING, "all copies of a shard"),
)
_STAGED = (*_GROWING, "a stage", "all ranks", "all processes")
_LAYOUTS = (
    Layout(pp=2, dp=2, ep=2, sharded=True),
    Layout(pp=4),
    Layout(pp=2, dp=2),
    Layout(pp=2, tp=2),
)
_NUM_REPLICATED = 6


def jobs_of(*, quick: bool) -> list[FallbackJob]:
    """Return all jobs of the campaign."""
    if quick:
        return [
            FallbackJob.staged(0, ("node", "all ranks", "all processes")),
            FallbackJob.replicated(1, ("rank", "all copies of an expert"), num_nodes=4),
        ]
    staged = [FallbackJob.staged(number, _STAGED, layout) for number, layout in enumerate(_LAYOUTS)]
    rest = range(len(staged), len(staged) + _NUM_REPLICATED)
    return staged + [FallbackJob.replicated(number, _REPLICATED[number % 2]) for number in rest]


@dataclass(slots=True)
class Campaign:
    """Executes trials. The losses of a job share one run."""

    bench: Bench
    jobs: Sequence[FallbackJob]
    waits_for_quiet: bool
    loads: dict[int, float] = field(default_factory=dict)
    """Load of the machine before each job."""

    def execute(self, trials: Sequence[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        """Execute trials and yield their outcomes."""
        return execute_jobs(trials, lambda number: self.run(self.jobs[number]))

    def run(self, job: FallbackJob) -> list[Outcome]:
        """Run a job and its references. Return an outcome for each loss."""
        deadline = time.monotonic() + _QUIET_SECONDS * self.waits_for_quiet
        while (load := os.getloadavg()[0]) > MOST_LOAD and time.monotonic() < deadline:
            time.sleep(1.0)
        rng = random.Random(f"{SEED} {job.number}")
        driver = Driver(job=job, folder=self.bench.folder, socket=self.bench.socket, rng=rng)
        records, exit_code, output = driver.run()
        try:
            run = JobResult(exit_code, driver.run_dir, output)
            if job.keeps_layout:
                problems, num_compared = self._against_undisturbed(job, run)
            else:
                problems, num_compared = self._against_history(job, run, records)
        finally:
            shutil.rmtree(driver.run_dir, ignore_errors=True)
        missing = [{"fault": n, "kind": kind, "problem": "not reached"} for n, kind in enumerate(job.losses)]
        return [
            _outcome({**record, "load": load}, problems, num_compared)
            for record in [*records, *missing[len(records) :]]
        ]

    def _against_undisturbed(self, job: FallbackJob, run: JobResult) -> tuple[list[str], int]:
        found = Followed.of(run)
        with self.bench.running([*_of_reference(job), _until(found.last_iteration + 1)]) as undisturbed:
            reference = Followed.of(undisturbed)
        problems = [*found.problems, *(f"undisturbed: {text}" for text in reference.problems)]
        return problems + found.differences(reference), found.num_compared(reference)

    def _against_history(self, job: FallbackJob, run: JobResult, records: Sequence[Event]) -> tuple[list[str], int]:
        """Compare the iterations before a restart with a run of the same history, and those after it with a run that
        loads the same checkpoint on the remaining nodes."""
        events = run.records()
        restart = next((e for e in events if e["kind"] == "recovery_started" and e["strategy"] != "living_state"), None)
        found = Recorded.of(run, restarts=restart is not None)
        last, words = found.last_iteration - 1, _of_reference(job)
        at = float("inf") if restart is None else restart["time_unix_seconds"]
        before = [change for change in found.changes if change["time_unix_seconds"] < at]
        loaded = last if restart is None else int(restart["iteration"])
        earlier = replace(found, changes=[change for change in before if change["iteration"] <= loaded])
        history = scripted(earlier.changes, [], job.num_nodes)
        reference = self.bench.run([*words, *history, _until(loaded + 1)])
        problems = [*found.problems, *(f"scripted: {text}" for text in reference.problems)]
        problems += earlier.differences(reference, 1, loaded)
        num_compared = earlier.num_compared(reference, 1, loaded)
        if restart is None:
            return problems, num_compared
        if restart["strategy"] != "checkpoint":
            return [*problems, f"the job restarted by {restart['strategy']}, which has no reference"], num_compared
        later = [change for change in found.changes if change["time_unix_seconds"] > at]
        # Lost nodes join again later. The reference lacks these joins, so the comparison ends before them.
        last = min([last, *(change["iteration"] for change in later)])
        of_restart = [record for record in records if record.get("served", [None])[0] == restart["strategy"]]
        lost = of_restart[0]["nodes"] if of_restart else ()
        left = [f"node{node}" for node in range(job.num_nodes) if node not in lost]
        resumed = self.bench.run(
            [
                *words,
                f"launch.num_nodes={len(left)}",
                f"topology.failure_domains=[{','.join(left)}]",
                f"checkpoint.load={run.run_dir / 'checkpoints' / f'iter_{loaded:07d}'}",
                _until(last + 1),
            ],
            first=loaded + 1,
        )
        after = replace(found, changes=[])
        problems += [f"resumed: {text}" for text in resumed.problems]
        problems += after.differences(resumed, loaded + 1, last)
        return problems, num_compared + after.num_compared(resumed, loaded + 1, last)


def _of_reference(job: FallbackJob) -> list[str]:
    """Return the overrides of a job without losses that computes the same."""
    left_out = (*ABOUT_NODES, "checkpoint.", "snapshot.outlive_job_seconds")
    words = [word for word in job.words if not word.startswith(left_out)]
    return [*words, f"launch.num_nodes={job.num_nodes}", "launch.ranks_per_node=1", "checkpoint.save_at_end=false"]


def _until(iteration: int) -> str:
    return f"training.exit_at_iteration={iteration}"


def _outcome(record: Event, common: Sequence[str], num_compared: int) -> Outcome:
    """Judge one loss."""
    details: dict[str, Any] = dict(record)
    problems = [] if "served" in record else [str(record.get("problem", "the job did not train again"))]
    if not problems and record["served"] != record["named"]:
        problems.append(f"{record['served']} has served, but {record['named']} was named")
    problems += common
    predicted = details.get("predicted_seconds")
    if predicted is not None and "seconds" in details:
        details["ratio"] = details["seconds"] / predicted
    details["problems"] = problems[:5]
    proven = bool(details.get("proven", False))
    return Outcome(proven=proven, passed=not problems, num_compared=num_compared, details=details)


def _in_time(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """Return (number of losses whose time was within the factor, number of losses that are judged)."""
    ratios = [
        outcome.details["ratio"]
        for outcome in outcomes
        if "ratio" in outcome.details and outcome.details["load"] <= MOST_LOAD
    ]
    return sum(1 / FACTOR <= ratio <= FACTOR for ratio in ratios), len(ratios)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign and judge its result."""
    arguments = parse_arguments(__doc__, argv, takes_jobs=True)
    jobs = jobs_of(quick=arguments.quick)
    chosen = range(len(jobs)) if arguments.jobs is None else arguments.jobs
    trials: list[Row] = [
        {"job": number, "fault": fault, "kind": kind}
        for number in chosen
        for fault, kind in enumerate(jobs[number].losses)
    ]
    with tempfile.TemporaryDirectory(prefix=f"{ID}-") as folder, forkserver(WARM) as socket:
        bench = Bench(Path(folder), socket, base=(), timeout_seconds=JOB_TIMEOUT_SECONDS)
        campaign = Campaign(bench, jobs, waits_for_quiet=not arguments.quick)
        counts, outcomes = run_campaign(ID, trials, campaign.execute, script=Path(__file__), quick=arguments.quick)
    num_good, num_judged = _in_time([outcome for _, outcome in outcomes])
    in_time = num_judged >= MIN_JUDGED and num_good >= MIN_SHARE * num_judged
    planned = sum(len(job.losses) for job in jobs)
    served: dict[str, int] = {}
    for _, outcome in outcomes:
        if outcome.passed and outcome.proven:
            name = " ".join(filter(None, outcome.details["served"]))
            served[name] = served.get(name, 0) + 1
    by = ", ".join(f"{count} by {name}" for name, count in sorted(served.items()))
    figure = (
        f"{counts.passed} of {planned} losses in {len(jobs)} jobs: the named strategy served ({by}), all bits equal; "
        f"{num_good} of {num_judged} predicted times within a factor of {FACTOR:g}"
    )
    return finish(
        arguments.out,
        ID,
        passed=counts.passed == planned and (arguments.quick or (planned >= MIN_TRIALS and in_time)),
        figure=figure + counts.again if counts.complete else counts.summary(),
        threshold=f"all of at least {MIN_TRIALS} losses as named, atol=0; of at least {MIN_JUDGED} predicted times "
        f"nine of ten within a factor of {FACTOR:g}",
        counts={**counts.to_counts(), "jobs": len(jobs), "in_time": num_good, "judged": num_judged},
        details={
            "losses": [dict(outcome.details) for _, outcome in outcomes],
            "failures": [
                {**t.parameters, **o.details} for t, o in outcomes if not (o.passed and o.proven and o.num_compared)
            ],
        },
    )


if __name__ == "__main__":
    sys.exit(main())
