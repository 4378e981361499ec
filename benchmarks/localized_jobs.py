"""Jobs that keep their layout while ranks and nodes die: layouts, faults, and what is left of them."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.covering import Row
from benchmarks.elastic_jobs import MOST_ITERATIONS
from megatron_ft.failpoints import ITERATION_PHASES
from tests.helpers.jobs import JobResult

Event = Mapping[str, Any]
BASE = (
    "model=moe_micro",
    "optimizer.lr_warmup_iterations=3",
    f"training.train_iterations={MOST_ITERATIONS}",
    "training.micro_batch_size=1",
    "training.global_batch_size=8",
    "training.eval_interval_iterations=0",
    "training.digest_interval_iterations=1",
    "checkpoint.save_at_end=false",
    "telemetry.wandb=disabled",
    "launch.ranks_per_node=1",
    "snapshot=sparse_window",
    "snapshot.num_peer_copies=1",
    "snapshot.iteration_seconds=1",
)
_MOST_PASSES = {"capture": 3, "replicate": 1}
"""Of phases that not every iteration has; 8 of the others."""
FIRST_FAULT_ITERATION = 14
"""A window has been committed by then."""
_TOTAL_BANDWIDTH = 1.2e6
"""Bytes per second and job that windows are planned for: some iterations long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a job is cut."""

    pp: int
    dp: int = 1
    ep: int = 1
    tp: int = 1
    vpp: int | None = None
    sharded: bool = False
    dtype: str = "fp32"

    @property
    def num_ranks(self) -> int:
        """One on each node."""
        return self.pp * self.dp * self.tp

    @property
    def name(self) -> str:
        """For people."""
        parts = [f"PP{self.pp}", f"DP{self.dp}", f"EP{self.ep}", f"TP{self.tp}"]
        parts += [f"VPP{self.vpp}"] if self.vpp else []
        return " ".join([*parts, *(["sharded"] if self.sharded else []), self.dtype])

    @property
    def overrides(self) -> list[str]:
        """The job's."""
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
        """Global ranks of a stage, which are its nodes too."""
        size = self.dp * self.tp
        return range(stage * size, (stage + 1) * size)

    @property
    def places(self) -> tuple[int, ...]:
        """First, middle and last stage."""
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


@dataclass(frozen=True, slots=True)
class FaultJob:
    """One living job and its faults, in order."""

    number: int
    layout: Layout
    faults: Sequence[Row]

    def has_ended(self, events: Sequence[Event]) -> bool:
        """Whether all faults have come, and some iterations after the last one."""
        changes = [event for event in events if event["kind"] == "membership_changed"]
        if not changes or changes[-1]["generation"] < len(self.faults):
            return False
        later = {e["iteration"] for e in events[events.index(changes[-1]) :] if e["kind"] == "state_digest"}
        return len(later) >= 4


def jobs_of(seed: int, *, quick: bool) -> list[FaultJob]:
    """Every layout twice: half of the phases, and the sequences of two deaths."""
    layouts = [LAYOUTS[4]] if quick else list(LAYOUTS)
    jobs = []
    for index, layout in enumerate(layouts):
        for half in range(1 if quick else 2):
            rng = random.Random(f"{seed} {layout.name} {half}")
            phases = ITERATION_PHASES[1:8:3] if quick else ITERATION_PHASES[half::2]
            singles = [
                [_fault(layout, layout.places[(place + index) % 3], phase, rng)]
                for place, phase in enumerate(phases, start=half)
            ]
            pairs = _pairs(layout, rng)
            groups = singles + (pairs[:2] if quick else pairs[half::2])
            rng.shuffle(groups)
            faults: list[Row] = []
            for group in groups:
                for fault in group:
                    first = {"at_iteration": FIRST_FAULT_ITERATION} if not faults else {}
                    faults.append({**fault, "fault": len(faults), "generation": len(faults), **first})
            faults[0].pop("passes", None)
            jobs.append(FaultJob(len(jobs), layout, faults))
    return jobs


def _fault(layout: Layout, stage: int, phase: str, rng: random.Random, **about: Any) -> Row:
    node = rng.choice(list(layout.ranks_of(stage)))
    passes = rng.randint(1, _MOST_PASSES.get(phase, 8))
    return {"kind": "single", "node": node, "stage": stage, "phase": phase, "passes": passes, **about}


def _pairs(layout: Layout, rng: random.Random) -> list[list[Row]]:
    """Two deaths that meet: the second comes while the membership after the first forms, replays, or has just begun."""
    stages = list(range(layout.pp))
    stage = rng.choice(stages)
    beside = (stage + 1) % layout.pp if layout.pp > 1 else stage
    apart = (stage + 2) % layout.pp if layout.pp > 2 else beside
    peers = list(layout.ranks_of(stage))

    def first(kind: str, node: int | None = None) -> Row:
        found = _fault(layout, stage, "forward", rng, kind=kind)
        return found if node is None else {**found, "node": node}

    def second(kind: str, node: int, phase: str, passes: int = 1) -> Row:
        of_stage = node // len(peers)
        return {"kind": kind, "node": node, "stage": of_stage, "phase": phase, "passes": passes}

    neighbour, far = rng.choice(list(layout.ranks_of(beside))), rng.choice(list(layout.ranks_of(apart)))
    substitute = first("substitute dies")
    pairs = [
        [first("side by side"), second("side by side", neighbour, "reform_join")],
        [first("inside a replay"), second("inside a replay", rng.choice(peers), "replay", rng.randint(1, 4))],
        [first("apart"), second("apart", far, "reform_join")],
        [first("beside a replay"), second("beside a replay", neighbour, "reform_move")],
        [first("two of a stage", peers[0]), second("two of a stage", peers[-1], "reform_join")],
        [substitute, second("substitute dies", int(str(substitute["node"])), "reform_build")],
        [first("next door"), second("next door", neighbour, "forward")],
        [first("next door"), second("next door", neighbour, "vote_inside")],
    ]
    # Of two ranks one has to keep its state: where both lose it there is nothing to recover in place.
    fatal = ("side by side", "apart", "beside a replay") if layout.num_ranks == 2 else ()
    return [pair for pair in pairs if pair[0]["kind"] not in fatal]


@dataclass(frozen=True, slots=True)
class Followed:
    """What a job wrote down, by iteration."""

    exit_code: int
    losses: Mapping[int, float]
    digests: Mapping[int, Sequence[str]]
    changes: Sequence[Event]
    shares: Sequence[Event]
    """What each rank did in each recovery."""
    rungs: Sequence[Event]
    hits: Sequence[Event]
    committed: Sequence[Event]
    """Windows."""
    planned: Sequence[Event]
    problems: Sequence[str]

    @classmethod
    def of(cls, run: JobResult) -> "Followed":
        """Read a run that has ended."""
        events = run.records()
        by_kind = {
            kind: [event for event in events if event["kind"] == kind]
            for kind in (
                "membership_changed",
                "stage_recovery",
                "recovery_decided",
                "window_committed",
                "snapshot_planned",
                "stop_requested",
            )
        }
        losses = [(m["iteration"], m["loss"]) for m in run.records("metrics.jsonl") if "loss" in m]
        digests = [(e["iteration"], e["digests"]) for e in events if e["kind"] == "state_digest"]
        ended_well = run.exit_code == (130 if by_kind["stop_requested"] else 0)
        problems = [] if ended_well else [f"exit code {run.exit_code}: {run.output[-4000:]}"]
        for name, found in (("loss", losses), ("state", digests)):
            by_iteration: dict[int, Any] = {}
            problems += [
                f"{name} of iteration {iteration} recorded twice, not alike"
                for iteration, value in found
                if by_iteration.setdefault(iteration, value) != value
            ]
        counts = Counter(iteration for iteration, _ in losses)
        problems += [f"loss of iteration {i} recorded {count} times" for i, count in counts.items() if count > 1]
        return cls(
            exit_code=run.exit_code,
            losses=dict(losses),
            digests=dict(digests),
            changes=by_kind["membership_changed"],
            shares=by_kind["stage_recovery"],
            rungs=by_kind["recovery_decided"],
            hits=run.records("failpoints.jsonl"),
            committed=by_kind["window_committed"],
            planned=by_kind["snapshot_planned"],
            problems=problems,
        )

    @property
    def last_iteration(self) -> int:
        """Newest whose state it has recorded."""
        return max(self.digests, default=0)

    def differences(self, reference: "Followed") -> list[str]:
        """What is not equal to a run that nothing happened to; the reporter may die before it tells a loss."""
        targets = {change["iteration"] for change in self.changes}
        found = []
        for iteration in range(1, self.last_iteration + 1):
            if self.digests.get(iteration) != reference.digests.get(iteration):
                found.append(f"state of iteration {iteration}")
            is_untold = iteration not in self.losses and iteration in targets
            if not is_untold and self.losses.get(iteration) != reference.losses.get(iteration):
                found.append(f"loss of iteration {iteration}")
        return found
