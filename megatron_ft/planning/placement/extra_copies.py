"""Replicas in two parts: base copies are placed for survival, extra copies by load.

Base copies are the minimum of every expert, alike in all layers, so that layers fail together; they do not depend on
loads and never move while the membership lasts. Extra copies only add holders: wherever they are, the model survives
every loss that its base copies survive. They are placed by load, and connect the small groups of domains that share
base copies, so that balanced shares (``planning/balanced_shares.py``) can even out the loads of ranks.
"""

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_ft.planning.placement.layout import Counts

Integers = npt.NDArray[np.int64]


def base_counts(replica_counts: Sequence[int], floor: int, num_slots: int) -> tuple[int, ...]:
    """Base copies of each expert ``[E]``: at least ``floor``, and more in ``num_slots``, first where there are fewest.

    No expert has more base copies than copies.
    """
    counts = np.asarray(replica_counts, dtype=np.int64)
    base = np.minimum(counts, floor)
    while (spare := num_slots - int(base.sum())) > 0 and (growing := np.nonzero(base < counts)[0]).size:
        lowest = growing[base[growing] == base[growing].min()]
        base[lowest[:spare]] += 1
    return tuple(base.tolist())


def base_capacities(capacities: Sequence[int], num_base: int) -> tuple[int, ...]:
    """Slots of each domain for ``num_base`` base copies, in proportion to its slots, rounded up."""
    total = sum(capacities)
    return tuple(-(-capacity * num_base // total) for capacity in capacities)


def add_extra_copies(
    base: Counts,
    replica_counts: Sequence[int],
    capacities: Sequence[int],
    loads: Sequence[float],
    held: Counts | None = None,
) -> Counts:
    """Add the copies that ``base`` ``[E, D]`` lacks, the heaviest first, each to the domain with least load for its
    slots that has no copy of its expert.

    Args:
        replica_counts: all copies of each expert, ``[E]``.
        capacities: slots of each domain, ``[D]``.
        loads: tokens of each expert, ``[E]``.
        held: copies before, ``[E, D]``: those that are still wanted stay where they are.
    """
    result = base.copy()
    left = np.asarray(replica_counts, dtype=np.int64) - base.sum(axis=1)
    vacant = np.asarray(capacities, dtype=np.int64) - base.sum(axis=0)
    weights = np.asarray(loads, dtype=np.float64) / np.asarray(replica_counts)
    order = np.argsort(-weights, kind="stable").tolist()
    if held is not None:
        _keep(result, held, left, vacant, order)
    sums = weights @ result
    queue = [(float(sums[domain] / capacities[domain]), domain) for domain in np.nonzero(vacant)[0].tolist()]
    heapq.heapify(queue)
    for expert in order:
        for _ in range(int(left[expert])):
            _add_copy(result[expert], float(weights[expert]), queue, vacant, capacities)
    return result


def _keep(result: Counts, held: Counts, left: Integers, vacant: Integers, order: Sequence[int]) -> None:
    for expert in order:
        for domain in np.nonzero(held[expert] > result[expert])[0].tolist():
            kept = min(int(held[expert, domain] - result[expert, domain]), int(left[expert]), int(vacant[domain]))
            result[expert, domain] += kept
            left[expert] -= kept
            vacant[domain] -= kept


def _add_copy(
    copies: Counts,
    weight: float,
    queue: list[tuple[float, int]],
    vacant: Integers,
    capacities: Sequence[int],
) -> None:
    """Add a copy to a domain of ``queue``, whose entries are (load for each slot, domain) with a vacant slot."""
    passed = []
    while queue and copies[queue[0][1]]:
        passed.append(heapq.heappop(queue))
    # Where every domain with a vacant slot has a copy of the expert, the least loaded takes another one.
    load, domain = heapq.heappop(queue) if queue else passed.pop(0)
    copies[domain] += 1
    vacant[domain] -= 1
    if vacant[domain]:
        passed.append((load + weight / capacities[domain], domain))
    for entry in passed:
        heapq.heappush(queue, entry)


def match_domains(base: Sequence[Counts], held: Sequence[Counts], capacities: Sequence[int]) -> list[Counts]:
    """Exchange domains of equal capacity, in all layers alike, so that as many base copies as possible are there.

    Args:
        base: base copies of each layer, ``[L][E, D]``.
        held: copies before, ``[L][E, D]``.
        capacities: slots of each domain, ``[D]``.
    """
    if all((old >= new).all() for new, old in zip(base, held, strict=True)):
        return list(base)
    from scipy.optimize import linear_sum_assignment  # importing it takes a third of a second

    present = sum(
        np.minimum(old, 1).T.astype(np.float64) @ np.minimum(new, 1) for new, old in zip(base, held, strict=True)
    )
    sizes = np.asarray(capacities)
    source = np.arange(len(sizes))
    for size in np.unique(sizes):
        alike = np.nonzero(sizes == size)[0]
        rows, columns = linear_sum_assignment(-np.asarray(present)[np.ix_(alike, alike)])
        source[alike[rows]] = alike[columns]
    return [layer[:, source] for layer in base]
