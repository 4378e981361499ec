"""Claim ``wandb-continuity``: wandb has one run of a job that was killed and started again, with each iteration once.

Each job of three nodes is killed completely, three times. Launcher, controller, agents, snapshot servers, ranks and
wandb's own process receive SIGKILL at one instant, at a random moment of an iteration; everything that wandb had not
written yet is lost. Each time the run is continued (``run.resume=must``) from a dense checkpoint some iterations back,
so that iterations run again. In the last job, the rank of node 0, which reports, is killed at a random moment while the
other ranks continue. Then wandb's offline folders are read by wandb's own reader (``wandb_readback.py``). A job counts
only if its events show every fault.
"""

import contextlib
import dataclasses
import random
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks import kill_to_commit
from benchmarks.kill_peers import random_moment, wait_for
from benchmarks.report import finish, parse_arguments
from benchmarks.trace_jobs import Job
from benchmarks.wandb_readback import WandbHistory, history_of
from megatron_ft.failures.processes import processes_of
from megatron_ft.testing.jobs import forkserver

ID = "wandb-continuity"
NUM_JOBS, QUICK_JOBS = 4, 1
NUM_KILLS, QUICK_KILLS = 3, 1
"""Number of kills of each whole job."""
LEAST_ITERATIONS, MOST_ITERATIONS = 3, 12
"""Smallest and largest number of iterations that an attempt reports before it is killed. After few iterations, wandb
has not written anything yet."""
SAVE_INTERVAL = 4
"""Iterations from one checkpoint to the next. A kill comes one to three iterations after a checkpoint."""
NUM_NODES = 3
SEED = 20261122
WARM = "megatron_ft.mcore.rank_main:warm"
WORDS = (
    "telemetry.wandb=offline",
    f"launch.num_nodes={NUM_NODES}",
    f"recovery.min_nodes={NUM_NODES - 1}",
    f"checkpoint.save_interval_iterations={SAVE_INTERVAL}",
    "checkpoint.async_save=false",
)


@dataclasses.dataclass(slots=True)
class Killed:
    """Run and the results of its faults."""

    num_due: int
    """Planned number of kills of the whole job."""
    problems: list[str] = dataclasses.field(default_factory=list)
    num_kills: int = 0
    num_ranks_killed: int = 0
    history: WandbHistory | None = None

    @property
    def proven(self) -> bool:
        """Return whether the run's own events show every fault."""
        if self.history is None:
            return False
        changes = [event for event in self.history.events if event.kind == "membership_changed"]
        is_killed = self.num_kills == self.num_due == self.history.num_attempts - 1
        return is_killed and self.history.num_run_again >= self.num_due and bool(changes)


def run_and_kill(folder: Path, socket: str, number: int, rng: random.Random, num_kills: int) -> Killed:
    """Make one run with all its faults, and stop it as Ctrl-C does. Its folder is read and then removed."""
    job = Job(folder, f"run-{number:03d}", WORDS, socket, NUM_NODES)
    killed = Killed(num_kills)
    try:
        job.start()
        for _ in range(num_kills):
            train_and_kill(job, rng)
            killed.num_kills += 1
            job.start("run.resume=must")
        living = kill_to_commit.Job(job.run_dir, psutil.Process(job.console.pid), [0])
        wait_for(lambda: fresh(job), job.alive, "an iteration of the last job")
        living.fault(rng, signal.SIGKILL)
        killed.num_ranks_killed += 1
    except (TimeoutError, psutil.Error) as error:
        killed.problems.append(str(error))
    killed.problems += job.stop()
    try:
        killed.history = history_of(job.run_dir)
    except (OSError, ValueError) as error:
        killed.problems.append(str(error))
    else:
        killed.problems += killed.history.problems()
    shutil.rmtree(job.run_dir, ignore_errors=True)
    return killed


def fresh(job: Job) -> int:
    """Return the number of iterations that the current launcher has reported."""
    return sum(record["time_unix_seconds"] >= job.began for record in job.iterations())


def newest(job: Job) -> int:
    """Return the iteration that was reported last."""
    return int(job.iterations()[-1]["iteration"])


def train_and_kill(job: Job, rng: random.Random) -> None:
    """Wait until the current launcher has reported some iterations, the last of them after a checkpoint, then kill all
    its processes.

    Raises:
        TimeoutError: the iterations were not reported in time, or a process did not end.
    """
    enough = rng.randint(LEAST_ITERATIONS, MOST_ITERATIONS)
    place = rng.randrange(1, SAVE_INTERVAL)
    wait_for(lambda: fresh(job) >= enough and newest(job) > SAVE_INTERVAL, job.alive, f"{enough} iterations")
    wait_for(lambda: newest(job) % SAVE_INTERVAL == place, job.alive, f"{place} iterations after a checkpoint")
    random_moment(rng, statistics.median(record["iteration_seconds"] for record in job.iterations()[-enough:]))
    kill_at_once(job)


def kill_at_once(job: Job) -> None:
    """Kill all processes of the job at one instant, as if their machine died. Return when none is left.

    Raises:
        TimeoutError: a process did not end.
    """
    console = psutil.Process(job.console.pid)
    with processes_of(job.run_dir, range(NUM_NODES), 1) as found:
        tree = [console, *console.children(recursive=True)]
        for process in (process for processes in found.values() for process in processes):
            process.send(signal.SIGKILL)
        for child in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    job.kill()


def main(argv: Sequence[str] | None = None) -> int:
    """Run and kill all jobs, and judge wandb's records of them."""
    arguments = parse_arguments(__doc__, argv)
    num_jobs, num_kills = (QUICK_JOBS, QUICK_KILLS) if arguments.quick else (NUM_JOBS, NUM_KILLS)
    rng = random.Random(SEED)
    with tempfile.TemporaryDirectory(prefix="wandb-continuity-") as name, forkserver(WARM) as socket:
        runs = [run_and_kill(Path(name), socket, number, rng, num_kills) for number in range(1, num_jobs + 1)]
    histories = [run.history for run in runs if run.history is not None]
    good = [run for run in runs if run.proven and not run.problems]
    counts = {
        "runs": len(runs),
        "one_run_each": len(good),
        "unproven": sum(not run.proven for run in runs),
        "jobs_killed": sum(run.num_kills for run in runs),
        "ranks_killed": sum(run.num_ranks_killed for run in runs),
        "iterations": sum(len(history.steps) for history in histories),
        "run_again": sum(history.num_run_again for history in histories),
        "sent_late": sum(history.num_sent_late for history in histories),
        "untold": sum(len(history.untold) for history in histories),
    }
    untold = f"; {counts['untold']} without a report, their reporter being dead" if counts["untold"] else ""
    problems = [problem for run in runs for problem in run.problems]
    figure = (
        f"{len(good)} of {len(runs)} runs are one in wandb after {counts['jobs_killed']} killed jobs and "
        f"{counts['ranks_killed']} killed ranks: {counts['iterations']} iterations, each once ({counts['run_again']} "
        f"were run again, {counts['sent_late']} that wandb had lost came later{untold})"
    )
    return finish(
        arguments.out,
        ID,
        passed=len(good) == num_jobs,
        figure="; ".join([figure, *problems[:1]]),
        threshold="every run has one id, its iterations rise by one without gap or duplicate, with reported losses",
        counts=counts,
        details={"problems": [problem[:500] for problem in problems]},
    )


if __name__ == "__main__":
    sys.exit(main())
