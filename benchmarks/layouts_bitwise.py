"""Claim ``layouts-bitwise``: jobs of every parallel layout lose nodes and continue from replicas with unchanged bits.

A job loses nodes one after the other, each in another phase. In jobs of the kind ``rejoin`` each lost node starts again
and joins before the next one dies. In jobs of the kind ``halving`` nodes do not come back, until one lane (one model
replica) is left. Whole nodes are killed from outside, in every third job with returning nodes only ranks. Losses and
digests are compared as in ``elastic_bitwise``: with a run in which the same nodes leave and join by schedule, with
``atol=0``.
"""

import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.campaign import Trial, run_campaign
from benchmarks.covering import Row
from benchmarks.elastic_bitwise import RANKS_ALONE, WARM, Campaign, Job
from benchmarks.elastic_jobs import Bench
from benchmarks.localized_jobs import Layout
from benchmarks.report import finish, parse_arguments
from megatron_ft.failpoints import ITERATION_PHASES
from megatron_ft.planning.recovery.layout import LaneLimits, choose_layout
from megatron_ft.planning.state.parallel_layout import ParallelLayout
from megatron_ft.testing.jobs import forkserver

ID = "layouts-bitwise"
SEED = 20261123
NUM_CYCLES = 12
MIN_TRIALS = 150
JOB_TIMEOUT_SECONDS = 900.0
COMMON = Layout(pp=2, dp=2, tp=2, sharded=True, dtype="bf16")
"""The layout with everything on. It loses a node in every phase."""
LAYOUTS = (
    COMMON,
    Layout(pp=2, dp=3),
    Layout(pp=2, dp=3, sharded=True),
    Layout(pp=2, dp=2, vpp=2, sharded=True),
    Layout(pp=4, dp=2, dtype="bf16"),
    Layout(pp=4, dp=2, sharded=True),
    Layout(pp=1, dp=3, tp=2, sharded=True),
    Layout(pp=2, dp=2, tp=2),
    Layout(pp=1, dp=3, tp=2, dtype="bf16"),
)
_RARE = {"capture": 4, "replicate": 1}
"""Largest number of passes before a fault, for phases that do not occur in every iteration; 8 for other phases."""
_NUM_EXPERTS = 8
_SNAPSHOTS = ("snapshot=sparse_window", "snapshot.num_peer_copies=1", "snapshot.iteration_seconds=1")
_REJOINING = ("nodes.restart_lost_nodes=true", "nodes.join_window_seconds=0.1", "nodes.max_node_restarts=100")


def jobs_of(*, quick: bool) -> list[Job]:
    """Return all jobs of the campaign: two for each layout, and one more for the common layout."""
    if quick:
        return [replace(_rejoining(0, COMMON, ITERATION_PHASES[3:9:2]), number=0)]
    halves = (ITERATION_PHASES[0::2], ITERATION_PHASES[1::2])
    jobs = [_rejoining(number, COMMON, phases) for number, phases in enumerate((*halves, ITERATION_PHASES))]
    jobs += [
        _rejoining(number, layout, halves[number % 2] + halves[number % 2]) for number, layout in enumerate(LAYOUTS, 3)
    ]
    return jobs + [_shrinking(number, layout) for number, layout in enumerate(LAYOUTS, len(jobs))]


def _words(layout: Layout, fewest_lanes: int) -> list[str]:
    """Return the overrides of a layout, with just enough slots for two copies of each expert on the fewest lanes."""
    num_slots = min(_NUM_EXPERTS, -(-2 * _NUM_EXPERTS // (fewest_lanes * layout.tp)))
    words = [*layout.overrides, *_SNAPSHOTS, f"placement.num_slots_per_rank={num_slots}"]
    return words + (["placement.state_copies=2"] if layout.sharded else [])


def _rejoining(number: int, layout: Layout, phases: Sequence[str]) -> Job:
    rng = random.Random(f"{SEED} {layout.name} {number}")
    faults: list[Row] = [
        {
            "fault": index,
            "node": rng.randrange(layout.num_ranks),
            "phase": phase,
            "generation": 2 * index,
            "passes": rng.randint(1, _RARE.get(phase, 8)),
        }
        for index, phase in enumerate(phases)
    ]
    return Job(
        "rejoin",
        number,
        [f"recovery.min_nodes={layout.num_ranks - 1}", *_REJOINING],
        faults,
        kills_nodes=number % RANKS_ALONE != RANKS_ALONE - 1,
        num_nodes=layout.num_ranks,
        layout=_words(layout, layout.dp - 1),
    )


def _shrinking(number: int, layout: Layout) -> Job:
    """Make a job that loses nodes until one lane is left. Each victim trains when it dies: a hot spare would not reach
    its failpoint."""
    rng = random.Random(f"{SEED} {layout.name} {number} shrinking")
    num_nodes = layout.num_ranks
    first = ParallelLayout.regular(num_nodes, tensor_size=layout.tp, num_stages=layout.pp)
    limits = LaneLimits(most=layout.dp)
    living, now = set(range(num_nodes)), first
    faults: list[Row] = []
    # With one lane, nobody has another copy of what its ranks hold.
    while now.num_lanes > 1:
        victim = rng.choice(now.ranks)
        following = choose_layout(first, living - {victim}, {node: node for node in range(num_nodes)}, limits)
        assert isinstance(following, ParallelLayout), f"{layout.name}: {following.reason}"
        index, now = len(faults), following
        living.remove(victim)
        phase = ITERATION_PHASES[(3 * number + index) % 10]
        faults.append(
            {"fault": index, "node": victim, "phase": phase, "generation": index, "passes": rng.randint(1, 8)}
        )
    words = [f"recovery.min_nodes={len(living)}"]
    return Job("halving", number, words, faults, num_nodes=num_nodes, layout=_words(layout, 1))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign and judge its result."""
    arguments = parse_arguments(__doc__, argv, takes_jobs=True)
    jobs = jobs_of(quick=arguments.quick)
    chosen = range(len(jobs)) if arguments.jobs is None else arguments.jobs
    trials: list[Row] = [{"job": number, **fault} for number in chosen for fault in jobs[number].faults]
    with tempfile.TemporaryDirectory(prefix=f"{ID}-") as folder, forkserver(WARM) as socket:
        bench = Bench(Path(folder), socket, timeout_seconds=JOB_TIMEOUT_SECONDS)
        campaign = Campaign(bench, jobs, {})
        counts, outcomes = run_campaign(ID, trials, campaign.execute, script=Path(__file__), quick=arguments.quick)
    planned = sum(len(job.faults) for job in jobs)
    num_whole = sum(len(job.faults) for job in jobs if job.kills_nodes)
    figure = (
        f"{counts.passed} of {planned} killed nodes ({num_whole} whole) in {len(jobs)} living jobs of "
        f"{len({tuple(job.layout) for job in jobs})} layouts: the others continued from replicas, equal in every bit "
        "to the scripted history"
    )
    return finish(
        arguments.out,
        ID,
        passed=counts.passed == planned and (arguments.quick or planned >= MIN_TRIALS),
        figure=figure + counts.again if counts.complete else counts.summary(),
        threshold=f"all of at least {MIN_TRIALS} equal, atol=0; no committed iteration lost",
        counts={**counts.to_counts(), "whole_nodes": num_whole, "jobs": len(jobs)},
        details={"failures": [_failure(t, o.details) for t, o in outcomes if not (o.passed and o.proven)]},
    )


def _failure(trial: Trial, details: object) -> Row:
    return {**trial.parameters, "problems": str(details)}


if __name__ == "__main__":
    sys.exit(main())
