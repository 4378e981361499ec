"""Interface of an engine for recovery: load a slice, run a logged iteration again."""

from collections.abc import Collection
from typing import Protocol

from megatron_ft.operators import OperatorId
from megatron_ft.planning.commit import Vote


class ReplayEngine(Protocol):
    """Protocol of one rank's engine with a window to replay. All calls are collective over the ranks that replay."""

    def load(self, index: int) -> None:
        """Load slice ``index`` of the window; slice 0 also restores random numbers, counters and history."""
        ...

    def replay(self, vote: Vote, frozen: Collection[OperatorId]) -> None:
        """Run the iteration of ``vote`` again, without weight gradients and updates of the operators ``frozen``.

        Raises:
            RecoveryError: the result differs from the logged vote.
        """
        ...
