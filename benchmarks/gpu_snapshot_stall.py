"""Claim ``gpu-snapshot-stall``: iterations with sparse windows take hardly longer than iterations without windows.

The real program runs on one GPU, alternately with and without windows. The medians of its reported iteration times are
compared.
"""

import statistics
import sys
from collections.abc import Sequence

from benchmarks.gpu_engine import slice_words, stage
from benchmarks.report import finish, parse_arguments

ID = "gpu-snapshot-stall"
MAX_RATIO = 1.02
ROUNDS, NUM_ITERATIONS, SHORT_ITERATIONS = 3, 60, 4
LIMIT_SECONDS = 540.0
SLICE_BYTES = 500_000_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs and judge the claim."""
    arguments = parse_arguments(__doc__, argv)
    from tools.gpu import recovery
    from tools.gpu.day import read_report

    size = [] if arguments.quick else slice_words()
    rows = []
    with stage(LIMIT_SECONDS) as day, recovery.rank_server(day.device_type) as socket:
        jobs = recovery.Jobs(day, socket, SHORT_ITERATIONS if arguments.quick else NUM_ITERATIONS)
        windows = recovery.windows(recovery.SLICE_BYTES if arguments.quick else SLICE_BYTES)
        for number in range(1 if arguments.quick else ROUNDS):
            with day.part(f"round {number}"):
                pair = [
                    recovery.iteration_seconds(jobs.run(f"{name}-{number}", [*size, *more]))
                    for name, more in (("with", windows), ("without", []))
                ]
                rows.append(pair)
        _, problems, _ = read_report(day.folder)
    ratio = statistics.median(mine / other for mine, other in rows) if rows else float("inf")
    return finish(
        arguments.out,
        ID,
        passed=ratio <= MAX_RATIO and not problems,
        figure=f"{ratio:.3f}x" + (f"; {problems[0]}" if problems else ""),
        threshold=f"<= {MAX_RATIO:g}x an iteration without windows",
        counts={"rounds": len(rows)},
        details={"seconds": rows, "problems": problems},
    )


if __name__ == "__main__":
    sys.exit(main())
