"""Claim ``accuracy-under-failures``: validation loss of runs that lose updates of experts, and of runs that do not.

    python -m benchmarks.accuracy_under_failures --plot docs/images/accuracy.png    # also draws the losses

A small model is trained on real text, and all of its ranks are killed at 20, 40, 60 and 80 % of the run. Runs with
dense snapshots and with sparse windows must equal the undisturbed run of their seed in every bit. In runs whose windows
leave out experts, the validation loss may differ from that of the undisturbed run by at most 0.5 %, or by the spread of
the undisturbed runs (the largest minus the smallest validation loss, over the mean) if the spread is larger.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.campaign import Outcome, Trial, in_threads, run_campaign
from benchmarks.report import finish
from megatron_ft.testing.jobs import JobResult, forkserver, run_job

ID = "accuracy-under-failures"
WARM = "megatron_ft.mcore.rank_main:warm"
NUM_ITERATIONS, QUICK_ITERATIONS = 600, 40
SEEDS, QUICK_SEEDS = (1, 2, 3), (1,)
NUM_PARALLEL = 2
"""Jobs that run at the same time."""
FAULTS_AT = (0.2, 0.4, 0.6, 0.8)
WITHIN, NUM_SPREADS, MAX_LOST_SHARE = 0.005, 3.0, 0.0375
VALIDATION_SAMPLES = 624
"""Samples of an evaluation: all of the validation data. With fewer, each seed would evaluate other samples, and the
spread of the losses of undisturbed runs would mostly be that of the samples."""
SMOOTH = 10
"""Iterations over which the difference of two losses is averaged."""
JOB = (
    "model=moe_tiny",
    "training.micro_batch_size=4",
    "training.global_batch_size=4",
    f"training.eval_iterations={VALIDATION_SAMPLES // 4}",
    "training.digest_interval_iterations=0",
    "optimizer.lr_warmup_iterations=20",
    "snapshot.num_peer_copies=0",
    "snapshot.iteration_seconds=0.2",
    "snapshot.bandwidth_bytes_per_second=1e9",
    "recovery.max_restarts=4",
    "checkpoint.save_at_end=false",
    "telemetry.log_interval_iterations=1",
    "telemetry.wandb=disabled",
    "telemetry.progress=plain",
)
PARTIAL = ("snapshot=partial_experts", "snapshot.policy.num_experts=1", "snapshot.policy.max_lost_share=null")
POLICIES: dict[str, tuple[str, ...]] = {
    "undisturbed": ("snapshot=none",),
    "dense": ("snapshot=dense", "snapshot.policy.interval_iterations=1"),
    "sparse window": ("snapshot=sparse_window", "snapshot.policy.min_window_iterations=4"),
    "partial: moments": (*PARTIAL, "snapshot.policy.leave_out=[moments]"),
    "partial: masters": (*PARTIAL, "snapshot.policy.leave_out=[masters]"),
    "partial: masters and moments": PARTIAL,
    "selective": ("snapshot=selective_experts", "snapshot.policy.num_experts=1"),
    "ten times the lost tokens": (*PARTIAL, "snapshot.policy.interval_iterations=10"),
}
"""Overrides of snapshots of each kind of run. Windows that leave out experts have one of 8 experts of a layer."""
EXACT, BOUNDED, WORSE = ("dense", "sparse window"), tuple(POLICIES)[3:7], "ten times the lost tokens"


def main(argv: Sequence[str] | None = None) -> int:
    """Train all runs that the journal lacks, and judge their validation losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run the quick variant")
    parser.add_argument("--out", type=Path, help="file for the result, as JSON")
    parser.add_argument("--plot", type=Path, help="picture of the losses")
    arguments = parser.parse_args(argv)
    quick = arguments.quick
    names = ("undisturbed", "sparse window", "partial: masters and moments") if quick else tuple(POLICIES)
    length, seeds = (QUICK_ITERATIONS, QUICK_SEEDS) if quick else (NUM_ITERATIONS, SEEDS)
    rows = [{"policy": name, "seed": seed, "iterations": length} for seed in seeds for name in names]
    with tempfile.TemporaryDirectory(prefix=f"{ID}-") as folder, forkserver(WARM) as socket:
        execute = in_threads(lambda trial: _train(trial, Path(folder) / trial.key(""), socket), NUM_PARALLEL)
        counts, outcomes = run_campaign(ID, rows, execute, script=Path(__file__), quick=quick)
    runs = {(str(t.parameters["policy"]), int(str(t.parameters["seed"]))): dict(o.details) for t, o in outcomes}
    table = _compare(runs, names, seeds)
    for row in table:
        print(
            "{policy:<30} loss {loss:.4f}  {difference:+.3%}  PLT {lost_share:.2%}  spikes {spike:+.4f}  {back:3.0f} "
            "iterations to return  equal {is_equal}".format(**row)
        )
    if arguments.plot is not None:
        _draw(runs, names, arguments.plot)
    spread = table[0]["spread"]
    limit = max(WITHIN, spread)
    exact = [row for row in table if row["policy"] in EXACT]
    bounded = [row for row in table if row["policy"] in BOUNDED]
    worse = [row for row in table if row["policy"] == WORSE]
    is_exact = all(row["is_equal"] for row in exact)
    is_within = all(row["worst"] <= limit and row["lost_share"] <= MAX_LOST_SHARE for row in bounded)
    is_worse = all(row["difference"] > NUM_SPREADS * spread for row in worse)
    largest = max((row["worst"] for row in bounded), default=0.0)
    return finish(
        arguments.out,
        ID,
        passed=counts.complete and is_exact and (quick or (is_within and is_worse)),
        figure=f"dense and sparse windows equal in every bit: {is_exact}; windows that leave out experts at most "
        f"{largest:.2%} from the undisturbed validation loss (limit {limit:.2%}, PLT at most "
        f"{max((row['lost_share'] for row in bounded), default=0.0):.2%}); ten times the lost tokens "
        f"{worse[0]['difference'] if worse else 0.0:+.2%} at PLT {worse[0]['lost_share'] if worse else 0.0:.1%} (3 "
        f"spreads are {NUM_SPREADS * spread:.2%})",
        threshold="dense and sparse equal, atol=0; others within max(0.5 %, spread) at a PLT <= 3.75 %; ten times the "
        "lost tokens worse by more than 3 spreads",
        counts={**counts.to_counts(), "seeds": len(seeds), "iterations": length},
        details={"table": table},
    )


def _train(trial: Trial, runs: Path, socket: str) -> Outcome:
    """Train one run. Its outcome is proven if all faults happened."""
    policy, length = str(trial.parameters["policy"]), int(str(trial.parameters["iterations"]))
    faults = [] if policy == "undisturbed" else [int(length * share) + 1 for share in FAULTS_AT]
    points = ", ".join(
        f"'kill(at_iteration={iteration},phase=\"backward\",generation={generation})'"
        for generation, iteration in enumerate(faults)
    )
    words = [
        *POLICIES[policy],
        *JOB,
        f"training.train_iterations={length}",
        f"training.eval_interval_iterations={length}",
        f"training.seed={trial.parameters['seed']}",
        f"data.seed={trial.parameters['seed']}",
        f"testing.failpoints=[{points}]",
        "run.name=job",
    ]
    job = run_job(words, forkserver=socket, runs=runs, timeout_seconds=3600.0)
    losses = {row["iteration"]: row["loss"] for row in job.records("metrics.jsonl") if "loss" in row}
    (validation,) = [*_of_kind(job, "evaluation"), {"loss": None}][:1]
    recoveries = [event["iteration"] for event in _of_kind(job, "recovery_started")]
    lost = _of_kind(job, "expert_updates_lost")
    is_whole = job.exit_code == 0 and sorted(losses) == list(range(1, length + 1))
    return Outcome(
        proven=len(job.records("failpoints.jsonl")) == len(faults) == len(recoveries),
        passed=is_whole and validation["loss"] is not None,
        num_compared=len(losses),
        details={
            "losses": [losses.get(iteration) for iteration in range(1, length + 1)],
            "validation_loss": validation["loss"],
            "lost_share": lost[-1]["lost_share"] if lost else 0.0,
            "recoveries": recoveries,
            "error": "" if is_whole else job.output[-2000:],
        },
    )


def _of_kind(job: JobResult, kind: str) -> list[dict[str, Any]]:
    return [event for event in job.records() if event["kind"] == kind]


def _compare(
    runs: dict[tuple[str, int], dict[str, Any]], names: Sequence[str], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Compare each kind of run with the undisturbed runs of the same seeds. Return means over seeds."""
    calm = {seed: runs["undisturbed", seed] for seed in seeds}
    finals = [run["validation_loss"] for run in calm.values()]
    spread = (max(finals) - min(finals)) / statistics.mean(finals)
    rows = []
    for name in names:
        mine = {seed: runs[name, seed] for seed in seeds}
        differences = [
            mine[seed]["validation_loss"] / calm[seed]["validation_loss"] - 1 if mine[seed]["validation_loss"] else 9.0
            for seed in seeds
        ]
        peaks = [peak for seed in seeds for peak in _spikes(mine[seed], calm[seed])]
        rows.append(
            {
                "policy": name,
                "loss": statistics.mean(run["validation_loss"] or 0.0 for run in mine.values()),
                "difference": statistics.mean(differences),
                "worst": max(abs(difference) for difference in differences),
                "spread": spread,
                "lost_share": max(run["lost_share"] for run in mine.values()),
                "spike": statistics.mean([height for height, _ in peaks] or [0.0]),
                "back": statistics.mean([length for _, length in peaks] or [0.0]),
                "is_equal": all(mine[seed]["losses"] == calm[seed]["losses"] for seed in seeds)
                and all(mine[seed]["validation_loss"] == calm[seed]["validation_loss"] for seed in seeds),
            }
        )
    return rows


def _spikes(run: dict[str, Any], calm: dict[str, Any]) -> list[tuple[float, int]]:
    """Return two figures for each recovery: how far the loss of the next iteration is above that of the undisturbed
    run, and after how many iterations the mean difference over ``SMOOTH`` iterations is at most 0.5 % of the loss."""
    differences = [(mine or 9.0) - other for mine, other in zip(run["losses"], calm["losses"], strict=True)]
    found = []
    for iteration in run["recoveries"]:
        length = next(
            (
                number
                for number in range(len(differences) - iteration - SMOOTH)
                if statistics.mean(differences[iteration + number : iteration + number + SMOOTH])
                <= WITHIN * calm["losses"][iteration + number]
            ),
            len(differences) - iteration,
        )
        found.append((differences[iteration] if iteration < len(differences) else 0.0, length))
    return found


def _draw(runs: dict[tuple[str, int], dict[str, Any]], names: Sequence[str], path: Path) -> None:
    """Draw the difference of each kind of run to the undisturbed one, for the first seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    seed = min(seed for _, seed in runs)
    calm = runs["undisturbed", seed]["losses"]
    figure, axes = pyplot.subplots(figsize=(10.5, 4.5), layout="constrained")
    for name in names[1:]:
        losses = runs[name, seed]["losses"]
        raw = [(mine or float("nan")) - other for mine, other in zip(losses, calm, strict=True)]
        smooth = [statistics.mean(raw[max(0, at - SMOOTH + 1) : at + 1]) for at in range(len(raw))]
        axes.plot(range(1, len(smooth) + 1), smooth, label=name, linewidth=1.2)
    for share in FAULTS_AT:
        axes.axvline(int(len(calm) * share) + 1, color="#7f7f7f", linewidth=0.8, linestyle=":")
    axes.set_xlabel("iteration (dotted: all ranks are killed)")
    axes.set_ylabel(f"loss above the undisturbed run\n(mean of {SMOOTH} iterations)")
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
