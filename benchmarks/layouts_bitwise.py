"""Claim ``layouts-bitwise``: jobs of every parallel layout lose ranks and nodes, and continue with unchanged bits.

Layouts and their protection (TP, PP, VPP, kind of optimizer, replicas, windows, what takes the place of a lost node)
are combined to cells (``layout_cells``). The prediction of ``tools/can_recover`` decides which cells survive. Jobs
cover every pair of values that occurs in a surviving cell; other cells are listed with the reason. Another four jobs
have the *common layout* and a fault in every phase.

Each job continues after each of its faults. Its bits must equal those of a reference, with ``atol=0``:

* If the number of ranks may change, the reference is a run in which the same nodes leave and join by schedule, as in
  ``elastic_bitwise``. Memberships are also compared with a new job of their size, which starts from the dense
  checkpoint of the iteration after which the membership began (``fresh_jobs``).
* If the layout is kept, or all ranks start again from windows, the reference is an undisturbed run, as in
  ``localized_bitwise``.

The campaign can be stopped and continues with the jobs that are missing; ``--jobs`` runs some of them.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.campaign import Counts, Outcome, Trial, execute_jobs, run_campaign
from benchmarks.covering import Row
from benchmarks.elastic_bitwise import WARM, Campaign, Job
from benchmarks.elastic_jobs import Bench, Recorded
from benchmarks.fresh_jobs import SAVING, Comparison, compare_with_fresh
from benchmarks.histories import at_first_nodes, entries_of, script_of
from benchmarks.layout_cells import TRAINING, Cell, covered, prospects
from benchmarks.localized_bitwise import Campaign as KeptCampaign
from benchmarks.localized_jobs import FaultJob, Layout, in_order, single_faults, whole_nodes
from benchmarks.report import finish, parse_arguments
from megatron_ft.failpoints import ITERATION_PHASES
from megatron_ft.planning.recovery.layout import LaneLimits, choose_layout
from megatron_ft.planning.state.declined import Declined
from megatron_ft.planning.state.parallel_layout import ParallelLayout
from megatron_ft.testing.jobs import forkserver

ID = "layouts-bitwise"
SEED = 20261124
MIN_TRIALS, MIN_FRESH = 300, 60
THRESHOLD = f"all of at least {MIN_TRIALS} equal, {MIN_FRESH} also to new jobs, atol=0; no committed iteration lost"
JOB_TIMEOUT_SECONDS = 900.0
COMMON = Cell(
    layout=Layout(pp=2, dp=2, tp=2, sharded=True, dtype="bf16"),
    replicas=True,
    windows=True,
    nodes="return",
    way="fewer nodes",
)
"""The common layout: all features that can be used together are on. Its jobs lose a node in every phase."""
COMMON_KEPT = replace(COMMON, layout=replace(COMMON.layout, ep=2), replicas=False, nodes="spare", way="kept layout")
"""The common layout with upstream logs, which exclude replicas."""
_PASSES = {"forward": 10, "dispatch": 20, "backward": 10, "replicate": 1}
"""Largest number of times that a rank reaches a phase before its fault. For phases that are not listed, it is 3."""
_FIRST_ITERATION, _MOST_APART = 3, 4
"""First iteration in which a fault may come if nodes do not come back, and largest number of iterations from one fault
to the next."""
_NUM_SPARED, _NUM_WHOLE, _NUM_FRESH, _NUM_FRESH_QUICK = 8, 8, 12, 2
_OFTEN = ITERATION_PHASES[:10]
"""Phases that occur in every iteration."""
_TWICE = (*ITERATION_PHASES, *_OFTEN)
_NUM_SHRINKING = 4
"""Number of jobs of a cell whose nodes do not come back. Several are needed, because each has only few faults."""
AnyJob = Job | FaultJob


def jobs_of(*, quick: bool) -> list[AnyJob]:
    """Return all jobs of the campaign, those of the common layout first."""
    if quick:
        return [rejoining(0, COMMON, ("backward", "update"), kills_nodes=True)]
    halves = (ITERATION_PHASES[0::2], ITERATION_PHASES[1::2])
    jobs: list[AnyJob] = [
        rejoining(0, COMMON, halves[0], kills_nodes=True),
        rejoining(1, COMMON, halves[1], kills_nodes=True),
        rejoining(2, COMMON, ITERATION_PHASES, kills_nodes=False),
        kept(3, COMMON_KEPT, _TWICE, "localized_replay"),
    ]
    for cell in covered():
        jobs += _jobs_of_cell(cell, len(jobs))
    return jobs


def _jobs_of_cell(cell: Cell, number: int) -> Iterator[AnyJob]:
    strategy = prospects()[cell.in_fp32].strategies[0]
    if cell.way == "restart":
        yield kept(number, cell, ITERATION_PHASES, strategy)
    elif cell.way == "kept layout":
        yield kept(number, cell, _TWICE, strategy)
        yield kept(number + 1, cell, (), strategy)
    elif cell.nodes == "return":
        yield rejoining(number, cell, _TWICE[:18], kills_nodes=number % 2 == 0)
    elif cell.nodes == "spare":
        yield _spared(number, cell)
    else:
        yield from (_shrinking(number + index, cell) for index in range(_NUM_SHRINKING))


def _rng(cell: Cell, number: int) -> random.Random:
    return random.Random(f"{SEED} {cell.name} {number}")


def _occurring(phases: Sequence[str], cell: Cell) -> list[str]:
    """Return those of ``phases`` that occur in jobs of the cell. Phases about windows do not occur without windows."""
    return [phase for phase in phases if cell.windows or phase in _OFTEN]


def _passes(phase: str, rng: random.Random) -> int:
    return rng.randint(1, _PASSES.get(phase, 3))


def rejoining(number: int, cell: Cell, phases: Sequence[str], *, kills_nodes: bool) -> Job:
    """Make a job whose lost nodes start again and join before the next one dies."""
    rng, num_nodes, lanes = _rng(cell, number), cell.layout.num_ranks, cell.layout.dp - 1
    phases = _occurring(phases, cell)
    faults: list[Row] = [
        {
            "fault": index,
            "node": rng.randrange(num_nodes),
            "phase": phase,
            "generation": 2 * index,
            "passes": _passes(phase, rng),
        }
        for index, phase in enumerate(phases)
    ]
    words, layout = cell.way_words(num_nodes - 1), cell.words(lanes)
    return Job("rejoin", number, words, faults, kills_nodes=kills_nodes, num_nodes=num_nodes, layout=layout)


def _spared(number: int, cell: Cell) -> Job:
    """Make a job in which a spare takes the place of each lost node. The spare's number is not known in advance, so
    faults name their victims by rank. With more than two lanes the victim is always the last rank."""
    rng, num_nodes = _rng(cell, number), cell.layout.num_ranks
    phases = rng.sample(_OFTEN, _NUM_SPARED)
    # Ranks are in the order of node numbers, and spares have the highest numbers. In the reference, a spare has the
    # number of the node whose place it takes (``at_first_nodes``). So ranks have the same order in both only if the
    # spare replaces the last node. With more than two lanes, sums have other bits in another order.
    first_victim = num_nodes - 1 if cell.layout.dp > 2 else 0
    faults: list[Row] = [
        {
            "fault": index,
            "rank": rng.randrange(first_victim, num_nodes),
            "phase": phase,
            "generation": index,
            "passes": _passes(phase, rng),
        }
        for index, phase in enumerate(phases)
    ]
    words, layout = cell.way_words(num_nodes - 1, num_spares=_NUM_SPARED), cell.words(cell.layout.dp - 1)
    return Job("spare", number, words, faults, num_nodes=num_nodes, layout=layout)


def _shrinking(number: int, cell: Cell) -> Job:
    """Make a job that loses nodes until one lane is left. Victims are chosen among the nodes that train, because a hot
    spare would not reach its failpoint."""
    rng, layout = _rng(cell, number), cell.layout
    num_nodes = layout.num_ranks
    first = ParallelLayout.regular(num_nodes, tensor_size=layout.tp, num_stages=layout.pp)
    limits = LaneLimits(most=layout.dp)
    living, now = set(range(num_nodes)), first
    faults: list[Row] = []
    # The ranks of the last lane have the only copy of their state, so none of them may be lost.
    while now.num_lanes > 1:
        victim = rng.choice(now.ranks)
        following = choose_layout(first, living - {victim}, {node: node for node in range(num_nodes)}, limits)
        assert not isinstance(following, Declined), f"{cell.name}: {following.reason}"
        index, now = len(faults), following
        living.remove(victim)
        phase = _OFTEN[(3 * number + index) % len(_OFTEN)]
        iteration = _FIRST_ITERATION + _MOST_APART * index + rng.randrange(_MOST_APART)
        faults.append({"fault": index, "node": victim, "phase": phase, "generation": index, "at_iteration": iteration})
    words, kept = cell.way_words(len(living)), cell.words(1)
    return Job("halving", number, words, faults, kills_nodes=number % 2 == 0, num_nodes=num_nodes, layout=kept)


def kept(number: int, cell: Cell, phases: Sequence[str], strategy: str) -> FaultJob:
    """Make a job that keeps its layout and loses ranks in ``phases``. If ``phases`` is empty, it loses whole nodes."""
    rng, layout = _rng(cell, number), cell.layout
    if phases:
        groups = single_faults(layout, _occurring(phases, cell), rng, first=number)
        expected = [[{**fault, "strategy": strategy} for fault in group] for group in groups]
        faults = in_order(expected, rng, keeps_layout=cell.way == "kept layout")
    else:
        faults = whole_nodes(layout, _NUM_WHOLE, strategy)
    return FaultJob(
        number=number,
        layout=layout,
        num_spares=1 if cell.nodes == "spare" else 0,
        faults=faults,
        kills_nodes=not phases,
        protection=[word for word in cell.words(max(1, layout.dp - 1)) if word not in layout.overrides],
        way=cell.way_words(layout.num_ranks),
    )


@dataclass(slots=True)
class ChangingCampaign(Campaign):
    """Executes jobs whose number of ranks may change, and compares memberships with new jobs of their sizes."""

    num_fresh: int = _NUM_FRESH
    """Largest number of memberships of a job that are compared with new jobs."""
    fresh: dict[int, Comparison] = field(default_factory=dict)
    """Comparisons of the present job, by the number of the change."""
    compares_undisturbed: bool = False

    def run(self, job: Job) -> list[Outcome]:
        """Run the job with its faults, then its references. Return an outcome for each fault."""
        self.fresh = {}
        return [self._with_fresh(job, number, outcome) for number, outcome in enumerate(Campaign.run(self, job))]

    def reference(self, job: Job, killed: Recorded) -> Recorded:
        """Run the job in which the same nodes leave and join by a schedule, and new jobs from its checkpoints."""
        words, entries = job.overrides_of_reference, entries_of(killed.changes, killed.orders, job.num_nodes)
        if job.kind == "spare":
            entries = at_first_nodes(entries)
        end = f"training.exit_at_iteration={killed.last_iteration}"
        changes = range(len(killed.changes))
        wanted = [] if job.kind == "spare" else changes[:: -(-len(changes) // self.num_fresh) or 1]
        with self.bench.running([*words, *SAVING, *script_of(entries), end]) as run:
            found = Recorded.of(run)
            if not found.problems:
                compared = compare_with_fresh(self.bench, words, killed, run.run_dir, wanted)
                self.fresh = {each.change: each for each in compared}
        return found

    def _with_fresh(self, job: Job, number: int, outcome: Outcome) -> Outcome:
        """Add the comparisons of the memberships that follow a fault to its outcome."""
        numbers = (2 * number, 2 * number + 1) if job.is_rejoining else (number,)
        mine = [self.fresh[change] for change in numbers if change in self.fresh]
        problems = [problem for each in mine for problem in each.problems]
        details = {**outcome.details, "fresh": sum(each.num_compared > 0 for each in mine)}
        details["problems"] = [*outcome.details["problems"], *problems][:5]
        return replace(outcome, passed=outcome.passed and not problems, details=details)


@dataclass(slots=True)
class LayoutCampaign:
    """Executes the jobs of all ways to recover."""

    jobs: Sequence[AnyJob]
    changing: Campaign
    kept: KeptCampaign

    @classmethod
    def of(cls, jobs: Sequence[AnyJob], folder: Path, socket: str, num_fresh: int = _NUM_FRESH) -> "LayoutCampaign":
        """Return the campaign of ``jobs``, which run in ``folder``.

        Args:
            num_fresh: see ``ChangingCampaign``.
        """
        for name in ("changing", "kept"):
            (folder / name).mkdir()
        changing, kept = (Bench(folder / name, socket, TRAINING, JOB_TIMEOUT_SECONDS) for name in ("changing", "kept"))
        return cls(
            jobs=jobs,
            changing=ChangingCampaign(changing, [job for job in jobs if isinstance(job, Job)], {}, num_fresh=num_fresh),
            kept=KeptCampaign(kept, [job for job in jobs if isinstance(job, FaultJob)]),
        )

    def execute(self, trials: Sequence[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        """Execute trials and yield their outcomes."""
        return execute_jobs(trials, lambda number: self.run(self.jobs[number]))

    def run(self, job: AnyJob) -> list[Outcome]:
        """Run a job and its references. Return an outcome for each fault."""
        return self.changing.run(job) if isinstance(job, Job) else self.kept.run(job)


def cells_table() -> dict[str, Any]:
    """Return the table of cells that do not survive, grouped by the reason."""
    by_reason: dict[str, list[str]] = {}
    for cell, prospect in prospects().items():
        if not prospect.survives:
            reason = f"refused: {prospect.refused}" if prospect.refused else f"declined: {prospect.declined}"
            by_reason.setdefault(reason, []).append(cell.way)
    rows = [[", ".join(sorted(set(ways))), len(ways), reason] for reason, ways in by_reason.items()]
    title = f"Of {len(prospects())} cells, {sum(map(len, by_reason.values()))} are refused or decline"
    return {"title": title, "header": ["way to recover", "cells", "reason"], "rows": rows}


def run_jobs(
    claim: str,
    jobs: Sequence[AnyJob],
    arguments: argparse.Namespace,
    *,
    script: Path,
    open_campaign: Callable[[Path, str], LayoutCampaign],
) -> tuple[Counts, list[tuple[Trial, Outcome]]]:
    """Run the faults of all jobs that ``arguments`` choose. Return totals and outcomes.

    Args:
        claim: id of the claim.
        arguments: options of the claim's script.
        script: file of the campaign.
        open_campaign: creates the campaign from a temporary folder and the socket of a fork server.
    """
    chosen = range(len(jobs)) if arguments.jobs is None else arguments.jobs
    trials: list[Row] = [{"job": number, **fault} for number in chosen for fault in jobs[number].faults]
    with tempfile.TemporaryDirectory(prefix=f"{claim}-") as folder, forkserver(WARM) as socket:
        campaign = open_campaign(Path(folder), socket)
        return run_campaign(claim, trials, campaign.execute, script=script, quick=arguments.quick)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign and judge its result."""
    arguments = parse_arguments(__doc__, argv, takes_jobs=True)
    jobs = jobs_of(quick=arguments.quick)
    num_fresh = _NUM_FRESH_QUICK if arguments.quick else _NUM_FRESH
    counts, outcomes = run_jobs(
        *(ID, jobs, arguments),
        script=Path(__file__),
        open_campaign=lambda folder, socket: LayoutCampaign.of(jobs, folder, socket, num_fresh),
    )
    planned = sum(len(job.faults) for job in jobs)
    num_whole = sum(len(job.faults) for job in jobs if job.kills_nodes)
    good = [outcome.details for _, outcome in outcomes if outcome.proven and outcome.passed and outcome.num_compared]
    num_fresh = sum(details.get("fresh", 0) for details in good)
    strategies = sorted({str(details["strategy"]) for details in good})
    enough = arguments.quick or (planned >= MIN_TRIALS and num_fresh >= MIN_FRESH)
    tables = [] if arguments.quick else [cells_table()]
    figure = (
        f"{counts.passed} of {planned} killed ranks ({num_whole} as whole nodes) in {len(jobs)} living jobs: the jobs "
        f"continued by {', '.join(strategies)}, equal in every bit to the history without faults; {num_fresh} "
        "memberships also equal to a new job of their size from a dense checkpoint"
    )
    return finish(
        arguments.out,
        ID,
        passed=counts.passed == planned and enough,
        figure=figure + counts.again if counts.complete else counts.summary(),
        threshold=THRESHOLD,
        counts={**counts.to_counts(), "whole_nodes": num_whole, "jobs": len(jobs), "new_jobs": num_fresh},
        details={
            "failures": [{**t.parameters, **o.details} for t, o in outcomes if not (o.passed and o.proven)],
            "tables": tables,
        },
    )


if __name__ == "__main__":
    sys.exit(main())
