"""Rebalancing: whether the tokens that a new placement saves justify the bytes that it moves."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.config.placement import BALANCED
from megatron_ft.planning.balanced_shares import least_load
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


def fullest_tokens(plan: PlacementPlan, layer: int, load: Sequence[float], shares: str = BALANCED) -> float:
    """Return the tokens of the fullest rank in a layer, from tokens of each expert ``[E]``.

    Args:
        layer: position in the plan.
        shares: ``placement.shares``.
    """
    copies = plan.replicas_per_rank(layer)
    if shares == BALANCED:
        return least_load(load, copies)
    return float((per_replica_loads(copies, load) @ copies).max())


def critical_tokens(plan: PlacementPlan, loads: Sequence[Sequence[float]], shares: str = BALANCED) -> float:
    """Return the tokens of the fullest rank, summed over layers.

    The all-to-all of a layer synchronizes all ranks, so each layer takes as long as its own fullest rank.
    """
    return sum(fullest_tokens(plan, layer, load, shares) for layer, load in enumerate(loads))


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
    shares: str = BALANCED
    """``placement.shares``."""

    def due(self, iteration: int) -> bool:
        """Whether a new placement is planned after ``iteration``."""
        return self.interval_iterations > 0 and iteration > 0 and iteration % self.interval_iterations == 0

    def decide(self, now: PlacementPlan, migration: MigrationPlan, loads: Sequence[Sequence[float]]) -> Rebalance:
        """Compare the present plan with ``migration`` under ``loads`` [layers][experts] of one iteration."""
        before, after = (critical_tokens(plan, loads, self.shares) for plan in (now, migration.placement))
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


def imbalance(plan: PlacementPlan, loads: Sequence[Sequence[float]], shares: str = BALANCED) -> float:
    """Return the ratio of the fullest rank's tokens to the mean in the worst layer; 1 for even loads."""
    means = [sum(load) / len(plan.ranks) for load in loads]
    ratios = [
        fullest_tokens(plan, layer, load, shares) / mean
        for layer, (load, mean) in enumerate(zip(loads, means, strict=True))
        if mean
    ]
    return max([1.0, *ratios])
