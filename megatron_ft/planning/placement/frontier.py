"""Counts the losses after which every set of domains has a survivor, by dynamic programming over the domains.

Sets without a common domain are independent, so each connected component is counted alone and the results are
convolved. After some domains, the state is the collection of sets that have no survivor among them yet. Its value is
the weight of the losses that lead to it, by number of lost domains.
"""

import math
from collections.abc import Iterable, Sequence

# Each state has a list of weights: with more of them, counting would take too much memory.
MAX_STATES = 4096


class TooManyStates(Exception):
    """The sets overlap so much that counting would need more than ``MAX_STATES`` states."""


def minimal_masks(masks: Iterable[int]) -> list[int]:
    """Remove masks that contain another one: the loss of a set includes the loss of its subsets."""
    kept: list[int] = []
    for mask in sorted(set(masks), key=lambda mask: (mask.bit_count(), mask)):
        if not any(smaller & mask == smaller for smaller in kept):
            kept.append(mask)
    return kept


def surviving_weights(
    masks: Sequence[int], num_domains: int, max_lost: int, odds: Sequence[float] | None = None
) -> list[float]:
    """Return the weights of the losses of 0 to ``max_lost`` domains after which every set of ``masks`` has a survivor.

    The weight of a loss is the product of its domains' ``odds``; without odds, losses are counted in integers.

    Raises:
        TooManyStates: a connected component needs more than ``MAX_STATES`` states.
    """
    touched = 0
    total: list[float] = [1]
    for part in _parts(masks):
        union = 0
        for mask in part:
            union |= mask
        touched |= union
        total = _convolve(total, _sweep(part, union, max_lost, odds), max_lost)
    free = [domain for domain in range(num_domains) if not touched >> domain & 1]
    if odds is None:
        total = _convolve(total, [math.comb(len(free), lost) for lost in range(max_lost + 1)], max_lost)
    else:
        for domain in free:
            total = _convolve(total, [1, odds[domain]], max_lost)
    return total + [0] * (max_lost + 1 - len(total))


def _parts(masks: Sequence[int]) -> list[list[int]]:
    parts: list[tuple[int, list[int]]] = []
    for mask in masks:
        union, members, apart = mask, [mask], []
        for other, group in parts:
            if other & mask:
                union, members = union | other, members + group
            else:
                apart.append((other, group))
        parts = [*apart, (union, members)]
    return [members for _, members in parts]


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
            # The domain survives, and with it all sets that it holds.
            _add(following, unhit & ~members[domain], weights)
            # The domain is lost: that is survived only if no set without a survivor ends with it.
            if not unhit & closing[domain]:
                _add(following, unhit, [0, *(value * weight for value in weights[:max_lost])])
        if len(following) > MAX_STATES:
            raise TooManyStates(f"{len(masks)} sets over {len(domains)} domains")
        states = following
    return states.get(0, [0])


def _add(states: dict[int, list[float]], state: int, weights: list[float]) -> None:
    known = states.get(state)
    if known is None:
        states[state] = weights
        return
    longer, shorter = (known, weights) if len(known) >= len(weights) else (weights, known)
    states[state] = [value + other for value, other in zip(longer, shorter, strict=False)] + longer[len(shorter) :]


def _convolve(left: list[float], right: list[float], max_lost: int) -> list[float]:
    result: list[float] = [0] * min(len(left) + len(right) - 1, max_lost + 1)
    for position, value in enumerate(left):
        if value:
            for offset, other in enumerate(right[: len(result) - position]):
                result[position + offset] += value * other
    return result
