"""Counts lost tokens. A token is lost if the router assigned it to an expert, and its update of this expert was lost.

A recovery loses updates if its window leaves out an expert. The recovery then restores an older state of this expert
than of the rest of the model, and the updates of the expert between the two states are lost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Rows = tuple[tuple[int, ...], ...]
"""Numbers of tokens as [MoE layer][expert]. Layers without routed experts have no row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLedger:
    """Numbers of tokens that each expert has processed and lost since iteration 0. These numbers are part of the train
    state, so a recovery restores the numbers of the iteration from which training continues."""

    processed: Rows
    """Tokens that each expert has processed in committed iterations."""
    lost: Rows
    """Tokens of each expert whose updates were lost in recoveries, summed over recoveries."""
    repaid: Rows
    """Tokens that experts processed beyond their usual capacity in committed iterations, to make up for lost tokens."""

    @classmethod
    def empty(cls, loads: Sequence[Sequence[int]]) -> "TokenLedger":
        """Create token counts of 0 for every MoE layer and expert of ``loads``."""
        zeros = tuple((0,) * len(row) for row in loads)
        return cls(processed=zeros, lost=zeros, repaid=zeros)

    def after(self, loads: Sequence[Sequence[int]], repaid: Sequence[Sequence[int]] | None = None) -> "TokenLedger":
        """Return the token counts after a committed iteration.

        Args:
            loads: number of tokens of each expert in this iteration, [MoE layer][expert].
            repaid: number of these tokens that experts processed beyond their usual capacity, to make up for lost
                tokens; None if there are none.
        """
        return TokenLedger(
            processed=_sum(self.processed, loads),
            lost=self.lost,
            repaid=self.repaid if repaid is None else _sum(self.repaid, repaid),
        )

    def after_loss(self, lost: Sequence[Sequence[int]]) -> "TokenLedger":
        """Return the token counts after a recovery that has lost ``lost`` [MoE layer][expert] tokens."""
        return replace(self, lost=_sum(self.lost, lost))

    def owed(self) -> Rows:
        """Return each expert's lost tokens minus the additional tokens that it has processed to make up for them
        (``repaid``), but at least 0, as [MoE layer][expert]."""
        return tuple(
            tuple(max(0, lost - repaid) for lost, repaid in zip(*rows, strict=True))
            for rows in zip(self.lost, self.repaid, strict=True)
        )

    def lost_share(self, planned_tokens: int) -> float:
        """Return the proportion of lost tokens (PLT; MoC-System, equation 7): lost tokens divided by planned
        tokens, as a mean over MoE layers.

        Args:
            planned_tokens: tokens that the router assigns in one layer in the whole training. A token counts once for
                each of its experts. The number of tokens so far is not used, because an early failure would then exceed
                any bound.
        """
        return mean_share(self.lost, planned_tokens)

    def momentary(self, lost: Sequence[Sequence[int]]) -> float:
        """Return the momentary lost tokens (MLT) of one recovery by equation 6 of MoEtion. Each layer's lost tokens are
        divided by its processed tokens, and the quotients are *summed* over layers, so the result can exceed 1. A bound
        such as ``max_lost_share`` applies to a mean over layers instead, as in ``lost_share``.

        Args:
            lost: tokens of [MoE layer][expert] whose updates the recovery lost.
        """
        pairs = [(sum(mine), sum(all_tokens)) for mine, all_tokens in zip(lost, self.processed, strict=True)]
        return sum(mine / all_tokens for mine, all_tokens in pairs if all_tokens)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "TokenLedger":
        """Create token counts from the JSON form of their ``dataclasses.asdict``. ``repaid`` may be missing."""
        read = {name: tuple(tuple(row) for row in rows) for name, rows in content.items()}
        return cls(**{"repaid": cls.empty(read["lost"]).repaid, **read})


def mean_share(tokens: Sequence[Sequence[int]], per_layer: int) -> float:
    """Divide the ``tokens`` of each MoE layer by ``per_layer``. Return the mean over layers; 0 without MoE layers."""
    if not tokens or per_layer <= 0:
        return 0.0
    return sum(sum(row) for row in tokens) / (len(tokens) * per_layer)


def _sum(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> Rows:
    return tuple(tuple(a + b for a, b in zip(*rows, strict=True)) for rows in zip(one, other, strict=True))
