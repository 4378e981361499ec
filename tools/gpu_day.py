"""Runs the stages of a GPU day and stores their results.

    python tools/gpu_day.py first --budget 560 --out day
    python tools/gpu_day.py nccl --budget 570 --out day
    python tools/gpu_day.py first --stages facts recovery

Every stage is a process with its own time limit. If a stage fails, hangs or dies, the next stages still run. The result
of each stage is printed and written as one JSON line when the stage ends; a table follows at the end. Without a GPU,
each stage runs its code on the CPU over gloo with small sizes, and writes nothing to benchmarks/results.
docs/gpu-day.md describes the stages and their purpose.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.gpu import results, runner, stages

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_BUDGET_SECONDS = 560.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages of one call (group of GPU tests, e.g. ``first``). Return 0 if no stage failed."""
    options = _parse(arguments)
    plan = [stage for stage in stages.CALLS[options.call] if options.stages is None or stage.name in options.stages]
    options.out.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)  # stages find the package there
    outcomes = []
    for outcome in runner.run_stages(plan, budget_seconds=options.budget):
        results.append_line(options.out / f"{options.call}.jsonl", outcome)
        outcomes.append(outcome)
    results.keep(options.call, outcomes, out=options.out, results_dir=options.results)
    print(results.table(outcomes), flush=True)
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    head, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="gpu_day", description=head, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("call", choices=sorted(stages.CALLS), help="group of stages to run")
    parser.add_argument(
        "--budget",
        type=float,
        default=DEFAULT_BUDGET_SECONDS,
        metavar="SECONDS",
        help="time limit of the whole command",
    )
    parser.add_argument("--stages", nargs="+", metavar="NAME", help="run only these stages of the group")
    parser.add_argument("--out", type=Path, default=Path("gpu-day"), help="folder for the JSON lines, logs and results")
    parser.add_argument(
        "--results",
        type=Path,
        default=ROOT / "benchmarks" / "results",
        help="folder for results that were measured on a GPU",
    )
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    known = {stage.name for stage in stages.CALLS[options.call]}
    if unknown := sorted(set(options.stages or ()) - known):
        parser.error(
            f"--stages {' '.join(unknown)}: must be stages of {options.call}, which are {', '.join(sorted(known))}"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
