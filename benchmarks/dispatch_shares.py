"""Claim ``dispatch-shares``: balanced shares reach the bound of the linear program, equally on all ranks and backends.

A case has a placement and the number of tokens of every rank for every expert, for one layer and microbatch. Cases are
random or recorded. In recorded cases, the placement is planned from earlier records than those that are dispatched. The
rule ``balanced`` divides the tokens of an expert over its replicas. A linear program computes the bound independently
of the rule: no division, even of single tokens into fractions, gives the rank with the most tokens a smaller load.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import recorded
from benchmarks.planner_speed import recorded_layers
from benchmarks.report import finish, parse_arguments
from megatron_ft.planning.dispatch import quotas
from megatron_ft.planning.placement.algorithm import PlacementAlgorithm
from megatron_ft.planning.placement.allocation import allocate
from megatron_ft.planning.placement.maximum_rank_overlap import MaximumRankOverlap
from megatron_ft.planning.placement.overlap_search import OverlapSearch
from megatron_ft.planning.placement.spread import Spread
from megatron_ft.topology import Cluster

ID = "dispatch-shares"
CASES, QUICK_CASES = 2000, 100
MAX_ROWS = 1.1
MAX_SECONDS = 0.0005
TIMED_RANKS, STATED_RANKS = 64, 1024
TIMED_SLOTS = {TIMED_RANKS: 8, STATED_RANKS: 2}
REPEATS, QUICK_REPEATS = 15, 5
TIMED_LAYERS, QUICK_TIMED_LAYERS = 58, 4
RECORDED_SLOTS, MIN_REPLICAS, RECORDS_SEEN = 6, 2, 20
CASES_PER_PLAN = 50
ALGORITHMS: tuple[PlacementAlgorithm, ...] = (
    OverlapSearch(num_kicks=0),
    Spread(),
    MaximumRankOverlap(),
)
THRESHOLD = (
    f"fullest rank less than one token above the bound in every case, equal on all ranks and backends, "
    f"rows sent <= {MAX_ROWS:g}x even shares, <= {MAX_SECONDS * 1e3:g} CPU ms at 256 experts on {TIMED_RANKS} ranks"
)

Matrix = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Tokens and placement of one layer and microbatch."""

    kind: str
    tokens: Matrix
    """Number of tokens of each expert on each rank, [experts, ranks]."""
    replicas: Matrix
    """Number of replicas of each expert on each rank, [experts, ranks]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Figures of one case."""

    kind: str
    fullest: int
    """Number of tokens of the rank with most tokens."""
    even_fullest: int
    bound: float
    rows: int
    """Number of rows (a token for one expert) that are sent to another rank."""
    even_rows: int
    is_equal: bool
    """Whether all ranks and backends compute the same shares."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, measure and judge all cases."""
    arguments = parse_arguments(__doc__, argv)
    num_cases = QUICK_CASES if arguments.quick else CASES
    generator = np.random.default_rng(18)
    cases = [random_case(generator) for _ in range(num_cases // 2)]
    cases += recorded_cases(generator, num_cases - len(cases))
    backends = open_backends()
    outcomes = [measure(case, backends, generator) for case in cases]
    milliseconds = {num_ranks: timed(num_ranks, arguments.quick) for num_ranks in TIMED_SLOTS}
    above = max(outcome.fullest - outcome.bound for outcome in outcomes)
    rows = {kind: total(outcomes, kind, "rows") / total(outcomes, kind, "even_rows") for kind in ("random", "recorded")}
    is_equal = all(outcome.is_equal for outcome in outcomes)
    slowest = milliseconds[TIMED_RANKS]["slowest"]
    # The solver's bound has a relative error.
    is_least = all(outcome.fullest < outcome.bound * (1 + 1e-7) + 1 for outcome in outcomes)
    for kind in rows:
        print(in_words(kind, outcomes, rows[kind]))
    return finish(
        arguments.out,
        ID,
        passed=is_least and is_equal and max(rows.values()) <= MAX_ROWS and slowest <= 1e3 * MAX_SECONDS,
        figure=f"at most {max(above, 0.0):.2f} tokens above the bound in {len(outcomes)} cases "
        f"(even shares: {mean_excess(outcomes, 'even_fullest'):.0%} on average); rows sent "
        f"{rows['random']:.3f}x random, {rows['recorded']:.3f}x recorded; {slowest:.2f} ms on {TIMED_RANKS} ranks, "
        f"{milliseconds[STATED_RANKS]['median']:.1f} ms on {STATED_RANKS}",
        threshold=THRESHOLD,
        counts={"cases": len(outcomes), "backends": len(backends), "timed_layers": int(milliseconds[TIMED_RANKS]["n"])},
        details={"milliseconds": milliseconds, "rows": rows, "kinds": {k: summary(outcomes, k) for k in rows}},
    )


def random_case(generator: np.random.Generator) -> Case:
    """Draw sizes, a placement of one of four kinds, and uneven loads. Some ranks may have no tokens."""
    num_experts = int(generator.choice([4, 8, 16, 32, 64, 128]))
    num_ranks = int(generator.choice([2, 3, 4, 8, 16, 32]))
    replicas = random_placement(generator, num_experts, num_ranks)
    weights = (1.0 + generator.permutation(num_experts)) ** -generator.uniform(0.0, 1.6)
    spread = weights / weights.sum() * num_experts * 10 ** generator.uniform(0.0, 3.0) + 1e-6
    per_rank = int(10 ** generator.uniform(0.0, 4.5))
    tokens = np.stack([generator.multinomial(per_rank, generator.dirichlet(spread)) for _ in range(num_ranks)], axis=1)
    if generator.random() < 0.2:
        tokens[:, generator.random(num_ranks) < 0.4] = 0
    return Case(kind="random", tokens=tokens, replicas=replicas)


def random_placement(generator: np.random.Generator, num_experts: int, num_ranks: int) -> Matrix:
    """Return a placement, [experts, ranks]: copies on neighbours in a ring, in closed groups, on random ranks, or in
    random slots."""
    kind = generator.choice(["ring", "groups", "ranks", "slots"])
    copies = int(generator.integers(1, min(num_ranks, 4) + 1))
    replicas = np.zeros((num_experts, num_ranks), dtype=np.int64)
    if kind == "slots":
        num_slots = max(num_experts, num_ranks * int(generator.integers(1, 11)))
        drawn = np.append(np.arange(num_experts), generator.integers(0, num_experts, num_slots - num_experts))
        np.add.at(replicas, (generator.permutation(drawn), np.arange(num_slots) % num_ranks), 1)
        return replicas
    for expert in range(num_experts):
        if kind == "ring":
            holders = (expert * num_ranks // num_experts + np.arange(copies)) % num_ranks
        elif kind == "groups":
            holders = (expert % max(1, num_ranks // copies)) * copies + np.arange(copies)
        else:
            holders = generator.choice(num_ranks, copies, replace=False)
        replicas[expert, holders] = 1
    return replicas


def recorded_cases(generator: np.random.Generator, num_cases: int) -> Iterator[Case]:
    """Draw microbatches of the recorded training run, with placements planned from the previous records."""
    trace = recorded.read(recorded.SMARTMOE)
    cluster, num_slots = Cluster.of(trace.num_ranks, 1), trace.num_ranks * RECORDED_SLOTS
    for number in range(num_cases):
        if number % CASES_PER_PLAN == 0:
            algorithm = ALGORITHMS[number // CASES_PER_PLAN % len(ALGORITHMS)]
            planned = int(generator.integers(RECORDS_SEEN, trace.num_records - RECORDS_SEEN))
            layer = int(generator.integers(trace.num_layers))
            loads = [trace.tokens[planned - RECORDS_SEEN : planned, :, layer].sum(axis=(0, 1, 2)).tolist()]
            counts = [allocate(loads[0], num_slots, MIN_REPLICAS).replica_counts]
            place = partial(algorithm.place, min_replicas=MIN_REPLICAS)
            plan = place(counts, cluster, num_slots_per_rank=RECORDED_SLOTS, loads=loads)
        record = planned + int(generator.integers(RECORDS_SEEN))
        microbatch = int(generator.integers(trace.tokens.shape[3]))
        tokens = np.ascontiguousarray(trace.tokens[record, :, layer, microbatch].T.astype(np.int64))
        yield Case(kind="recorded", tokens=tokens, replicas=plan.replicas_per_rank(0))


def open_backends() -> dict[str, Any]:
    """Open every backend that this machine supports. The keys are their names."""
    import torch

    from megatron_ft.runtime.dispatch.backend import open_backend

    names = ["reference", "cpp", *(["cuda"] if torch.cuda.is_available() else [])]
    return {name: open_backend(name) for name in names}


def measure(case: Case, backends: dict[str, Any], generator: np.random.Generator) -> Outcome:
    """Compute the balanced and even shares of one case, and its bound."""
    balanced = quotas(case.tokens, case.replicas)
    even = quotas(case.tokens, case.replicas, "even")
    return Outcome(
        kind=case.kind,
        fullest=int(balanced.sum(axis=0).max()),
        even_fullest=int(even.sum(axis=0).max()),
        bound=solve(case.tokens, case.replicas),
        rows=int(np.maximum(case.tokens - balanced, 0).sum()),
        even_rows=int(np.maximum(case.tokens - even, 0).sum()),
        is_equal=is_equal(case, balanced, backends, int(generator.integers(case.tokens.shape[1]))),
    )


def is_equal(case: Case, balanced: Matrix, backends: dict[str, Any], chosen: int) -> bool:
    """Return whether the ranks of each backend send and receive according to ``balanced``, and whether each backend
    gives rank ``chosen`` the same schedule as the reference. The reference computes only this schedule, because all its
    schedules follow from ``balanced``."""
    import torch

    counts, replicas = torch.from_numpy(case.tokens), torch.from_numpy(case.replicas)
    expected = backends["reference"].schedule(counts, replicas, chosen)
    for name in [name for name in backends if name != "reference"]:
        device = "cuda" if name == "cuda" else "cpu"
        there = (counts.to(device), replicas.to(device))
        schedules = torch.stack([backends[name].schedule(*there, rank) for rank in range(counts.shape[1])]).cpu()
        sent, received = schedules.unbind(1)
        same = torch.equal(schedules[chosen], expected) and torch.equal(sent.sum(0), torch.from_numpy(balanced))
        if not (same and torch.equal(sent.permute(1, 0, 2), received.permute(1, 2, 0))):
            return False
    return True


def solve(tokens: Matrix, replicas: Matrix) -> float:
    """Solve the linear program. Return the smallest load of the rank with most tokens if tokens can be divided."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix

    experts, ranks = np.nonzero(replicas)
    num_pairs, (num_experts, num_ranks) = len(experts), tokens.shape
    pairs, ones = np.arange(num_pairs), np.ones(num_pairs)
    whole = csr_matrix((ones, (experts, pairs)), shape=(num_experts, num_pairs + 1))
    entries = (np.append(ranks, np.arange(num_ranks)), np.append(pairs, np.full(num_ranks, num_pairs)))
    fits = csr_matrix((np.append(ones, np.full(num_ranks, -1.0)), entries), shape=(num_ranks, num_pairs + 1))
    cost = np.append(np.zeros(num_pairs), 1.0)
    found = linprog(cost, A_ub=fits, b_ub=np.zeros(num_ranks), A_eq=whole, b_eq=tokens.sum(axis=1), method="highs")
    assert found.success, found.message
    return float(found.fun)


def timed(num_ranks: int, quick: bool) -> dict[str, float]:
    """Measure the CPU milliseconds of ``cpp`` for the schedule of one rank, with recorded loads of 256 experts. Take a
    median for each layer; return the median and the largest of these values, and the number of layers."""
    import torch

    from megatron_ft.runtime.dispatch.backend import open_backend

    torch.set_num_threads(1)
    backend, generator = open_backend("cpp"), np.random.default_rng(num_ranks)
    layers = recorded_layers()[: QUICK_TIMED_LAYERS if quick else TIMED_LAYERS]
    slots = TIMED_SLOTS[num_ranks]
    medians = []
    for loads in layers:
        counts = allocate(loads, num_ranks * slots, MIN_REPLICAS).replica_counts
        plan = OverlapSearch(num_kicks=0).place(
            [counts], Cluster.of(num_ranks // 8, 8), num_slots_per_rank=slots, loads=[loads]
        )
        share = np.asarray(loads, dtype=np.float64) / sum(loads)
        tokens = torch.from_numpy(generator.multinomial(8 * 4096, share, num_ranks).T.copy())
        replicas = torch.from_numpy(plan.replicas_per_rank(0))
        spent = []
        for _ in range(QUICK_REPEATS if quick else REPEATS):
            began = time.thread_time()
            backend.schedule(tokens, replicas, 0)
            spent.append(1e3 * (time.thread_time() - began))
        medians.append(statistics.median(spent))
    return {"median": statistics.median(medians), "slowest": max(medians), "n": len(medians)}


def total(outcomes: Sequence[Outcome], kind: str, name: str) -> int:
    """Return the sum of a field over the outcomes of a kind, at least 1."""
    return max(1, sum(getattr(outcome, name) for outcome in outcomes if outcome.kind == kind))


def mean_excess(outcomes: Sequence[Outcome], name: str) -> float:
    """Return the mean over all cases of the share by which the load in the field ``name`` exceeds the bound."""
    return float(np.mean([getattr(o, name) / o.bound - 1.0 for o in outcomes if o.bound > 0]))


def summary(outcomes: Sequence[Outcome], kind: str) -> dict[str, float]:
    """Return the figures of one kind of cases."""
    chosen = [outcome for outcome in outcomes if outcome.kind == kind]
    return {
        "cases": len(chosen),
        "most_tokens_above_bound": max(outcome.fullest - outcome.bound for outcome in chosen),
        "mean_excess": mean_excess(chosen, "fullest"),
        "even_mean_excess": mean_excess(chosen, "even_fullest"),
        "largest_rows_ratio": max(outcome.rows / max(1, outcome.even_rows) for outcome in chosen),
    }


def in_words(kind: str, outcomes: Sequence[Outcome], rows: float) -> str:
    """Describe one kind of cases in one line."""
    found = summary(outcomes, kind)
    return (
        f"{kind:>9}: {found['cases']} cases, fullest rank {found['mean_excess']:.2%} above the bound on average "
        f"(even shares {found['even_mean_excess']:.1%}), rows sent {rows:.3f}x, at most "
        f"{found['largest_rows_ratio']:.2f}x in a case"
    )


if __name__ == "__main__":
    raise SystemExit(main())
