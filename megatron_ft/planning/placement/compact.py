"""Placement by packing an expert's replicas on as few failure domains as possible: a baseline that invites loss."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ft.planning.placement.algorithm import place_layers
from megatron_ft.planning.placement.layout import Counts
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.topology import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Compact:
    """Each expert's replicas close together (baseline of Lazarus, section 6.3)."""

    def place(
        self,
        replica_counts: Sequence[Sequence[int]],
        cluster: Cluster,
        *,
        num_slots_per_rank: int,
        ranks: Sequence[int] | None = None,
        loads: Sequence[Sequence[float]] | None = None,
        layer_numbers: Sequence[int] | None = None,
    ) -> PlacementPlan:
        """See ``PlacementAlgorithm.place``."""
        return place_layers(pack, "compact", replica_counts, cluster, num_slots_per_rank, ranks, loads, layer_numbers)


def pack(replica_counts: Sequence[int], capacities: Sequence[int], loads: Sequence[float] | None = None) -> Counts:
    """Replicas per domain of one layer, ``[E, D]``.

    Experts by descending replicas. What is left of an expert goes to the domain with the least room that takes all of
    it; where none does, the domain with most room is filled.
    """
    counts = np.zeros((len(replica_counts), len(capacities)), dtype=np.int64)
    vacant = list(capacities)
    for expert in sorted(range(len(replica_counts)), key=lambda expert: (-replica_counts[expert], expert)):
        left = replica_counts[expert]
        while left:
            fitting = [domain for domain, room in enumerate(vacant) if room >= left]
            if fitting:
                domain = min(fitting, key=lambda domain: (vacant[domain], domain))
            else:
                domain = max(range(len(vacant)), key=lambda domain: (vacant[domain], -domain))
            num_replicas = min(left, vacant[domain])
            counts[expert, domain] += num_replicas
            vacant[domain] -= num_replicas
            left -= num_replicas
    return counts
