"""Maximum rank overlap: experts of similar popularity on the same failure domains."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from megatron_ft.planning.placement.algorithm import LayerwisePlacement, ascending, fill_vacancies
from megatron_ft.planning.placement.layout import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class MaximumRankOverlap(LayerwisePlacement):
    """Construction of Lazarus, section 4.1, with failure domains instead of nodes.

    Optimal for every number of lost domains if the slots of a domain divide the number of experts, or are at least as
    many. Otherwise a better placement may exist, and an expert may be on fewer domains than slots would allow.
    """

    name: ClassVar[str] = "maximum_rank_overlap"

    def assign(self, replica_counts: Sequence[int], capacities: Sequence[int], loads: Sequence[float] | None) -> Counts:
        return overlap(replica_counts, capacities, loads)


def overlap(replica_counts: Sequence[int], capacities: Sequence[int], loads: Sequence[float] | None = None) -> Counts:
    """Replicas per domain of one layer, ``[E, D]``.

    Experts in ascending order of replicas form groups of c, the slots of the smallest domain. Each group gets as many
    domains as its first expert has replicas, the last group the remaining ones, and all experts of a group are on all
    its domains. The remaining replicas fill the free slots.
    """
    return overlap_groups(replica_counts, capacities, group_sizes(len(replica_counts), min(capacities)), loads)


def group_sizes(num_experts: int, num_slots: int) -> list[int]:
    """Sizes of full groups, then of the remainder."""
    full, rest = divmod(num_experts, num_slots)
    return [num_slots] * full + ([rest] if rest else [])


def overlap_groups(
    replica_counts: Sequence[int], capacities: Sequence[int], sizes: Sequence[int], loads: Sequence[float] | None
) -> Counts:
    """``overlap`` with groups of given sizes."""
    order = ascending(replica_counts)
    counts = np.zeros((len(replica_counts), len(capacities)), dtype=np.int64)
    first_expert = first_domain = 0
    for size in sizes:
        group = order[first_expert : first_expert + size]
        # The rarest expert of the group decides: the group lives as long as its rarest expert has a domain left.
        num_domains = min(replica_counts[group[0]], len(capacities) - first_domain)
        counts[np.asarray(group), first_domain : first_domain + num_domains] = 1
        first_expert += size
        first_domain += num_domains
    return fill_vacancies(counts, replica_counts, capacities, loads)
