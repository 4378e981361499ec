"""Turning layers against each other: which domain of one layer's placement is which domain of another's.

Permuting the domains of a layer leaves that layer's survival alone, but a model survives only where all its layers do.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from megatron_ft.planning.placement.layout import Counts
from megatron_ft.planning.placement.local_search import EPSILON, Bools, Losses, support_masks

MAX_SWEEPS = 4


def align(layers: Sequence[Counts], capacities: Sequence[int], losses: Losses) -> list[Counts]:
    """The same layers with domains of equal capacity exchanged, one layer at a time, while joint survival grows."""
    result = [layer.copy() for layer in layers]
    lethal = [_lethal(layer, losses) for layer in result]
    pairs = [(a, b) for a, b in combinations(range(len(capacities)), 2) if capacities[a] == capacities[b]]
    cover = np.sum(lethal, axis=0, dtype=np.int32)
    for _ in range(MAX_SWEEPS):
        changed = False
        for position in range(len(result)):
            others = (cover - lethal[position]) == 0
            improved = _turn(result[position], others, pairs, losses)
            if improved is not None:
                cover = cover - lethal[position]
                result[position], lethal[position] = improved
                cover = cover + lethal[position]
                changed = True
        if not changed:
            break
    return result


def _lethal(counts: Counts, losses: Losses) -> Bools:
    return np.asarray(losses.dead(support_masks(counts)).any(axis=0))


def _turn(
    counts: Counts, others: Bools, pairs: Sequence[tuple[int, int]], losses: Losses
) -> tuple[Counts, Bools] | None:
    """The layer after the exchanges of domains that help, each taken as soon as found; None if none does."""
    values = np.where(others, losses.values, 0.0)
    best, best_lethal = counts, _lethal(counts, losses)
    score, changed, quiet = float(values[~best_lethal].sum()), False, 0
    while quiet < len(pairs):
        for left, right in pairs:
            turned = best.copy()
            turned[:, [left, right]] = turned[:, [right, left]]
            lethal = _lethal(turned, losses)
            gain = float(values[~lethal].sum()) - score
            if gain > EPSILON:
                best, best_lethal, score, changed, quiet = turned, lethal, score + gain, True, 0
            else:
                quiet += 1
            if quiet >= len(pairs):
                break
    return (best, best_lethal) if changed else None
