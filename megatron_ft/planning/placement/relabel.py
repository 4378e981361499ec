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
    rows = np.arange(len(totals))
    blocked = (totals[:, None] != totals[None, :]) | (rows[:, None] >= rows[None, :])
    overlaps = (counts @ counts.T).astype(np.float64)
    own = np.diag(overlaps)
    distances = own[:, None] + own[None, :] - 2 * overlaps
    place = rows.copy()
    """Row of ``counts`` that each expert stands in."""
    for _ in range(max_exchanges):
        sums = weights @ counts[place]
        along = (counts @ sums)[place]
        moved = weights[None, :] - weights[:, None]
        change = moved * (2 * (along[:, None] - along[None, :]) + moved * distances[np.ix_(place, place)])
        change[blocked] = 0.0
        first, second = divmod(int(change.argmin()), len(totals))
        if change[first, second] >= -NEGLIGIBLE * float(sums.sum()) ** 2:
            break
        place[[first, second]] = place[[second, first]]
    return np.asarray(counts[place])
