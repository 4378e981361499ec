"""``Declined``: the reason why no plan is possible, and the state that is missing."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.planning.state.tensors import StateTensor

_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingState:
    """Elements [start, stop) of a tensor that a rank needs but no rank has."""

    tensor: StateTensor
    start: int
    stop: int
    iteration: int
    """Iteration after which the state of the elements is needed."""
    held_iterations: tuple[int, ...]
    """Other iterations for which a rank or storage has elements of this tensor."""

    def __str__(self) -> str:
        held = f" (iterations held: {', '.join(map(str, self.held_iterations))})" if self.held_iterations else ""
        return f"{self.tensor} elements {self.start} to {self.stop} of iteration {self.iteration}{held}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """Result that a planner returns if no plan is possible."""

    reason: str
    """Reason as a clause, without a full stop."""
    missing: tuple[MissingState, ...] = ()

    def summary(self) -> str:
        """Describe the result in one line for a log."""
        if not self.missing:
            return self.reason
        operators = list(dict.fromkeys(str(item.tensor.operator) for item in self.missing))
        return f"{self.reason}: {_list(self.missing)}; operators {_list(operators)}"


def _list(items: Sequence[object]) -> str:
    more = f" and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
    return ", ".join(map(str, items[:_NAMED])) + more
