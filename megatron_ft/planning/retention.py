"""Retention policy for dense checkpoints: decides which checkpoints are deleted."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """Keeps the newest ``keep_last`` checkpoints, and those of iterations divisible by ``keep_every_iterations``."""

    keep_last: int
    """Number of newest complete checkpoints to keep; 0 keeps all."""
    keep_every_iterations: int = 0
    """Checkpoints of iterations that are a multiple of this number are also kept; 0 turns this off."""

    def removable(self, complete: Sequence[tuple[int, str]], *, in_use: Collection[str] = ()) -> tuple[str, ...]:
        """List the names of checkpoints to delete, oldest first. The newest checkpoint is never deleted.

        Args:
            complete: (iteration, name) of every complete checkpoint; if iterations are equal, names are compared.
            in_use: names of checkpoints that must not be deleted, such as the checkpoint from which the run resumed.
        """
        if self.keep_last == 0:
            return ()
        newest_first = sorted(complete, reverse=True)
        spare = newest_first[max(1, self.keep_last) :]
        return tuple(name for iteration, name in reversed(spare) if not self._pinned(iteration) and name not in in_use)

    def _pinned(self, iteration: int) -> bool:
        return self.keep_every_iterations > 0 and iteration % self.keep_every_iterations == 0
