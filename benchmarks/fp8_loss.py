"""Claim ``fp8-loss``: training losses of the five regimes of ``precision.regime``, and of FP8 layers with delayed
scaling, compared with those of FP32.

The model ``moe_tiny`` is trained on real text, in each regime and in FP32, with the same samples and initial weights.
The reduction of the loss is the loss of the first iteration minus the mean loss of the last tenth of the iterations.
Runs with masters of at least 16 bits must reach 90 % of the reduction of FP32, and the regime with FP8 masters 70 %.

FP16 starts with the default loss scale, so the first iterations overflow and are skipped. Skipped iterations count like
others. The quick variant is too short for them and has no FP16 run.
"""

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.campaign import Outcome, Trial, in_threads, run_campaign
from benchmarks.report import finish, parse_arguments
from megatron_ft.config.checks.training import REGIMES
from megatron_ft.testing.jobs import forkserver, run_job

ID = "fp8-loss"
WARM = "megatron_ft.mcore.rank_main:warm"
REFERENCE = "fp32"
NUM_ITERATIONS, QUICK_ITERATIONS = 100, 10
PRECISIONS = (*REGIMES, "fp8_delayed")
LEAST_SHARES = {name: 0.7 if name.startswith("fp8_fp8_") else 0.9 for name in PRECISIONS}
"""Smallest share of the reduction of FP32, for each precision."""
NUM_PARALLEL = 2
"""Jobs that run at the same time."""
TIMEOUT_SECONDS = 3600.0
JOB = (
    "model=moe_tiny",
    "training.micro_batch_size=4",
    "training.global_batch_size=4",
    "training.eval_iterations=16",
    "training.digest_interval_iterations=0",
    "snapshot=none",
    "checkpoint.save_at_end=false",
    "telemetry.log_interval_iterations=1",
    "telemetry.wandb=disabled",
    "telemetry.progress=plain",
    "run.name=job",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Train all runs that the journal lacks, and judge their losses."""
    arguments = parse_arguments(__doc__, argv)
    quick = arguments.quick
    length = QUICK_ITERATIONS if quick else NUM_ITERATIONS
    names = (REFERENCE, *(PRECISIONS[-2:] if quick else PRECISIONS))
    rows = [{"precision": name, "iterations": length} for name in names]
    with tempfile.TemporaryDirectory(prefix=f"{ID}-") as folder, forkserver(WARM) as socket:
        execute = in_threads(lambda trial: _train(trial, Path(folder) / trial.key(""), socket), NUM_PARALLEL)
        counts, outcomes = run_campaign(ID, rows, execute, script=Path(__file__), quick=quick)
    runs = {str(trial.parameters["precision"]): outcome.details for trial, outcome in outcomes if outcome.passed}
    table = _compare(runs) if len(runs) == len(names) else []
    for row in table:
        print(
            "{precision:<20} loss {first:.4f} -> {last:.4f}  validation {validation:.4f}  share {share:.1%}".format(
                **row
            )
        )
    shares = {row["precision"]: row["share"] for row in table if row["precision"] != REFERENCE}
    wide = min((share for name, share in shares.items() if LEAST_SHARES[name] > 0.7), default=0.0)
    narrow = min((share for name, share in shares.items() if LEAST_SHARES[name] == 0.7), default=0.0)
    figure = (
        f"share of the loss reduction of FP32 ({table[0]['first']:.2f} to {table[0]['last']:.2f}) after {length} "
        f"iterations: at least {wide:.1%} with masters of 16 bits or more, {narrow:.1%} with FP8 masters"
        if table
        else counts.summary()
    )
    return finish(
        arguments.out,
        ID,
        passed=counts.complete and bool(table) and all(shares[name] >= LEAST_SHARES[name] for name in shares),
        figure=figure,
        threshold="at least 90 % of the loss reduction of FP32 with masters of 16 bits or more, 70 % with FP8 masters",
        counts={**counts.to_counts(), "iterations": length},
        details={"table": table, "failures": [dict(o.details) for _, o in outcomes if not o.passed]},
    )


def _train(trial: Trial, runs: Path, socket: str) -> Outcome:
    """Train one run. It passes if each of its iterations has a finite loss."""
    precision, length = str(trial.parameters["precision"]), int(str(trial.parameters["iterations"]))
    words = [
        f"precision={precision}",
        *JOB,
        f"training.train_iterations={length}",
        f"training.eval_interval_iterations={length}",
        f"optimizer.lr_warmup_iterations={length // 10}",
    ]
    job = run_job(words, forkserver=socket, runs=runs, timeout_seconds=TIMEOUT_SECONDS)
    rows = [row for row in job.records("metrics.jsonl") if "loss" in row]
    losses = {row["iteration"]: row["loss"] for row in rows}
    validation = [event["loss"] for event in job.records() if event["kind"] == "evaluation"]
    is_whole = job.exit_code == 0 and sorted(losses) == list(range(1, length + 1)) and len(validation) == 1
    is_finite = is_whole and all(isinstance(loss, float) for loss in (*losses.values(), *validation))
    return Outcome(
        proven=is_whole,
        passed=is_finite,
        num_compared=len(losses),
        details={
            "precision": precision,
            "losses": [losses.get(iteration) for iteration in range(1, length + 1)],
            "validation_loss": validation[0] if validation else None,
            "error": "" if is_finite else job.output[-2000:],
        },
    )


def _compare(runs: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each run, its first and last loss, and its share of the loss reduction of FP32."""
    rows = []
    for name, run in runs.items():
        losses = run["losses"]
        last = statistics.mean(losses[-(len(losses) // 10) :])
        validation = run["validation_loss"]
        rows.append({"precision": name, "first": losses[0], "last": last, "validation": validation})
    reference = next(row for row in rows if row["precision"] == REFERENCE)
    for row in rows:
        row["share"] = (row["first"] - row["last"]) / (reference["first"] - reference["last"])
    return sorted(rows, key=lambda row: row is not reference)


if __name__ == "__main__":
    sys.exit(main())
