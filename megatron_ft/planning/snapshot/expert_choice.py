"""Chooses the experts that a window captures. An earlier window provides the state of all other experts.

All functions use only values that are equal on all ranks, so every rank chooses the same experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]
"""True for experts that are captured, ``[MoE layers, experts]``."""
Counts = npt.NDArray[np.int64]


class ExpertChoice(Protocol):
    """Protocol of a class that chooses the experts of a window: a frozen dataclass, named by a policy's ``choice``."""

    def choose(self, number: int, num_experts: int, at_risk: Counts, num_groups: int) -> Mask:
        """Choose ``num_experts`` experts in each layer on average.

        Args:
            number: index of the window, counted from the start of the run.
            num_experts: number of experts to choose in each layer on average; at most the number of experts of a layer.
            at_risk: tokens that each expert has processed since its last capture, ``[MoE layers, experts]``.
            num_groups: number of equal groups of consecutive experts; the experts of a group are on the same ranks.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequential:
    """Chooses the experts in turn, ``num_experts`` per layer (MoC-System, section 3.2 and figure 4).

    The next window captures in layer i the experts that this window captures in layer i + 1. The order alternates
    between groups (experts on the same ranks), so that experts next to each other in the order are on different ranks.
    """

    def choose(self, number: int, num_experts: int, at_risk: Counts, num_groups: int) -> Mask:
        num_layers, total = at_risk.shape
        order = np.arange(total).reshape(num_groups, -1).T.reshape(-1)
        chosen = np.zeros(at_risk.shape, dtype=np.bool_)
        turns = np.arange(num_experts)
        for layer in range(num_layers):
            chosen[layer, order[((number + layer) * num_experts + turns) % total]] = True
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobin:
    """Chooses the experts in turn, the same experts in all layers; a baseline (MoEtion, section 7.4)."""

    def choose(self, number: int, num_experts: int, at_risk: Counts, num_groups: int) -> Mask:
        total = at_risk.shape[1]
        chosen = np.zeros(at_risk.shape, dtype=np.bool_)
        chosen[:, (number * num_experts + np.arange(num_experts)) % total] = True
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAware:
    """Chooses, in each layer, the experts that have processed the most tokens since their last capture (load-aware
    selection; MoC-System, section 3.2)."""

    def choose(self, number: int, num_experts: int, at_risk: Counts, num_groups: int) -> Mask:
        return _top(at_risk, np.full(len(at_risk), num_experts))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRisk:
    """Divides the number of experts among layers in proportion to the layers' tokens at risk, and chooses in each layer
    the experts that have processed the most tokens since their last capture (MoEtion, algorithm 1)."""

    def choose(self, number: int, num_experts: int, at_risk: Counts, num_groups: int) -> Mask:
        return _top(at_risk, _per_layer(at_risk.sum(axis=1).tolist(), num_experts * len(at_risk), at_risk.shape[1]))


def _per_layer(risk: Sequence[int], total: int, most: int) -> Counts:
    """Divide ``total`` experts among layers in proportion to ``risk``, at most ``most`` for each layer (MoEtion,
    algorithm 1, lines 4 and 5).

    Shares are rounded down, and the layers with the largest remainders get the remaining experts. The arithmetic uses
    integers, so that the result is equal on all ranks.
    """
    assert 0 <= total <= most * len(risk), f"{total} experts do not fit {len(risk)} layers of {most}"
    shares = np.zeros(len(risk), dtype=np.int64)
    left, open_layers = total, list(range(len(risk)))
    while left:
        weights = [max(risk[layer], 0) for layer in open_layers]
        # If no layer that can take more experts has tokens at risk, all of these layers get equal shares.
        weights = weights if any(weights) else [1] * len(open_layers)
        whole = sum(weights)
        parts = [left * weight // whole for weight in weights]
        remainders = [(-(left * weight % whole), layer) for weight, layer in zip(weights, open_layers, strict=True)]
        for _, layer in sorted(remainders)[: left - sum(parts)]:
            parts[open_layers.index(layer)] += 1
        for part, layer in zip(parts, open_layers, strict=True):
            shares[layer] += part
        # Experts above ``most`` are divided among the layers that are not full.
        left = int(np.maximum(shares - most, 0).sum())
        shares = np.minimum(shares, most)
        open_layers = [layer for layer in open_layers if shares[layer] < most]
    return shares


def _top(at_risk: Counts, numbers: Counts) -> Mask:
    # Ties are decided by the number of the expert: all ranks must choose the same.
    order = np.argsort(-at_risk, axis=1, kind="stable")
    chosen = np.zeros(at_risk.shape, dtype=np.bool_)
    for layer, number in enumerate(numbers.tolist()):
        chosen[layer, order[layer, :number]] = True
    return chosen


def worst_next_loss(loads: npt.NDArray[np.float64], interval_iterations: int, num_experts: int) -> float:
    """Return the largest number of tokens that one failure can lose in a layer whose experts are captured in turn.

    An expert is captured in every ``ceil(experts / num_experts)``-th window. So right after a window, ``num_experts``
    experts were captured 0 windows ago, the next ones 1 window ago, and so on. The bound holds for any order of turns:
    it assumes that the experts with the most tokens were captured longest ago.

    Args:
        loads: tokens of each expert per iteration, ``[experts]``.
    """
    ages = np.arange(len(loads)) // num_experts
    return float(np.sort(loads) @ ages) * interval_iterations
