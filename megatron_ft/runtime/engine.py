"""The methods that an engine must have to replay a window: load a slice, run a logged iteration again."""

from collections.abc import Collection
from typing import Protocol

from megatron_ft.operators import OperatorId
from megatron_ft.planning.commit import Vote


class ReplayEngine(Protocol):
    """Interface of one rank's engine during the replay of a window. All ranks that replay must make the same calls."""

    def load(self, index: int) -> None:
        """Load slice ``index`` of the window. Slice 0 also restores random number generators, counters and history."""
        ...

    def replay(self, vote: Vote, frozen: Collection[OperatorId]) -> None:
        """Run the iteration of the logged ``vote`` again. Do not update the operators in ``frozen``.

        Raises:
            RecoveryError: the new vote of this iteration differs from ``vote``.
        """
        ...
