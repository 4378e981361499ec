"""Claim ``recomputed-iterations``: a localized recovery runs at most two windows and the lag of a commit again.

The figures come from the jobs and the journal of ``localized-bitwise``. For every recovery, the number of iterations
that its stages ran again is compared with the window length W and the longest commit lag of the same job. Forward
passes that healthy stages computed during the recovery are counted too.
"""

import statistics
import sys
from collections.abc import Sequence

from benchmarks.localized_bitwise import campaign, recovered
from benchmarks.report import finish, parse_arguments

ID = "recomputed-iterations"
MIN_RECOVERIES = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials that the journal lacks, and judge the claim."""
    arguments = parse_arguments(__doc__, argv)
    _, counts, outcomes = campaign(quick=arguments.quick)
    recoveries = recovered(outcomes)
    beyond = [found["replayed"] - 2 * found["window"] - found["lag"] for found in recoveries]
    passes = sum(found["healthy_forward_passes"] for found in recoveries)
    ratio = statistics.mean(found["replayed"] / found["window"] for found in recoveries) if recoveries else 0.0
    figure = (
        f"{len(recoveries)} recoveries ran {sum(found['replayed'] for found in recoveries)} iterations again: "
        f"{ratio:.2f} W on average, at most {max((f['replayed'] for f in recoveries), default=0)} (W up to "
        f"{max((f['window'] for f in recoveries), default=0)}); {sum(b > 0 for b in beyond)} of them more than 2 W and "
        f"the commit lag, by {max([0, *beyond])} at most; healthy stages computed {passes} forward passes"
    )
    enough = len(recoveries) >= (1 if arguments.quick else MIN_RECOVERIES)
    return finish(
        arguments.out,
        ID,
        passed=counts.complete and enough and max([0, *beyond]) == 0 and passes == 0,
        figure=figure,
        threshold="never more than 2 W and the measured commit lag; healthy stages compute no forward pass",
        counts={"recoveries": len(recoveries), "trials": counts.planned, "passed": counts.passed},
        details={"recoveries": [dict(found) for found in recoveries]},
    )


if __name__ == "__main__":
    sys.exit(main())
