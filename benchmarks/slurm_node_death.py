"""Claim ``slurm-node-death``: node failures in real Slurm jobs change no bit of the training.

slurmctld runs on this machine, and one slurmd per node in its own namespaces. ``sbatch`` starts jobs with overrides on
five nodes, in some trials with a spare. There are three kinds of failures. A node is cut off from the network and its
first process is killed by kill -9 at a random moment, in some trials while slurmctld is dead. A node is partitioned and
returns. An administrator drains a node. Some jobs are arrays. The other nodes continue from replicas. With two pipeline
stages, a spare takes the place of the lost node and replays. Every loss and every rank's state after every iteration
are compared with a reference, with ``atol=0``.
"""

import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.elastic_jobs import Bench
from benchmarks.report import finish, parse_arguments
from benchmarks.slurm_trials import (
    Lab,
    Trial,
    attempt,
    dead_node,
    drained,
    replicas,
    spare_takes_over,
    summary,
    without_slurmctld,
    zombie,
)
from megatron_ft.testing.jobs import forkserver

ID = "slurm-node-death"
SEED = 20261122
WARM = "megatron_ft.mcore.rank_main:warm"

TRIALS: dict[str, Callable[[Lab, str], Trial]] = {
    "a dead node, expert replicas": lambda lab, name: replicas(lab, name, dead_node(2)),
    "a dead node, replicas and a spare": lambda lab, name: replicas(lab, name, dead_node(3), spares=1),
    "a dead node, two stages and a spare": lambda lab, name: spare_takes_over(lab, name, dead_node(1)),
    "a dead node while slurmctld is dead": lambda lab, name: replicas(lab, name, without_slurmctld(3)),
    "a partition that ends": lambda lab, name: replicas(lab, name, zombie(2)),
    "an array: a dead node, replicas": lambda lab, name: replicas(lab, name, dead_node(2), is_array=True),
    "an array: a dead node, two stages and a spare": lambda lab, name: spare_takes_over(
        lab, name, dead_node(1), is_array=True
    ),
    "a drained node": lambda lab, name: replicas(lab, name, drained(4)),
    "an array: a dead node while slurmctld is dead": lambda lab, name: replicas(
        lab, name, without_slurmctld(3), is_array=True
    ),
    "an array: a partition that ends": lambda lab, name: replicas(lab, name, zombie(2), is_array=True),
    "an array: a drained node": lambda lab, name: replicas(lab, name, drained(4), is_array=True),
}
QUICK_NODES = 2
"""Number of nodes of the quick variant's only job, which has two stages and a spare."""


def _quick(lab: Lab, name: str) -> Trial:
    return spare_takes_over(lab, name, dead_node(1), num_nodes=QUICK_NODES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials and judge them."""
    arguments = parse_arguments(__doc__, argv)
    runs = {"a dead node, quick": _quick} if arguments.quick else TRIALS
    with tempfile.TemporaryDirectory(prefix="slurm-node-death-") as folder, forkserver(WARM) as socket:
        lab = Lab(Bench(Path(folder) / "references", socket, base=()), Path(folder), random.Random(SEED))
        lab.bench.folder.mkdir()
        trials = [attempt(name, lambda name=name, run=run: run(lab, name)) for name, run in runs.items()]
    print(summary(trials), flush=True)
    failed = [trial for trial in trials if trial.problems]
    strategies = sorted({strategy for trial in trials for strategy in trial.figures.get("strategies", [])})
    return finish(
        arguments.out,
        ID,
        passed=not failed,
        figure=(
            f"{len(trials) - len(failed)} of {len(trials)} jobs on six nodes continued without a new start, "
            f"equal in every bit to their reference ({', '.join(strategies)})"
        ),
        threshold="all equal, atol=0; one launcher each",
        counts={"trials": len(trials), "passed": len(trials) - len(failed)},
        details={trial.name: {"problems": trial.problems, **trial.figures} for trial in trials},
    )


if __name__ == "__main__":
    sys.exit(main())
