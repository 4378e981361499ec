"""Retention of dense checkpoints."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """Keeps the newest ``keep_last`` checkpoints and every multiple of ``keep_every_iterations``."""

    keep_last: int
    """Number of newest complete checkpoints to keep; 0 keeps all."""
    keep_every_iterations: int = 0
    """Also keep iterations that are a multiple of this; 0 keeps no others."""

    def removable(self, complete: Sequence[tuple[int, str]], *, in_use: Collection[str] = ()) -> tuple[str, ...]:
        """List the names to delete, oldest first. The newest checkpoint is never deleted.

        Args:
            complete: (iteration, name) of every complete checkpoint; of equal iterations the later name is newer.
            in_use: names to keep, e.g. the checkpoint that the run resumed from.
        """
        if self.keep_last == 0:
            return ()
        newest_first = sorted(complete, reverse=True)
        spare = newest_first[max(1, self.keep_last) :]
        return tuple(name for iteration, name in reversed(spare) if not self._pinned(iteration) and name not in in_use)

    def _pinned(self, iteration: int) -> bool:
        return self.keep_every_iterations > 0 and iteration % self.keep_every_iterations == 0
