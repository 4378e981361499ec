"""Rebalancing: decides whether a new placement saves enough tokens to justify the bytes that have to move."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.config.placement import BALANCED
from megatron_ft.planning.placement.layout import busiest_tokens
from megatron_ft.planning.placement.migration import MigrationPlan
from megatron_ft.planning.placement.plan import PlacementPlan


def smooth(
    previous: Sequence[Sequence[float]] | None, newest: Sequence[Sequence[int]], weight: float
) -> list[list[float]]:
    """Return exponentially smoothed loads [layers][experts]: ``weight`` times ``previous`` plus ``1 - weight`` times
    ``newest``. Without ``previous``, return ``newest``."""
    if previous is None:
        return [[float(tokens) for tokens in layer] for layer in newest]
    return [
        [weight * old + (1.0 - weight) * new for old, new in zip(old_layer, new_layer, strict=True)]
        for old_layer, new_layer in zip(previous, newest, strict=True)
    ]


def critical_tokens(plan: PlacementPlan, loads: Sequence[Sequence[float]], shares: str = BALANCED) -> float:
    """Return the number of tokens of the busiest rank of each layer, summed over layers.

    The all-to-all of a layer synchronizes all ranks, so a layer takes as long as the busiest rank in this layer.
    """
    return sum(busiest_tokens(plan.replicas_per_rank(layer), load, shares) for layer, load in enumerate(loads))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rebalance:
    """Decision whether a new placement replaces the present one."""

    pays: bool
    reason: str
    gain: float
    """Fraction of ``critical_tokens`` (tokens of the layers' busiest ranks) that the new placement saves."""
    moved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalancePolicy:
    """Decides whether ranks carry out a planned migration of experts."""

    interval_iterations: int
    min_gain: float
    """Smallest fraction of ``critical_tokens`` (tokens of the layers' busiest ranks) that a new plan must save."""
    bytes_per_saved_token: float
    """Largest number of bytes that may move for each token that the busiest ranks save until the next rebalance."""
    shares: str = BALANCED
    """Value of ``placement.shares``."""

    def due(self, iteration: int) -> bool:
        """Whether ranks plan a new placement after ``iteration``."""
        return self.interval_iterations > 0 and iteration > 0 and iteration % self.interval_iterations == 0

    def decide(self, now: PlacementPlan, migration: MigrationPlan, loads: Sequence[Sequence[float]]) -> _Rebalance:
        """Decide whether to carry out ``migration``, under the ``loads`` [layers][experts] of one iteration."""
        before, after = (critical_tokens(plan, loads, self.shares) for plan in (now, migration.placement))
        gain = 1.0 - after / before if before else 0.0
        # The migration costs bytes once and saves tokens until the next rebalancing.
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
        return _Rebalance(pays=verdict, reason=why, gain=gain, moved_bytes=migration.num_bytes)


def imbalance(plan: PlacementPlan, loads: Sequence[Sequence[float]], shares: str = BALANCED) -> float:
    """Return the tokens of the busiest rank divided by the mean over ranks, in the layer where this ratio is largest.
    The result is at least 1."""
    means = [sum(load) / len(plan.ranks) for load in loads]
    ratios = [
        busiest_tokens(plan.replicas_per_rank(layer), load, shares) / mean
        for layer, (load, mean) in enumerate(zip(loads, means, strict=True))
        if mean
    ]
    return max([1.0, *ratios])
