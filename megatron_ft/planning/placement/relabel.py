"""Evening out the loads of failure domains without touching survival: experts with equal replicas change places whole.

Which sets of domains hold an expert stays as it is, only which expert that is changes: alone, and jointly with other
layers, the placement survives exactly as before.
"""

from collections.abc import Sequence

import numpy as np

from megatron_ft.planning.placement.layout import Counts, per_replica_loads

MAX_EXCHANGES = 100
NEGLIGIBLE = 1e-9
"""Exchanges that lower the squared total load by less than this share are not made."""


def even_out(counts: Counts, loads: Sequence[float], max_exchanges: int = MAX_EXCHANGES) -> Counts:
    """``counts`` ``[E, D]`` with rows of experts of equal replicas exchanged, the best exchange first.

    Each exchange lowers the sum of the squared loads of domains most among all pairs of such experts.
    """
    weights = per_replica_loads(counts, loads)
    totals = counts.sum(axis=1)
    left, right = np.nonzero(np.triu(totals[:, None] == totals[None, :], k=1))
    if not left.size:
        return counts
    held = counts.astype(np.float64)
    overlaps = held @ held.T
    distances = overlaps[left, left] + overlaps[right, right] - 2 * overlaps[left, right]
    along = held @ (weights @ held)
    """Load of the domains of each row, as often as the row is there."""
    enough = -NEGLIGIBLE * float((weights @ held).sum()) ** 2
    expert_of = np.arange(len(totals))
    """Expert that stands in each row."""
    for _ in range(max_exchanges):
        standing = weights[expert_of]
        moved = standing[right] - standing[left]
        change = moved * (2 * (along[left] - along[right]) + moved * distances)
        best = int(change.argmin())
        if change[best] >= enough:
            break
        first, second = left[best], right[best]
        along += moved[best] * (overlaps[first] - overlaps[second])
        expert_of[[first, second]] = expert_of[[second, first]]
    result = np.empty_like(counts)
    result[expert_of] = counts
    return result
