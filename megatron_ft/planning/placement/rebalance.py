"""Rebalancing: whether the tokens that a new placement saves justify the bytes that it moves."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ft.planning.placement.layout import per_replica_loads
from megatron_ft.planning.placement.migration import MigrationPlan
from megatron_ft.planning.placement.plan import PlacementPlan


def smooth(
    previous: Sequence[Sequence[float]] | None, newest: Sequence[Sequence[int]], weight: float
) -> list[list[float]]:
    """Return exponentially smoothed loads [layers][experts], with ``weight`` for the past; without a past the
    newest."""
    if previous is None:
        return [[float(tokens) for tokens in layer] for layer in newest]
    return [
        [weight * old + (1.0 - weight) * new for old, new in zip(old_layer, new_layer, strict=True)]
        for old_layer, new_layer in zip(previous, newest, strict=True)
    ]


def critical_tokens(plan: PlacementPlan, loads: Sequence[Sequence[float]]) -> float:
    """Return the tokens of the busiest rank, summed over layers.

    The all-to-all of a layer synchronizes all ranks, so each layer takes as long as its own busiest rank.
    """
    total = 0.0
    for layer, load in enumerate(loads):
        copies = plan.replicas_per_rank(layer)
        total += float((per_replica_loads(copies, load) @ copies).max())
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalance:
    """Decision about a new placement."""

    pays: bool
    reason: str
    gain: float
    """Share of the busiest ranks' tokens that the new placement saves."""
    moved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalancePolicy:
    """Decides whether to carry out a migration."""

    interval_iterations: int
    min_gain: float
    """Smallest share of the busiest ranks' tokens that a new plan must save."""
    bytes_per_saved_token: float
    """Bytes that may move per token that the busiest ranks save until the next rebalancing."""

    def due(self, iteration: int) -> bool:
        """Whether a new placement is planned after ``iteration``."""
        return self.interval_iterations > 0 and iteration > 0 and iteration % self.interval_iterations == 0

    def decide(self, now: PlacementPlan, migration: MigrationPlan, loads: Sequence[Sequence[float]]) -> Rebalance:
        """Compare the present plan with ``migration`` under ``loads`` [layers][experts] of one iteration."""
        before, after = critical_tokens(now, loads), critical_tokens(migration.placement, loads)
        gain = 1.0 - after / before if before else 0.0
        # The move is paid once and saves tokens until the next one.
        saved = (before - after) * self.interval_iterations
        budget = saved * self.bytes_per_saved_token
        if gain < self.min_gain:
            verdict, why = (
                False,
                f"the busiest ranks would save {gain:.1%} of their tokens, less than {self.min_gain:.1%}",
            )
        elif migration.num_bytes > budget:
            verdict, why = False, f"too many bytes would move: {migration.num_bytes:,} for {saved:,.0f} saved tokens"
        else:
            verdict, why = (
                True,
                f"the busiest ranks save {gain:.1%} of their tokens, and {migration.num_bytes:,} bytes move",
            )
        return Rebalance(pays=verdict, reason=why, gain=gain, moved_bytes=migration.num_bytes)


def imbalance(plan: PlacementPlan, loads: Sequence[Sequence[float]]) -> float:
    """Return the ratio of the busiest rank's tokens to the mean in the worst layer; 1 for even loads."""
    worst = 1.0
    for layer, load in enumerate(loads):
        copies = plan.replicas_per_rank(layer)
        tokens = per_replica_loads(copies, load) @ copies
        if np.mean(tokens) > 0:
            worst = max(worst, float(tokens.max() / tokens.mean()))
    return worst
