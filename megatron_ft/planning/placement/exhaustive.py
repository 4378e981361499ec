"""Every placement of a small layer, up to the order of equal failure domains."""

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement

import numpy as np

from megatron_ft.planning.placement.layout import Counts

Column = tuple[int, ...]
"""Experts in the slots of one domain, ascending; the number of experts stands for an empty slot."""


def placements(replica_counts: Sequence[int], num_slots: int, num_domains: int, floor: int) -> Iterator[Counts]:
    """Replicas per domain ``[E, D]`` of every placement that keeps each expert on ``floor`` domains if it can.

    Domains hold ``num_slots`` each and are interchangeable, so of all orders of the same columns only one is yielded.
    """
    num_experts = len(replica_counts)
    left = [*replica_counts, num_slots * num_domains - sum(replica_counts)]
    columns = list(combinations_with_replacement(range(num_experts + 1), num_slots))
    goals = np.minimum(np.minimum(replica_counts, floor), num_domains)
    for chosen in _fill(columns, 0, left, num_domains):
        counts = np.zeros((num_experts + 1, num_domains), dtype=np.int64)
        for domain, column in enumerate(chosen):
            np.add.at(counts[:, domain], list(column), 1)
        if ((counts[:-1] > 0).sum(axis=1) >= goals).all():
            yield counts[:-1]


def _fill(columns: list[Column], first: int, left: list[int], num_domains: int) -> Iterator[tuple[Column, ...]]:
    """Columns in order, none before ``first``, that use up exactly what is ``left``."""
    if not num_domains:
        yield ()
        return
    smallest = next(expert for expert, count in enumerate(left) if count)
    for position in range(first, len(columns)):
        column = columns[position]
        if column[0] > smallest:
            return
        if any(column.count(expert) > left[expert] for expert in set(column)):
            continue
        rest = left.copy()
        for expert in column:
            rest[expert] -= 1
        for others in _fill(columns, position, rest, num_domains - 1):
            yield (column, *others)
