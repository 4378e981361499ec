"""Order of operators within a window: experts with many tokens come last, so they stay frozen longest in a replay.

An operator is frozen until its full state is loaded. While it is frozen, its weight gradients are not computed, so
replays are cheaper (MoEvement, 3.5). Operators other than routed experts process every token and come after the experts
(figure 6), from the last layer to the first, because a backward pass ends at the first active operator (appendix E).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from megatron_ft.errors import ConfigError
from megatron_ft.operators import OperatorId
from megatron_ft.planning.snapshot.plan import Activations


class OperatorOrder(Protocol):
    """Protocol of a policy that orders the operators of a job, in the same way on every rank."""

    @property
    def uses_activations(self) -> bool:
        """Whether the order depends on ``Activations``, the numbers of tokens of experts."""

    def order(self, operators: Sequence[OperatorId], activations: Activations | None) -> tuple[OperatorId, ...]:
        """Return ``operators`` in capture order. Without ``activations`` (token counts), all experts count alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardCount:
    """Orders experts by their numbers of tokens, summed over all recorded iterations (MoEvement, section 3.5)."""

    uses_activations: ClassVar[bool] = True

    def order(self, operators: Sequence[OperatorId], activations: Activations | None) -> tuple[OperatorId, ...]:
        return _ascending(operators, activations, [] if activations is None else activations.totals)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeDecayed:
    """Orders experts by ``A(t) = decay * A(t-1) + (1 - decay) * tokens(t)`` (moving average; MoEvement, appendix B)."""

    decay: float = 0.9
    """Weight of earlier records (alpha in the paper), from 0 (newest record only) to below 1."""
    uses_activations: ClassVar[bool] = True

    def order(self, operators: Sequence[OperatorId], activations: Activations | None) -> tuple[OperatorId, ...]:
        """Return the ordered operators. Raises ConfigError if ``decay`` is outside [0, 1)."""
        if not 0 <= self.decay < 1:
            raise ConfigError.of("snapshot.policy.order.decay", self.decay, "must be at least 0 and below 1")
        scores: list[list[float]] = []
        for rows in () if activations is None else activations.tokens:
            past = scores or [[0.0] * len(row) for row in rows]
            scores = [
                [self.decay * old + (1.0 - self.decay) * new for old, new in zip(*pair, strict=True)]
                for pair in zip(past, rows, strict=True)
            ]
        return _ascending(operators, activations, scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityAware:
    """Orders experts by their tokens divided by their capacity, if their capacities differ (MoEvement, appendix B)."""

    capacities: tuple[float, ...]
    """Capacity of each expert, by expert id, the same in all layers; above 0. Only the ratios of capacities matter."""
    uses_activations: ClassVar[bool] = True

    def order(self, operators: Sequence[OperatorId], activations: Activations | None) -> tuple[OperatorId, ...]:
        """Return the ordered operators. Raises ConfigError if the capacity of an expert is missing or not above 0."""
        num_experts = 1 + max((operator.expert for operator in operators if operator.expert is not None), default=-1)
        if len(self.capacities) != num_experts or not all(capacity > 0 for capacity in self.capacities):
            constraint = f"must be {num_experts} numbers above 0, one for each expert"
            raise ConfigError.of("snapshot.policy.order.capacities", self.capacities, constraint)
        rows = () if activations is None else activations.totals
        scores = [[tokens / capacity for tokens, capacity in zip(row, self.capacities, strict=True)] for row in rows]
        return _ascending(operators, activations, scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackToFront:
    """Orders operators from the output head to the embedding; meant for dense models (MoEvement, appendix E)."""

    uses_activations: ClassVar[bool] = False

    def order(self, operators: Sequence[OperatorId], activations: Activations | None) -> tuple[OperatorId, ...]:
        return tuple(sorted(operators, key=_back_to_front))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOrder:
    """Orders operators from the embedding to the output head; a baseline."""

    uses_activations: ClassVar[bool] = False

    def order(self, operators: Sequence[OperatorId], activations: Activations | None) -> tuple[OperatorId, ...]:
        return tuple(sorted(operators, key=lambda operator: (operator.layer, operator.kind, operator.expert or 0)))


def _ascending(
    operators: Sequence[OperatorId], activations: Activations | None, scores: Sequence[Sequence[float]]
) -> tuple[OperatorId, ...]:
    """Order experts by ``scores`` [layer][expert], then other operators from the last layer to the first."""
    experts = [operator for operator in operators if operator.expert is not None]
    rest = [operator for operator in operators if operator.expert is None]
    row_of = {} if activations is None else {layer: row for row, layer in enumerate(activations.layers)}

    def key(operator: OperatorId) -> tuple[float, int, int]:
        assert operator.expert is not None, f"{operator} is not an expert"
        if not row_of:
            return 0.0, operator.layer, operator.expert
        row = scores[row_of[operator.layer]] if operator.layer in row_of else ()
        assert operator.expert < len(row), f"activations lack {operator}"
        # Ties are decided by layer and id, never by the order of the input: all ranks need the same plan.
        return row[operator.expert], operator.layer, operator.expert

    return (*sorted(experts, key=key), *sorted(rest, key=_back_to_front))


def _back_to_front(operator: OperatorId) -> tuple[int, str, int]:
    return -operator.layer, operator.kind, operator.expert or 0
