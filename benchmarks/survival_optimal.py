"""Claim ``survival-optimal``: the placement search finds the best possible placement, and always keeps the minimum
number of failure domains per expert."""

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations, combinations_with_replacement
from typing import Any

import numpy as np

from benchmarks import recorded
from benchmarks.report import finish, parse_arguments
from megatron_ft.planning.placement.algorithms import ALGORITHMS
from megatron_ft.planning.placement.allocation import allocate
from megatron_ft.planning.placement.maximum_rank_overlap import overlap
from megatron_ft.planning.placement.overlap_search import OverlapSearch
from megatron_ft.planning.placement.survival import SurvivalObjective, survival
from megatron_ft.topology import Cluster

ID = "survival-optimal"
THRESHOLD = (
    "equal to the best of all placements on every instance and for every number lost, floor never broken; "
    "figures 4 and 5; GPT-L loads: at least maximum rank overlap, above spread and compact"
)
MAX_NODES, MAX_SLOTS, MAX_EXPERTS = 5, 3, 5
QUICK_MAX_NODES = 4
GPT_L = {"nodes": 10, "slots": 6, "experts": 16, "layers": 12, "min_replicas": 2, "iteration": 201}
LOST = range(1, 6)

Sets = tuple[int, ...]
"""Nodes that have each expert, as bit masks."""


def main(argv: Sequence[str] | None = None) -> int:
    """Check every small instance, the two figures of the paper and the recorded loads."""
    arguments = parse_arguments(__doc__, argv)
    small = check_instances(QUICK_MAX_NODES if arguments.quick else MAX_NODES)
    figures = check_figures()
    large = check_recorded()
    problems = [*small["problems"], *figures["problems"], *large["problems"]]
    joint = large["joint"]
    return finish(
        arguments.out,
        ID,
        passed=not problems,
        figure="; ".join(problems[:5])
        if problems
        else (
            f"{small['instances']} instances, {small['comparisons']} comparisons equal, better than maximum rank "
            f"overlap in {small['better']}; GPT-L loads, 4 lost, all layers: {joint['overlap_search'][3]:.3f} against "
            f"{joint['spread'][3]:.3f} (spread) and {joint['compact'][3]:.3f} (compact)"
        ),
        threshold=THRESHOLD,
        counts={
            "instances": small["instances"],
            "comparisons": small["comparisons"],
            "placements": small["placements"],
        },
        details={"small": small, "figures": figures, "gpt_l": {**GPT_L, **large}},
    )


def check_instances(max_nodes: int) -> dict[str, Any]:
    """Compare the search with all placements, for every allocation that fills the slots. The search optimizes for the
    loss of each number of nodes, and for a weighted mixture of these losses."""
    totals: dict[str, Any] = defaultdict(int)
    problems: list[str] = []
    for num_nodes in range(1, max_nodes + 1):
        for num_slots in range(1, MAX_SLOTS + 1):
            for num_experts in range(1, min(MAX_EXPERTS, num_nodes * num_slots) + 1):
                for counts, placements in all_placements(num_nodes, num_slots, num_experts).items():
                    totals["instances"] += 1
                    totals["placements"] += len(placements)
                    problems += check_instance(num_nodes, num_slots, counts, placements, totals)
    return {**totals, "problems": problems}


def all_placements(num_nodes: int, num_slots: int, num_experts: int) -> dict[tuple[int, ...], set[Sets]]:
    """Return all placements, by allocation in rising order. Each placement has the holders of each expert; placements
    that differ only in the order of nodes count once."""
    columns = list(combinations_with_replacement(range(num_experts), num_slots))
    found: dict[tuple[int, ...], set[Sets]] = defaultdict(set)
    for chosen in combinations_with_replacement(columns, num_nodes):
        counts, held = [0] * num_experts, [0] * num_experts
        for node, column in enumerate(chosen):
            for expert in column:
                counts[expert] += 1
                held[expert] |= 1 << node
        if counts[0] and counts == sorted(counts):
            found[tuple(counts)].add(tuple(held))
    return found


def check_instance(
    num_nodes: int, num_slots: int, counts: tuple[int, ...], placements: set[Sets], totals: dict[str, Any]
) -> Iterator[str]:
    """Yield errors of the search for one allocation."""
    floor = min(*counts, num_nodes)
    curves = {held: curve(held, num_nodes) for held in placements}
    keeping = [held for held in placements if min(mask.bit_count() for mask in held) >= floor]
    paper = curve(sets(overlap(counts, (num_slots,) * num_nodes)), num_nodes)
    mixture = SurvivalObjective()
    for lost in range(num_nodes):
        weights = tuple(float(k == lost) for k in range(1, num_nodes)) if lost else ()
        objective = SurvivalObjective(lost_weights=weights) if lost else mixture
        weighted = objective.weights(num_nodes) if num_nodes > 1 else (1.0,)

        def value(losses: Sequence[float], weighted: Sequence[float] = weighted) -> float:
            return sum(weight * share for weight, share in zip(weighted, losses, strict=False))

        best = max(value(curves[held]) for held in keeping)
        free = max(value(curves[held]) for held in placements)
        totals["floor_costs"] += free > best + 1e-12
        totals["better"] += best > value(paper) + 1e-12
        for exhaustive in (True, False):
            search = OverlapSearch(objective=objective, num_exhaustive_slots=15 if exhaustive else 0)
            held = sets(search.assign(counts, (num_slots,) * num_nodes))
            where = f"N={num_nodes} c={num_slots} r={counts} lost={lost or 'mixed'}"
            if min(mask.bit_count() for mask in held) < floor:
                yield f"{where}: floor {floor} broken"
            reached = value(curve(held, num_nodes))
            if reached < value(paper) - 1e-12:
                yield f"{where}: worse than maximum rank overlap"
            if exhaustive:
                totals["comparisons"] += 1
                if abs(reached - best) > 1e-12:
                    yield f"{where}: the survival is {reached} instead of {best}"
            else:
                totals["exchanges_alone_reach_the_best"] += abs(reached - best) <= 1e-12


def curve(held: Sets, num_nodes: int) -> list[float]:
    """Return the survival probability for 0, 1, ... ``num_nodes`` lost nodes, by trying each loss."""
    shares = []
    for lost in range(num_nodes + 1):
        gone = [sum(1 << node for node in chosen) for chosen in combinations(range(num_nodes), lost)]
        shares.append(sum(all(mask & ~dead for mask in held) for dead in gone) / len(gone))
    return shares


def sets(counts: np.ndarray) -> Sets:
    """Return the nodes that have each expert, from its numbers of replicas per node."""
    return tuple(sum(1 << node for node in np.nonzero(row)[0].tolist()) for row in counts)


def check_figures() -> dict[str, Any]:
    """Check figures 4 and 5 of Lazarus, whose sets of nodes are given in section 4.1."""
    figure_4 = {
        "plan_a": failing([{1, 2}, {2, 3, 4}, {1, 4, 5}, {1, 2, 3, 4, 5}]),
        "plan_b": failing(places("maximum_rank_overlap", (2, 5, 6, 7), 4)),
        "search": failing(places("overlap_search", (2, 5, 6, 7), 4)),
    }
    figure_5 = {
        "case_1": failing(places("maximum_rank_overlap", (2, 2, 3, 3), 2)),
        "case_2": failing([{1, 2}, {1, 3}, {3, 4, 5}, {2, 4, 5}]),
        "case_3": failing([{1, 2}, {3, 4}, {3, 4, 5}, {1, 2, 5}]),
        "search": failing(places("overlap_search", (2, 2, 3, 3), 2)),
    }
    expected = {"plan_a": 5, "plan_b": 3, "search": 3}, {"case_1": 4, "case_2": 7, "case_3": 6, "search": 4}
    problems = [
        f"figure {number}: {name} fails {found[name]} of 10 instead of {count}"
        for number, found, wanted in zip((4, 5), (figure_4, figure_5), expected, strict=True)
        for name, count in wanted.items()
        if found[name] != count
    ]
    return {"failing_of_10": {"figure_4": figure_4, "figure_5": figure_5}, "problems": problems}


def places(name: str, counts: tuple[int, ...], num_slots: int) -> list[set[int]]:
    """Return the nodes (1 to 5) that have each expert, for an algorithm that optimizes the loss of three nodes."""
    aimed = OverlapSearch(objective=SurvivalObjective(lost_weights=(0, 0, 1)))
    algorithm = aimed if name == "overlap_search" else ALGORITHMS[name]()
    plan = algorithm.place([counts], Cluster.of(5, 1), num_slots_per_rank=num_slots)
    return [{int(domain[4:]) + 1 for domain in held} for held in plan.expert_domains(0)]


def failing(held: Sequence[set[int]]) -> int:
    """Return the number of ways to lose three of five nodes in which an expert is lost."""
    return sum(any(nodes <= set(lost) for nodes in held) for lost in combinations(range(1, 6), 3))


def check_recorded() -> dict[str, Any]:
    """Return the survival of each layer and of all layers, for every algorithm and recorded loads like those of
    GPT-L."""
    loads = gpt_l_loads()
    num_slots = GPT_L["nodes"] * GPT_L["slots"]
    counts = [allocate(layer, num_slots, GPT_L["min_replicas"]).replica_counts for layer in loads]
    cluster = Cluster.of(GPT_L["nodes"], 1)
    joint: dict[str, list[float]] = {}
    layers: dict[str, list[list[float]]] = {}
    for name, algorithm in ALGORITHMS.items():
        policy = OverlapSearch(survival_share=1.0) if name == "overlap_search" else algorithm()
        plan = policy.place(counts, cluster, num_slots_per_rank=GPT_L["slots"], loads=loads)
        domains = cluster.failure_domains
        joint[name] = [value.probability for value in survival(plan.all_expert_domains(), domains, LOST)]
        layers[name] = [
            [value.probability for value in survival(plan.expert_domains(layer), domains, LOST)]
            for layer in range(len(loads))
        ]
        print(f"{name:>22}  all layers, 1 to 5 lost: " + "  ".join(f"{value:.3f}" for value in joint[name]))
    problems = []
    for position, lost in enumerate(LOST):
        ours, rows = joint["overlap_search"][position], layers["overlap_search"]
        if ours < joint["maximum_rank_overlap"][position] - 1e-12:
            problems.append(f"GPT-L, {lost} lost: below maximum rank overlap")
        for name in ("spread", "compact"):
            worse = [rows[k][position] < layers[name][k][position] - 1e-12 for k in range(len(rows))]
            below = ours < joint[name][position] or (lost >= GPT_L["min_replicas"] and ours == joint[name][position])
            if below or any(worse):
                problems.append(f"GPT-L, {lost} lost: not above {name}")
    return {"joint": joint, "layers": layers, "problems": problems}


def gpt_l_loads() -> list[list[int]]:
    """Return the loads of the most loaded experts of each layer in one recorded iteration, as in the paper."""
    trace = recorded.read(recorded.SMARTMOE)
    tokens = trace.per_layer(trace.record_of(GPT_L["iteration"]))[: GPT_L["layers"]]
    return [sorted(layer, reverse=True)[: GPT_L["experts"]] for layer in tokens.tolist()]


if __name__ == "__main__":
    sys.exit(main())
