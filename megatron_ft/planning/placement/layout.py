"""``Layout``: slots of ranks and failure domains, and the assignment of a domain's replicas to its ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ft.errors import ConfigError
from megatron_ft.topology import Cluster

Counts = npt.NDArray[np.int64]
"""``[E, D]``: replicas of each expert in each failure domain."""
Holdings = tuple[tuple[frozenset[int], ...], ...]
"""Experts whose state each rank holds, as ``[layer][rank]`` in a plan's order of ranks; a joining rank holds none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Ranks with slots, in order, and the failure domain of each."""

    ranks: tuple[int, ...]
    """Global ranks."""
    domains: tuple[str, ...]
    """Failure domains in order of their first rank."""
    domain_of: tuple[int, ...]
    """Index into ``domains`` of each entry of ``ranks``."""
    num_slots_per_rank: int

    @classmethod
    def of(cls, cluster: Cluster, num_slots_per_rank: int, ranks: Sequence[int] | None = None) -> "Layout":
        """Make the layout of ``ranks``, or of all ranks on nodes that are alive.

        Raises:
            ConfigError: no slots, no ranks, or a rank of a lost node.
        """
        if num_slots_per_rank < 1:
            raise ConfigError.of("num_slots_per_rank", num_slots_per_rank, "must be at least 1")
        alive = [rank for node in sorted(cluster.alive) for rank in cluster.ranks_of(node)]
        chosen = tuple(alive if ranks is None else ranks)
        if not chosen:
            raise ConfigError.of("ranks", "[]", "must name at least one rank of a living node")
        for rank in chosen:
            if cluster.node_of(rank) not in cluster.alive:
                raise ConfigError.of("ranks", rank, "must run on a node that is alive")
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
        """Failure domains with at least one rank."""
        return len(self.domains)

    @property
    def num_slots(self) -> int:
        """Slots of a layer over all ranks."""
        return len(self.ranks) * self.num_slots_per_rank

    def capacities(self) -> tuple[int, ...]:
        """Slots of each failure domain."""
        return tuple(int(count) * self.num_slots_per_rank for count in np.bincount(self.domain_of))

    def check_counts(self, replica_counts: Sequence[int]) -> None:
        """Check that counts give every expert a replica and do not exceed the slots. Raises ConfigError."""
        for expert, count in enumerate(replica_counts):
            if count < 1:
                raise ConfigError.of(f"replica_counts[{expert}]", count, "must be at least 1: each expert needs a slot")
        if sum(replica_counts) > self.num_slots:
            what = f"must add up to at most {self.num_slots}: {len(self.ranks)} ranks x {self.num_slots_per_rank} slots"
            raise ConfigError.of("replica_counts", list(replica_counts), what)

    def deal(
        self, counts: Counts, loads: Sequence[float] | None = None, held: Sequence[frozenset[int]] | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Assign the replicas of each domain to its ranks; return expert ids by rank, ascending.

        The heaviest replicas come first, each to the rank of its domain with a free slot and the smallest load so far,
        ties to the rank with the fewest replicas. Without ``loads`` all replicas have the same weight. A rank first
        takes what it holds (``held``, by rank).
        """
        weights = per_replica_loads(counts, loads)
        members: list[list[int]] = [[] for _ in self.domains]
        for position, domain in enumerate(self.domain_of):
            members[domain].append(position)
        slots: list[list[int]] = [[] for _ in self.ranks]
        order = np.argsort(-weights, kind="stable")
        domains, places = np.nonzero(counts[order].T)
        replicas = counts[order[places], domains]
        experts = np.repeat(order[places], replicas).tolist()
        ends = np.cumsum(counts.sum(axis=0)).tolist()
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
        for expert in experts:
            free = (position for position in positions if len(slots[position]) < self.num_slots_per_rank)
            # Among equal loads the rank with fewest replicas: without loads all sums would decide by position alone.
            chosen = min(free, key=lambda position: (sums[position], len(slots[position]), position))
            slots[chosen].append(expert)
            sums[chosen] += weights[expert]


def _take(experts: list[int], held: frozenset[int], most: int) -> list[int]:
    """Remove one replica of each expert of ``held`` from ``experts``; return the removed ones, at most ``most``."""
    taken: list[int] = []
    for expert in sorted(held):
        if expert in experts and len(taken) < most:
            experts.remove(expert)
            taken.append(expert)
    return taken


def per_replica_loads(counts: Counts, loads: Sequence[float] | None) -> npt.NDArray[np.float64]:
    """Tokens of one replica of each expert, ``[E]``; ones without ``loads``."""
    if loads is None:
        return np.ones(counts.shape[0])
    # The dispatcher gives the replicas of an expert equal shares of its tokens.
    return np.asarray(np.asarray(loads, dtype=np.float64) / np.maximum(counts.sum(axis=1), 1))
