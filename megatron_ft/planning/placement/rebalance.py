"""Whether a new placement pays: what it saves against what it moves. Integers, so that every rank decides alike."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ft.planning.placement.layout import per_replica_loads
from megatron_ft.planning.placement.migration import MigrationPlan
from megatron_ft.planning.placement.plan import PlacementPlan


def smooth(
    previous: Sequence[Sequence[float]] | None, newest: Sequence[Sequence[int]], weight: float
) -> list[list[float]]:
    """Exponentially smoothed loads [layers][experts]; ``weight`` of the past, the newest alone when there is none."""
    if previous is None:
        return [[float(tokens) for tokens in layer] for layer in newest]
    return [
        [weight * old + (1.0 - weight) * new for old, new in zip(old_layer, new_layer, strict=True)]
        for old_layer, new_layer in zip(previous, newest, strict=True)
    ]


def critical_tokens(plan: PlacementPlan, loads: Sequence[Sequence[float]]) -> float:
    """Tokens of the busiest rank, summed over layers: what the stage waits for.

    Every layer's exchange is a meeting of all ranks, so each layer costs its own busiest rank.
    """
    total = 0.0
    for layer, load in enumerate(loads):
        copies = plan.replicas_per_rank(layer)
        total += float((per_replica_loads(copies, load) @ copies).max())
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalance:
    """The verdict on a new placement."""

    pays: bool
    reason: str
    gain: float
    """Share of the busiest ranks' tokens that it saves."""
    moved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalancePolicy:
    """Decides whether to carry out a migration.

    ``min_gain`` is the least share of the critical tokens a new plan must save; ``bytes_per_saved_token`` is how many
    bytes may be moved for each token that the busiest ranks are spared until the next chance to rebalance.
    """

    interval_iterations: int
    min_gain: float
    bytes_per_saved_token: float

    def due(self, iteration: int) -> bool:
        """Whether a plan is made before iteration ``iteration + 1``."""
        return self.interval_iterations > 0 and iteration > 0 and iteration % self.interval_iterations == 0

    def judge(self, now: PlacementPlan, migration: MigrationPlan, loads: Sequence[Sequence[float]]) -> Rebalance:
        """Compare the plan in force with ``migration`` under ``loads`` [layers][experts] of one iteration."""
        before, after = critical_tokens(now, loads), critical_tokens(migration.placement, loads)
        gain = 1.0 - after / before if before else 0.0
        saved = (before - after) * self.interval_iterations
        budget = saved * self.bytes_per_saved_token
        if gain < self.min_gain:
            verdict, why = False, f"saves {gain:.1%} of the busiest ranks' tokens, less than {self.min_gain:.1%}"
        elif migration.num_bytes > budget:
            verdict, why = False, f"moves {migration.num_bytes:,} bytes for {saved:,.0f} tokens saved"
        else:
            verdict, why = (
                True,
                f"saves {gain:.1%} of the busiest ranks' tokens and moves {migration.num_bytes:,} bytes",
            )
        return Rebalance(pays=verdict, reason=why, gain=gain, moved_bytes=migration.num_bytes)


def imbalance(plan: PlacementPlan, loads: Sequence[Sequence[float]]) -> float:
    """Busiest rank over mean rank, worst layer; 1 is even."""
    worst = 1.0
    for layer, load in enumerate(loads):
        copies = plan.replicas_per_rank(layer)
        tokens = per_replica_loads(copies, load) @ copies
        if np.mean(tokens) > 0:
            worst = max(worst, float(tokens.max() / tokens.mean()))
    return worst
