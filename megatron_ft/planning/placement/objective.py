"""Objective of placements: expected survival after the loss of failure domains."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.survival import minimal_masks, surviving_weights

NEGLIGIBLE = 1e-4
"""Numbers of lost domains are left out if ``lost_ratio`` gives them, before normalization, at most this weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalObjective:
    """Expected survival, as a weighted mean over the number of domains that are lost at the same time."""

    lost_weights: tuple[float, ...] = ()
    """Weights of the loss of 1, 2, ... domains; if it is empty, ``lost_ratio`` determines the weights."""
    lost_ratio: float = 0.5
    """Ratio of the weight of losing n + 1 domains to the weight of losing n domains, if ``lost_weights`` is empty."""
    failure_rates: tuple[float, ...] = ()
    """Failure probability of each domain, in order; empty if all are equal."""

    def validate(self, num_domains: int | None = None) -> None:
        """Raise ConfigError for impossible weights or rates."""
        if any(not math.isfinite(weight) or weight < 0 for weight in self.lost_weights):
            raise ConfigError.of("lost_weights", list(self.lost_weights), "must be finite numbers, 0 or more")
        if self.lost_weights and not any(self.lost_weights):
            raise ConfigError.of("lost_weights", list(self.lost_weights), "must not all be 0")
        for key, value in (("lost_ratio", self.lost_ratio), *(("failure_rates", rate) for rate in self.failure_rates)):
            if not 0 < value < 1:
                raise ConfigError.of(key, value, "must be above 0 and below 1")
        if num_domains is not None and self.failure_rates and len(self.failure_rates) != num_domains:
            raise ConfigError.of("failure_rates", list(self.failure_rates), f"must have {num_domains} entries")

    def odds(self) -> tuple[float, ...] | None:
        """Return the odds of failure ``q / (1 - q)`` of each domain; None if all are equal."""
        return tuple(rate / (1 - rate) for rate in self.failure_rates) or None

    def weights(self, num_domains: int) -> tuple[float, ...]:
        """Return the weights of losing 0, 1, ... domains, up to the last weight that is not 0; their sum is 1.

        If only losses of more domains have a weight, because domains were lost, the largest loss that leaves a domain
        gets all weight.
        """
        geometric = (self.lost_ratio**lost for lost in range(1, num_domains + 1))
        chosen = self.lost_weights or tuple(weight for weight in geometric if weight > NEGLIGIBLE)
        raw = [0.0, *chosen][: num_domains + 1]
        while len(raw) > 1 and not raw[-1]:
            raw.pop()
        if num_domains and len(raw) == 1:
            raw = [0.0] * max(1, num_domains - 1) + [1.0]
        total = sum(raw) or 1.0
        return tuple(weight / total for weight in raw)

    def losses(self, num_domains: int, limit: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return sets of lost domains as bit masks, fewest domains first, and the weight of each set.

        There are at most ``limit`` sets: larger losses are left out, and the sum of the weights is then below 1.
        """
        weights, odds = self.weights(num_domains), self.odds()
        masks: list[int] = []
        values: list[float] = []
        for lost in range(1, len(weights)):
            if not weights[lost]:
                continue
            # All sets of one size or none of them: a part of them would favour the domains that it does not contain.
            if len(masks) + math.comb(num_domains, lost) > limit:
                break
            sets = list(combinations(range(num_domains), lost))
            shares = [math.prod(odds[domain] for domain in chosen) if odds else 1.0 for chosen in sets]
            masks += [sum(1 << domain for domain in chosen) for chosen in sets]
            values += [share * weights[lost] / sum(shares) for share in shares]
        return np.asarray(masks, dtype=np.int64), np.asarray(values, dtype=np.float64)

    def score(self, masks: Sequence[int], num_domains: int) -> float:
        """Return the expected survival of state, exact up to rounding. Each mask has the domains of one piece of state.

        Raises:
            TooManyStates: the sets overlap so much that counting would take too much memory.
        """
        weights, odds = self.weights(num_domains), self.odds()
        last = len(weights) - 1
        # State in more domains than can be lost always survives.
        minimal = [mask for mask in minimal_masks(masks) if mask.bit_count() <= last]
        survive = surviving_weights(minimal, num_domains, last, odds)
        possible = surviving_weights([], num_domains, last, odds)
        return sum(weight * (good / all_) for weight, good, all_ in zip(weights, survive, possible, strict=True))
