"""Which checkpoints may be deleted."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """Keep the newest ``keep_last`` checkpoints and every one on a multiple of ``keep_every_iterations``."""

    keep_last: int
    """Newest complete checkpoints kept; 0 keeps all."""
    keep_every_iterations: int = 0
    """Keep iterations divisible by this as well; 0 none."""

    def removable(self, complete: Sequence[tuple[int, str]], *, in_use: Collection[str] = ()) -> tuple[str, ...]:
        """Names to delete, oldest first.

        ``complete`` holds (iteration, name) of every complete checkpoint in any order; two names may
        share an iteration, the later name is then the newer. The newest is never deleted, nor any in
        ``in_use`` (the one a run resumed from, while nothing newer of its own is complete).
        """
        if self.keep_last == 0:
            return ()
        newest_first = sorted(complete, reverse=True)
        spare = newest_first[max(1, self.keep_last) :]
        return tuple(name for iteration, name in reversed(spare) if not self._pinned(iteration) and name not in in_use)

    def _pinned(self, iteration: int) -> bool:
        return self.keep_every_iterations > 0 and iteration % self.keep_every_iterations == 0
