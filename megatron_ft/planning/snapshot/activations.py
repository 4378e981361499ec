"""Activation counts of experts, and the change that requires another order of operators."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ft.config.model import ModelConfig
from megatron_ft.operators import is_moe_layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Tokens that every expert received in the whole job, the same on every rank."""

    layers: tuple[int, ...]
    """Layers with experts, in Megatron's numbering (from 1)."""
    tokens: tuple[tuple[tuple[int, ...], ...], ...]
    """[record][layer][expert], oldest record first; a record is one or several iterations."""

    @classmethod
    def of(cls, model: ModelConfig, loads: Iterable[Sequence[Sequence[int]]]) -> "Activations | None":
        """Make activations from records of tokens [layer of the model][expert], oldest first; None without any."""
        layers = tuple(number for number in range(1, model.num_layers + 1) if is_moe_layer(model, number))
        records = tuple(tuple(tuple(rows[layer - 1]) for layer in layers) for rows in loads)
        return cls(layers=layers, tokens=records) if records else None

    def validate(self) -> None:
        """Assert that every record has a row of counts for each layer, all of equal length."""
        assert self.tokens, "there is no record of activations"
        width = len(self.tokens[0][0]) if self.layers else 0
        for rows in self.tokens:
            assert len(rows) == len(self.layers), f"{len(rows)} rows of activations for {len(self.layers)} layers"
            assert all(len(row) == width for row in rows), "layers have different numbers of experts"
            assert all(value >= 0 for row in rows for value in row), "a count is negative"

    @property
    def totals(self) -> tuple[tuple[int, ...], ...]:
        """[layer][expert]: tokens over all records."""
        return tuple(
            tuple(sum(column) for column in zip(*rows, strict=True)) for rows in zip(*self.tokens, strict=True)
        )

    def collapsed(self) -> "Activations":
        """Return the totals as one record."""
        return Activations(layers=self.layers, tokens=(self.totals,))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Activations":
        return cls(
            layers=tuple(content["layers"]),
            tokens=tuple(tuple(tuple(row) for row in rows) for rows in content["tokens"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReorderTrigger:
    """Decides when the popularity of experts has changed so much that operators are ordered again (MoEvement, 3.5).

    The frequency of an expert is its share of its layer's tokens. It is compared with the frequency for which the
    present order was made, not with the previous value: so slow drift triggers a new order, and oscillation does not.
    """

    min_change: float = 0.10
    """Relative change of an expert's frequency above which the expert counts as changed."""
    min_share: float = 0.25
    """Share of all experts that must have changed; above 1 keeps the first order."""

    def fires(self, before: Activations | None, now: Activations | None) -> bool:
        """Whether the order made from ``before`` is outdated."""
        if now is None:
            return False
        # Before the next check: the first order stays, even if it was made without any activations.
        if self.min_share > 1:
            return False
        if before is None or before.layers != now.layers:
            return True
        pairs = [
            pair
            for rows in zip(_frequencies(before), _frequencies(now), strict=True)
            for pair in zip(*rows, strict=True)
        ]
        num_moved = sum(abs(new - old) > self.min_change * old for old, new in pairs)
        # With a share of 0 equal frequencies must not count as changed.
        return num_moved > 0 and num_moved >= self.min_share * len(pairs)


def _frequencies(activations: Activations) -> list[list[float]]:
    return [[tokens / (sum(row) or 1) for tokens in row] for row in activations.totals]
