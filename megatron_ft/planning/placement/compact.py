"""Baseline placement: puts the replicas of an expert into as few failure domains as possible."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from megatron_ft.planning.placement.algorithm import LayerwisePlacement
from megatron_ft.planning.placement.layout import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Compact(LayerwisePlacement):
    """Puts all replicas of an expert into as few failure domains as possible (baseline of Lazarus, section 6.3)."""

    name: ClassVar[str] = "compact"

    def assign(self, replica_counts: Sequence[int], capacities: Sequence[int], loads: Sequence[float] | None) -> Counts:
        return _pack(replica_counts, capacities, loads)


def _pack(replica_counts: Sequence[int], capacities: Sequence[int], loads: Sequence[float] | None = None) -> Counts:
    """Return the number of replicas of each expert in each domain for one layer, ``[E, D]``.

    Experts are placed in descending order of their numbers of replicas. All replicas of an expert go to the fullest
    domain that has enough free slots. If no domain has enough, the domain with the most free slots is filled first.
    """
    counts = np.zeros((len(replica_counts), len(capacities)), dtype=np.int64)
    vacant = list(capacities)
    for expert in sorted(range(len(replica_counts)), key=lambda expert: (-replica_counts[expert], expert)):
        left = replica_counts[expert]
        while left:
            fitting = [domain for domain, room in enumerate(vacant) if room >= left]
            if fitting:
                # The fitting domain with the fewest free slots, so that domains with many free slots stay free.
                domain = min(fitting, key=lambda domain: (vacant[domain], domain))
            else:
                domain = max(range(len(vacant)), key=lambda domain: (vacant[domain], -domain))
            num_replicas = min(left, vacant[domain])
            counts[expert, domain] += num_replicas
            vacant[domain] -= num_replicas
            left -= num_replicas
    return counts
