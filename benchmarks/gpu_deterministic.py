"""Claim ``gpu-deterministic``: deterministic algorithms cost a few per cent of an iteration's time.

One engine trains alternating iterations with and without PyTorch's deterministic algorithms.
"""

import statistics
import sys
from collections.abc import Sequence
from functools import partial

from benchmarks.gpu_engine import open_engine
from benchmarks.report import finish, parse_arguments

ID = "gpu-deterministic"
MAX_RATIO = 1.05
WARM_UP, PAIRS, QUICK_PAIRS = 4, 30, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and judge the claim."""
    arguments = parse_arguments(__doc__, argv)
    engine = open_engine({"training.train_iterations": 100}, quick=arguments.quick)
    import torch

    from tools.gpu.timing import timed

    seconds: dict[bool, list[float]] = {True: [], False: []}
    num_iterations = 2 * ((QUICK_PAIRS if arguments.quick else PAIRS) + WARM_UP)
    for iteration in range(1, num_iterations + 1):
        deterministic = bool(iteration % 2)
        torch.use_deterministic_algorithms(deterministic)
        _, spent = timed(partial(engine.run_iteration, iteration), engine.device)
        seconds[deterministic].append(spent)
    torch.use_deterministic_algorithms(True)
    pairs = list(zip(seconds[True], seconds[False], strict=True))[WARM_UP:]
    ratio = statistics.median(mine / other for mine, other in pairs)
    return finish(
        arguments.out,
        ID,
        passed=ratio <= MAX_RATIO,
        figure=f"{ratio:.3f}x, {statistics.median(mine for mine, _ in pairs) * 1e3:.1f} ms an iteration",
        threshold=f"<= {MAX_RATIO:g}x an iteration without",
        counts={"pairs": len(pairs)},
        details={
            "pairs": pairs,
            "peak_bytes": torch.cuda.max_memory_allocated() if engine.device.type == "cuda" else 0,
        },
    )


if __name__ == "__main__":
    sys.exit(main())
