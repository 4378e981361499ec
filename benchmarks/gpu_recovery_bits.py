"""Claim ``gpu-recovery-bits``: ranks on a GPU that are killed and continue from windows in memory reach the same bits.

The rank of one job of the real program is killed twenty times, in alternating phases. Losses, and digests of the whole
state after every iteration, are compared with those of an undisturbed job. A kill counts only if the run's own record
shows it.
"""

import sys
from collections.abc import Sequence

from benchmarks.gpu_engine import stage
from benchmarks.report import finish, parse_arguments

ID = "gpu-recovery-bits"
NUM_KILLS, QUICK_KILLS = 20, 1
FIRST_KILL, STEP = 8, 2
PHASES = ("backward", "update", "forward", "vote_after", "grad_sync", "gather", "data", "vote_before")
LIMIT_SECONDS = 540.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run both jobs and judge the claim."""
    arguments = parse_arguments(__doc__, argv)
    from tools.gpu import recovery
    from tools.gpu.day import read_report

    count = QUICK_KILLS if arguments.quick else NUM_KILLS
    kills = [(PHASES[number % len(PHASES)], FIRST_KILL + STEP * number) for number in range(count)]
    with stage(LIMIT_SECONDS) as day:
        with day.part("kills"):
            recovery.run_kills(day, kills, num_iterations=kills[-1][1] + 3)
        figures, problems, _ = read_report(day.folder)
    happened = figures.get("kills", 0)
    return finish(
        arguments.out,
        ID,
        passed=not problems and happened == count,
        figure=f"{happened} kills, {figures.get('digests_compared', 0)} digests"
        + (f"; {problems[0]}" if problems else ", all equal"),
        threshold=f"all of {NUM_KILLS} equal in every bit, continued from memory",
        counts={"kills": happened, "digests_compared": figures.get("digests_compared", 0)},
        details={"figures": figures, "problems": problems},
    )


if __name__ == "__main__":
    sys.exit(main())
