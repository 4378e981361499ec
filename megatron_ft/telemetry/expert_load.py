"""Computes how evenly the router spreads tokens over the experts of a layer."""

import math
from collections.abc import Sequence

from megatron_ft.events import ExpertLoad


def relative_load(tokens: Sequence[int]) -> list[float]:
    """Return each expert's number of tokens divided by the mean number per expert. Even load gives 1 for each expert.

    Args:
        tokens: Tokens per expert of one layer.
    """
    total = sum(tokens)
    return [count * len(tokens) / total if total else 0.0 for count in tokens]


def max_over_even_share(tokens: Sequence[int]) -> float:
    """Return the number of tokens of the busiest expert divided by the mean number per expert. The result is 1 for even
    load. It is the number of experts if one expert has all tokens."""
    return max(relative_load(tokens), default=0.0)


def herfindahl(tokens: Sequence[int]) -> float:
    """Return the Herfindahl-Hirschman index (HHI): the sum of the squares of the experts' shares of all tokens.

    With E experts, it is 1 / E for even load and 1 if one expert has all tokens. It is 0 if there are no tokens.
    """
    total = sum(tokens)
    return sum((count / total) ** 2 for count in tokens) if total else 0.0


def _herfindahl_over_even(tokens: Sequence[int]) -> float:
    """Return the Herfindahl-Hirschman index times the number of experts E. The result is 1 for even load, E if one
    expert has all tokens, and 0 if there are no tokens."""
    return len(tokens) * herfindahl(tokens)


def _percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the percentile ``percent`` of ``ordered``, whose values are in rising order, with linear interpolation.
    Return 0 if ``ordered`` is empty."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percent / 100.0
    below, share = math.floor(place), place - math.floor(place)
    return ordered[below] + share * (ordered[math.ceil(place)] - ordered[below])


def load_figures(record: ExpertLoad) -> dict[str, float]:
    """Return metrics of expert load by name: one group for each layer, and one group for all layers together."""
    numbers = record.layer_numbers or tuple(range(1, len(record.layers) + 1))
    figures: dict[str, float] = {}
    together: list[float] = []
    skews: list[float] = []
    for number, tokens in zip(numbers, record.layers, strict=True):
        ordered, skew = sorted(relative_load(tokens)), _herfindahl_over_even(tokens)
        figures |= _spread(f"expert_load/layer_{number}_", ordered, skew)
        together += ordered
        skews.append(skew)
    if skews:
        figures |= _spread("expert_load/", sorted(together), sum(skews) / len(skews))
    return figures


def _spread(prefix: str, ordered: Sequence[float], skew: float) -> dict[str, float]:
    return {
        f"{prefix}p50_over_even": _percentile(ordered, 50),
        f"{prefix}p95_over_even": _percentile(ordered, 95),
        f"{prefix}max_over_even": ordered[-1] if ordered else 0.0,
        f"{prefix}hhi_over_even": skew,
    }


def bin_loads(loads: Sequence[float], num_bins: int) -> list[float]:
    """Reduce ``loads`` to at most ``num_bins`` values. A value is the largest load in a group of adjacent experts."""
    bin_size = max(1, -(-len(loads) // num_bins))
    return [max(loads[start : start + bin_size]) for start in range(0, len(loads), bin_size)]
