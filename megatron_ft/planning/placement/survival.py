"""Computes the probability that a model's state survives the loss of failure domains.

State survives if every part of it (an expert of a layer, a shard of non-expert state) is in at least one domain that is
not lost. A part is represented by the set of domains that hold it. All layers are considered together, because layers
in the same domains do not survive independently. Losses are counted exactly. If this would take too much memory, they
are sampled instead; ``Survival.method`` states which method was used.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

import numpy as np
import numpy.typing as npt

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.plan import PlacementPlan

# How losses are counted: sets without a common domain are independent, so each connected component is counted
# separately, and the results are convolved. In a component, dynamic programming processes one domain after another. Its
# states are the collections of sets that have no surviving domain so far. Each state has a list of total weights: entry
# n belongs to the losses of n domains that lead to the state.

# Each state has a list of weights, so more states would take too much memory.
MAX_STATES = 4096
NEGLIGIBLE = 1e-4
"""Losses of n domains are ignored if their weight before normalization, ``lost_ratio ** n``, is at most this value."""


class TooManyStates(Exception):
    """Error: sets of domains overlap so much that counting would need more than ``MAX_STATES`` states."""


def minimal_masks(masks: Iterable[int]) -> list[int]:
    """Remove each mask (set of domains that hold a part of the state) that contains another mask. If the part with the
    contained mask survives, the part with the removed mask survives too."""
    kept: list[int] = []
    by_size = sorted(set(masks), key=lambda mask: (mask.bit_count(), mask))
    for _, of_size in groupby(by_size, key=int.bit_count):
        smaller = tuple(kept)  # no mask contains another one of the same size
        kept += [mask for mask in of_size if not any(other & mask == other for other in smaller)]
    return kept


def surviving_weights(
    masks: Sequence[int], num_domains: int, max_lost: int, odds: Sequence[float] | None = None
) -> list[float]:
    """Return, for 0, 1, ... ``max_lost`` lost domains, the total weight of the losses that all of ``masks`` survive.

    A mask survives if at least one of its domains is not lost. The weight of a loss is the product of the ``odds`` of
    the lost domains; without ``odds`` it is 1, and losses are counted in integers.

    Raises:
        TooManyStates: a connected component needs more than ``MAX_STATES`` states.
    """
    touched = 0
    found: list[tuple[float, ...]] = []
    for part in _parts(masks):
        union = 0
        for mask in part:
            union |= mask
        touched |= union
        found.append(tuple(_sweep(part, union, max_lost, odds)))
    total: list[float] = [1]
    if odds is None:
        # Components with equal counts are combined by a power. Integers are exact, so their order has no influence.
        for counts, number in Counter(found).items():
            total = _convolve(total, _power(counts, number, max_lost), max_lost)
    else:
        for weights in found:
            total = _convolve(total, weights, max_lost)
    free = [domain for domain in range(num_domains) if not touched >> domain & 1]
    if odds is None:
        total = _convolve(total, [math.comb(len(free), lost) for lost in range(max_lost + 1)], max_lost)
    else:
        for domain in free:
            total = _convolve(total, [1, odds[domain]], max_lost)
    return total + [0] * (max_lost + 1 - len(total))


def _parts(masks: Sequence[int]) -> list[list[int]]:
    # Returns the connected components: masks with a common bit are in one list. ``part`` stands for a component.
    parts: dict[int, list[int]] = {}
    part_of: dict[int, int] = {}
    merged_into: list[int] = []
    for number, mask in enumerate(masks):
        merged_into.append(number)
        found, left = set(), mask
        while left:
            bit = left.bit_length()
            left ^= 1 << bit - 1
            part = part_of.get(bit, number)
            while merged_into[part] != part:
                part = merged_into[part]
            found.add(part)
            part_of[bit] = number
        members = [mask]
        for part in sorted(found - {number}):
            members += parts.pop(part)
            merged_into[part] = number
        parts[number] = members
    return list(parts.values())


def _sweep(masks: Sequence[int], union: int, max_lost: int, odds: Sequence[float] | None) -> list[float]:
    if len(masks) == 1 and odds is None:
        size = union.bit_count()
        return [math.comb(size, lost) - (lost == size) for lost in range(min(size, max_lost) + 1)]
    domains = [domain for domain in range(union.bit_length()) if union >> domain & 1]
    members = {domain: sum(1 << k for k, mask in enumerate(masks) if mask >> domain & 1) for domain in domains}
    closing = {
        domain: sum(1 << k for k, mask in enumerate(masks) if mask.bit_length() - 1 == domain) for domain in domains
    }
    states: dict[int, list[float]] = {(1 << len(masks)) - 1: [1]}
    for domain in domains:
        weight = 1 if odds is None else odds[domain]
        following: dict[int, list[float]] = {}
        for unhit, weights in states.items():
            # The domain survives, and so do all sets that contain it.
            _add(following, unhit & ~members[domain], weights)
            # The domain is lost. Sets whose last domain this is must already have a surviving domain.
            if not unhit & closing[domain]:
                _add(following, unhit, [0, *(value * weight for value in weights[:max_lost])])
        if len(following) > MAX_STATES:
            raise TooManyStates(f"{len(masks)} sets of {len(domains)} domains need more than {MAX_STATES} states")
        states = following
    return states.get(0, [0])


def _add(states: dict[int, list[float]], state: int, weights: list[float]) -> None:
    known = states.get(state)
    if known is None:
        states[state] = weights
        return
    longer, shorter = (known, weights) if len(known) >= len(weights) else (weights, known)
    states[state] = [value + other for value, other in zip(longer, shorter, strict=False)] + longer[len(shorter) :]


def _power(counts: Sequence[float], exponent: int, max_lost: int) -> list[float]:
    result: list[float] = [1]
    factor = list(counts)
    while exponent:
        if exponent & 1:
            result = _convolve(result, factor, max_lost)
        exponent >>= 1
        if exponent:
            factor = _convolve(factor, factor, max_lost)
    return result


def _convolve(left: Sequence[float], right: Sequence[float], max_lost: int) -> list[float]:
    result: list[float] = [0] * min(len(left) + len(right) - 1, max_lost + 1)
    for position, value in enumerate(left):
        if value:
            for offset, other in enumerate(right[: len(result) - position]):
                result[position + offset] += value * other
    return result


MAX_ENUMERATED_DOMAINS = 16
"""Largest number of domains for which all sets of lost domains are enumerated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalObjective:
    """Probability that state survives, as a weighted mean over the number of domains that are lost at the same time."""

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
        """Return the odds of failure ``q / (1 - q)`` of each domain; None if all domains have equal odds."""
        return tuple(rate / (1 - rate) for rate in self.failure_rates) or None

    def weights(self, num_domains: int) -> tuple[float, ...]:
        """Return the weights of losing 0, 1, ... domains, up to the last weight that is not 0; their sum is 1.

        If ``lost_weights`` is 0 for every number of lost domains up to ``num_domains``, the loss of ``num_domains - 1``
        domains (at least one) has weight 1.
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
            # Sets of one size are all taken or all left out: otherwise some domains would be in fewer sets than others.
            if len(masks) + math.comb(num_domains, lost) > limit:
                break
            sets = list(combinations(range(num_domains), lost))
            shares = [math.prod(odds[domain] for domain in chosen) if odds else 1.0 for chosen in sets]
            masks += [sum(1 << domain for domain in chosen) for chosen in sets]
            values += [share * weights[lost] / sum(shares) for share in shares]
        return np.asarray(masks, dtype=np.int64), np.asarray(values, dtype=np.float64)

    def score(self, masks: Sequence[int], num_domains: int) -> float:
        """Return the expected survival of state, exact up to rounding. Each mask has the domains of one part of state.

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


CONFIDENCE_DEVIATIONS = 3.2905
"""Number of standard deviations on each side of the mean that contain 99.9 % of a normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """Probability of survival if exactly ``num_lost`` domains are lost."""

    num_lost: int
    probability: float
    method: str
    """``enumeration`` or ``counting`` (both exact), or ``monte_carlo``."""
    interval: tuple[float, float] | None = None
    """99.9 % confidence interval of a Monte Carlo estimate (Wilson)."""

    @property
    def exact(self) -> bool:
        """Whether the probability is exact and not an estimate."""
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
    """Return one ``Survival`` for each number in ``lost``, in ascending order of these numbers.

    Args:
        holders: domains that hold each part of the state.
        domains: all domains that may be lost.
        lost: numbers of domains that are lost at the same time.
        odds: odds ``q / (1 - q)`` of the failure of each domain. The weight of a loss is the product of the odds of the
            lost domains. If it is None, all losses of the same number of domains are equally likely.
        num_samples: number of sampled losses, if counting would take too much memory.
        seed: seed of the samples.

    Raises:
        ConfigError: ``lost`` contains a number above the number of domains, or a part of the state has no holder.
    """
    index = {name: position for position, name in enumerate(domains)}
    masks = minimal_masks(sum(1 << index[name] for name in set(held)) for held in holders)
    wanted = sorted(set(lost))
    for count in wanted:
        if not 0 <= count <= len(index):
            raise ConfigError.of("lost domains", count, f"must be from 0 to {len(index)}, the number of domains")
    if 0 in masks:
        raise ConfigError.of("holders", "{}", "must name at least one failure domain for each part of the state")
    return tuple(_survival(masks, len(index), count, odds, num_samples, seed) for count in wanted)


def single_loss_survival(plans: Sequence[PlacementPlan], *, min_ranks: int = 0) -> float | None:
    """Return the probability that a job continues from expert replicas after the loss of one random failure domain.

    The job continues if every expert of all stages has a replica left and at least ``min_ranks`` ranks remain. The
    result is None if there is only one domain.
    """
    num_ranks = Counter(domain for plan in plans for domain in plan.domains)
    alone = {next(iter(held)) for plan in plans for held in plan.all_expert_domains() if len(held) == 1}
    # A job with too few ranks ends even if all experts survive.
    too_large = {domain for domain, count in num_ranks.items() if num_ranks.total() - count < min_ranks}
    return 1.0 - len(alone | too_large) / len(num_ranks) if len(num_ranks) > 1 else None


def _survival(
    masks: Sequence[int], num_domains: int, lost: int, odds: Sequence[float] | None, num_samples: int, seed: int
) -> Survival:
    relevant = [mask for mask in masks if mask.bit_count() <= lost]
    if not relevant:
        return Survival(num_lost=lost, probability=1.0, method="counting")
    if num_domains <= MAX_ENUMERATED_DOMAINS and odds is None:
        good = int(np.count_nonzero(~_lethal(relevant, num_domains) & (_popcounts(num_domains) == lost)))
        return Survival(num_lost=lost, probability=good / math.comb(num_domains, lost), method="enumeration")
    try:
        good_weight = surviving_weights(relevant, num_domains, lost, odds)[lost]
        all_weight = surviving_weights([], num_domains, lost, odds)[lost]
        return Survival(num_lost=lost, probability=good_weight / all_weight, method="counting")
    except TooManyStates:
        if odds is not None:
            raise
        return _monte_carlo(relevant, num_domains, lost, num_samples, seed)


def _popcounts(num_domains: int) -> npt.NDArray[np.int64]:
    """Return the number of lost domains in each of the ``2**num_domains`` sets of lost domains."""
    counts = np.zeros(1, dtype=np.int64)
    for _ in range(num_domains):
        counts = np.concatenate((counts, counts + 1))
    return counts


def _lethal(masks: Iterable[int], num_domains: int) -> npt.NDArray[np.bool_]:
    """Return for each of the ``2**num_domains`` sets of lost domains whether it is a superset of a set in ``masks``."""
    bad = np.zeros(1 << num_domains, dtype=np.bool_)
    bad[list(masks)] = True
    for bit in range(num_domains):
        # More lost domains keep a set lethal, so one pass for each domain replaces one pass for each mask.
        view = bad.reshape(-1, 2, 1 << bit)
        view[:, 1] |= view[:, 0]
    return bad


def _monte_carlo(masks: Sequence[int], num_domains: int, lost: int, num_samples: int, seed: int) -> Survival:
    # A separate generator, so that equal inputs give equal results everywhere.
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
