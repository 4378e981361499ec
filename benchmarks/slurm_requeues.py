"""Runs jobs that Slurm puts back into the queue, and compares them with undisturbed runs."""

from typing import Any

from benchmarks.elastic_jobs import failpoints
from benchmarks.slurm_trials import NUM_ITERATIONS, PIPELINE, REFORM_SECONDS, Lab, Trial
from benchmarks.wandb_readback import history_of
from megatron_ft.control.slurm.calls import JobView
from megatron_ft.testing.jobs import JobResult
from megatron_ft.testing.slurm_cluster import wait_until
from megatron_ft.testing.slurm_jobs import SlurmJob

REQUEUE_SECONDS = 240.0
"""Time until a requeued job trains again. It waits for its nodes, which must import all modules again."""
STEP = 8
"""Number of iterations between two events."""
KEPT = (
    "snapshot.persist_interval_windows=1",
    "checkpoint.save_at_end=true",
    "detector.lost_controller_seconds=6",
)
"""Overrides of the jobs: every window is written to storage, a job saves a checkpoint when it is warned, and nodes wait
only briefly for an unresponsive controller."""
FINAL_EXIT_CODE = 93


def requeued(lab: Lab) -> Trial:
    """Requeue a job three times: by itself, by an administrator, and by the nodes that remain after the batch host has
    died."""
    trial = Trial("requeued by itself, from outside, and by its nodes")
    with lab.job([*PIPELINE, *KEPT, "telemetry.wandb=offline"], num_nodes=4, spares=0) as job:
        _warned(job, lab)
        _from_outside(job, lab)
        _batch_host_dies(job, lab, trial)
        run = job.result()
        num_restarts = _view(job).num_restarts
        trial.require(num_restarts == 3, f"requeued {num_restarts} times: a start was in an earlier allocation")
        logs = "".join(path.read_text() for path in job.run_dir.glob("logs/node-*.log"))
        trial.require(f"job {job.number} is requeued" in logs, "no node has asked for the job's return")
        starts = [event for event in run.records() if event["kind"] == "run_started"]
        trial.require(run.exit_code == 0, f"exit code {run.exit_code}: {run.output[-3000:]}")
        trial.require(len(starts) == 4, f"{len(starts)} starts")
        resumed = [start.get("resumed_from_iteration") for start in starts]
        trial.require(resumed[0] is None and all(resumed[1:]), f"the starts resumed from iterations {resumed}")
        history = history_of(job.run_dir)
        trial.problems += [f"wandb: {problem}" for problem in history.problems()]
        trial.figures |= {"resumed_from": resumed, "iterations_in_wandb": len(history.steps)}
    _judge(trial, lab, run)
    return trial


def array_goes_on(lab: Lab) -> Trial:
    """Run an array whose task 0, with the launcher, loses its node. The next launcher must join the remaining nodes."""
    trial = Trial("an array whose first node dies")
    with lab.job([*PIPELINE, *KEPT], num_nodes=4, spares=0, is_array=True) as job:
        lab.some_moment(job, 2 * STEP)
        before = [job.host_of(node) for node in range(4)]
        job.cluster.kill_node(before[0])
        _await_start(job, 2)
        after = [job.host_of(node) for node in range(4)]
        moved = [node for node in range(4) if before[node] != after[node]]
        trial.require(moved == [0], f"tasks {moved} are on other machines: {before}, then {after}")
        trial.require(job.num_controllers == 2, f"the job had {job.num_controllers} controllers")
        run = job.result()
        starts = [event for event in run.records() if event["kind"] == "run_started"]
        resumed = [start.get("resumed_from_iteration") for start in starts]
        trial.require(run.exit_code == 0, f"exit code {run.exit_code}: {run.output[-3000:]}")
        trial.require(len(resumed) == 2 and resumed[-1], f"the starts resumed from iterations {resumed}")
        trial.figures |= {"resumed_from": resumed}
    _judge(trial, lab, run)
    return trial


def hopeless(lab: Lab, max_fruitless: int) -> Trial:
    """Run a job in which a rank dies in the second iteration of every start.

    Args:
        max_fruitless: Number of attempts without progress after which the job ends.
    """
    trial = Trial("one without progress")
    fault = failpoints([{"phase": "forward", "node": 0, "at_iteration": 2}])
    extra = {"MFT_FINAL_EXIT_CODE": str(FINAL_EXIT_CODE), "MFT_MAX_FRUITLESS": str(max_fruitless)}
    with lab.job([*PIPELINE, fault], num_nodes=2, spares=0, extra=extra) as job:
        end = job.end()
        attempts = job.attempts()
    trial.require(end["exit_code"] == FINAL_EXIT_CODE, f"exit code {end['exit_code']}: {end['reason']}")
    trial.require("attempts without progress" in end["reason"], end["reason"])
    trial.require(
        len(attempts) == 1 + max_fruitless,
        f"{len(attempts)} attempts, of which the first reached iteration 1, instead of {1 + max_fruitless}",
    )
    trial.figures |= {"attempts": len(attempts)}
    return trial


def _judge(trial: Trial, lab: Lab, run: JobResult) -> None:
    """Compare a job with the undisturbed run."""
    reference = lab.undisturbed(PIPELINE, 4)
    trial.require(reference.exit_code == 0, f"undisturbed: {reference.output[-3000:]}")
    trial.problems += compare(run, reference)
    trial.figures["iterations_again"] = len(run.records("metrics.jsonl")) - NUM_ITERATIONS


def _warned(job: SlurmJob, lab: Lab) -> None:
    lab.some_moment(job, STEP)
    job.cluster.run("scancel", "--signal=USR1", "--batch", job.number)
    _await_start(job, 2)


def _from_outside(job: SlurmJob, lab: Lab) -> None:
    lab.some_moment(job, job.iteration + STEP)
    job.cluster.run("scontrol", "requeue", job.number)
    _await_start(job, 3)


def _batch_host_dies(job: SlurmJob, lab: Lab, trial: Trial) -> None:
    lab.some_moment(job, job.iteration + STEP)
    view = _view(job)
    trial.require(view.has_batch_host, f"no batch host: {view}")
    job.cluster.kill_node(int(view.batch_host.removeprefix("node")))
    _await_start(job, 4)


def _view(job: SlurmJob) -> JobView:
    return JobView.parse(job.cluster.run("scontrol", "--oneliner", "show", "job", job.number))


def _await_start(job: SlurmJob, number: int) -> None:
    """Wait until the run has started for the ``number``-th time and trains."""
    started = lambda: job.will(lambda: len(job.records("run_started")) >= number)  # noqa: E731
    wait_until(f"start {number} of job {job.number}", started, seconds=REQUEUE_SECONDS)
    lines = len(job.lines("metrics.jsonl"))
    wait_until("it trains", lambda: job.will(lambda: len(job.lines("metrics.jsonl")) > lines), seconds=REFORM_SECONDS)


def compare(run: JobResult, reference: JobResult) -> list[str]:
    """Return the differences from the undisturbed run. Every report counts, also those of repeated iterations."""
    problems = []
    for file, figure in (("metrics.jsonl", "loss"), ("events.jsonl", "digests")):
        expected = dict(_values(reference, file, figure))
        found = _values(run, file, figure)
        problems += [f"{figure} of iteration {iteration}" for iteration, value in found if value != expected[iteration]]
        missing = set(expected) - {iteration for iteration, _ in found}
        problems += [f"{figure} of iteration {iteration} is missing" for iteration in sorted(missing)]
    return problems[:10]


def _values(run: JobResult, file: str, figure: str) -> list[tuple[int, Any]]:
    return [(line["iteration"], line[figure]) for line in run.records(file) if figure in line]
