"""``Layout``: ranks with slots, and their failure domains. It assigns a domain's replicas to the domain's ranks."""

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from megatron_ft.config.placement import BALANCED
from megatron_ft.errors import ConfigError
from megatron_ft.planning.balanced_shares import least_load
from megatron_ft.topology import Cluster

Counts = npt.NDArray[np.int64]
"""Number of replicas of each expert in each failure domain, ``[E, D]``."""
Holdings = tuple[tuple[frozenset[int], ...], ...]
"""Experts whose state each rank has, ``[layer][rank]``, in the rank order of a plan; empty for joining ranks."""
OtherHoldings = Mapping[int, Sequence[frozenset[int]]]
"""Experts of one stage that ranks of other stages hold, by rank and layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Ranks that have slots, and the failure domain of each rank."""

    ranks: tuple[int, ...]
    """Global ranks that have slots."""
    domains: tuple[str, ...]
    """Failure domains in order of their first rank."""
    domain_of: tuple[int, ...]
    """Failure domain of each entry of ``ranks``, as an index of ``domains``."""
    num_slots_per_rank: int

    @classmethod
    def of(cls, cluster: Cluster, num_slots_per_rank: int, ranks: Sequence[int] | None = None) -> "Layout":
        """Create the layout of ``ranks``, or of all ranks on nodes that are alive.

        Raises:
            ConfigError: there are no slots or no ranks, or a rank is on a lost node.
        """
        if num_slots_per_rank < 1:
            raise ConfigError.of("num_slots_per_rank", num_slots_per_rank, "must be at least 1")
        alive = [rank for rank, node in enumerate(cluster.nodes) if node in cluster.alive]
        chosen = tuple(alive if ranks is None else ranks)
        if not chosen:
            raise ConfigError.of("ranks", "[]", "must contain at least one rank on a node that is alive")
        for rank in chosen:
            if cluster.node_of(rank) not in cluster.alive:
                raise ConfigError.of("rank", rank, "must be on a node that is alive")
        names = [cluster.failure_domains[cluster.node_of(rank)] for rank in chosen]
        domains = tuple(dict.fromkeys(names))
        index = {name: position for position, name in enumerate(domains)}
        return cls(
            ranks=chosen,
            domains=domains,
            domain_of=tuple(index[name] for name in names),
            num_slots_per_rank=num_slots_per_rank,
        )

    @property
    def num_domains(self) -> int:
        """Number of failure domains with at least one rank."""
        return len(self.domains)

    @property
    def num_slots(self) -> int:
        """Number of slots of all ranks together in one layer."""
        return len(self.ranks) * self.num_slots_per_rank

    def capacities(self) -> tuple[int, ...]:
        """Return the number of slots of each failure domain in one layer."""
        return tuple(int(count) * self.num_slots_per_rank for count in np.bincount(self.domain_of))

    def check_counts(self, replica_counts: Sequence[int]) -> None:
        """Check that every expert has a replica and that all replicas fit into the slots. Raises ConfigError if not."""
        for expert, count in enumerate(replica_counts):
            if count < 1:
                raise ConfigError.of(f"replica_counts[{expert}]", count, "must be at least 1: each expert needs a slot")
        if sum(replica_counts) > self.num_slots:
            slots = f"{len(self.ranks)} ranks x {self.num_slots_per_rank} slots"
            what = f"must have a sum of at most {self.num_slots} ({slots})"
            raise ConfigError.of("replica_counts", list(replica_counts), what)

    def deal(
        self, counts: Counts, loads: Sequence[float] | None = None, held: Sequence[frozenset[int]] | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Assign the replicas of each domain to the ranks in it; return the expert ids of each rank, ascending.

        Replicas with the largest loads come first. Each replica goes to the rank with a free slot and the smallest load
        so far; ties go to the rank with the fewest replicas. Without ``loads``, all replicas have the same load.
        Experts that a rank already has (``held``, by rank) are assigned to this rank before all others.
        """
        weights = per_replica_loads(counts, loads)
        members: list[list[int]] = [[] for _ in self.domains]
        for position, domain in enumerate(self.domain_of):
            members[domain].append(position)
        slots: list[list[int]] = [[] for _ in self.ranks]
        order = np.argsort(-weights, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        held_experts, domains = np.nonzero(counts)
        sequence = np.lexsort((place[held_experts], domains))
        held_experts, domains = held_experts[sequence], domains[sequence]
        replicas = counts[held_experts, domains]
        experts = np.repeat(held_experts, replicas).tolist()
        ends = np.cumsum(np.bincount(np.repeat(domains, replicas), minlength=len(members))).tolist()
        loads_of = weights.tolist()
        for first, last, positions in zip([0, *ends], ends, members, strict=False):
            self._deal_domain(experts[first:last], loads_of, positions, slots, held)
        return tuple(tuple(sorted(experts)) for experts in slots)

    def _deal_domain(
        self,
        experts: list[int],
        weights: list[float],
        positions: list[int],
        slots: list[list[int]],
        held: Sequence[frozenset[int]] | None,
    ) -> None:
        if len(positions) == 1:
            slots[positions[0]] = experts
            return
        sums = dict.fromkeys(positions, 0.0)
        if held is not None:
            experts = list(experts)
            for position in positions:
                slots[position] = _take(experts, held[position], self.num_slots_per_rank)
                sums[position] = sum(weights[expert] for expert in slots[position])
        free = (position for position in positions if len(slots[position]) < self.num_slots_per_rank)
        queue = [(sums[position], len(slots[position]), position) for position in free]
        heapq.heapify(queue)
        for expert in experts:
            # A second copy on a rank has no benefit. With equal loads, the rank with the fewest replicas comes first.
            passed = []
            while queue and expert in slots[queue[0][2]]:
                passed.append(heapq.heappop(queue))
            load, number, position = heapq.heappop(queue) if queue else passed.pop(0)
            slots[position].append(expert)
            if number + 1 < self.num_slots_per_rank:
                passed.append((load + weights[expert], number + 1, position))
            for entry in passed:
                heapq.heappush(queue, entry)


def _take(experts: list[int], held: frozenset[int], most: int) -> list[int]:
    """Remove from ``experts`` one replica of each expert in ``held``, ``most`` replicas at most, and return them."""
    taken: list[int] = []
    for expert in sorted(held):
        if expert in experts and len(taken) < most:
            experts.remove(expert)
            taken.append(expert)
    return taken


def per_replica_loads(counts: Counts, loads: Sequence[float] | None) -> npt.NDArray[np.float64]:
    """Return the number of tokens of one replica of each expert, ``[E]``; 1 if ``loads`` is None."""
    if loads is None:
        return np.ones(counts.shape[0])
    # An estimate: the dispatcher gives the replicas of an expert equal shares only with placement.shares=even.
    return np.asarray(np.asarray(loads, dtype=np.float64) / np.maximum(counts.sum(axis=1), 1))


def _filled_slots(by_rank: Sequence[Collection[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the expert and the rank of each slot that is in use, from the experts of each rank."""
    experts = np.fromiter(chain.from_iterable(by_rank), dtype=np.int64)
    return experts, np.repeat(np.arange(len(by_rank)), [len(held) for held in by_rank])


def copies_per_rank(
    by_rank: Sequence[Collection[int]], num_experts: int, column_of: Sequence[int] | None = None
) -> Counts:
    """Return the number of copies of each expert on each rank, ``[E, N]``, from the experts in the slots of each rank.
    If ``column_of`` gives the failure domain of each rank, return the copies in each domain, ``[E, D]``."""
    num_columns = len(by_rank) if column_of is None else max(column_of) + 1
    experts, ranks = _filled_slots(by_rank)
    columns = ranks if column_of is None else np.asarray(column_of)[ranks]
    flat = np.bincount(experts * num_columns + columns, minlength=num_experts * num_columns)
    return flat.reshape(num_experts, num_columns)


def even_tokens(by_rank: Sequence[Sequence[int]], load: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return the number of tokens of each rank in a layer, ``[N]``, if all copies of an expert get equal shares.

    Args:
        by_rank: experts in the slots of each rank, ``[N][slots]``.
        load: tokens of each expert, ``[E]``.
    """
    experts, ranks = _filled_slots(by_rank)
    per_copy = np.asarray(load, dtype=np.float64) / np.maximum(np.bincount(experts, minlength=len(load)), 1)
    return np.asarray(np.bincount(ranks, per_copy[experts], minlength=len(by_rank)), dtype=np.float64)


def busiest_tokens(copies: Counts, load: Sequence[float], shares: str = BALANCED) -> float:
    """Return the number of tokens of the busiest rank in a layer.

    Args:
        copies: number of copies of each expert on each rank, ``[E, N]``.
        load: tokens of each expert, ``[E]``.
        shares: value of ``placement.shares``.
    """
    if shares == BALANCED:
        return least_load(load, copies)
    return float((per_replica_loads(copies, load) @ copies).max())
