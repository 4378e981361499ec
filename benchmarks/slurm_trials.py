"""Trials on a real Slurm cluster: jobs that train, faults that hit them, and the references with which they are
compared."""

import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.elastic_jobs import Bench, Recorded, failpoints
from benchmarks.histories import scripted
from benchmarks.localized_jobs import Followed
from megatron_ft.testing.jobs import JobResult
from megatron_ft.testing.slurm_arrays import submit_array
from megatron_ft.testing.slurm_cluster import SlurmCluster, slurm_cluster, wait_until
from megatron_ft.testing.slurm_jobs import Site, SlurmJob, submit

NUM_NODES, NUM_SPARES = 5, 1
NUM_ITERATIONS = 40
FIRST_FAULT = 14
"""Iteration after which the first fault happens. A window is committed before it."""
REFORM_SECONDS = 120.0
COMMON = (
    "model=moe_micro",
    "optimizer.lr_warmup_iterations=3",
    f"training.train_iterations={NUM_ITERATIONS}",
    "training.micro_batch_size=1",
    "training.eval_interval_iterations=0",
    "training.digest_interval_iterations=1",
    "checkpoint.save_at_end=false",
    "telemetry.wandb=disabled",
)
REPLICAS = (
    *COMMON,
    "training.global_batch_size=10",
    "parallel.use_distributed_optimizer=false",
    "placement=overlap_search",
    "placement.min_replicas=2",
)
"""Overrides of a job of five ranks with expert replicas."""
PIPELINE = (
    *COMMON,
    "training.global_batch_size=8",
    "parallel.pipeline_model_parallel_size=2",
    "snapshot=sparse_window",
    "snapshot.num_peer_copies=1",
    "snapshot.iteration_seconds=1",
    "snapshot.bandwidth_bytes_per_second=300000",
)
"""Overrides of a job of four ranks, PP=2 and DP=2, with windows in memory."""


@dataclass(slots=True)
class Lab:
    """Provides clusters for the jobs of trials, and a fork server for their references."""

    bench: Bench
    folder: Path
    rng: random.Random
    num_trials: int = 0

    @contextmanager
    def job(
        self,
        overrides: Sequence[str],
        *,
        num_nodes: int,
        spares: int,
        extra: Mapping[str, str] | None = None,
        is_array: bool = False,
    ) -> Iterator[SlurmJob]:
        """Start a cluster of six nodes and a job on it. Spares of an array wait in Slurm's queue."""
        self.num_trials += 1
        folder = self.folder / f"trial-{self.num_trials}"
        folder.mkdir()
        site = Site(folder, spares=spares, extra=extra or {})
        words = [*overrides, f"data.cache_dir={self.folder / 'cache'}"]
        with slurm_cluster(NUM_NODES + NUM_SPARES) as cluster:
            if is_array:
                tasks = f"0-{num_nodes - 1}%{num_nodes - spares}"
                yield submit_array(cluster, site, words, tasks=tasks, name="trial")
            else:
                yield submit(cluster, site, words, num_nodes=num_nodes, name="trial")

    def some_moment(self, job: SlurmJob, iteration: int = FIRST_FAULT) -> None:
        """Wait for a random moment within about one iteration after ``iteration`` has been reported."""
        job.await_iteration(iteration)
        threading.Event().wait(self.rng.uniform(0.0, 0.5))

    def undisturbed(self, overrides: Sequence[str], num_nodes: int) -> JobResult:
        """Run the same training on one machine without faults."""
        with self.bench.running([*overrides, f"launch.num_nodes={num_nodes}"]) as run:
            return JobResult(
                run.exit_code, _kept(run.run_dir, self.folder / f"reference-{self.num_trials}"), run.output
            )


@dataclass(slots=True)
class Trial:
    """Outcome of a trial."""

    name: str
    problems: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def require(self, holds: object, problem: str) -> None:
        """Add ``problem`` unless ``holds``."""
        if not holds:
            self.problems.append(problem)


def attempt(name: str, run: Callable[[], Trial]) -> Trial:
    """Run a trial. If it raises an exception, return a trial with the exception as its problem."""
    try:
        return run()
    except AssertionError as error:
        return Trial(name, [str(error)[-4000:]])


def replicas(
    lab: Lab, name: str, fault: Callable[[SlurmJob, Trial], None], *, spares: int = 0, is_array: bool = False
) -> Trial:
    """Run a job with expert replicas to which ``fault`` happens.

    The job is compared with the scripted history of its memberships. Scripts do not support spares, so a job with a
    spare is compared with a job on one machine that loses the same node after the same iteration. A task of an array
    comes back on another machine, and joins if the other nodes still train.
    """
    trial = Trial(name)
    words = [*REPLICAS, "recovery.min_nodes=2"]
    with lab.job(words, num_nodes=NUM_NODES + spares, spares=spares, is_array=is_array) as job:
        lab.some_moment(job)
        fault(job, trial)
        found = Recorded.of(job.result())
        trial.require(job.num_controllers == 1, f"the job had {job.num_controllers} controllers")
    trial.problems += found.problems
    counts = (1, 2) if is_array else (1,)
    trial.require(len(found.changes) in counts, f"the membership changed {len(found.changes)} times")
    if not trial.problems:
        history = (
            scripted(found.changes, found.orders, NUM_NODES) if spares == 0 else _same_loss(found.changes[0], spares)
        )
        reference = lab.bench.run([*REPLICAS, f"launch.num_nodes={NUM_NODES}", *history])
        trial.problems += [f"reference: {text}" for text in reference.problems]
        memberships = [[(c["nodes"], c["iteration"]) for c in run.changes] for run in (found, reference)]
        trial.require(memberships[0] == memberships[1], f"memberships {memberships}")
        trial.problems += found.differences(reference, 1, NUM_ITERATIONS)[:5]
    trial.figures |= {
        "strategies": [event["strategy"] for event in found.recoveries],
        "nodes": [c["nodes"] for c in found.changes],
    }
    return trial


def _same_loss(change: Mapping[str, Any], spares: int) -> list[str]:
    """Return the overrides of a job that loses the same node at the beginning of the next iteration, so that both jobs
    have the same last complete iteration."""
    (lost,) = set(range(NUM_NODES)) - set(change["nodes"])
    fault = {"phase": "data", "node": lost, "at_iteration": change["iteration"] + 1}
    return [f"nodes.num_spare_nodes={spares}", "recovery.min_nodes=2", failpoints([fault])]


def spare_takes_over(
    lab: Lab, name: str, fault: Callable[[SlurmJob, Trial], None], *, num_nodes: int = 4, is_array: bool = False
) -> Trial:
    """Run a job of two stages with a spare to which ``fault`` happens, and compare it with an undisturbed job.

    Args:
        num_nodes: Even number of nodes, without the spare.
    """
    trial = Trial(name)
    words = [*PIPELINE, "recovery.keep_layout=true"]
    with lab.job(words, num_nodes=num_nodes + 1, spares=1, is_array=is_array) as job:
        lab.some_moment(job)
        fault(job, trial)
        found = Followed.of(job.result())
        trial.require(job.num_controllers == 1, f"the job had {job.num_controllers} controllers")
    reference = Followed.of(lab.undisturbed(PIPELINE, num_nodes))
    trial.problems += [*found.problems, *(f"undisturbed: {text}" for text in reference.problems)]
    trial.require(found.changes, "the membership did not change")
    trial.problems += found.differences(reference)[:5]
    trial.require(found.last_iteration >= NUM_ITERATIONS - 1, f"the job reached only iteration {found.last_iteration}")
    trial.figures |= {
        "strategies": [event["strategy"] for event in found.recoveries],
        "nodes": [c["nodes"] for c in found.changes],
    }
    return trial


# --- faults -----------------------------------------------------------------------------------------------------


def dead_node(node: int) -> Callable[[SlurmJob, Trial], None]:
    """Return a fault that cuts a node off from the network and kills its first process by kill -9."""

    def fault(job: SlurmJob, trial: Trial) -> None:
        job.cluster.kill_node(job.host_of(node))
        await_change(job, without=node)

    return fault


def without_slurmctld(node: int) -> Callable[[SlurmJob, Trial], None]:
    """Return the fault of ``dead_node`` while slurmctld is dead. slurmctld is started again before the job ends."""

    def fault(job: SlurmJob, trial: Trial) -> None:
        host = job.host_of(node)
        job.cluster.stop_controller()
        job.cluster.kill_node(host)
        changed = lambda: [c for c in job.records("membership_changed") if node not in c["nodes"]]  # noqa: E731
        wait_until("the other nodes continue", changed, seconds=REFORM_SECONDS)
        reached = job.iteration
        wait_until(
            "the other nodes train without slurmctld", lambda: job.iteration > reached + 2, seconds=REFORM_SECONDS
        )
        job.cluster.start_controller()

    return fault


def zombie(node: int) -> Callable[[SlurmJob, Trial], None]:
    """Return a fault that partitions a node and reconnects it while its ranks are alive. The other nodes must continue.
    The ranks of the node must have no effect on the job, and must end."""

    def fault(job: SlurmJob, trial: Trial) -> None:
        host = job.host_of(node)
        before = ranks_on(job.cluster, host)
        trial.require(before, "no rank was seen on the node")
        job.cluster.cut(host)
        await_change(job, without=node)
        trial.require(any(process.is_running() for process in before), "its ranks had ended before it came back")
        job.cluster.heal(host)
        gone = lambda: not any(process.is_running() for process in before)  # noqa: E731
        wait_until("all processes of the node have ended", gone, seconds=REFORM_SECONDS)

    return fault


def drained(node: int) -> Callable[[SlurmJob, Trial], None]:
    """Return a fault in which an administrator drains a node."""

    def fault(job: SlurmJob, trial: Trial) -> None:
        job.cluster.drain(job.host_of(node))
        await_change(job, without=node)
        trial.require(not job.records("node_lost") and not job.records("rank_failed"), "something was lost")

    return fault


def await_change(job: SlurmJob, *, without: int) -> None:
    """Wait until a membership without node ``without`` has begun."""
    changed = lambda: job.will(lambda: any(without not in c["nodes"] for c in job.records("membership_changed")))  # noqa: E731
    wait_until(f"the others continue without node {without}", changed, seconds=REFORM_SECONDS)


def ranks_on(cluster: SlurmCluster, host: int) -> list[Any]:
    """Return the processes of ranks on a node of the cluster, which are children of its fork server."""
    servers = [process for process in cluster.processes(host) if "forkserver" in " ".join(process.cmdline())]
    return [child for server in servers for child in server.children(recursive=True)]


def _kept(run_dir: Path, target: Path) -> Path:
    """Copy a run's logs to ``target``, because the run's folder is removed with the job."""
    target.mkdir()
    for path in run_dir.glob("*.jsonl"):
        (target / path.name).write_bytes(path.read_bytes())
    return target


def summary(trials: Sequence[Trial]) -> str:
    """Return a summary of the trials in one line."""
    return json.dumps({trial.name: {"problems": trial.problems, **trial.figures} for trial in trials}, indent=1)
