"""Claim ``gpu-reform``: after a rank is lost inside a collective, the survivors have new process groups within seconds.

Four ranks share one GPU and communicate over NCCL's sockets. The measured time is that from the order to abort to the
end of the first all-reduce without the lost rank, on the slowest survivor. A trial counts only if the rank was lost
inside an all-reduce.
"""

import sys
from collections.abc import Sequence

from benchmarks.gpu_engine import stage
from benchmarks.report import finish, parse_arguments

ID = "gpu-reform"
MAX_SECONDS = 5.0
TRIALS, QUICK_TRIALS = 5, 1
LIMIT_SECONDS = 500.0


def main(argv: Sequence[str] | None = None) -> int:
    """Lose ranks and judge the claim."""
    arguments = parse_arguments(__doc__, argv)
    from tools.gpu import abort
    from tools.gpu.day import read_report
    from tools.gpu.transports import find_transport

    rows: dict[str, list[float]] = {how: [] for how in abort.SIGNALS}
    with stage(LIMIT_SECONDS) as day:
        transport = find_transport(day)
        for _ in range(QUICK_TRIALS if arguments.quick else TRIALS):
            for how, seconds in rows.items():
                with day.part(how):
                    found = abort.run_trial(day, transport, how, abort.surviving())
                    seconds.append(found["abort_and_form_seconds"])
        _, problems, _ = read_report(day.folder)
    worst = max((seconds for row in rows.values() for seconds in row), default=float("inf"))
    return finish(
        arguments.out,
        ID,
        passed=worst <= MAX_SECONDS and not problems and transport.backend == "nccl",
        figure=f"at most {worst:.2f} s over {transport.name}" + (f"; {problems[0]}" if problems else ""),
        threshold=f"<= {MAX_SECONDS:g} s, in every trial over NCCL, tensors untouched",
        counts={f"{how}_trials": len(row) for how, row in rows.items()},
        details={"seconds": rows, "problems": problems},
    )


if __name__ == "__main__":
    sys.exit(main())
