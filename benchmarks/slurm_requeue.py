"""Claim ``slurm-requeue``: a requeued Slurm job continues with the same bits, and a job without progress ends.

On a real cluster (see ``slurm_node_death``) one job of four nodes is requeued three times. After a warning (``scancel
--signal=USR1 --batch``) it writes a checkpoint and requeues itself. An administrator requeues it in the middle of an
iteration. The batch host dies with launcher and controller, and the remaining nodes requeue the job. Each time the job
gets nodes again and finds its run. Every iteration that it reports, for the first time or again, has the bits of an
undisturbed run; wandb's files contain one run without gap or duplicate. The same holds for an array whose task 0 loses
its node with launcher and controller. A last job fails at every start, and ends after three attempts without progress.
"""

import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.elastic_jobs import Bench
from benchmarks.report import finish, parse_arguments
from benchmarks.slurm_requeues import array_goes_on, hopeless, requeued
from benchmarks.slurm_trials import Lab, attempt, summary
from megatron_ft.testing.jobs import forkserver

ID = "slurm-requeue"
SEED = 20261123
NUM_TRIES, QUICK_TRIES = 3, 1
"""Number of attempts without progress after which a job must end."""
WARM = "megatron_ft.mcore.rank_main:warm"


def main(argv: Sequence[str] | None = None) -> int:
    """Run all jobs and judge them."""
    arguments = parse_arguments(__doc__, argv)
    num_tries = QUICK_TRIES if arguments.quick else NUM_TRIES
    with tempfile.TemporaryDirectory(prefix="slurm-requeue-") as folder, forkserver(WARM) as socket:
        lab = Lab(Bench(Path(folder) / "references", socket, base=()), Path(folder), random.Random(SEED))
        lab.bench.folder.mkdir()
        trials = [attempt("one without progress", lambda: hopeless(lab, num_tries))]
        if not arguments.quick:
            trials.append(attempt("requeued", lambda: requeued(lab)))
            trials.append(attempt("an array whose first node dies", lambda: array_goes_on(lab)))
    print(summary(trials), flush=True)
    failed = [trial for trial in trials if trial.problems]
    again = sum(trial.figures.get("iterations_again", 0) for trial in trials)
    return finish(
        arguments.out,
        ID,
        passed=not failed,
        figure=(
            f"{len(trials) - len(failed)} of {len(trials)} jobs ({', '.join(trial.name for trial in trials)}): {again} "
            f"iterations run again, all equal to the bit; {num_tries} attempts without progress end it"
        ),
        threshold="all iterations equal, atol=0; 3 requeues; 3 attempts without progress end the job",
        counts={"jobs": len(trials), "passed": len(trials) - len(failed), "iterations_again": again},
        details={trial.name: {"problems": trial.problems, **trial.figures} for trial in trials},
    )


if __name__ == "__main__":
    sys.exit(main())
