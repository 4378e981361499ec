"""Claim ``balance``: placements planned from a recorded training run's loads give ranks even work, and survive losses.

The default algorithm plans placements from earlier records; they are evaluated on later records. The first interval,
whose placement is planned from even loads, is shown separately.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import recorded
from benchmarks.report import finish, parse_arguments
from benchmarks.source import ROOT
from megatron_ft.expert_loads import ExpertLoads
from megatron_ft.planning.dispatch import quotas
from megatron_ft.planning.placement.algorithm import PlacementAlgorithm
from megatron_ft.planning.placement.allocation import allocate
from megatron_ft.planning.placement.layout import Holdings, Layout
from megatron_ft.planning.placement.maximum_rank_overlap import MaximumRankOverlap
from megatron_ft.planning.placement.migration import MigrationPlan, holdings, remap
from megatron_ft.planning.placement.overlap_search import OverlapSearch
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.spread import Spread
from megatron_ft.planning.placement.survival import survival
from megatron_ft.topology import Cluster

ID = "balance"
NUM_SLOTS, MIN_REPLICAS = 6, 2
RECORDS_PER_PLAN = 20
"""Number of records for which a placement is used. Every tenth iteration is recorded, so this is 200 iterations, as in
the paper."""
EXPERT_BYTES = 112_000_000
"""Size of weights and optimizer state of one expert of GPT-L (Lazarus, section 6.3)."""
CHOSEN = "overlap_search"
LOST = (1, 2, 3, 4)
MAX_MEAN, MAX_P99, MAX_GIGABYTES = 1.10, 2.0, 50.0
THRESHOLD = (
    f"mean max/mean tokens per rank <= {MAX_MEAN:g}, p99 <= {MAX_P99:g}; joint survival at least static EP's for 1 to "
    f"4 lost; <= {MAX_GIGABYTES:g} GB moved by a plan on average"
)
QUICK_THRESHOLD = "mean max/mean tokens per rank below static EP and maximum rank overlap"
PICTURE = ROOT / "docs" / "images" / "balance.png"
CURVE_SLOTS, CURVE_FLOORS = (3, 4, 6, 8), (1, 2, 3, 4)
CURVE_RECORDS_PER_PLAN, CURVE_EVALUATED = 50, 10
QUICK_RECORDS = 40

Planner = Callable[[list[list[int]], Holdings | None], PlacementPlan]
"""Plans a placement from loads [layers][experts] and the experts that ranks have now (None at first)."""
Tokens = npt.NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Figures of one placement algorithm on the recorded run."""

    num_slots: int
    """Number of slots of each rank that the placement uses in a layer."""
    imbalance: list[float] = field(default_factory=list)
    """Tokens of the busiest rank over the mean of ranks, for each layer and microbatch."""
    first: list[float] = field(default_factory=list)
    """The same values in the first interval."""
    moved: list[int] = field(default_factory=list)
    """Number of bytes that each plan moves."""
    survival: list[tuple[float, ...]] = field(default_factory=list)
    """Joint survival of each placement, for each number of lost ranks in ``LOST``."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures for the result's table."""
        row: dict[str, Any] = {
            "slots_per_rank": self.num_slots,
            "mean": round(float(np.mean(self.imbalance)), 4),
            "p99": round(float(np.percentile(self.imbalance, 99)), 4),
            "moved_gigabytes_per_plan": round(float(np.mean(self.moved or [0])) / 1e9, 1),
            "most_gigabytes_of_a_plan": round(max(self.moved, default=0) / 1e9, 1),
        }
        if self.first:
            row["first_interval_mean"] = round(float(np.mean(self.first)), 4)
        if self.survival:
            means = np.mean(self.survival, axis=0).tolist()
            row["joint_survival"] = {str(lost): round(value, 4) for lost, value in zip(LOST, means, strict=True)}
        return row


def main(argv: Sequence[str] | None = None) -> int:
    """Replay the recorded loads with every placement algorithm, and judge the figures."""
    arguments = parse_arguments(__doc__, argv)
    trace = recorded.read(recorded.SMARTMOE)
    records = range(min(trace.num_records, QUICK_RECORDS) if arguments.quick else trace.num_records)
    rows = {"static EP": static(trace, records).to_json()}
    planners = {name: planner(algorithm, trace.num_ranks) for name, algorithm in algorithms().items()}
    for name, plan in {**planners, "greedy balancer": greedy_planner(trace.num_ranks)}.items():
        rows[name] = replay(trace, records, plan, RECORDS_PER_PLAN).to_json()
    show(rows)
    curve = [] if arguments.quick else measure_curve(trace)
    if curve:
        draw(curve, PICTURE)
    ours, even, greedy = rows[CHOSEN], rows["static EP"], rows["greedy balancer"]
    kept, even_kept = ours["joint_survival"], even["joint_survival"]
    if arguments.quick:
        passed = ours["mean"] < min(even["mean"], rows["maximum_rank_overlap"]["mean"])
    else:
        passed = ours["mean"] <= MAX_MEAN and ours["p99"] <= MAX_P99
        passed = passed and ours["moved_gigabytes_per_plan"] <= MAX_GIGABYTES
        passed = passed and all(kept[lost] >= even_kept[lost] for lost in kept)
    return finish(
        arguments.out,
        ID,
        passed=passed,
        figure=(
            f"max/mean tokens per rank {ours['mean']:.2f}, p99 {ours['p99']:.2f} (static EP {even['mean']:.2f}, greedy "
            f"{greedy['mean']:.2f}), {ours['moved_gigabytes_per_plan']:.0f} GB moved by a plan, "
            f"joint survival of 2 lost ranks {kept['2']:.3f} (static EP {even_kept['2']:.3f}, "
            f"greedy {greedy['joint_survival']['2']:.3f})"
        ),
        threshold=QUICK_THRESHOLD if arguments.quick else THRESHOLD,
        counts={"records": len(records), "layers": trace.num_layers, "microbatches": int(trace.tokens.shape[3])},
        details={"rows": rows, "curve": curve, "slots_per_rank": NUM_SLOTS, "min_replicas": MIN_REPLICAS},
    )


def algorithms() -> dict[str, PlacementAlgorithm]:
    """Return the compared algorithms by the name that the table shows."""
    return {
        CHOSEN: OverlapSearch(),
        "overlap_search, all for survival": OverlapSearch(survival_share=1.0, num_kicks=0),
        "maximum_rank_overlap": MaximumRankOverlap(),
        "spread": Spread(),
    }


def planner(
    algorithm: PlacementAlgorithm, num_ranks: int, num_slots: int = NUM_SLOTS, min_replicas: int = MIN_REPLICAS
) -> Planner:
    """Return a function that plans a placement for the loads of each layer. Every rank is a failure domain."""
    cluster = Cluster.of(num_ranks, 1)

    def plan(loads: list[list[int]], previous: Holdings | None) -> PlacementPlan:
        counts = [allocate(layer, num_ranks * num_slots, min_replicas).replica_counts for layer in loads]
        place = partial(algorithm.place, min_replicas=min_replicas, previous=previous)
        return place(counts, cluster, num_slots_per_rank=num_slots, loads=loads)

    return plan


def greedy_planner(num_ranks: int, num_slots: int = NUM_SLOTS) -> Planner:
    """Return a planner that works greedily, first for the numbers of replicas (``replicate_greedily``), then for the
    assignment of replicas to ranks (``pack_greedily``)."""
    layout = Layout.of(Cluster.of(num_ranks, 1), num_slots)

    def plan(loads: list[list[int]], previous: Holdings | None) -> PlacementPlan:
        layers = tuple(pack_greedily(replicate_greedily(layer, layout.num_slots), layer, layout) for layer in loads)
        return PlacementPlan.of(layout, layers, len(loads[0]), "greedy")

    return plan


def replicate_greedily(loads: Sequence[int], num_slots: int) -> list[int]:
    """Give each expert one replica. Then, for each slot that is left, add a replica of the expert with the most load
    per replica."""
    counts = [1] * len(loads)
    for _ in range(num_slots - len(loads)):
        counts[max(range(len(loads)), key=lambda expert: loads[expert] / counts[expert])] += 1
    return counts


def pack_greedily(counts: Sequence[int], loads: Sequence[int], layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Assign replicas to ranks, heaviest first: each to the rank with the least load that has a free slot."""
    replicas = [(loads[expert] / count, expert) for expert, count in enumerate(counts) for _ in range(count)]
    slots: list[list[int]] = [[] for _ in layout.ranks]
    sums = [0.0] * len(slots)
    for load, expert in sorted(replicas, key=lambda replica: (-replica[0], replica[1])):
        free = (rank for rank in range(len(slots)) if len(slots[rank]) < layout.num_slots_per_rank)
        rank = min(free, key=lambda rank: (sums[rank], rank))
        slots[rank].append(expert)
        sums[rank] += load
    return tuple(tuple(sorted(experts)) for experts in slots)


def static(trace: ExpertLoads, records: range) -> Outcome:
    """Evaluate static expert parallelism: tokens stay in their expert-parallel group, and every expert has equally many
    replicas. Of all numbers of experts per rank that permit this with the available slots, the largest is used."""
    experts_per_rank = max(size for size in range(1, NUM_SLOTS + 1) if trace.num_experts % size == 0)
    outcome = Outcome(num_slots=experts_per_rank)
    group = trace.num_experts // experts_per_rank
    for record in records:
        tokens = trace.tokens[record]
        per_group = tokens.reshape(-1, group, *tokens.shape[1:]).sum(axis=1)
        per_rank = per_group.reshape(*per_group.shape[:3], group, experts_per_rank).sum(axis=4)
        flat = per_rank.transpose(1, 2, 0, 3).reshape(-1, tokens.shape[0])
        outcome.imbalance += (flat.max(axis=1) / flat.mean(axis=1)).tolist()
    domains = [f"rank{rank}" for rank in range(trace.num_ranks)]
    holders = [domains[first::group] for first in range(group)]
    outcome.survival.append(tuple(value.probability for value in survival(holders, domains, LOST)))
    return outcome


def replay(trace: ExpertLoads, records: range, plan_for: Planner, records_per_plan: int, evaluated: int = 1) -> Outcome:
    """Replay ``records``. Plan each placement from the loads since the previous plan, the first one from even loads,
    and evaluate it on the loads that follow."""
    plan = plan_for([[1] * trace.num_experts] * trace.num_layers, None)
    outcome = Outcome(num_slots=plan.num_slots_per_rank)
    for record in records:
        if record and record % records_per_plan == 0:
            seen = trace.tokens[record - records_per_plan : record].sum(axis=(0, 1, 3))
            plan = move(outcome, plan, plan_for(seen.tolist(), holdings(plan)))
        if record % evaluated == 0:
            judged = outcome.first if record < records_per_plan else outcome.imbalance
            judged += judge(trace.tokens[record], plan)
    return outcome


def move(outcome: Outcome, old: PlacementPlan, new: PlacementPlan) -> PlacementPlan:
    """Return the new plan with its ranks renumbered so that the fewest bytes move. Add the number of moved bytes and
    the plan's survival to ``outcome``."""
    mapped = remap(new, holdings(old))
    outcome.moved.append(MigrationPlan.between(mapped, holdings(old), EXPERT_BYTES).num_bytes)
    add_survival(outcome, mapped)
    return mapped


def add_survival(outcome: Outcome, plan: PlacementPlan) -> None:
    """Add the joint survival of a plan to ``outcome``."""
    outcome.survival.append(tuple(v.probability for v in survival(plan.all_expert_domains(), plan.domains, LOST)))


def judge(tokens: Tokens, plan: PlacementPlan) -> list[float]:
    """Return the tokens of the busiest rank over the mean of ranks, for each layer and microbatch."""
    found = []
    for layer in range(tokens.shape[1]):
        replicas = plan.replicas_per_rank(layer)
        for microbatch in range(tokens.shape[2]):
            computed = quotas(tokens[:, layer, microbatch].T, replicas).sum(axis=0)
            found.append(float(computed.max() / computed.mean()))
    return found


def show(rows: dict[str, dict[str, Any]]) -> None:
    """Print one table of all algorithms."""
    lost = "".join(f"{count:>8} lost" for count in LOST)
    print(f"{'':<34}{'slots':>6}{'max/mean':>9}{'p99':>8}{'GB moved':>10}   joint survival:{lost}")
    for name, row in rows.items():
        values = "".join(f"{value:>13.3f}" for value in row["joint_survival"].values())
        print(
            f"{name:<34}{row['slots_per_rank']:>6}{row['mean']:>9.3f}{row['p99']:>8.3f}"
            f"{row['moved_gigabytes_per_plan']:>10.1f}{'':18}{values}"
        )


def measure_curve(trace: ExpertLoads) -> list[dict[str, Any]]:
    """Measure imbalance and joint survival for several minimum numbers of replicas and several numbers of slots, on a
    sample of the records."""
    points = []
    for num_slots in CURVE_SLOTS:
        for floor in CURVE_FLOORS:
            if floor * trace.num_experts > num_slots * trace.num_ranks:
                continue
            plan_for = planner(OverlapSearch(num_kicks=0), trace.num_ranks, num_slots, floor)
            outcome = replay(trace, range(trace.num_records), plan_for, CURVE_RECORDS_PER_PLAN, CURVE_EVALUATED)
            points.append({"min_replicas": floor, **outcome.to_json()})
            print(f"slots {num_slots}, f {floor}: {points[-1]['mean']:.3f}", flush=True)
    return points


def draw(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the imbalance over the minimum number of replicas, with a line for each number of slots. Draws nothing if
    matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed, so the curve is only in the result and not drawn")
        return
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for num_slots in CURVE_SLOTS:
        chosen = [point for point in points if point["slots_per_rank"] == num_slots]
        floors = [point["min_replicas"] for point in chosen]
        left.plot(floors, [point["mean"] for point in chosen], marker="o", label=f"{num_slots} slots per rank")
        right.plot(floors, [point["joint_survival"]["2"] for point in chosen], marker="o")
    left.set(xlabel="replicas of every expert, at least", ylabel="largest / mean tokens per rank", ylim=(1, None))
    right.set(
        xlabel="replicas of every expert, at least", ylabel="survival of 2 lost ranks, all layers", ylim=(0, 1.02)
    )
    for axes in (left, right):
        axes.set_xticks(CURVE_FLOORS)
        axes.grid(alpha=0.3)
    left.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    sys.exit(main())
