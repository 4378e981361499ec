"""Probability that a model's state survives the loss of failure domains.

State survives if every piece of it (an expert of a layer, a shard of non-expert state) has a holder left. A piece is
represented by the set of domains that hold it. All layers are considered together, because layers on the same domains
do not survive independently. Counting is exact; sampling is used only if counting would take too much memory, and
results say so.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.frontier import TooManyStates, minimal_masks, surviving_weights
from megatron_ft.planning.placement.plan import PlacementPlan

MAX_ENUMERATED_DOMAINS = 16
"""Largest number of domains for which all sets of lost domains are enumerated."""
CONFIDENCE_DEVIATIONS = 3.2905
"""Two-sided 99.9 % of a normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """Probability of survival if exactly ``num_lost`` domains are lost, all such losses being equally likely."""

    num_lost: int
    probability: float
    method: str
    """``enumeration`` or ``counting`` (both exact), or ``monte_carlo``."""
    interval: tuple[float, float] | None = None
    """99.9 % confidence interval of a Monte Carlo estimate (Wilson)."""

    @property
    def exact(self) -> bool:
        """Whether the probability is exact, not an estimate."""
        return self.method != "monte_carlo"


def survival(
    holders: Iterable[Iterable[str]],
    domains: Sequence[str],
    lost: Iterable[int],
    *,
    odds: Sequence[float] | None = None,
    num_samples: int = 200_000,
    seed: int = 0,
) -> tuple[Survival, ...]:
    """Survival for each number of lost domains.

    Args:
        holders: domains that hold each piece of state.
        domains: all domains that may be lost.
        lost: numbers of domains that are lost together.
        odds: odds ``q / (1 - q)`` of each domain's failure, if they differ; the weight of a loss is the product of its
            domains' odds.
        num_samples: samples where counting would take too much memory.
        seed: seed of the samples.

    Raises:
        ConfigError: more lost domains than there are, or a piece without a holder.
    """
    index = {name: position for position, name in enumerate(domains)}
    masks = minimal_masks(sum(1 << index[name] for name in set(held)) for held in holders)
    wanted = sorted(set(lost))
    for count in wanted:
        if not 0 <= count <= len(index):
            raise ConfigError.of("lost domains", count, f"must be in 0..{len(index)}, the number of failure domains")
    if 0 in masks:
        raise ConfigError.of("holders", "{}", "must name at least one failure domain for each piece of state")
    return tuple(_survival(masks, len(index), count, odds, num_samples, seed) for count in wanted)


def single_loss_survival(plans: Sequence[PlacementPlan], *, min_ranks: int = 0) -> float | None:
    """Return the probability that a job continues from expert replicas when one failure domain, chosen at random, is
    lost.

    It continues if every expert of all stages has a replica left and at least ``min_ranks`` ranks remain. None if there
    is only one domain.
    """
    num_ranks = Counter(domain for plan in plans for domain in plan.domains)
    alone = {next(iter(held)) for plan in plans for held in plan.all_expert_domains() if len(held) == 1}
    # Experts that survive are of no use to a job that ends for lack of ranks.
    too_large = {domain for domain, count in num_ranks.items() if num_ranks.total() - count < min_ranks}
    return 1.0 - len(alone | too_large) / len(num_ranks) if len(num_ranks) > 1 else None


def _survival(
    masks: Sequence[int], num_domains: int, lost: int, odds: Sequence[float] | None, num_samples: int, seed: int
) -> Survival:
    relevant = [mask for mask in masks if mask.bit_count() <= lost]
    if not relevant:
        return Survival(num_lost=lost, probability=1.0, method="counting")
    if num_domains <= MAX_ENUMERATED_DOMAINS and odds is None:
        good = int(np.count_nonzero(~lethal(relevant, num_domains) & (popcounts(num_domains) == lost)))
        return Survival(num_lost=lost, probability=good / math.comb(num_domains, lost), method="enumeration")
    try:
        good_weight = surviving_weights(relevant, num_domains, lost, odds)[lost]
        all_weight = surviving_weights([], num_domains, lost, odds)[lost]
        return Survival(num_lost=lost, probability=good_weight / all_weight, method="counting")
    except TooManyStates:
        if odds is not None:
            raise
        return _monte_carlo(relevant, num_domains, lost, num_samples, seed)


def popcounts(num_domains: int) -> npt.NDArray[np.int64]:
    """Number of lost domains in each of the ``2**num_domains`` sets."""
    counts = np.zeros(1, dtype=np.int64)
    for _ in range(num_domains):
        counts = np.concatenate((counts, counts + 1))
    return counts


def lethal(masks: Iterable[int], num_domains: int) -> npt.NDArray[np.bool_]:
    """Whether each of the ``2**num_domains`` sets of lost domains includes one of ``masks``."""
    bad = np.zeros(1 << num_domains, dtype=np.bool_)
    bad[list(masks)] = True
    for bit in range(num_domains):
        # Sets with the bit are lethal if they are without it: n passes over all sets instead of one for each mask.
        view = bad.reshape(-1, 2, 1 << bit)
        view[:, 1] |= view[:, 0]
    return bad


def _monte_carlo(masks: Sequence[int], num_domains: int, lost: int, num_samples: int, seed: int) -> Survival:
    # A generator of its own: the same question has the same answer everywhere.
    draw = random.Random(seed)
    good = 0
    for _ in range(num_samples):
        gone = sum(1 << domain for domain in draw.sample(range(num_domains), lost))
        good += all(mask & ~gone for mask in masks)
    return Survival(
        num_lost=lost, probability=good / num_samples, method="monte_carlo", interval=_wilson(good, num_samples)
    )


def _wilson(good: int, total: int) -> tuple[float, float]:
    z, share = CONFIDENCE_DEVIATIONS, good / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    width = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, centre - width), min(1.0, centre + width)
