"""Figures of how evenly the router spreads tokens over a layer's experts."""

from collections.abc import Sequence


def relative_load(tokens: Sequence[int]) -> list[float]:
    """Each expert's tokens over the even share; all ones when every expert has the same.

    Args:
        tokens: Tokens per expert of one layer.
    """
    total = sum(tokens)
    return [count * len(tokens) / total if total else 0.0 for count in tokens]


def max_over_even_share(tokens: Sequence[int]) -> float:
    """Tokens of the busiest expert over the even share: 1 is even, the number of experts is the worst."""
    return max(relative_load(tokens), default=0.0)


def herfindahl(tokens: Sequence[int]) -> float:
    """Herfindahl-Hirschman index (HHI), the sum of squared shares: 1 / experts is even, 1 is all tokens on one expert.

    0 where there are no tokens.
    """
    total = sum(tokens)
    return sum((count / total) ** 2 for count in tokens) if total else 0.0


def bin_loads(loads: Sequence[float], num_bins: int) -> list[float]:
    """At most ``num_bins`` figures: so many neighbours as needed are merged, the largest stands for all."""
    bin_size = max(1, -(-len(loads) // num_bins))
    return [max(loads[start : start + bin_size]) for start in range(0, len(loads), bin_size)]
