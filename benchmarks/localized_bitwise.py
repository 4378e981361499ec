"""Claim ``localized-bitwise``: only the pipeline stages that lost a rank replay, and they reach the same bits.

Running jobs of every layout (pipeline, data, expert and tensor parallel, interleaved, sharded optimizer) lose one rank
after another by kill -9, in every phase, and in the first, a middle and the last stage. Some faults come in pairs. The
second lost rank is in a neighbouring, a distant or the same stage; or it replays, waits during a replay, has replaced
the first rank, or is in a neighbouring stage just after the recovery. A new process takes the place of each lost rank.

A trial is a fault. It counts only if the victim recorded the fault before it happened. It passes if the job continued
by a localized recovery, and if the losses and state digests of all ranks in every iteration equal those of an
undisturbed run of the same layout, with ``atol=0``. The repeated work of each rank is counted for every recovery.
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.campaign import Counts, Outcome, Trial, execute_jobs, run_campaign
from benchmarks.covering import Row
from benchmarks.elastic_jobs import Bench
from benchmarks.localized_jobs import BASE, FaultJob, Followed, jobs_of
from benchmarks.node_killer import NodeKiller
from benchmarks.report import finish, parse_arguments
from megatron_ft.testing.jobs import forkserver

ID = "localized-bitwise"
MIN_TRIALS = 240
SEED = 20261121
WARM = "megatron_ft.mcore.rank_main:warm"
JOB_TIMEOUT_SECONDS = 900.0


@dataclass(slots=True)
class Campaign:
    """Executes trials. The faults of a job share one run of the job."""

    bench: Bench
    jobs: Sequence[FaultJob]
    references: dict[Sequence[str], Followed] = field(default_factory=dict)
    """Longest undisturbed run so far, by its overrides."""

    def execute(self, trials: Sequence[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        """Execute trials and yield their outcomes."""
        return execute_jobs(trials, lambda number: self.run(self.jobs[number]))

    def run(self, job: FaultJob) -> list[Outcome]:
        """Run the job with faults and the job without. Return an outcome for each fault."""
        killer = NodeKiller(job, self.bench.next_run_dir) if job.kills_nodes else None
        until = job.has_ended if killer is None else killer
        with self.bench.running(job.overrides, until=until) as run:
            found = Followed.of(run)
        reference = self._reference(job, found.last_iteration)
        common = [] if killer is None else [f"not injected: {text}" for text in killer.problems]
        common += [*found.problems, *(f"undisturbed: {text}" for text in reference.problems)]
        common += found.differences(reference)
        num_compared = found.num_compared(reference)
        return [_outcome(job, fault, found, common, num_compared) for fault in job.faults]

    def _reference(self, job: FaultJob, last: int) -> Followed:
        words = tuple(job.overrides_of_reference)
        if words not in self.references or self.references[words].last_iteration < last:
            end = f"training.exit_at_iteration={last + 20}"
            with self.bench.running([*words, end]) as run:
                self.references[words] = Followed.of(run)
        return self.references[words]


def _outcome(job: FaultJob, fault: Row, found: Followed, common: Sequence[str], num_compared: int) -> Outcome:
    """Judge one fault. The outcome contains the recovery after the fault and the cost of this recovery."""
    number, generation = int(str(fault["fault"])), int(str(fault["generation"]))
    hit = found.hits[number] if number < len(found.hits) else None
    is_it = hit is not None and (hit["rank"], hit["phase"]) == (fault["rank"], fault["phase"])
    unproven = [] if is_it else ["the victim did not record the fault"]
    problems = list(common)
    shares = [share for share in found.shares if share["generation"] == generation + 1]
    strategy = next((event["strategy"] for event in found.recoveries if event["generation"] > generation), None)
    if is_it and strategy != fault["strategy"]:
        problems.append(f"the job continued by {strategy}, not by {fault['strategy']}")
    idle = [share["num_forward_passes"] for share in shares if share["role"] != "replays"]
    problems += ["a healthy stage computed a forward pass"] if any(idle) else []
    replayed = [share["num_iterations"] for share in shares if share["role"] == "replays"]
    window = max((plan["window_iterations"] for plan in found.planned), default=0)
    details = {
        "unproven": unproven,
        "kind": fault["kind"],
        "layout": job.layout.name,
        "strategy": strategy,
        "replayed": max(replayed, default=None),
        "window": window,
        "lag": _lag(found),
        "stages": len({share["stage"] for share in shares if share["role"] == "replays"}),
        "healthy_forward_passes": sum(idle),
        "problems": problems[:5],
    }
    return Outcome(proven=not unproven, passed=not problems, num_compared=num_compared, details=details)


def _lag(found: Followed) -> int:
    """Return the largest number of iterations from a window's last slice to the vote that committed the window, in
    undisturbed memberships."""
    breaks = [change["iteration"] for change in found.changes]
    lags = [
        event["iteration"] - (event["start_iteration"] + event["num_iterations"] - 1)
        for event in found.committed
        if not any(event["start_iteration"] <= at < event["iteration"] for at in breaks)
    ]
    return max(lags, default=0)


def campaign(*, quick: bool) -> tuple[Sequence[FaultJob], Counts, list[Outcome]]:
    """Run every fault of every job. A job whose outcomes are all in the journal does not run."""
    jobs = jobs_of(SEED, quick=quick)
    trials: list[Row] = [{"job": job.number, **fault} for job in jobs for fault in job.faults]
    with tempfile.TemporaryDirectory(prefix="localized-bitwise-") as folder, forkserver(WARM) as socket:
        found = Campaign(Bench(Path(folder), socket, BASE, JOB_TIMEOUT_SECONDS), jobs)
        counts, outcomes = run_campaign(ID, trials, found.execute, script=Path(__file__), quick=quick)
    return jobs, counts, [replace(o, details={**t.parameters, **o.details}) for t, o in outcomes]


def recovered(outcomes: Sequence[Outcome]) -> list[Mapping[str, Any]]:
    """Return the figures of each localized recovery whose fault counts."""
    good = [outcome.details for outcome in outcomes if outcome.proven and outcome.passed]
    return [details for details in good if details["replayed"] is not None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign and judge its result."""
    arguments = parse_arguments(__doc__, argv)
    jobs, counts, outcomes = campaign(quick=arguments.quick)
    recoveries = recovered(outcomes)
    num_layouts = len({job.layout.name for job in jobs})
    kinds = sorted({str(outcome.details["kind"]) for outcome in outcomes})
    figure = (
        f"{counts.passed} of {counts.planned} faults in {len(jobs)} living jobs of {num_layouts} layouts, in "
        f"{len(recoveries)} localized recoveries: every loss and state equal to the undisturbed run's "
        f"({', '.join(kinds)})"
    )
    return finish(
        arguments.out,
        ID,
        passed=counts.complete and (arguments.quick or counts.passed >= MIN_TRIALS),
        figure=figure + counts.again if counts.complete else counts.summary(),
        threshold=f"all of at least {MIN_TRIALS} equal, atol=0",
        counts={
            **counts.to_counts(),
            "jobs": len(jobs),
            "recoveries": len(recoveries),
        },
        details={"failures": [outcome.details for outcome in outcomes if not (outcome.passed and outcome.proven)]},
    )


if __name__ == "__main__":
    sys.exit(main())
