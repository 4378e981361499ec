"""Claim ``elastic-bitwise``: a job that loses nodes and gets them back continues in its processes with unchanged bits.

There are three kinds of jobs, all with eight nodes. In most jobs, nodes are killed one after the other, each in a
random phase; each node starts again and joins between two iterations before the next one dies. In some jobs, four nodes
die one by one and do not come back. In other jobs, two or three nodes die at the same time. The strategy
``living_state`` must then recover if every expert and, with the distributed optimizer, every shard still has a copy.
Otherwise the newest checkpoint must be loaded. Some jobs of each kind use the distributed optimizer with two copies of
each shard. Whole nodes are killed from outside: agent, snapshot server and rank at one instant. In every third job
whose nodes come back, only ranks are lost, which kill themselves.

A reference run repeats the recorded history of memberships by a schedule. Losses and the digests of every rank's whole
state after every iteration must be equal, with ``atol=0``. (If survivors finish an iteration after a loss, its digest
does not cover the lost ranks, so it is not compared.) A job that loaded a checkpoint is compared with a run on the
remaining nodes that loads this checkpoint. Losses are also compared with those of an undisturbed run. A trial is a
fault. It counts only if the victim recorded the fault before it happened, if a kill of a whole node from outside is
also recorded, and if the job continued without the node.
"""

import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.campaign import Outcome, Trial, execute_jobs, run_campaign
from benchmarks.covering import Row
from benchmarks.elastic_jobs import ABOUT_NODES, MIGRATING, MOST_ITERATIONS, NUM_NODES, Bench, Recorded, failpoints
from benchmarks.histories import scripted
from benchmarks.node_killer import StoppedNodeKiller
from benchmarks.report import finish, parse_arguments
from megatron_ft.failpoints import ITERATION_PHASES
from megatron_ft.planning.placement.copies import NON_EXPERT, StateCopyPlan
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.recovery.living_state import lost_experts
from megatron_ft.testing.jobs import forkserver

ID = "elastic-bitwise"
NUM_REJOINING, NUM_CYCLES = 14, 8
NUM_HALVING, NUM_LOST = 3, 4
NUM_AT_ONCE = 8
RANKS_ALONE = 3
"""Every ``RANKS_ALONE``-th of the jobs whose nodes come back loses only ranks, not whole nodes."""
MIN_TRIALS = 120
TOLERANCE = 1.0e-3
"""Relative tolerance of a loss compared with the undisturbed run."""
COMPARED_ITERATIONS = 40
"""Number of iterations for which the tolerance is valid. Training amplifies rounding differences in later
iterations."""
SEED = 20261121
WARM = "megatron_ft.mcore.rank_main:warm"
_MIGRATE_PHASES = ("migrate", "migrate_step")
PHASES = (*ITERATION_PHASES, *_MIGRATE_PHASES)
_MOST_PASSES = {"capture": 4, "replicate": 1, "migrate": 2, "migrate_step": 4}
"""Largest number of times that a rank reaches a phase until its fault, for phases that do not occur in every iteration.
It is 12 for other phases."""
_SNAPSHOTS = (
    "snapshot=sparse_window",
    "snapshot.num_peer_copies=1",
    "snapshot.iteration_seconds=1",
    "snapshot.bandwidth_bytes_per_second=3e5",
)
_SHARDED = ("parallel.use_distributed_optimizer=true", "placement.state_copies=2")
_REBALANCING = ("placement.rebalance_interval_iterations=3", "placement.rebalance_min_gain=0.0")
VARIANTS: tuple[Sequence[str], ...] = (
    (*_SNAPSHOTS, *_REBALANCING, "placement.num_slots_per_rank=4"),
    ("precision.params_dtype=bf16", "placement.num_slots_per_rank=4", *_SHARDED, *_SNAPSHOTS, *_REBALANCING),
    ("precision.params_dtype=bf16", "placement.num_slots_per_rank=4", *_SNAPSHOTS, *_REBALANCING),
    (
        "model.moe_router_score_function=sigmoid",
        "model.moe_router_enable_expert_bias=true",
        "placement.num_slots_per_rank=6",
        *_SNAPSHOTS,
        *_REBALANCING,
    ),
)
"""Overrides of the variants of jobs."""


@dataclass(frozen=True, slots=True)
class Job:
    """Job and its faults, in order."""

    kind: str
    """``rejoin``, ``halving``, ``at_once``, or ``spare``: a spare takes the place of each lost node at once."""
    number: int
    overrides: Sequence[str]
    faults: Sequence[Row]
    kills_nodes: bool = True
    """Whether whole nodes are killed from outside after their ranks have stopped themselves. If not, ranks kill
    themselves."""
    num_nodes: int = NUM_NODES
    layout: Sequence[str] = ()
    """Overrides of the nodes and the parallel layout, which the reference needs as well."""

    @property
    def overrides_and_faults(self) -> list[str]:
        """Return the overrides of the job, including its failpoints."""
        action = "stop" if self.kills_nodes else "kill"
        return [*self.layout, *self.overrides, failpoints([{**fault, "action": action} for fault in self.faults])]

    @property
    def overrides_of_reference(self) -> list[str]:
        """Return the overrides of a job without faults that computes the same."""
        return [*self.layout, *(w for w in self.overrides if not w.startswith((*ABOUT_NODES, "checkpoint.")))]

    def killer(self, run_dir: Path) -> Callable[[Sequence[Any]], bool]:
        """Return a function that injects the kills from outside, and returns whether the job may end."""
        if not self.kills_nodes:
            return self.has_ended
        num_faults = len(self.faults)
        at_once = [num_faults] if self.kind == "at_once" else [1] * num_faults
        return StoppedNodeKiller(run_dir, at_once, self.has_ended)

    @property
    def is_rejoining(self) -> bool:
        """Return whether lost nodes come back."""
        return self.kind == "rejoin"

    def has_ended(self, events: Sequence[Any]) -> bool:
        """Return whether all faults have happened and ended, and some iterations have followed."""
        changes = [event for event in events if event["kind"] == "membership_changed"]
        restarts = [event for event in events if event["kind"] == "ranks_restarted"]
        expected = {"rejoin": 2 * len(self.faults), "at_once": 1}.get(self.kind, len(self.faults))
        if len(changes) + len(restarts) < expected:
            return False
        last = (changes + restarts)[-1]
        later = [e for e in events[events.index(last) :] if e["kind"] == "state_digest"]
        return len(later) >= 4


def jobs_of(*, quick: bool) -> list[Job]:
    """Return all jobs of the campaign."""
    counts = {"rejoin": 2, "halving": 0, "at_once": 1} if quick else {}
    numbers = {"rejoin": NUM_REJOINING, "halving": NUM_HALVING, "at_once": NUM_AT_ONCE, **counts}
    makers = {"rejoin": _rejoining, "halving": _halving, "at_once": _at_once}
    return [makers[kind](number, quick) for kind, count in numbers.items() for number in range(count)]


def _rejoining(number: int, quick: bool) -> Job:
    rng = random.Random(f"{SEED} rejoin {number}")
    faults: list[Row] = []
    for index in range(3 if quick else NUM_CYCLES):
        phase = PHASES[(5 * number + 3 * index) % len(PHASES)]
        passes = rng.randint(1, _MOST_PASSES.get(phase, 12))
        node = rng.randrange(NUM_NODES)
        faults.append({"fault": index, "node": node, "phase": phase, "generation": 2 * index, "passes": passes})
    words = [f"recovery.min_nodes={NUM_NODES - 2}", "nodes.restart_lost_nodes=true", "nodes.join_window_seconds=0.1"]
    words.append("nodes.max_node_restarts=100")
    migrates = any(fault["phase"] in _MIGRATE_PHASES for fault in faults)
    overrides = [*VARIANTS[number % len(VARIANTS)], *(MIGRATING if migrates else ()), *words]
    return Job("rejoin", number, overrides, faults, kills_nodes=number % RANKS_ALONE != RANKS_ALONE - 1)


def _halving(number: int, _quick: bool) -> Job:
    rng = random.Random(f"{SEED} halving {number}")
    nodes = rng.sample(range(NUM_NODES), NUM_LOST)
    phases = [PHASES[(4 * number + 3 * index) % 10] for index in range(NUM_LOST)]
    faults: list[Row] = [
        {"fault": index, "node": node, "phase": phase, "generation": index, "passes": rng.randint(1, 8)}
        for index, (node, phase) in enumerate(zip(nodes, phases, strict=True))
    ]
    return Job(
        "halving",
        number,
        [*VARIANTS[number % len(VARIANTS)], f"recovery.min_nodes={NUM_NODES - NUM_LOST}"],
        faults,
    )


def _at_once(number: int, _quick: bool) -> Job:
    """Make a job in which two or three nodes die in the same phase of the same iteration. Most experts have two
    copies."""
    rng = random.Random(f"{SEED} at once {number}")
    nodes, iteration = rng.sample(range(NUM_NODES), 2 + number % 2), rng.randint(5, 9)
    faults: list[Row] = [
        {"fault": index, "node": node, "phase": "forward", "generation": 0, "at_iteration": iteration}
        for index, node in enumerate(sorted(nodes))
    ]
    words = [f"recovery.min_nodes={NUM_NODES - 4}", "recovery.max_restarts=1", "placement.num_slots_per_rank=2"]
    words += ["checkpoint.save_interval_iterations=2", "checkpoint.keep_last=100"]  # the reference loads one too
    words += _SHARDED if number % 4 >= 2 else ()
    return Job("at_once", number, words, faults)


@dataclass(slots=True)
class Campaign:
    """Executes trials. The faults of a job share one run of the job."""

    bench: Bench
    jobs: Sequence[Job]
    undisturbed: dict[Sequence[str], Recorded]
    """Undisturbed runs, by their overrides."""
    compares_undisturbed: bool = True
    """Whether losses are also compared with those of an undisturbed run, within ``TOLERANCE``."""

    def execute(self, trials: Sequence[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        """Execute trials and yield their outcomes."""
        return execute_jobs(trials, lambda number: self.run(self.jobs[number]))

    def run(self, job: Job) -> list[Outcome]:
        """Run the job with its faults, then its reference. Return an outcome for each fault."""
        is_at_once = job.kind == "at_once"
        killer = job.killer(self.bench.next_run_dir)
        words = job.overrides_of_reference
        with self.bench.running(job.overrides_and_faults, until=killer) as run:
            killed = Recorded.of(run, restarts=is_at_once)
            killed.problems.extend(f"not injected: {text}" for text in getattr(killer, "problems", ()))
            served = next((event for event in killed.recoveries if event["strategy"] != "living_state"), None)
            if is_at_once and served is not None:
                return [self._against_resumed(job, killed, served, words, run.run_dir)] * len(job.faults)
        reference = self.reference(job, killed)
        common = [*killed.problems, *(f"scripted: {text}" for text in reference.problems)]
        if is_at_once:
            last = killed.last_iteration - 1
            problems = [*common, *killed.differences(reference, 1, last)]
            return [_judge_at_once(job, killed, problems, killed.num_compared(reference, 1, last))] * len(job.faults)
        distance = 0.0
        if self.compares_undisturbed:
            distance = killed.distance(self._undisturbed(words), COMPARED_ITERATIONS)
        if distance > TOLERANCE and "params_dtype" not in " ".join(job.overrides):
            common.append(f"a loss is {distance:.1e} from that of the undisturbed run")
        return [outcome_of(job, fault, killed, reference, common, distance) for fault in job.faults]

    def reference(self, job: Job, killed: Recorded) -> Recorded:
        """Run the job in which the same nodes leave and join by a schedule."""
        end = f"training.exit_at_iteration={killed.last_iteration}"
        words = [*job.overrides_of_reference, *scripted(killed.changes, killed.orders, job.num_nodes), end]
        return self.bench.run(words)

    def _against_resumed(self, job: Job, killed: Recorded, served: Any, words: Sequence[str], run_dir: Path) -> Outcome:
        """Compare a job that loaded a checkpoint with a run on the remaining nodes that loads the same checkpoint."""
        loaded, last = served["iteration"], killed.last_iteration
        problems, num_compared = list(killed.problems), 0
        if served["strategy"] == "checkpoint" and last > loaded + 1:
            lost = {fault["node"] for fault in job.faults}
            left = [f"node{node}" for node in range(NUM_NODES) if node not in lost]
            reference = self.bench.run(
                [
                    *words,
                    f"launch.num_nodes={len(left)}",
                    f"topology.failure_domains=[{','.join(left)}]",
                    f"checkpoint.load={run_dir / 'checkpoints' / f'iter_{loaded:07d}'}",
                    f"training.exit_at_iteration={last}",
                ],
                first=loaded + 1,
            )
            problems += [f"resumed: {text}" for text in reference.problems]
            problems += killed.differences(reference, loaded + 1, last - 1)
            num_compared = killed.num_compared(reference, loaded + 1, last - 1)
        return _judge_at_once(job, killed, problems, num_compared)

    def _undisturbed(self, words: Sequence[str]) -> Recorded:
        key = tuple(words)
        if key not in self.undisturbed:
            end = f"training.exit_at_iteration={COMPARED_ITERATIONS}"
            self.undisturbed[key] = self.bench.run([*words, end])
        return self.undisturbed[key]


def outcome_of(
    job: Job, fault: Row, killed: Recorded, reference: Recorded, common: Sequence[str], distance: float
) -> Outcome:
    """Judge the outcome of one fault."""
    number = int(str(fault["fault"]))
    change_number = 2 * number if job.is_rejoining else number
    hit = killed.hits[number] if number < len(killed.hits) else None
    victim = "rank" if "rank" in fault else "node"
    is_it = hit is not None and (hit[victim], hit["phase"]) == (fault[victim], fault["phase"])
    node = None if hit is None else hit["node"]
    unproven, problems = [] if is_it else ["the victim did not record the fault"], list(common)
    if job.kills_nodes:
        unproven += _why_not_killed(killed, number, [] if node is None else [node])
    at, target, num_compared = None, None, 0
    if len(killed.changes) <= change_number or node in killed.changes[change_number]["nodes"]:
        (problems if is_it else unproven).append("the job did not continue without the node")
    elif hit is not None:
        at, target = hit["iteration"], killed.changes[change_number]["iteration"]
        later = killed.changes[change_number + 1 : change_number + 2]
        last = later[0]["iteration"] if later else killed.last_iteration - 1
        problems += [] if target in (at - 1, at) else [f"killed in iteration {at}, continued after {target}"]
        problems += killed.differences(reference, 1, last)
        num_compared = killed.num_compared(reference, 1, last)
        if job.is_rejoining and (not later or node not in later[0]["nodes"]):
            problems.append("the node did not join again")
    details = {
        "unproven": unproven,
        "target": target,
        "finished": target is not None and target == at,
        "is_untold": target is not None and target not in killed.losses,
        "distance": distance,
        "strategy": "living_state",
        "problems": problems[:5],
    }
    return Outcome(proven=not unproven, passed=not problems, num_compared=num_compared, details=details)


def _why_not_killed(killed: Recorded, kill_number: int, nodes: Sequence[Any]) -> list[str]:
    """Check the record of kills from outside. It must prove that one kill hit all these nodes, each with its agent and
    its rank. Return a description of what is missing; empty if nothing is."""
    if kill_number >= len(killed.kills):
        return [f"no kill of nodes {list(nodes)} from outside is recorded"]
    kill = killed.kills[kill_number]
    wanted = {name for node in nodes for name in (f"node-{node:03d}.log", f"rank-{node:05d}.log")}
    missing = sorted(wanted - set(kill["processes"]))
    return [f"the kill from outside did not hit {', '.join(missing)}"] if missing else []


def _loses_a_shard(plan: PlacementPlan, survivors: Sequence[int]) -> bool:
    """Return whether a shard of the optimizer state has neither its owner nor its copy on ``survivors``."""
    copies = StateCopyPlan.of(plan, 2, expert_bytes=0, non_expert_bytes=((0, 0),))
    (shards,) = (operator.owners for operator in copies.operators if operator.expert == NON_EXPERT)
    return not all(set(owners) & set(survivors) for owners in shards)


def _judge_at_once(job: Job, killed: Recorded, wrong: Sequence[str], num_compared: int) -> Outcome:
    """Check that the strategy used is the one that the current placement requires.

    Args:
        wrong: Errors of the job, and differences from its reference.
    """
    nodes = sorted(int(str(fault["node"])) for fault in job.faults)
    hit = sorted(found["node"] for found in killed.hits)
    survivors = [node for node in range(NUM_NODES) if node not in nodes]
    problems = list(wrong)
    strategy = killed.recoveries[0]["strategy"] if killed.recoveries else "none"
    if not killed.placements:
        problems.append("no placement was written")
    else:  # these jobs have only one placement before the fault
        plan = PlacementPlan.from_json(killed.placements[min(killed.placements)]["stages"][0])
        is_sharded = set(_SHARDED) <= set(job.overrides)
        is_lost = bool(lost_experts(plan, survivors)) or (is_sharded and _loses_a_shard(plan, survivors))
        expected = "checkpoint" if is_lost else "living_state"
        if strategy != expected:
            problems.append(f"the strategy {strategy} recovered, but the placement requires {expected}")
    unproven = [] if hit == nodes else [f"nodes {hit} recorded a fault, but {nodes} were due"]
    unproven += _why_not_killed(killed, 0, nodes)
    details = {
        "unproven": unproven,
        "target": killed.recoveries[0]["iteration"] if killed.recoveries else None,
        "finished": False,
        "is_untold": False,
        "distance": 0.0,
        "strategy": strategy,
        "problems": problems[:5],
    }
    return Outcome(proven=not unproven, passed=not problems, num_compared=num_compared, details=details)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign and judge its result."""
    arguments = parse_arguments(__doc__, argv)
    jobs = jobs_of(quick=arguments.quick)
    trials: list[Row] = [{"job": number, **fault} for number, job in enumerate(jobs) for fault in job.faults]
    with tempfile.TemporaryDirectory(prefix="elastic-bitwise-") as folder, forkserver(WARM) as socket:
        campaign = Campaign(Bench(Path(folder), socket), jobs, {})
        counts, outcomes = run_campaign(ID, trials, campaign.execute, script=Path(__file__), quick=arguments.quick)
    good = [outcome for _, outcome in outcomes if outcome.proven and outcome.passed and outcome.num_compared]
    finished, num_untold = (sum(outcome.details[name] for outcome in good) for name in ("finished", "is_untold"))
    declined = sum(outcome.details["strategy"] != "living_state" for outcome in good)
    distance = max((outcome.details["distance"] for outcome in good), default=0.0)
    tried = arguments.quick or (declined > 0 and counts.passed >= MIN_TRIALS)
    num_whole = sum(len(job.faults) for job in jobs if job.kills_nodes)
    num_jobs = {kind: sum(job.kind == kind for job in jobs) for kind in ("rejoin", "halving", "at_once")}
    figure = (
        f"{counts.passed} of {counts.planned} killed nodes ({num_whole} whole) in {len(jobs)} jobs of {NUM_NODES} "
        f"nodes ({num_jobs['rejoin']} with nodes that come back, {num_jobs['halving']} down to half, "
        f"{num_jobs['at_once']} with several at once): {counts.passed - declined} times the survivors continued, "
        f"equal in every bit to the scripted history, {declined} times an expert or a shard had no copy left and a "
        f"checkpoint served, equal in every bit to a run that loads it; {finished} iterations finished after their "
        f"vote, no committed one lost ({num_untold} without a report: the reporter died before it); losses within "
        f"{distance:.1e} of an undisturbed run's"
    )
    return finish(
        arguments.out,
        ID,
        passed=counts.complete and tried,
        figure=figure + counts.again if counts.complete else counts.summary(),
        threshold=f"all of at least {MIN_TRIALS} equal, atol=0; no committed iteration lost",
        counts={
            **counts.to_counts(),
            "whole_nodes": num_whole,
            "jobs": len(jobs),
            "finished_after_their_vote": finished,
            "unreported": num_untold,
            "served_by_checkpoint": declined,
        },
        details={
            "failures": [
                {**t.parameters, **o.details} for t, o in outcomes if not (o.passed and o.proven and o.num_compared)
            ],
            "max_iterations": MOST_ITERATIONS,
        },
    )


if __name__ == "__main__":
    sys.exit(main())
