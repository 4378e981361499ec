"""Computes the number of replicas of each expert in a layer, in proportion to its tokens but at least a minimum. The
replicas consist of base copies, placed so that experts survive losses of domains, and extra copies, placed by load.

Every expert has the same small number of base copies. All layers place them in the same way, because the model is lost
as soon as one layer is lost. Base copies do not depend on loads, so they move only if the membership changes. Extra
copies never reduce survival, so they can be placed by load. Extra copies also connect the small groups of domains that
share base copies, so that balanced shares (``planning/balanced_shares.py``) can even out the loads of all ranks.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.layout import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Number of replicas of each expert in one layer, and the minimum that every expert has."""

    replica_counts: tuple[int, ...]
    """Number of replicas of each expert, by expert id."""
    min_replicas: int
    """Minimum number of replicas that every expert has."""
    requested_min_replicas: int
    """Minimum number of replicas that was requested; larger than ``min_replicas`` if there are too few slots."""

    @property
    def lowered(self) -> bool:
        """Whether there were too few slots for the requested minimum number of replicas."""
        return self.min_replicas < self.requested_min_replicas

    def validate(self) -> None:
        """Check that every expert has at least ``min_replicas`` replicas, and at least one."""
        for expert, count in enumerate(self.replica_counts):
            if count < max(1, self.min_replicas):
                raise ConfigError.of(
                    f"replica_counts[{expert}]", count, f"must be at least {max(1, self.min_replicas)}"
                )

    def summary(self) -> str:
        floor = f"at least {self.min_replicas}"
        if self.lowered:
            floor += f" (lowered from {self.requested_min_replicas}, because there are too few slots)"
        counts = self.replica_counts
        return f"{sum(counts)} replicas of {len(counts)} experts; replicas of an expert: {floor}, at most {max(counts)}"


def allocate(
    loads: Sequence[float], num_slots: int, min_replicas: int, *, num_domains: int | None = None
) -> Allocation:
    """Distribute ``num_slots`` over experts in proportion to ``loads`` (Lazarus, section 4.1, equation 1).

    In ascending order of load (ties by id), each expert gets ``floor(t_e * S / T)`` of the S remaining slots, but at
    least the minimum. The expert has t_e tokens; T is the number of tokens of this expert and all experts after it. The
    division is of integers, so that rounding of floats has no influence. The sum of all counts is ``num_slots``. In a
    layer without tokens, all experts get about the same count. If there are too few slots, the minimum is
    ``num_slots // num_experts``. A count may exceed the number of nodes or ranks: several replicas on one rank share
    one set of weights.

    Args:
        loads: tokens of each expert, ``[E]``; fractions are used exactly.
        num_slots: number of slots in the whole layer.
        min_replicas: requested minimum number of replicas of each expert, at least 1.
        num_domains: number of failure domains; ``min_replicas`` must not exceed it. None means no such limit.

    Raises:
        ConfigError: a load is negative or not finite, there are more experts than slots, or the minimum is impossible.
    """
    if min_replicas < 1:
        raise ConfigError.of("min_replicas", min_replicas, "must be at least 1")
    if num_domains is not None and min_replicas > num_domains:
        raise ConfigError.of(
            "min_replicas", min_replicas, f"must be at most {num_domains}, the number of failure domains"
        )
    if not loads:
        raise ConfigError.of("num_experts", 0, "must be at least 1")
    if len(loads) > num_slots:
        raise ConfigError.of("num_experts", len(loads), f"must be at most {num_slots}, the number of slots")
    floor = min(min_replicas, num_slots // len(loads))
    tokens = integer_loads(loads)
    if not any(tokens):
        tokens = [1] * len(tokens)
    counts, slots, total = [0] * len(tokens), num_slots, sum(tokens)
    # Experts with small loads come first. If the minimum gives them more slots, all others get proportionally fewer.
    for expert in sorted(range(len(tokens)), key=lambda expert: (tokens[expert], expert)):
        counts[expert] = max(tokens[expert] * slots // total, floor) if total else floor
        slots -= counts[expert]
        total -= tokens[expert]
    return Allocation(replica_counts=tuple(counts), min_replicas=floor, requested_min_replicas=min_replicas)


def integer_loads(loads: Sequence[float]) -> list[int]:
    """Return integers in exactly the same proportions as ``loads``.

    Raises:
        ConfigError: a load is negative or not finite.
    """
    for expert, load in enumerate(loads):
        if not math.isfinite(load) or load < 0:
            raise ConfigError.of(f"loads[{expert}]", load, "must be a finite number of tokens, at least 0")
    if all(int(load) == load for load in loads):
        return [int(load) for load in loads]
    # Every float is a fraction whose denominator is a power of two, so nothing is rounded.
    exact = [Fraction(float(load)) for load in loads]
    scale = math.lcm(*(load.denominator for load in exact))
    return [int(load * scale) for load in exact]


def base_counts(replica_counts: Sequence[int], floor: int, num_slots: int) -> tuple[int, ...]:
    """Return each expert's number of base copies, ``[E]``: ``floor``, and more until ``num_slots`` slots are used.

    Each further copy goes to the expert with the fewest base copies so far. ``replica_counts`` limits the base copies
    of each expert.
    """
    counts = np.asarray(replica_counts, dtype=np.int64)
    base = np.minimum(counts, floor)
    while (spare := num_slots - int(base.sum())) > 0 and (growing := np.nonzero(base < counts)[0]).size:
        lowest = growing[base[growing] == base[growing].min()]
        base[lowest[:spare]] += 1
    return tuple(base.tolist())


def base_capacities(capacities: Sequence[int], num_base: int) -> tuple[int, ...]:
    """Divide ``num_base`` slots for base copies among failure domains in proportion to ``capacities``, rounded up."""
    total = sum(capacities)
    return tuple(-(-capacity * num_base // total) for capacity in capacities)


def add_extra_copies(
    base: Counts,
    replica_counts: Sequence[int],
    capacities: Sequence[int],
    loads: Sequence[float],
    held: Counts | None = None,
) -> Counts:
    """Add copies to ``base`` ``[E, D]`` until every slot is in use.

    Experts with the most tokens per copy come first. Each expert gets copies until it has its number in
    ``replica_counts``. A copy goes to the domain with the smallest load per slot among those with a free slot and no
    copy of the expert. If there is no such domain, another expert gets the slot.

    Args:
        replica_counts: number of copies of each expert, ``[E]``.
        capacities: number of slots of each domain, ``[D]``.
        loads: tokens of each expert, ``[E]``.
        held: copies in the previous placement, ``[E, D]``; copies that an expert still needs stay in their domains.
    """
    result = base.copy()
    left = (np.asarray(replica_counts, dtype=np.int64) - base.sum(axis=1)).tolist()
    free = (np.asarray(capacities, dtype=np.int64) - base.sum(axis=0)).tolist()
    weights = np.asarray(loads, dtype=np.float64) / np.asarray(replica_counts)
    order = np.argsort(-weights, kind="stable").tolist()
    if held is not None:
        _keep(result, held, left, free, order)
    # With hundreds of experts and domains almost all entries are 0, so only the other entries are read one by one.
    experts, domains = np.nonzero(result)
    tokens = np.bincount(domains, weights[experts] * result[experts, domains], minlength=len(free))
    sums = (tokens / np.asarray(capacities)).tolist()
    queue = [(sums[domain], domain) for domain, slots in enumerate(free) if slots]
    heapq.heapify(queue)
    ends = np.searchsorted(experts, range(len(order) + 1)).tolist()
    places, weights_of = domains.tolist(), weights.tolist()
    rows: list[int] = []
    columns: list[int] = []
    for expert in order:
        if left[expert]:
            holders = set(places[ends[expert] : ends[expert + 1]])
            chosen = _choose_domains(holders, left[expert], weights_of[expert], queue, free, capacities)
            rows += [expert] * len(chosen)
            columns += chosen
    result[rows, columns] += 1
    _fill_up(result, free, np.asarray(loads, dtype=np.float64))
    return result


def _keep(result: Counts, held: Counts, left: list[int], free: list[int], order: Sequence[int]) -> None:
    experts, domains = np.nonzero(held)
    ends = np.searchsorted(experts, range(len(order) + 1)).tolist()
    places, numbers = domains.tolist(), (held[experts, domains] - result[experts, domains]).tolist()
    for expert in order:
        for position in range(ends[expert], ends[expert + 1]):
            domain = places[position]
            kept = min(numbers[position], left[expert], free[domain])
            if kept > 0:
                result[expert, domain] += kept
                left[expert] -= kept
                free[domain] -= kept


def _choose_domains(
    holders: set[int],
    number: int,
    weight: float,
    queue: list[tuple[float, int]],
    free: list[int],
    capacities: Sequence[int],
) -> list[int]:
    """Return up to ``number`` domains for copies of an expert: the first in ``queue`` that are not in ``holders``.

    Entries of ``queue`` are pairs (load per slot, domain with a free slot).
    """
    passed: list[tuple[float, int]] = []
    chosen: list[int] = []
    while queue and len(chosen) < number:
        entry = heapq.heappop(queue)
        load, domain = entry
        if domain in holders:
            passed.append(entry)
            continue
        chosen.append(domain)
        free[domain] -= 1
        if free[domain]:
            passed.append((load + weight / capacities[domain], domain))
    for entry in passed:
        heapq.heappush(queue, entry)
    return chosen


def _fill_up(result: Counts, free: list[int], loads: npt.NDArray[np.float64]) -> None:
    """Fill each free slot with an expert that has the fewest copies in the slot's domain. Of several, take the one with
    the most tokens per copy. A first copy in a domain helps more than a second copy of another expert."""
    for domain, slots in enumerate(free):
        for _ in range(slots):
            fewest = np.nonzero(result[:, domain] == result[:, domain].min())[0]
            per_copy = loads[fewest] / result[fewest].sum(axis=1)
            result[fewest[per_copy.argmax()], domain] += 1


def match_domains(base: Sequence[Counts], held: Sequence[Counts], capacities: Sequence[int]) -> list[Counts]:
    """Exchange the copies of whole domains with equal numbers of slots, in all layers alike, so that few copies move.

    Args:
        base: base copies of each layer, ``[L][E, D]``.
        held: copies in the previous placement, ``[L][E, D]``.
        capacities: number of slots of each domain, ``[D]``.
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
