"""Interface of placement algorithms, and the steps that they share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.layout import Counts, Holdings, Layout, per_replica_loads
from megatron_ft.planning.placement.plan import PlacementPlan, Slots
from megatron_ft.topology import Cluster


class PlacementAlgorithm(Protocol):
    """Policy: a frozen dataclass, built from ``placement.algorithm``."""

    def place(
        self,
        replica_counts: Sequence[Sequence[int]],
        cluster: Cluster,
        *,
        num_slots_per_rank: int,
        ranks: Sequence[int] | None = None,
        loads: Sequence[Sequence[float]] | None = None,
        layer_numbers: Sequence[int] | None = None,
        min_replicas: int | None = None,
        previous: Holdings | None = None,
    ) -> PlacementPlan:
        """Assign every replica to a slot.

        Args:
            replica_counts: replicas of each expert of each layer, ``[L][E]``.
            cluster: nodes, their ranks and failure domains, and which nodes are alive.
            num_slots_per_rank: replicas of a layer that a rank can hold.
            ranks: ranks with slots (those of one pipeline stage); None for all ranks that are alive.
            loads: tokens of each expert, ``[L][E]``.
            layer_numbers: Megatron's numbers of the layers; None to count from 1.
            min_replicas: copies of each expert that are there for survival; None for the smallest replica count.
            previous: experts that each of ``ranks`` holds before; an algorithm may leave them where they are.

        Raises:
            ConfigError: counts that do not fit the slots, or an expert without a replica.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementBase(ABC):
    """Base of algorithms that decide how many replicas each failure domain gets; ``place`` is the same for all."""

    name: ClassVar[str]
    """Name of the algorithm in plans."""

    @abstractmethod
    def assign_layers(
        self,
        replica_counts: Sequence[Sequence[int]],
        capacities: Sequence[int],
        loads: Sequence[Sequence[float] | None],
    ) -> list[Counts]:
        """Return replicas per domain ``[E, D]`` of each layer, from replica counts ``[L][E]`` and slots per domain
        ``[D]``."""

    def place(
        self,
        replica_counts: Sequence[Sequence[int]],
        cluster: Cluster,
        *,
        num_slots_per_rank: int,
        ranks: Sequence[int] | None = None,
        loads: Sequence[Sequence[float]] | None = None,
        layer_numbers: Sequence[int] | None = None,
        min_replicas: int | None = None,
        previous: Holdings | None = None,
    ) -> PlacementPlan:
        layout, layer_loads = _prepare(replica_counts, cluster, num_slots_per_rank, ranks, loads)
        slots = self.fill(layout, replica_counts, layer_loads, min_replicas, previous)
        return PlacementPlan.of(layout, slots, len(replica_counts[0]), self.name, layer_numbers)

    def fill(
        self,
        layout: Layout,
        replica_counts: Sequence[Sequence[int]],
        loads: Sequence[Sequence[float] | None],
        min_replicas: int | None,
        previous: Holdings | None,
    ) -> Slots:
        """Experts of each rank of each layer, ``[L][N]``. Arguments as of ``place``."""
        layers = self.assign_layers(replica_counts, layout.capacities(), loads)
        return tuple(layout.deal(layer, load) for layer, load in zip(layers, loads, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerwisePlacement(PlacementBase):
    """Base of algorithms that handle one layer at a time."""

    @abstractmethod
    def assign(self, replica_counts: Sequence[int], capacities: Sequence[int], loads: Sequence[float] | None) -> Counts:
        """Return replicas per domain ``[E, D]`` of one layer, from replica counts ``[E]`` and slots per domain
        ``[D]``."""

    def assign_layers(
        self,
        replica_counts: Sequence[Sequence[int]],
        capacities: Sequence[int],
        loads: Sequence[Sequence[float] | None],
    ) -> list[Counts]:
        return [self.assign(counts, capacities, load) for counts, load in zip(replica_counts, loads, strict=True)]


def _prepare(
    replica_counts: Sequence[Sequence[int]],
    cluster: Cluster,
    num_slots_per_rank: int,
    ranks: Sequence[int] | None,
    loads: Sequence[Sequence[float]] | None,
) -> tuple[Layout, list[Sequence[float] | None]]:
    # Check counts and loads against the layout; return the layout and the loads of each layer.
    layout = Layout.of(cluster, num_slots_per_rank, ranks)
    if not replica_counts:
        raise ConfigError.of("replica_counts", "[]", "must have at least one layer")
    for counts in replica_counts:
        layout.check_counts(counts)
        if len(counts) != len(replica_counts[0]):
            raise ConfigError.of(
                "replica_counts", len(counts), f"must have {len(replica_counts[0])} experts in every layer"
            )
    if loads is None:
        return layout, [None] * len(replica_counts)
    if [len(load) for load in loads] != [len(counts) for counts in replica_counts]:
        raise ConfigError.of("loads", [len(load) for load in loads], "must have the shape of replica_counts")
    return layout, list(loads)


def ascending(replica_counts: Sequence[int]) -> list[int]:
    """Sort expert ids by number of replicas, ties by id."""
    return sorted(range(len(replica_counts)), key=lambda expert: (replica_counts[expert], expert))


def fill_vacancies(
    placed: Counts, replica_counts: Sequence[int], capacities: Sequence[int], loads: Sequence[float] | None
) -> Counts:
    """Put the remaining replicas into free slots, if possible on domains without a replica of their expert.

    Experts with most remaining replicas come first. Each takes the domains with most free slots, ties by smallest load
    so far, then by position. If a solution exists for equal demands, this order finds one. If no new domain is left, a
    replica goes to a domain that already has one of its expert.
    """
    result = placed.copy()
    totals = np.asarray(replica_counts, dtype=np.int64)
    vacant = np.asarray(capacities, dtype=np.int64) - result.sum(axis=0)
    weights = np.ones(len(totals)) if loads is None else np.asarray(loads, dtype=np.float64) / totals
    sums = weights @ result
    left = totals - result.sum(axis=1)
    for expert in sorted(np.nonzero(left)[0].tolist(), key=lambda expert: (-left[expert], expert)):
        while left[expert] > 0:
            # The most vacant first: a domain that stays empty might have to take several replicas of one expert.
            order = np.lexsort((sums, -vacant))
            new = order[(vacant[order] > 0) & (result[expert, order] == 0)]
            chosen = (new if new.size else order[:1])[: left[expert]]
            result[expert, chosen] += 1
            vacant[chosen] -= 1
            sums[chosen] += weights[expert]
            left[expert] -= len(chosen)
    assert vacant.min() >= 0, "there are more replicas than slots"
    return result


def spread_to_floor(counts: Counts, floor: int) -> Counts:
    """Swap replicas until every expert is on ``floor`` domains, or on as many as replicas and domains allow.

    A replica that shares its domain with another one of the same expert is swapped with a replica in another domain.
    The expert of that replica must lose no domain, or still have enough. With domains of equal size such a partner
    always exists.
    """
    result = counts.copy()
    goals = np.minimum(np.minimum(result.sum(axis=1), floor), result.shape[1])
    for expert in np.nonzero((result > 0).sum(axis=1) < goals)[0].tolist():
        while (result[expert] > 0).sum() < goals[expert]:
            if not _spread_once(result, expert, goals):
                return result
    return result


def _spread_once(result: Counts, expert: int, goals: Counts) -> bool:
    for source in np.nonzero(result[expert] > 1)[0].tolist():
        for target in np.nonzero(result[expert] == 0)[0].tolist():
            held = result[:, target]
            support = (result > 0).sum(axis=1)
            # The partner keeps its number of domains, or has one more than it needs.
            spare = (held > 1) | (result[:, source] == 0) | (support > goals)
            partners = np.nonzero((held > 0) & spare)[0]
            if partners.size:
                swap(result, expert, source, int(partners[0]), target)
                return True
    return False


def swap(counts: Counts, expert: int, domain: int, other_expert: int, other_domain: int) -> None:
    """Exchange one replica of ``expert`` in ``domain`` with one of ``other_expert`` in ``other_domain``, in place."""
    counts[expert, domain] -= 1
    counts[expert, other_domain] += 1
    counts[other_expert, other_domain] -= 1
    counts[other_expert, domain] += 1


def domain_loads(counts: Counts, loads: Sequence[float] | None) -> np.ndarray:
    """Return the tokens that each domain computes, ``[D]``."""
    return per_replica_loads(counts, loads) @ counts
