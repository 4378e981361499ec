"""Maximum rank overlap: puts experts of similar popularity into the same failure domains."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from megatron_ft.planning.placement.algorithm import LayerwisePlacement, ascending, fill_vacancies
from megatron_ft.planning.placement.layout import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class MaximumRankOverlap(LayerwisePlacement):
    """Construction of Lazarus, section 4.1, with failure domains instead of nodes.

    The placement is optimal for every number of lost domains if a domain has slots for all experts, or if its number of
    slots divides the number of experts. Otherwise a better placement may exist, and an expert may be in fewer domains
    than the slots allow.
    """

    name: ClassVar[str] = "maximum_rank_overlap"

    def assign(self, replica_counts: Sequence[int], capacities: Sequence[int], loads: Sequence[float] | None) -> Counts:
        return overlap(replica_counts, capacities, loads)


def overlap(replica_counts: Sequence[int], capacities: Sequence[int], loads: Sequence[float] | None = None) -> Counts:
    """Return the number of replicas of each expert in each domain for one layer, ``[E, D]``.

    Experts are sorted by their numbers of replicas, ascending. Groups of consecutive experts have as many experts as
    the smallest domain has slots. A group gets as many domains as its first expert has replicas, or the remaining
    domains if these are fewer. Every expert of a group gets a replica in every domain of the group. All other replicas
    fill the free slots.
    """
    return overlap_groups(replica_counts, capacities, group_sizes(len(replica_counts), min(capacities)), loads)


def group_sizes(num_experts: int, num_slots: int) -> list[int]:
    """Return the sizes of the groups: ``num_slots`` each. Remaining experts form a smaller last group."""
    full, rest = divmod(num_experts, num_slots)
    return [num_slots] * full + ([rest] if rest else [])


def overlap_groups(
    replica_counts: Sequence[int], capacities: Sequence[int], sizes: Sequence[int], loads: Sequence[float] | None
) -> Counts:
    """Return the numbers of replicas ``[E, D]`` as ``overlap`` does, but with ``sizes[i]`` experts in group i."""
    order = ascending(replica_counts)
    counts = np.zeros((len(replica_counts), len(capacities)), dtype=np.int64)
    first_expert = first_domain = 0
    for size in sizes:
        group = order[first_expert : first_expert + size]
        # The rarest expert determines the number of domains: the whole group survives as long as this expert survives.
        num_domains = min(replica_counts[group[0]], len(capacities) - first_domain)
        counts[np.asarray(group), first_domain : first_domain + num_domains] = 1
        first_expert += size
        first_domain += num_domains
    fill_vacancies(counts, replica_counts, capacities, loads)
    return counts
