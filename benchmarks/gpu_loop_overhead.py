"""Claim ``gpu-loop-overhead``: on a GPU, the project's loop takes hardly longer than a hand-written Megatron loop.

Both loops train the same two layers in one process, in alternating iterations; the order within a pair changes from
pair to pair. The project's loop includes the commit vote and the rollback record. Snapshots and reports are switched
off.
"""

import statistics
import sys
from collections.abc import Sequence
from functools import partial

from benchmarks.gpu_engine import open_engine
from benchmarks.report import finish, parse_arguments

ID = "gpu-loop-overhead"
MAX_RATIO = 1.01
MAX_APART = 1e-3
"""Largest allowed relative difference of losses, which shows that both loops train the same model."""
WARM_UP, PAIRS, QUICK_PAIRS = 4, 40, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and judge the claim."""
    arguments = parse_arguments(__doc__, argv)
    pairs = WARM_UP + (QUICK_PAIRS if arguments.quick else PAIRS)
    overrides = {"training.train_iterations": pairs, "precision.params_dtype": "bf16"}
    engine = open_engine(overrides, quick=arguments.quick)
    from benchmarks.bare_megatron import BareLoop
    from tools.gpu.timing import timed

    bare = BareLoop(
        engine.config,
        vocab_size=engine.vocab_size,
        samples=engine.samples["train"],
        pg_collection=engine.groups.pg_collection,
        device=engine.device,
    )
    bare.copy_weights(engine.model_chunks[0])
    loops = (engine.run_iteration, bare.run_iteration)
    rows = []
    for iteration in range(1, pairs + 1):
        seconds = {}
        for number in (0, 1) if iteration % 2 else (1, 0):
            result, seconds[number] = timed(partial(loops[number], iteration), engine.device)
            if number == 0:
                loss = result.vote.loss
            else:
                bare_loss, _ = result
        rows.append((seconds[0], seconds[1], loss, bare_loss))
    rows = rows[WARM_UP:]
    ratio = statistics.median(ours / theirs for ours, theirs, _, _ in rows)
    apart = max(abs(mine / other - 1.0) for _, _, mine, other in rows)
    problems = [f"the losses differ by {apart:.1e}"] if apart > MAX_APART else []
    return finish(
        arguments.out,
        ID,
        passed=ratio <= MAX_RATIO and not problems,
        figure=f"{ratio:.3f}x, {statistics.median(ours for ours, _, _, _ in rows) * 1e3:.1f} ms an iteration",
        threshold=f"<= {MAX_RATIO:g}x an iteration of bare Megatron, the same losses",
        counts={"pairs": len(rows)},
        details={"rows": rows, "losses_apart": apart, "problems": problems},
    )


if __name__ == "__main__":
    sys.exit(main())
