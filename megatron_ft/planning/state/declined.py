"""``Declined``: the reason why no plan is possible, and the state that is missing."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.operators import OperatorId
from megatron_ft.planning.state.tensors import StateTensor

_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingState:
    """Elements [start, stop) of a tensor that a rank needs but no rank has."""

    tensor: StateTensor
    start: int
    stop: int
    iteration: int
    """The rank needs the values that the elements have after this iteration."""
    held_iterations: tuple[int, ...]
    """Other iterations whose values of this tensor, or of a part of it, are on a rank or on storage."""

    def __str__(self) -> str:
        held = f" (iterations held: {', '.join(map(str, self.held_iterations))})" if self.held_iterations else ""
        return f"{self.tensor} elements {self.start} to {self.stop} of iteration {self.iteration}{held}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """Result that a planner or a recovery strategy returns if no plan is possible."""

    reason: str
    """Reason as a clause, without a full stop."""
    strategy: str = ""
    """Name of the recovery strategy that is not possible; empty if the result is that of another planner."""
    missing: tuple[OperatorId | MissingState, ...] = ()
    """State that no living rank has: whole operators, or elements of their tensors."""

    @property
    def elements(self) -> tuple[MissingState, ...]:
        """Return the entries of ``missing`` that are elements of a tensor, not whole operators."""
        return tuple(item for item in self.missing if isinstance(item, MissingState))

    @property
    def operators(self) -> tuple[OperatorId, ...]:
        """Return the operators of ``missing``, each once."""
        found = (item.tensor.operator if isinstance(item, MissingState) else item for item in self.missing)
        return tuple(dict.fromkeys(found))

    def summary(self) -> str:
        """Describe the result in one line for a log, with the first missing elements and operators."""
        text = ": ".join(part for part in (self.strategy, self.reason, _list(self.elements)) if part)
        if not self.missing:
            return text
        return f"{text}{'; operators ' if self.elements else ': '}{_list(self.operators)}"


def _list(items: Sequence[object]) -> str:
    more = f" and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
    return ", ".join(map(str, items[:_NAMED])) + more
