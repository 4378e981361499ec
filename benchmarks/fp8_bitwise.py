"""Claim ``fp8-bitwise``: jobs with quantized optimizer state lose ranks and nodes, and continue with unchanged bits.

Each of the five regimes of ``precision.regime``, and FP8 layers with delayed scaling, train in three kinds of jobs:

* Nodes leave and come back (``living_state``). The distributed optimizer has another number of lanes after each change,
  experts have replicas, and replicas migrate every three iterations. The reference is a run in which the same nodes
  leave and join by a schedule.
* Only the stage that lost a rank replays (``localized_replay``). The reference is an undisturbed run.
* All ranks start again from a sparse window and replay it (``rollback``). The reference is an undisturbed run.

Losses and the digests of every rank's state, which contain codes, scales, moments, step counts and histories of delayed
scaling, must be equal with ``atol=0``. A fault counts only if the victim recorded it before it happened.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.elastic_bitwise import Campaign, Job
from benchmarks.elastic_jobs import MIGRATING
from benchmarks.layout_cells import Cell
from benchmarks.layouts_bitwise import AnyJob, LayoutCampaign, kept, rejoining, run_jobs
from benchmarks.localized_jobs import Layout
from benchmarks.report import finish, parse_arguments
from megatron_ft.config.checks.training import REGIMES

ID = "fp8-bitwise"
MIN_TRIALS = 40
_PHASES = ("backward", "grad_sync", "vote_inside", "update", "gather", "capture")
"""Phases in which ranks are killed: before, in and after the update. Each job has other three phases."""
_FAULTS_PER_JOB = 3
_DELAYED = "fp8_delayed"
PRECISIONS = (*REGIMES, _DELAYED)
_BUDGET = "snapshot.iteration_seconds"
_REBALANCING = ("placement.rebalance_interval_iterations=3", "placement.rebalance_min_gain=0.0", *MIGRATING)


def jobs_of(*, quick: bool) -> list[AnyJob]:
    """Return all jobs of the campaign. With ``quick``, return two jobs with FP8 masters and delayed scaling: the number
    of lanes of one changes, and all ranks of the other replay a window."""
    if quick:
        delayed = "precision.fp8_recipe=delayed"
        return [_job(0, REGIMES[-1], "fewer nodes", delayed), _job(1, REGIMES[-1], "restart", delayed)]
    ways = ("fewer nodes", "kept layout", "restart")
    combined = [(precision, way) for precision in PRECISIONS for way in ways]
    return [_job(number, precision, way) for number, (precision, way) in enumerate(combined)]


def _job(number: int, precision: str, way: str, *others: str) -> AnyJob:
    dtype = "fp16" if precision.startswith("fp16") else "bf16"
    phases = [_PHASES[(number + place) % len(_PHASES)] for place in range(_FAULTS_PER_JOB)]
    words = [f"precision={precision}", *others]
    if way == "fewer nodes":
        layout = Layout(pp=1, dp=3, sharded=True, dtype=dtype)
        cell = Cell(layout=layout, replicas=True, windows=True, nodes="return", way=way)
        job = rejoining(number, cell, phases, kills_nodes=number % 2 == 1)
        return replace(job, layout=[*words, *job.layout, *_REBALANCING])
    nodes, strategy = ("return", "localized_replay") if way == "kept layout" else ("none", "rollback")
    # Every second precision uses the optimizer that is not sharded.
    layout = Layout(pp=2, dp=2, ep=2, sharded=PRECISIONS.index(precision) % 2 == 0, dtype=dtype)
    cell = Cell(layout=layout, replicas=False, windows=True, nodes=nodes, way=way)
    found = kept(number, cell, phases, strategy)
    # Quantized moments are small. With these times for a capture, windows have 8 to 11 iterations, so that one is
    # committed before the first fault.
    seconds = 0.5 if precision.endswith(("_fp32_fp32", _DELAYED)) else 0.25
    protection = [word for word in found.protection if not word.startswith(_BUDGET)]
    return replace(found, protection=[*words, *protection, f"{_BUDGET}={seconds:g}"])


def campaign_of(jobs: Sequence[AnyJob], folder: Path, socket: str) -> LayoutCampaign:
    """Return the campaign of ``jobs``. Its memberships are not compared with new jobs, because a new job needs a
    schedule of placements, and with a schedule replicas do not migrate."""
    found = LayoutCampaign.of(jobs, folder, socket)
    changing = Campaign(found.changing.bench, found.changing.jobs, {}, compares_undisturbed=False)
    return replace(found, changing=changing)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign and judge its result."""
    arguments = parse_arguments(__doc__, argv, takes_jobs=True)
    jobs = jobs_of(quick=arguments.quick)
    counts, outcomes = run_jobs(
        *(ID, jobs, arguments),
        script=Path(__file__),
        open_campaign=lambda folder, socket: campaign_of(jobs, folder, socket),
    )
    planned = sum(len(job.faults) for job in jobs)
    strategies = sorted({str(o.details["strategy"]) for _, o in outcomes if o.proven and o.passed})
    num_changing = sum(isinstance(job, Job) for job in jobs)
    figure = (
        f"{counts.passed} of {planned} faults in {len(jobs)} jobs of {len(jobs) // 3 or 1} precisions: every loss, "
        f"code, scale, history and moment equal after {', '.join(strategies)}; {num_changing} jobs changed their lanes"
    )
    return finish(
        arguments.out,
        ID,
        passed=counts.passed == planned and (arguments.quick or planned >= MIN_TRIALS),
        figure=figure + counts.again if counts.complete else counts.summary(),
        threshold=f"all of at least {MIN_TRIALS} equal, atol=0",
        counts={**counts.to_counts(), "jobs": len(jobs)},
        details={"failures": [{**t.parameters, **o.details} for t, o in outcomes if not (o.passed and o.proven)]},
    )


if __name__ == "__main__":
    sys.exit(main())
