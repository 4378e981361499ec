"""Defines jobs that keep their layout while ranks and nodes die: their layouts, their faults, and the records they
leave."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.covering import Row
from benchmarks.elastic_jobs import MOST_ITERATIONS, before, failpoints
from megatron_ft.failpoints import ITERATION_PHASES
from megatron_ft.failures.injecting import INJECTED_FILE
from megatron_ft.testing.jobs import JobResult

Event = Mapping[str, Any]
_MICROBATCHES = 8
"""Microbatches of an iteration, summed over all data-parallel ranks."""
_RARE_PHASES = {"capture": 3, "replicate": 1}
"""Phases that do not occur in every iteration, each with its largest number of passes before a fault."""
_FIRST_PASSES = {"capture": 14, "replicate": 2}
"""Additional passes before the first fault of a job, so that a window is committed before the fault."""
_FIRST_ITERATION = 14
"""Iteration of the first fault, so that a window is committed before the fault."""
_MOST_APART = 14
"""Largest number of iterations between two faults, which is more than two windows."""
_LEAST_REPLAY = 6
"""Smallest number of iterations between two faults if the second one hits a replay: the replay must be long enough to
be hit."""
_MOST_REPLAYED = 4
_SETTLED = 24
"""Number of iterations after which each rare phase has occurred."""
_STALLED = 80
"""Number of iterations without a fault after which no more faults are expected."""
TRAINING = (
    "model=moe_micro",
    "optimizer.lr_warmup_iterations=3",
    f"training.train_iterations={MOST_ITERATIONS}",
    "training.micro_batch_size=1",
    f"training.global_batch_size={_MICROBATCHES}",
    "training.eval_interval_iterations=0",
    "training.digest_interval_iterations=1",
    "checkpoint.save_at_end=false",
    "telemetry.wandb=disabled",
    "launch.ranks_per_node=1",
)
"""Overrides of all jobs, which do not depend on the way to recover."""
BASE = (
    *TRAINING,
    "snapshot=sparse_window",
    "snapshot.num_peer_copies=1",
    "snapshot.iteration_seconds=1",
    "recovery.keep_layout=true",
    "recovery.strategies=[localized_replay,rollback,checkpoint]",
    "nodes.restart_lost_nodes=true",
    "nodes.max_node_restarts=1000",
    "recovery.max_restarts=1000",
)
_TOTAL_BANDWIDTH = 1.2e6
"""Bandwidth of captures of the whole job in bytes per second. It is so low that windows have several iterations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallel layout of a job."""

    pp: int
    dp: int = 1
    ep: int = 1
    tp: int = 1
    vpp: int | None = None
    sharded: bool = False
    dtype: str = "fp32"

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks, each of which is on its own node."""
        return self.pp * self.dp * self.tp

    @property
    def name(self) -> str:
        """Return the layout's name for reports."""
        parts = [f"PP{self.pp}", f"DP{self.dp}", f"EP{self.ep}", f"TP{self.tp}"]
        parts += [f"VPP{self.vpp}"] if self.vpp else []
        return " ".join([*parts, *(["sharded"] if self.sharded else []), self.dtype])

    @property
    def overrides(self) -> list[str]:
        """Return the overrides of a job with this layout."""
        words = [
            f"launch.num_nodes={self.num_ranks}",
            f"parallel.pipeline_model_parallel_size={self.pp}",
            f"parallel.expert_model_parallel_size={self.ep}",
            f"parallel.tensor_model_parallel_size={self.tp}",
            f"parallel.use_distributed_optimizer={str(self.sharded).lower()}",
            f"precision.params_dtype={self.dtype}",
            f"snapshot.bandwidth_bytes_per_second={_TOTAL_BANDWIDTH / self.num_ranks:.0f}",
        ]
        return words + ([f"parallel.virtual_pipeline_model_parallel_size={self.vpp}"] if self.vpp else [])

    def ranks_of(self, stage: int) -> range:
        """Return the global ranks of a stage, whose numbers are also those of their nodes."""
        size = self.dp * self.tp
        return range(stage * size, (stage + 1) * size)

    @property
    def places(self) -> tuple[int, ...]:
        """Return the first, a middle and the last stage."""
        return (0, self.pp // 2, self.pp - 1)


LAYOUTS = (
    Layout(pp=2),
    Layout(pp=2, dp=2),
    Layout(pp=2, dp=2, ep=2, sharded=True),
    Layout(pp=2, vpp=2),
    Layout(pp=2, dp=2, ep=2, vpp=2, sharded=True, dtype="bf16"),
    Layout(pp=4),
    Layout(pp=4, dp=2, sharded=True),
    Layout(pp=4, dp=2, ep=2),
    Layout(pp=2, tp=2),
    Layout(pp=2, dp=2, tp=2, ep=2, sharded=True),
    Layout(pp=4, tp=2, dtype="bf16"),
    Layout(pp=1, dp=4, ep=2),
)
NODE_LAYOUTS = (LAYOUTS[2], LAYOUTS[5], LAYOUTS[3])
"""Layouts of the jobs that lose whole nodes."""
_NODES_KILLED = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultJob:
    """Job and its faults, in order."""

    number: int
    layout: Layout
    num_spares: int = 0
    """Number of spare nodes that take the places of lost ones. Without any, the ranks of a lost node are started
    again."""
    faults: Sequence[Row]
    kills_nodes: bool = False
    """Whether whole nodes are killed from outside. If not, ranks kill themselves at failpoints."""
    protection: Sequence[str] = ()
    """Further overrides that the reference needs as well."""
    way: Sequence[str] = ()
    """Further overrides about the recovery, which the reference does not have."""

    @property
    def overrides(self) -> list[str]:
        """Return the overrides of the job."""
        armed = [] if self.kills_nodes else [failpoints(self.faults)]
        return [*self.overrides_of_reference, *self.way, f"nodes.num_spare_nodes={self.num_spares}", *armed]

    @property
    def overrides_of_reference(self) -> list[str]:
        """Return the overrides of a job without faults that computes the same."""
        return [*self.layout.overrides, *self.protection]

    def has_ended(self, events: Sequence[Event]) -> bool:
        """Return whether all faults have happened and some iterations have followed, or no more faults are expected."""
        generation, later = formed_by(events)
        return len(later) >= (4 if generation > int(str(self.faults[-1]["generation"])) else _STALLED)


def formed_by(events: Sequence[Event]) -> tuple[int, set[int]]:
    """Return the newest membership, and the iterations of which it has reported the state."""
    formed = [number for number, event in enumerate(events) if event["kind"] == "recovery_started"]
    first = formed[-1] if formed else 0
    generation = events[first]["generation"] if formed else 0
    return generation, {event["iteration"] for event in events[first:] if event["kind"] == "state_digest"}


def jobs_of(seed: int, *, quick: bool) -> list[FaultJob]:
    """Return two jobs for each layout. Each job has half of the phases and half of the pairs of faults; the second job
    has a spare."""
    layouts = [LAYOUTS[4]] if quick else list(LAYOUTS)
    jobs = []
    for index, layout in enumerate(layouts):
        for half in range(1 if quick else 2):
            rng = random.Random(f"{seed} {layout.name} {half}")
            phases = ITERATION_PHASES[1:8:3] if quick else ITERATION_PHASES[half::2]
            groups = single_faults(layout, phases, rng, first=half + index)
            pairs = _pairs(layout, rng)
            groups += pairs[:1] if quick else pairs[half::2]
            rng.shuffle(groups)
            faults = in_order(groups, rng)
            jobs.append(FaultJob(number=len(jobs), layout=layout, num_spares=half, faults=faults))
    if quick:
        return jobs
    return jobs + [_killing_nodes(len(jobs) + number, layout) for number, layout in enumerate(NODE_LAYOUTS)]


def single_faults(layout: Layout, phases: Sequence[str], rng: random.Random, *, first: int = 0) -> list[list[Row]]:
    """Return one group for each of ``phases``, with one fault: in the first, a middle and the last stage in turn."""
    return [[_fault(layout, layout.places[place % 3], phase, rng)] for place, phase in enumerate(phases, start=first)]


def _killing_nodes(number: int, layout: Layout) -> FaultJob:
    """Make a job that loses whole nodes. A node's memory is lost with it, so peers' copies of windows are used."""
    faults = whole_nodes(layout, _NODES_KILLED, "localized_replay")
    return FaultJob(number=number, layout=layout, num_spares=number % 2, faults=faults, kills_nodes=True)


def whole_nodes(layout: Layout, num_faults: int, strategy: str) -> list[Row]:
    """Return faults that kill whole nodes at any moment, in the first, a middle and the last stage in turn.

    Args:
        strategy: strategy that is expected to recover.
    """
    rng = random.Random(f"nodes {layout.name}")
    return [
        {
            "kind": "whole node",
            "rank": rng.choice(list(layout.ranks_of(layout.places[fault % 3]))),
            "stage": layout.places[fault % 3],
            "phase": "any",
            "after": rng.randint(3, _MOST_APART) + (0 if fault else _FIRST_ITERATION),
            "strategy": strategy,
            "fault": fault,
            "generation": fault,
        }
        for fault in range(num_faults)
    ]


def in_order(groups: Sequence[Sequence[Row]], rng: random.Random, *, keeps_layout: bool = True) -> list[Row]:
    """Return the faults. Each fault gets its number and the membership that it ends; the first fault of a group also
    gets its iteration.

    A recovery undoes no committed iteration, so each fault's iteration can be chosen before the job runs. This
    iteration comes after those of all earlier faults, so it is not a replayed iteration.

    Args:
        keeps_layout: whether the job keeps its layout. Otherwise all ranks start again after each fault.
    """
    faults: list[Row] = []
    iteration, generation = _FIRST_ITERATION, 0
    for group in groups:
        for place, fault in enumerate(group):
            about: dict[str, Any] = {"fault": len(faults), "generation": generation}
            if fault["phase"] in _RARE_PHASES:
                about["passes"] = int(str(fault["passes"])) + (0 if faults else _FIRST_PASSES[str(fault["phase"])])
                iteration += _SETTLED + (0 if faults else _FIRST_ITERATION)
            elif place == 0:
                least = _LEAST_REPLAY if fault["kind"] == "inside a replay" else 1
                iteration += rng.randint(least, _MOST_APART) if faults else 0
                about["at_iteration"] = iteration
            faults.append({**fault, **about})
            generation += 1
        # After one loss, a rollback of a kept layout takes two generations: places are filled first, then all ranks
        # start again. If the second fault of a group ends the last rank with state, they start again at once.
        generation += keeps_layout and len(group) == 1 and group[0]["strategy"] == "rollback"
        iteration += len(group)
    return faults


def _fault(layout: Layout, stage: int, phase: str, rng: random.Random, **about: Any) -> Row:
    rank = rng.choice(list(layout.ranks_of(stage)))
    most = _MICROBATCHES // layout.dp if phase in ("forward", "dispatch", "backward") else 1
    passes = rng.randint(1, _RARE_PHASES.get(phase, most))
    return {
        "kind": "single",
        "rank": rank,
        "stage": stage,
        "phase": phase,
        "passes": passes,
        "strategy": "localized_replay",
        **about,
    }


def _pairs(layout: Layout, rng: random.Random) -> list[list[Row]]:
    """Return pairs of faults. The second fault comes while the membership after the first one forms, replays, or has
    just begun."""
    stages = list(range(layout.pp))
    stage = rng.choice(stages)
    beside = (stage + 1) % layout.pp if layout.pp > 1 else stage
    apart = (stage + 2) % layout.pp if layout.pp > 2 else beside
    peers = list(layout.ranks_of(stage))

    def pair(kind: str, second: int, phase: str, *, first: int | None = None, passes: int = 1) -> list[Row]:
        # If both ranks of a job of two ranks are lost, no rank has state, and all ranks start again from windows.
        is_lost = layout.num_ranks == 2 and kind in ("side by side", "apart", "beside a replay")
        begins = _fault(
            layout, stage, "forward", rng, kind=kind, strategy="rollback" if is_lost else "localized_replay"
        )
        if first is not None:
            begins = {**begins, "rank": first}
        of_stage = second // len(peers)
        following = {**begins, "rank": second, "stage": of_stage, "phase": phase, "passes": passes}
        # The replay after the first loss has begun when the second rank is lost.
        return [{**begins, "strategy": "localized_replay"} if kind == "beside a replay" else begins, following]

    neighbour, far, mate = (rng.choice(list(layout.ranks_of(of))) for of in (beside, apart, stage))
    return [
        pair("side by side", neighbour, "reform_join"),
        pair("inside a replay", mate, "replay", passes=rng.randint(1, _MOST_REPLAYED)),
        pair("apart", far, "reform_join"),
        pair("beside a replay", neighbour, "reform_move"),
        pair("two of a stage", peers[-1], "reform_join", first=peers[0]),
        pair("substitute dies", mate, "reform_build", first=mate),
        pair("next door", neighbour, "forward"),
        pair("next door", neighbour, "vote_inside"),
    ]


@dataclass(frozen=True, slots=True)
class Followed:
    """Records of a job, by iteration."""

    exit_code: int
    losses: Mapping[int, float]
    digests: Mapping[int, Sequence[str]]
    changes: Sequence[Event]
    shares: Sequence[Event]
    """Report of each rank about its part in each recovery."""
    recoveries: Sequence[Event]
    hits: Sequence[Event]
    committed: Sequence[Event]
    """Committed windows."""
    planned: Sequence[Event]
    problems: Sequence[str]

    @classmethod
    def of(cls, run: JobResult, *, expected_exit: int | None = None) -> "Followed":
        """Read the records of a run that has ended.

        Args:
            expected_exit: Expected exit code. None stands for 0, or 130 if the job was requested to stop.
        """
        events = run.records()
        by_kind = {
            kind: [event for event in events if event["kind"] == kind]
            for kind in (
                "membership_changed",
                "stage_recovery",
                "recovery_started",
                "window_committed",
                "snapshot_planned",
                "stop_requested",
            )
        }
        losses = [(m["iteration"], m["loss"]) for m in run.records("metrics.jsonl") if "loss" in m]
        digests = [(e["iteration"], e["digests"]) for e in events if e["kind"] == "state_digest"]
        wanted = (130 if by_kind["stop_requested"] else 0) if expected_exit is None else expected_exit
        ended_well = run.exit_code == wanted
        problems = [] if ended_well else [f"exit code {run.exit_code}: {run.output[-4000:]}"]
        for name, found in (("loss", losses), ("state", digests)):
            by_iteration: dict[int, Any] = {}
            problems += [
                f"{name} of iteration {iteration} recorded twice, not alike"
                for iteration, value in found
                if by_iteration.setdefault(iteration, value) != value
            ]
        num_restarts = sum(event["strategy"] != "localized_replay" for event in by_kind["recovery_started"])
        counts = Counter(iteration for iteration, _ in losses)
        problems += [
            f"loss of iteration {iteration} recorded {count} times with {num_restarts} restarts"
            for iteration, count in counts.items()
            if count > 1 + num_restarts
        ]
        return cls(
            exit_code=run.exit_code,
            losses=dict(losses),
            digests=dict(digests),
            changes=by_kind["membership_changed"],
            shares=by_kind["stage_recovery"],
            recoveries=by_kind["recovery_started"],
            hits=[*run.records("failpoints.jsonl"), *run.records(INJECTED_FILE)],
            committed=by_kind["window_committed"],
            planned=by_kind["snapshot_planned"],
            problems=problems,
        )

    @property
    def last_iteration(self) -> int:
        """Return the newest iteration of which the run has recorded the state."""
        return max(self.digests, default=0)

    def num_compared(self, reference: "Followed", first: int = 1, last: int | None = None) -> int:
        """Return the number of losses and digests of the iterations ``first`` to ``last`` that both runs have
        recorded."""
        iterations = range(first, (self.last_iteration if last is None else last) + 1)
        pairs = ((self.losses, reference.losses), (self.digests, reference.digests))
        return sum(i in mine and i in theirs for i in iterations for mine, theirs in pairs)

    def differences(self, reference: "Followed", first: int = 1, last: int | None = None) -> list[str]:
        """Return the differences from an undisturbed run.

        If the reporting rank dies after an iteration was committed, the loss and the digest of that iteration, or only
        its digest, may be missing. No other rank reports them later. So a membership may begin after one iteration
        without reports, or after several if the agent that forwards reports was stopped.

        Args:
            last: Newest iteration to compare. None stands for the newest iteration of which this run has recorded the
                state.
        """
        unreported = set().union(*(before(change["iteration"], self.losses) for change in self.changes))
        pairs = (("state", self.digests, reference.digests), ("loss", self.losses, reference.losses))
        return [
            f"{name} of iteration {iteration} {'is missing' if iteration not in mine else 'is another'}"
            for iteration in range(first, (self.last_iteration if last is None else last) + 1)
            for name, mine, theirs in pairs
            if mine.get(iteration) != theirs.get(iteration) and (iteration in mine or iteration not in unreported)
        ]
