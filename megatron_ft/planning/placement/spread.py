"""Baseline placement: distributes replicas round-robin over failure domains."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from megatron_ft.planning.placement.algorithm import LayerwisePlacement
from megatron_ft.planning.placement.layout import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread(LayerwisePlacement):
    """Spreads the replicas of an expert over different domains (baseline of Lazarus, section 6.3)."""

    name: ClassVar[str] = "spread"

    def assign(self, replica_counts: Sequence[int], capacities: Sequence[int], loads: Sequence[float] | None) -> Counts:
        return _deal_round(replica_counts, capacities, loads)


def _deal_round(
    replica_counts: Sequence[int], capacities: Sequence[int], loads: Sequence[float] | None = None
) -> Counts:
    """Return the number of replicas of each expert in each domain for one layer, ``[E, D]``.

    In order of expert ids, each replica goes to the next domain that has a free slot.
    """
    counts = np.zeros((len(replica_counts), len(capacities)), dtype=np.int64)
    vacant = list(capacities)
    domain = 0
    for expert, num_replicas in enumerate(replica_counts):
        for _ in range(num_replicas):
            while not vacant[domain]:
                domain = (domain + 1) % len(vacant)
            counts[expert, domain] += 1
            vacant[domain] -= 1
            domain = (domain + 1) % len(vacant)
    return counts
