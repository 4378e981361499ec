"""Claim ``membership-simulation``: the project's decisions about a job's membership keep all rules of the protocol, in
simulations with a virtual clock.

A seed determines a job: its nodes and spares, all durations, which ranks and nodes die, hang or are cut off, which
nodes are requested to leave or to join, and which messages are late, repeated, or lost and sent again. Every fourth job
keeps its layout: other nodes take the places of lost ones, and the pipeline stage of such a place replays. The
controller's state machine, the choice of the target and the decision about replicas are the project's code. Ranks are
simulated, and do only what the commit protocol allows. The rules of the protocol are checked after every step. At the
end, every living rank must have the same history: each iteration once, with one vote.
"""

import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.report import finish, parse_arguments
from benchmarks.simulated_job import Job

ID = "membership-simulation"
NUM_SCHEDULES, QUICK_SCHEDULES = 2000, 200
MIN_SCHEDULES = 1000
TRIED = ("reform", "finished", "undone", "restart", "declined", "joined nodes", "left nodes", "replaced nodes")
TRIED += ("hung ranks found", "silent nodes", "sent again", "filled places", "places filled by their own node")
TRIED += ("replayed ranks",)
"""Events that must happen often, because the simulation would prove nothing without them."""


def simulate(seeds: Sequence[int]) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Run every seed. Return the total number of each event, and the seeds in which a rule was broken."""
    counts: Counter[str] = Counter()
    failures = []
    for seed in seeds:
        try:
            counts += Job(seed).run()
        except AssertionError as error:
            failures.append({"seed": seed, "error": str(error), "traceback": traceback.format_exc()[-1500:]})
    return counts, failures


def main(argv: Sequence[str] | None = None) -> int:
    """Run the simulation and judge the claim."""
    arguments = parse_arguments(__doc__, argv)
    number = QUICK_SCHEDULES if arguments.quick else NUM_SCHEDULES
    counts, failures = simulate(range(number))
    reforms, finished, undone = (counts[name] for name in ("reform", "finished", "undone"))
    figure = (
        f"{number - len(failures)} of {number} schedules keep every rule: {reforms} new memberships formed, "
        f"{counts['joined nodes']} nodes joined, {counts['replaced nodes']} of them in the place of a lost one, "
        f"{counts['left nodes']} left, {counts['filled places']} places of kept layouts filled, "
        f"{counts['hung ranks found']} hung ranks found, "
        f"{finished} iterations finished by ranks that were behind, {undone} undone, {counts['declined']} declined, "
        f"{counts['restart']} restarts"
    )
    tried = min(counts[name] for name in TRIED) > number // 100
    return finish(
        arguments.out,
        ID,
        passed=not failures and tried and (arguments.quick or number >= MIN_SCHEDULES),
        figure=figure,
        threshold="every rule in all of at least 1000 seeded schedules",
        counts={"schedules": number, **dict(sorted(counts.items()))},
        details={"failures": failures[:20]},
    )


if __name__ == "__main__":
    sys.exit(main())
