"""Plans expert replicas for recorded loads: the number of replicas of each expert, and their nodes. Also computes which
losses of nodes the experts survive."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ft.errors import ConfigError, MegatronFtError, SoftwareError
from megatron_ft.expert_loads import SUFFIXES, ExpertLoads, Tokens
from megatron_ft.planning.placement.algorithm import PlacementAlgorithm
from megatron_ft.planning.placement.algorithms import ALGORITHMS
from megatron_ft.planning.placement.allocation import Allocation, allocate
from megatron_ft.planning.placement.overlap_search import OverlapSearch
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.survival import Survival, SurvivalObjective, survival
from megatron_ft.planning.placement.tradeoff import TradeoffPoint, tradeoff
from megatron_ft.topology import Cluster

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_MIN_REPLICAS = 2
MAX_CURVE_NODES = 16
"""Largest number of nodes for which plots show the survival probability for every number of lost nodes. For more nodes,
plots show it only for the requested numbers of lost nodes."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(prog="plan_placement", description=__doc__)
    source = result.add_mutually_exclusive_group(required=True)
    source.add_argument("--loads", type=Path, metavar="FILE", help=f"file with recorded loads ({', '.join(SUFFIXES)})")
    source.add_argument(
        "--replica-counts",
        metavar="2,3,3",
        help="number of replicas of each expert, instead of computing it from loads",
    )
    result.add_argument(
        "--iteration", type=int, help="use only this iteration of the recorded loads (default: sum of all)"
    )
    result.add_argument("--num-nodes", type=int, required=True)
    result.add_argument("--slots-per-node", type=int, required=True)
    result.add_argument(
        "--min-replicas", type=int, help=f"smallest number of replicas of each expert (default: {DEFAULT_MIN_REPLICAS})"
    )
    result.add_argument("--algorithm", choices=tuple(ALGORITHMS), default="overlap_search")
    result.add_argument(
        "--lost-nodes",
        type=int,
        action="append",
        metavar="K",
        help="number of nodes that are lost together; may be given several times (default: 1 and 2)",
    )
    result.add_argument(
        "--survival-share",
        type=float,
        metavar="SHARE",
        help="for overlap_search: share of the slots whose copies are placed only for survival (default: 0)",
    )
    result.add_argument(
        "--curve",
        action="store_true",
        help="print survival and balance for each number of slots up to --slots-per-node and several values of "
        "--survival-share, instead of one plan; --plot draws them",
    )
    result.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    result.add_argument("--plot", type=Path, metavar="FILE.png", help="draw slots and survival curves into this file")
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Placement plan. ``joint`` has, for each number of lost nodes, the probability that no layer loses an expert."""

    allocations: tuple[Allocation, ...]
    """Replica counts of experts, computed for each layer. Empty if the command line gives the replica counts."""
    plan: PlacementPlan
    layers: tuple[tuple[Survival, ...], ...]
    """Probability that every expert still has a replica, for each layer and each number of lost nodes."""
    joint: tuple[Survival, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document that ``--json`` prints."""
        layers = [
            {
                "replica_counts": list(self.plan.replica_counts(layer)),
                "placement": [list(experts) for experts in self.plan.slots[layer]],
                "survival": {str(value.num_lost): value.probability for value in values},
            }
            for layer, values in enumerate(self.layers)
        ]
        document: dict[str, Any] = {
            "layers": layers,
            "survival": {str(value.num_lost): value.probability for value in self.joint},
        }
        if self.allocations:
            document["min_replicas"] = [allocation.min_replicas for allocation in self.allocations]
        estimates = {
            f"{scope}{value.num_lost}": list(value.interval)
            for scope, values in [("joint ", self.joint), *((f"layer {n} ", v) for n, v in enumerate(self.layers))]
            for value in values
            if value.interval is not None
        }
        return document | ({"monte_carlo_intervals": estimates} if estimates else {})


def plan(options: argparse.Namespace) -> Result:
    """Compute replica counts and a placement as the command line requests."""
    check(options)
    lost, cluster = lost_of(options), Cluster.of(options.num_nodes, 1)
    loads, allocations, counts = demand(options)
    algorithm = chosen_algorithm(options, lost)
    placed = algorithm.place(
        counts,
        cluster,
        num_slots_per_rank=options.slots_per_node,
        loads=loads,
        min_replicas=None if loads is None else floor_of(options),
    )
    layers = tuple(
        survival(placed.expert_domains(layer), cluster.failure_domains, lost) for layer in range(len(placed.slots))
    )
    joint = survival(placed.all_expert_domains(), cluster.failure_domains, lost)
    return Result(allocations=allocations, plan=placed, layers=layers, joint=joint)


def check(options: argparse.Namespace) -> None:
    """Check the options of the command line. Raise a ConfigError for an impossible number or combination."""
    for key in ("num_nodes", "slots_per_node", "min_replicas"):
        value = getattr(options, key)
        if value is not None and value < 1:
            raise ConfigError.of(flag(key), value, "must be at least 1")
    if options.min_replicas is not None and options.min_replicas > options.num_nodes:
        raise ConfigError.of(
            "--min-replicas", options.min_replicas, f"must be at most {options.num_nodes}, the value of --num-nodes"
        )
    for lost in options.lost_nodes or ():
        if not 0 <= lost <= options.num_nodes:
            raise ConfigError.of("--lost-nodes", lost, f"must be 0 to {options.num_nodes}, the value of --num-nodes")
    if options.iteration is not None and options.loads is None:
        raise ConfigError.of("--iteration", options.iteration, "needs --loads")
    if options.curve and (options.loads is None or options.algorithm != "overlap_search"):
        raise ConfigError.of("--curve", "true", "needs --loads and --algorithm=overlap_search")
    if options.survival_share is not None and (options.algorithm != "overlap_search" or options.curve):
        constraint = "can only be used with --algorithm=overlap_search and without --curve"
        raise ConfigError.of("--survival-share", options.survival_share, constraint)


def lost_of(options: argparse.Namespace) -> tuple[int, ...]:
    """Return the numbers k for which the tool computes the probability to survive a loss of k nodes at once."""
    return tuple(dict.fromkeys(options.lost_nodes or [k for k in (1, 2) if k <= options.num_nodes]))


def floor_of(options: argparse.Namespace) -> int:
    """Return the minimum number of replicas of each expert."""
    return min(DEFAULT_MIN_REPLICAS, options.num_nodes) if options.min_replicas is None else int(options.min_replicas)


def flag(name: str) -> str:
    """Return the command-line option whose value is the field ``name`` of the parsed options."""
    return f"--{name.replace('_', '-')}"


def demand(
    options: argparse.Namespace,
) -> tuple[list[list[float]] | None, tuple[Allocation, ...], list[tuple[int, ...]]]:
    """Return loads, allocations (computed numbers of replicas) and replica counts of all layers. With the option
    ``--replica-counts``, which gives the counts of one layer, return None, no allocations and these counts."""
    num_slots = options.num_nodes * options.slots_per_node
    if options.replica_counts is not None:
        counts = parse_counts(options.replica_counts)
        if len(counts) > num_slots:
            raise ConfigError.of("num_experts", len(counts), f"must be at most {num_slots}, the total number of slots")
        floor = options.min_replicas
        for expert, count in enumerate(counts):
            if floor is not None and count < floor:
                raise ConfigError.of(f"replica_counts[{expert}]", count, f"must be at least --min-replicas={floor}")
        return None, (), [counts]
    loads = read_loads(options).tolist()
    allocations = tuple(allocate(layer, num_slots, floor_of(options), num_domains=options.num_nodes) for layer in loads)
    return loads, allocations, [allocation.replica_counts for allocation in allocations]


def parse_counts(text: str) -> tuple[int, ...]:
    """Parse ``2,3,3`` as integers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError.of("--replica-counts", text, "must be integers separated by commas") from None


def read_loads(options: argparse.Namespace) -> Tokens:
    """Read recorded tokens per expert, ``[layers, experts]``: of ``--iteration``; if not given, sums of iterations."""
    recorded = ExpertLoads.read(options.loads)
    return recorded.per_layer(None if options.iteration is None else recorded.record_of(options.iteration))


def chosen_algorithm(options: argparse.Namespace, lost: Sequence[int]) -> PlacementAlgorithm:
    """Return the chosen placement algorithm. ``overlap_search`` maximizes the probabilities to survive k lost nodes,
    for each k in ``lost`` with equal weight."""
    if options.algorithm != "overlap_search":
        return ALGORITHMS[options.algorithm]()
    return search_for(lost, options.num_nodes, options.survival_share or 0.0)


def search_for(lost: Sequence[int], num_nodes: int, survival_share: float = 0.0) -> OverlapSearch:
    """Return an ``OverlapSearch`` that maximizes the probabilities to survive k lost nodes, for each k in ``lost``."""
    weights = tuple(float(k in lost) for k in range(1, num_nodes + 1))
    objective = SurvivalObjective(lost_weights=weights) if any(weights) else SurvivalObjective()
    return OverlapSearch(objective=objective, survival_share=survival_share)


def curve(options: argparse.Namespace) -> list[TradeoffPoint]:
    """Compute survival probability and load balance for each number of slots per node, up to ``--slots-per-node``. The
    smallest number of slots is just enough for the minimum number of replicas of every expert."""
    check(options)
    lost, loads = lost_of(options), read_loads(options).tolist()
    fewest = min(-(-floor_of(options) * len(loads[0]) // options.num_nodes), options.slots_per_node)
    return list(
        tradeoff(
            search_for(lost, options.num_nodes),
            loads,
            Cluster.of(options.num_nodes, 1),
            slots=range(fewest, options.slots_per_node + 1),
            min_replicas=floor_of(options),
            lost=lost,
        )
    )


def curve_table(points: Sequence[TradeoffPoint]) -> str:
    """Format the results of ``curve`` as a table: a row for each number of slots and each ``survival_share`` (share of
    the slots whose copies are placed so that experts survive losses of nodes)."""
    lost = "".join(f"{value.num_lost:>3} lost" for value in points[0].survival)
    lines = [f"slots  survival_share  busiest/mean  worst layer  survival{lost}"]
    for point in points:
        values = "".join(f"{value.probability:>8.4f}" for value in point.survival)
        figures = f"{point.imbalance:>14.3f}{point.worst_imbalance:>13.3f}"
        lines.append(f"{point.num_slots:>5}{point.survival_share:>16g}{figures}  {'':8}{values}")
    return "\n".join(lines)


def draw_curve(points: Sequence[TradeoffPoint], path: Path) -> None:
    """Draw load imbalance against the probability to survive lost nodes, with a line for each number of slots."""
    figure = new_figure()
    axes = figure.subplots()
    for num_slots in sorted({point.num_slots for point in points}):
        chosen = [point for point in points if point.num_slots == num_slots]
        survive = [point.survival[-1].probability for point in chosen]
        axes.plot(survive, [point.imbalance for point in chosen], marker="o", label=f"{num_slots} slots")
    axes.set(
        xlabel=f"survival of {points[0].survival[-1].num_lost} lost nodes", ylabel="tokens of the busiest rank / mean"
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def table(result: Result) -> str:
    """Format the survival probabilities as text, followed by the replica counts and slots of each layer."""
    lines = [result.plan.summary()]
    lowered = {allocation.min_replicas for allocation in result.allocations if allocation.lowered}
    if lowered:
        wanted = result.allocations[0].requested_min_replicas
        lines.append(
            f"too few slots: the smallest number of replicas of any expert is {min(lowered)} instead of {wanted}"
        )
    lines += ["", "survival        " + "".join(f"{value.num_lost:>3} lost" for value in result.joint)]
    for number, values in enumerate(result.layers, start=1):
        lines.append(f"  layer {number:<8}" + "".join(f"{value.probability:>8.4f}" for value in values))
    lines.append("  all layers    " + "".join(f"{value.probability:>8.4f}" for value in result.joint))
    for value in result.joint:
        if value.interval is not None:
            low, high = value.interval
            lines.append(f"  {value.num_lost} lost: an estimate between {low:.4f} and {high:.4f} (99.9 %)")
    for number, by_rank in enumerate(result.plan.slots, start=1):
        counts = ",".join(str(count) for count in result.plan.replica_counts(number - 1))
        lines += ["", f"layer {number}: replicas {counts}"]
        lines += [f"  node {node:<4} {' '.join(str(e) for e in experts)}" for node, experts in enumerate(by_rank)]
    return "\n".join(lines)


def new_figure() -> "Figure":
    """Return an empty figure. Raise a SoftwareError if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise SoftwareError("--plot needs matplotlib, which `make docs-deps` installs") from error
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    return Figure(figsize=(11, 4.2), layout="constrained")


def plot(result: Result, path: Path) -> None:
    """Draw the replicas of the first layer per node, and survival probabilities over the number of lost nodes."""
    figure = new_figure()
    left, right = figure.subplots(1, 2)
    matrix = result.plan.replicas_per_rank(0)
    image = left.imshow(matrix, aspect="auto", cmap="Blues", interpolation="nearest")
    left.set(xlabel="node", ylabel="expert", title="Replicas of the first layer")
    figure.colorbar(image, ax=left, label="replicas")
    lost, layers, joint = curves(result)
    for values in layers:
        right.plot(lost, values, color="tab:gray", alpha=0.4, linewidth=1)
    right.plot(lost, joint, color="tab:blue", marker="o", label="all layers together")
    right.plot([], [], color="tab:gray", label="each layer alone")
    right.set(xlabel="nodes lost together", ylabel="probability of survival", ylim=(-0.02, 1.02), title="Survival")
    right.legend()
    right.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def curves(result: Result) -> tuple[list[int], list[list[float]], list[float]]:
    """Return numbers of lost nodes, and for each the survival probability of each layer and of all layers jointly."""
    num_nodes = len(result.plan.ranks)
    if num_nodes > MAX_CURVE_NODES:
        rows = [[value.probability for value in values] for values in result.layers]
        return [v.num_lost for v in result.joint], rows, [v.probability for v in result.joint]
    lost, domains = list(range(num_nodes + 1)), result.plan.domains
    rows = [
        [value.probability for value in survival(result.plan.expert_domains(layer), domains, lost)]
        for layer in range(len(result.plan.slots))
    ]
    return lost, rows, [v.probability for v in survival(result.plan.all_expert_domains(), domains, lost)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = parser().parse_args(arguments)
    try:
        if options.curve:
            points = curve(options)
            if options.plot is not None:
                draw_curve(points, options.plot)
            print(json.dumps([asdict(point) for point in points]) if options.json else curve_table(points))
            return 0
        result = plan(options)
        if options.plot is not None:
            plot(result, options.plot)
    except MegatronFtError as error:
        print(f"plan_placement: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(result.to_json()) if options.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
