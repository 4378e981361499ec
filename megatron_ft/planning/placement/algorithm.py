"""Interface of placement algorithms, and the steps that they share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.layout import Counts, Holdings, Layout
from megatron_ft.planning.placement.plan import PlacementPlan, Slots
from megatron_ft.topology import Cluster


class PlacementAlgorithm(Protocol):
    """Protocol of placement algorithms. An algorithm is a frozen dataclass, built from ``placement.algorithm``."""

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
            replica_counts: number of replicas of each expert in each layer, ``[L][E]``. Instead of a second replica on
                the same rank, an algorithm may place another expert; each expert keeps at least the smallest count.
            cluster: nodes, their ranks and failure domains, and which nodes are alive.
            num_slots_per_rank: number of replicas that a rank can hold in each layer.
            ranks: ranks with slots, such as the ranks of one pipeline stage; None for all ranks that are alive.
            loads: tokens of each expert, ``[L][E]``.
            layer_numbers: Megatron's numbers of the layers; None to number them from 1.
            min_replicas: number of copies of each expert that are placed so that it survives losses of domains; None
                for the smallest count in ``replica_counts``.
            previous: experts that each of ``ranks`` already holds; an algorithm may leave them there.

        Raises:
            ConfigError: the replicas exceed the slots, or an expert has no replica.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementBase(ABC):
    """Base of algorithms that only decide how many replicas of each expert a failure domain gets. ``place`` then
    assigns the replicas to the slots of ranks, in the same way for all of these algorithms."""

    name: ClassVar[str]
    """Name of the algorithm in plans."""

    @abstractmethod
    def assign_layers(
        self,
        replica_counts: Sequence[Sequence[int]],
        capacities: Sequence[int],
        loads: Sequence[Sequence[float] | None],
    ) -> list[Counts]:
        """Return for each layer the number of replicas of each expert in each domain, ``[E, D]``.

        Args:
            replica_counts: number of replicas of each expert in each layer, ``[L][E]``.
            capacities: number of slots of each domain, ``[D]``.
            loads: tokens of each expert ``[E]`` for each layer, or None.
        """

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
        """Return the experts of each rank in each layer, ``[L][N]``. The arguments are those of ``place``."""
        layers = self.assign_layers(replica_counts, layout.capacities(), loads)
        return tuple(layout.deal(layer, load) for layer, load in zip(layers, loads, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerwisePlacement(PlacementBase):
    """Base of algorithms that place each layer separately."""

    @abstractmethod
    def assign(self, replica_counts: Sequence[int], capacities: Sequence[int], loads: Sequence[float] | None) -> Counts:
        """Return the number of replicas of each expert in each domain, ``[E, D]``, for one layer. The arguments are the
        number of replicas of each expert, ``[E]``, and the number of slots of each domain, ``[D]``."""

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
    # Checks counts and loads against the layout; returns the layout and the loads of each layer.
    layout = Layout.of(cluster, num_slots_per_rank, ranks)
    if not replica_counts:
        raise ConfigError.of("replica_counts", "[]", "must have at least one layer")
    for counts in replica_counts:
        layout.check_counts(counts)
        if len(counts) != len(replica_counts[0]):
            lengths = [len(counts) for counts in replica_counts]
            raise ConfigError.of("replica_counts", lengths, "must have the same number of experts in every layer")
    if loads is None:
        return layout, [None] * len(replica_counts)
    if [len(load) for load in loads] != [len(counts) for counts in replica_counts]:
        raise ConfigError.of("loads per layer", [len(load) for load in loads], "must have the shape of replica_counts")
    return layout, list(loads)


def ascending(replica_counts: Sequence[int]) -> list[int]:
    """Return the expert ids in ascending order of their numbers of replicas; ties are in order of ids."""
    return sorted(range(len(replica_counts)), key=lambda expert: (replica_counts[expert], expert))


def fill_vacancies(
    placed: Counts, replica_counts: Sequence[int], capacities: Sequence[int], loads: Sequence[float] | None
) -> None:
    """Add missing replicas to ``placed`` ``[E, D]``, if possible in domains without a replica of the same expert.

    Experts with the most missing replicas come first. Each expert gets slots in the domains with the most free slots;
    ties are resolved by the smallest load so far, then by position. If all experts lack equally many replicas and a
    solution with distinct domains exists, this order finds one. If no other domain has a free slot, a replica goes to a
    domain that already has a replica of its expert.
    """
    totals = np.asarray(replica_counts, dtype=np.int64)
    left = totals - placed.sum(axis=1)
    if not left.any():
        return
    vacant = np.asarray(capacities, dtype=np.int64) - placed.sum(axis=0)
    weights = np.ones(len(totals)) if loads is None else np.asarray(loads, dtype=np.float64) / totals
    sums = weights @ placed
    for expert in sorted(np.nonzero(left)[0].tolist(), key=lambda expert: (-left[expert], expert)):
        while left[expert] > 0:
            # The emptiest domain comes first: otherwise it might have to take several replicas of one expert later.
            new = np.flatnonzero((vacant > 0) & (placed[expert] == 0))
            options, number = (new, left[expert]) if new.size else (np.arange(len(vacant)), 1)
            chosen = options[np.lexsort((sums[options], -vacant[options]))[:number]]
            placed[expert, chosen] += 1
            vacant[chosen] -= 1
            sums[chosen] += weights[expert]
            left[expert] -= len(chosen)
    assert vacant.min() >= 0, "there are more replicas than slots"


def spread_to_floor(counts: Counts, floor: int) -> Counts:
    """Swap replicas until every expert is in ``floor`` domains, or in as many as its replicas and the domains allow.

    If a domain has several replicas of an expert, one of them is swapped with a replica of another expert in another
    domain. The other expert must lose no domain, or still be in enough domains. If domains have equal size, such a swap
    always exists. If no expert needs more domains, the result is ``counts`` itself.
    """
    goals = np.minimum(np.minimum(counts.sum(axis=1), floor), counts.shape[1])
    short = np.nonzero((counts > 0).sum(axis=1) < goals)[0].tolist()
    result = counts.copy() if short else counts
    for expert in short:
        while (result[expert] > 0).sum() < goals[expert]:
            if not _spread_once(result, expert, goals):
                return result
    return result


def _spread_once(result: Counts, expert: int, goals: Counts) -> bool:
    for source in np.nonzero(result[expert] > 1)[0].tolist():
        for target in np.nonzero(result[expert] == 0)[0].tolist():
            held = result[:, target]
            support = (result > 0).sum(axis=1)
            # The other expert leaves no domain, gets a new one, or is in more domains than it needs.
            spare = (held > 1) | (result[:, source] == 0) | (support > goals)
            partners = np.nonzero((held > 0) & spare)[0]
            if partners.size:
                swap(result, expert, source, int(partners[0]), target)
                return True
    return False


def swap(counts: Counts, expert: int, domain: int, other_expert: int, other_domain: int) -> None:
    """Exchange a replica of ``expert`` in ``domain`` for one of ``other_expert`` in ``other_domain``, in place."""
    counts[expert, domain] -= 1
    counts[expert, other_domain] += 1
    counts[other_expert, other_domain] -= 1
    counts[other_expert, domain] += 1
