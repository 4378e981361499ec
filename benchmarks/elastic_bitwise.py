"""Claim ``elastic-bitwise``: a job that loses nodes goes on in its living processes, and computes what it would anyway.

In each job of eight nodes four are killed, one after another, each in a drawn phase of an iteration. The survivors keep
their state in memory, place the experts anew and go on. The history of memberships that the run has recorded is then
given to a run in which nodes leave by schedule instead of dying: losses and the digests of every rank's whole state
after every iteration must be equal. (An iteration that the survivors finish is digested by them only: its state is
compared from the next iteration on.) A trial is a fault; it counts when the victim wrote it down before it happened and
the job then went on without that node. ``atol=0``.
"""

import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.campaign import Outcome, Trial, run_campaign
from benchmarks.covering import Row
from benchmarks.report import finish, parse_arguments
from benchmarks.sparse_faults import PHASES as PHASES_WITH_SNAPSHOTS
from tests.helpers.jobs import JobResult, forkserver, run_job

ID = "elastic-bitwise"
NUM_NODES, NUM_FAULTS, QUICK_FAULTS = 8, 4, 3
NUM_JOBS, QUICK_JOBS = 30, 2
NUM_ITERATIONS = 24
MIN_TRIALS = 120
SEED = 20261121
TIMEOUT_SECONDS = 240.0
HUNG = -1
"""Exit code of a job that was ended because it took too long: a failure like any other."""
WARM = "megatron_ft.mcore.loop.main"
PHASES = tuple(phase for phase in PHASES_WITH_SNAPSHOTS if phase != "capture")
VARIANTS: tuple[Sequence[str], ...] = (
    (),
    ("precision.params_dtype=bf16",),
    ("model.moe_router_score_function=sigmoid", "model.moe_router_enable_expert_bias=true"),
    ("optimizer.clip_grad=0.0", "placement.num_slots_per_rank=6"),
)
"""What differs from job to job besides the faults."""
_BASE = (
    "model=moe_micro",
    "optimizer.lr_warmup_iterations=3",
    f"training.train_iterations={NUM_ITERATIONS}",
    "training.micro_batch_size=1",
    "training.global_batch_size=8",
    "training.eval_interval_iterations=0",
    "training.digest_interval_iterations=1",
    "parallel.use_distributed_optimizer=false",
    "checkpoint.save_at_end=false",
    "telemetry.wandb=disabled",
    f"launch.num_nodes={NUM_NODES}",
    "launch.ranks_per_node=1",
    "placement=overlap_search",
    "placement.min_replicas=2",
    "placement.num_slots_per_rank=4",
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a run wrote down, by iteration."""

    losses: Mapping[int, float]
    digests: Mapping[int, Sequence[str]]
    changes: Sequence[Mapping[str, Any]]
    """Its changes of membership, in order."""
    hits: Sequence[Mapping[str, Any]]
    problems: Sequence[str]

    @classmethod
    def of(cls, run: JobResult) -> "Recorded":
        """Read a run that has ended."""
        events = run.records()
        losses = [(m["iteration"], m["loss"]) for m in run.records("metrics.jsonl") if "loss" in m]
        digests = [(e["iteration"], e["digests"]) for e in events if e["kind"] == "state_digest"]
        changes = [event for event in events if event["kind"] == "membership_changed"]
        problems = [] if run.exit_code == 0 else [f"exit code {run.exit_code}: {run.output[-1500:]}"]
        for name, found in (("loss", losses), ("state", digests)):
            counts = Counter(iteration for iteration, _ in found)
            for iteration in range(1, NUM_ITERATIONS + 1):
                is_end = name == "state" and iteration == NUM_ITERATIONS  # digested once more at the end
                is_untold = name == "loss" and counts[iteration] == 0 and iteration in untold(changes)
                if counts[iteration] != 1 and not is_end and not is_untold:
                    problems.append(f"{name} of iteration {iteration} recorded {counts[iteration]} times")
        return cls(
            losses=dict(losses),
            digests=dict(digests),
            changes=changes,
            hits=run.records("failpoints.jsonl"),
            problems=problems,
        )

    def differences(self, reference: "Recorded", first: int, last: int) -> list[str]:
        """What is not equal to ``reference`` in the iterations from ``first`` to ``last``.

        The digest of an iteration that survivors finished after a loss is of other ranks than the reference's.
        """
        seen_later = {
            change["iteration"]
            for change in self.changes
            if len(self.digests.get(change["iteration"], ())) == change["world_size"]
        }
        return [
            f"{name} of iteration {iteration}"
            for name, mine, theirs in (
                ("loss", self.losses, reference.losses),
                ("state", self.digests, reference.digests),
            )
            for iteration in range(first, last + 1)
            if not (name == "state" and iteration in seen_later)
            if not (name == "loss" and iteration in untold(self.changes) and iteration not in mine)
            if iteration not in mine or mine[iteration] != theirs.get(iteration)
        ]


@dataclass(slots=True)
class Bench:
    """Runs jobs from one warm fork server."""

    folder: Path
    socket: str
    faults: Sequence[Sequence[Row]]
    """Of each job."""
    num_jobs: int = 0
    problems: list[str] = field(default_factory=list)

    def execute(self, trials: Sequence[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        """The campaign's executor: the faults of a job share it, whichever of them are waiting."""
        by_job: dict[int, list[Trial]] = {}
        for trial in trials:
            by_job.setdefault(int(str(trial.parameters["job"])), []).append(trial)
        for job, mine in by_job.items():
            outcomes = self.run_pair(job)
            for trial in mine:
                yield trial, outcomes[int(str(trial.parameters["fault"]))]

    def run_pair(self, job: int) -> list[Outcome]:
        """The job with faults, then the scripted one with the same history; an outcome for each fault."""
        faults, variant = self.faults[job], VARIANTS[job % len(VARIANTS)]
        words = [*_BASE, *variant]
        killed = self.run([*words, f"launch.min_nodes={NUM_NODES - len(faults)}", failpoints(faults)])
        schedule = scripted(killed.changes)
        reference = self.run([*words, *([schedule] if schedule else [])])
        common = [*killed.problems, *(f"scripted: {text}" for text in reference.problems)]
        return [outcome_of(fault, killed, reference, common) for fault in faults]

    def run(self, overrides: Sequence[str]) -> Recorded:
        """One job, to its end; one that does not come to it has failed."""
        self.num_jobs += 1
        name = f"job-{self.num_jobs:03d}"
        words = [*overrides, f"run.name={name}", f"data.cache_dir={self.folder / 'cache'}"]
        try:
            run = run_job(words, forkserver=self.socket, runs=self.folder, timeout_seconds=TIMEOUT_SECONDS)
        except AssertionError as error:
            run = JobResult(HUNG, self.folder / name, str(error))
        recorded = Recorded.of(run)
        shutil.rmtree(run.run_dir, ignore_errors=True)
        return recorded


def untold(changes: Sequence[Mapping[str, Any]]) -> set[int]:
    """Iterations that everybody has completed, but whose reporter may have died before it reported them."""
    found, reporter = set(), 0
    for change in changes:
        if min(change["nodes"]) != reporter:
            found.add(change["iteration"])
        reporter = min(change["nodes"])
    return found


def scripted(changes: Sequence[Mapping[str, Any]]) -> str:
    """The override that repeats a history of memberships without faults; empty for none."""
    members, entries = set(range(NUM_NODES)), []
    for change in changes:
        lost = sorted(members - set(change["nodes"]))
        members = set(change["nodes"])
        entries.append(
            f"'lose(nodes={json.dumps(lost, separators=(',', ':'))},before_iteration={change['iteration'] + 1})'"
        )
    return f"launch.membership_schedule=[{','.join(entries)}]" if entries else ""


def outcome_of(fault: Row, killed: Recorded, reference: Recorded, common: Sequence[str]) -> Outcome:
    """What became of one fault."""
    number, at = int(str(fault["fault"])), int(str(fault["iteration"]))
    hits = [
        hit
        for hit in killed.hits
        if (hit["node"], hit["iteration"], hit["phase"]) == (fault["node"], at, fault["phase"])
    ]
    unproven = [] if hits else ["the victim wrote no fault down"]
    problems = list(common)
    target = None
    if len(killed.changes) <= number or fault["node"] in killed.changes[number]["nodes"]:
        (problems if hits else unproven).append("the job did not go on without the node")
    else:
        target = killed.changes[number]["iteration"]
        later = killed.changes[number + 1 : number + 2]
        last = later[0]["iteration"] if later else NUM_ITERATIONS - 1
        problems += [] if target in (at - 1, at) else [f"killed in iteration {at}, went on after {target}"]
        problems += killed.differences(reference, 1, last)
    details = {
        "unproven": unproven,
        "target": target,
        "finished": target == at,
        "is_untold": target is not None and target not in killed.losses,
        "problems": problems[:5],
    }
    return Outcome(proven=not unproven, passed=not problems, details=details)


def faults_of(job: int, num_faults: int) -> list[Row]:
    """The faults of one job, in order: ``fault``, ``node``, ``phase``, ``iteration``."""
    generator = random.Random(f"{SEED} {job}")
    members, iteration = list(range(NUM_NODES)), 0
    faults: list[Row] = []
    for number in range(num_faults):
        node = generator.choice(members)
        members.remove(node)
        iteration += generator.randint(2, 4)
        phase = PHASES[(3 * job + number * 7) % len(PHASES)]
        faults.append({"job": job, "fault": number, "node": node, "phase": phase, "iteration": iteration})
    assert iteration < NUM_ITERATIONS, f"iteration {iteration} is after the end"
    return faults


def failpoints(faults: Sequence[Row]) -> str:
    """Faults as an override."""
    texts = [
        f"'kill(node={fault['node']},at_iteration={fault['iteration']},phase=\"{fault['phase']}\")'" for fault in faults
    ]
    return f"launch.failpoints=[{','.join(texts)}]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign and judge it."""
    arguments = parse_arguments(__doc__, argv)
    num_jobs, num_faults = (QUICK_JOBS, QUICK_FAULTS) if arguments.quick else (NUM_JOBS, NUM_FAULTS)
    faults = [faults_of(job, num_faults) for job in range(num_jobs)]
    with tempfile.TemporaryDirectory(prefix="elastic-bitwise-") as folder, forkserver(WARM) as socket:
        bench = Bench(Path(folder), socket, faults)
        trials = [fault for mine in faults for fault in mine]
        counts, outcomes = run_campaign(f"{ID}{'-quick' if arguments.quick else ''}", trials, bench.execute)
    good = [outcome for _, outcome in outcomes if outcome.proven and outcome.passed]
    finished, num_untold = (sum(outcome.details[name] for outcome in good) for name in ("finished", "is_untold"))
    figure = (
        f"{counts.passed} of {counts.planned} killed nodes in {num_jobs} jobs of {NUM_NODES} nodes: went on in the "
        f"living processes, equal in every bit to the scripted history; {finished} iterations finished after their "
        f"vote, no committed one lost ({num_untold} without a report: the reporter died before it)"
    )
    return finish(
        arguments.out,
        ID,
        passed=counts.complete and (arguments.quick or counts.passed >= MIN_TRIALS),
        figure=figure if counts.complete else counts.summary(),
        threshold="all of at least 120 equal, atol=0; no committed iteration lost",
        counts={
            "trials": counts.planned,
            "passed": counts.passed,
            "unproven": counts.unproven,
            "jobs": num_jobs,
            "finished_after_their_vote": finished,
            "unreported": num_untold,
        },
        details={
            "failures": [{**t.parameters, **o.details} for t, o in outcomes if not (o.passed and o.proven)],
        },
    )


if __name__ == "__main__":
    sys.exit(main())
