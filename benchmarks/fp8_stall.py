"""Claim ``fp8-stall``: windows of jobs with quantized state, their bytes, and the time that they block training.

For each of the five regimes of ``precision.regime``, two ranks of one real job capture windows of four iterations, as
in ``snapshot_stall.py``: the state is sent to real snapshot servers, with copies at two other nodes' servers. Each
round counts for its slowest rank. Times are medians over rounds, except the first round. A job with BF16 weights and
FP32 state is measured in the same way, before the regimes. The model is small, so fixed costs of about 2 ms dominate if
the state has few bytes. The ratio to the time of a memory copy is therefore reported, but not bounded.
"""

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import finish, parse_arguments
from benchmarks.snapshot_stall import JOB, NUM_NODES, NUM_SAVES, WORLD_SIZE, measure
from benchmarks.stall_figures import MAX_SHARE, OURS, QUICK_MAX_SHARE, summary
from megatron_ft.config.checks.training import REGIMES
from megatron_ft.corpus.samples import check_data
from megatron_ft.testing.ranks import compose, run_ranks
from megatron_ft.testing.snapshot_servers import cluster
from transformer_engine_ext.regimes import REGIMES as FORMATS

ID = "fp8-stall"
BASELINE = "bf16"
ROUNDS, QUICK_ROUNDS = 8, 2
JOB_SECONDS = 900.0
_SNAPSHOT = (
    "snapshot=sparse_window",
    f"snapshot.policy.min_window_iterations={NUM_SAVES}",
    "snapshot.num_peer_copies=2",
    "snapshot.iteration_seconds=1.0",
    "snapshot.bandwidth_bytes_per_second=1e9",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all regimes, print the table and judge the claim."""
    arguments = parse_arguments(__doc__, argv)
    precisions = (BASELINE, *(REGIMES[-1:] if arguments.quick else REGIMES))
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    measured = {precision: _measure(precision, rounds) for precision in precisions}
    for precision in precisions:
        print(_in_words(precision, measured), flush=True)
    max_share = QUICK_MAX_SHARE if arguments.quick else MAX_SHARE
    ours = {precision: figures["systems"][OURS] for precision, figures in measured.items()}
    share, memcpy = (max(row[name] for row in ours.values()) for name in ("share_of_iteration", "of_memcpy"))
    has_windows = all(
        figures["window_iterations"] == NUM_SAVES and figures["num_delayed"] == 0 for figures in measured.values()
    )
    least, most = (
        pick(ours[precision]["save_bytes"] for precision in precisions[1:]) / ours[BASELINE]["save_bytes"]
        for pick in (min, max)
    )
    return finish(
        arguments.out,
        ID,
        passed=has_windows and share <= max_share,
        figure=f"blocked at most {share:.2%} of an iteration ({memcpy:.2f}x memcpy) in {len(precisions) - 1} regimes "
        f"and with FP32 state; windows of {least:.2f} to {most:.2f} times the bytes of FP32 state",
        threshold=f"<= {max_share:.0%} of an iteration, slowest rank, W = {NUM_SAVES}",
        counts={"regimes": len(precisions) - 1, "rounds_each": rounds, "saves_each": NUM_SAVES, "ranks": WORLD_SIZE},
        details=measured,
    )


def _measure(precision: str, rounds: int) -> dict[str, Any]:
    config = compose(*JOB, f"precision={precision}", "training.global_batch_size=8")
    snapshot = compose(*JOB, f"precision={precision}", *_SNAPSHOT).snapshot
    check_data(config)
    with cluster(NUM_NODES) as keepers, tempfile.TemporaryDirectory(prefix="stall-") as folder:
        run = partial(measure, keepers, snapshot, (OURS,), rounds)
        ranks = run_ranks(run, config, world_size=WORLD_SIZE, run_dir=Path(folder), timeout_seconds=JOB_SECONDS)
    return summary(ranks)


def _in_words(precision: str, measured: dict[str, dict[str, Any]]) -> str:
    figures, row = measured[precision], measured[precision]["systems"][OURS]
    regime = FORMATS.get(precision)
    formats = "12.00 and 2.00" if regime is None else f"{regime.full_bytes:.2f} and {regime.frozen_bytes:.2f}"
    return (
        f"{precision:<20} {formats} bytes a parameter  slice {row['save_bytes'] / 1e6:6.1f} MB  blocked "
        f"{row['blocked_seconds'] * 1e3:6.2f} ms = {row['share_of_iteration']:.2%} of "
        f"{figures['iteration_seconds']:.2f} s, {row['of_memcpy']:.2f}x memcpy, first "
        f"{row['first_of_memcpy']:.1f}x  slowdown {row['slowdown']:.3f}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
