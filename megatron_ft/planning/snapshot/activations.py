"""How often experts were activated, and when that has changed enough to order operators anew."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ft.config.model import ModelConfig
from megatron_ft.operators import is_moe_layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Tokens that every expert received, over the whole job: the same on every rank."""

    layers: tuple[int, ...]
    """Megatron's numbers (from 1) of the layers that have experts."""
    tokens: tuple[tuple[tuple[int, ...], ...], ...]
    """[record][layer][expert], oldest record first; a record is an iteration or several."""

    @classmethod
    def of(cls, model: ModelConfig, loads: Iterable[Sequence[Sequence[int]]]) -> "Activations | None":
        """From records of tokens [layer of the model][expert], oldest first; None without any."""
        layers = tuple(number for number in range(1, model.num_layers + 1) if is_moe_layer(model, number))
        records = tuple(tuple(tuple(rows[layer - 1]) for layer in layers) for rows in loads)
        return cls(layers=layers, tokens=records) if records else None

    def validate(self) -> None:
        """Assert that every record has a row for each layer, equally long, of counts."""
        assert self.tokens, "activations have at least one record"
        width = len(self.tokens[0][0]) if self.layers else 0
        for rows in self.tokens:
            assert len(rows) == len(self.layers), f"{len(rows)} rows of activations for {len(self.layers)} layers"
            assert all(len(row) == width for row in rows), "layers have different numbers of experts"
            assert all(value >= 0 for row in rows for value in row), "activations are counts"

    @property
    def totals(self) -> tuple[tuple[int, ...], ...]:
        """[layer][expert] over all records."""
        return tuple(
            tuple(sum(column) for column in zip(*rows, strict=True)) for rows in zip(*self.tokens, strict=True)
        )

    def collapsed(self) -> "Activations":
        """The same totals as one record."""
        return Activations(layers=self.layers, tokens=(self.totals,))


    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Activations":
        """Inverse of ``to_json``."""
        return cls(
            layers=tuple(content["layers"]),
            tokens=tuple(tuple(tuple(row) for row in rows) for rows in content["tokens"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReorderTrigger:
    """When popularity has moved so far that operators are ordered anew (MoEvement, section 3.5).

    An expert's frequency is its share of its layer's tokens. What is compared is always the popularity that the order
    in force was made from, not the last one looked at: values that swing around it do not add up, slow drift does.
    """

    min_change: float = 0.10
    """Relative change of an expert's frequency above which it counts as moved."""
    min_share: float = 0.25
    """Share of all experts that must have moved; above 1 keeps the first order for good."""

    def fires(self, before: Activations | None, now: Activations | None) -> bool:
        """Whether the order made from ``before`` is out of date."""
        if now is None:
            return False
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
        return num_moved > 0 and num_moved >= self.min_share * len(pairs)


def _frequencies(activations: Activations) -> list[list[float]]:
    return [[tokens / (sum(row) or 1) for tokens in row] for row in activations.totals]
