"""Cost of each committed window on one rank."""

from megatron_ft.events import WindowCommitted
from megatron_ft.snapshot.capture.capture import CaptureFigures
from megatron_ft.snapshot.server.client import PERSISTED_BYTES, REPLICATED_BYTES, Arena

_NAMES = ("stalled_seconds", "captured_bytes", "replicated_bytes", "persisted_bytes")


class SnapshotStats:
    """Splits cumulative sums into the cost of each window, also if a sum restarts at 0."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = dict.fromkeys(_NAMES, 0)
        self._unreported: dict[str, float] = dict.fromkeys(_NAMES, 0)
        self._arena: Arena | None = None

    def end_captures(self, figures: CaptureFigures) -> None:
        """Add the last ``figures`` of a capture; those of the next capture start at 0."""
        self._add(figures)
        self._seen |= {"stalled_seconds": 0, "captured_bytes": 0}

    def watch(self, arena: Arena) -> None:
        """Read the snapshot server's sums from ``arena``; their present values belong to earlier processes or
        memory."""
        if arena is not self._arena:
            self._arena = arena
            self._seen |= self._server_sums()

    def record(
        self, iteration: int, *, start_iteration: int, num_iterations: int, figures: CaptureFigures
    ) -> WindowCommitted:
        """Return the event of a window that the vote of ``iteration`` has committed, with all costs since the previous
        window."""
        self._add(figures)
        cost, self._unreported = self._unreported, dict.fromkeys(_NAMES, 0)
        return WindowCommitted(
            iteration=iteration,
            start_iteration=start_iteration,
            num_iterations=num_iterations,
            stalled_seconds=cost["stalled_seconds"],
            captured_bytes=int(cost["captured_bytes"]),
            replicated_bytes=int(cost["replicated_bytes"]),
            persisted_bytes=int(cost["persisted_bytes"]),
        )

    def _add(self, figures: CaptureFigures) -> None:
        now = {"stalled_seconds": figures.stalled_seconds, "captured_bytes": figures.num_bytes, **self._server_sums()}
        for name, value in now.items():
            self._unreported[name] += value - self._seen[name]
        self._seen |= now

    def _server_sums(self) -> dict[str, float]:
        if self._arena is None:
            return {}
        words = {"replicated_bytes": REPLICATED_BYTES, "persisted_bytes": PERSISTED_BYTES}
        return {name: self._arena.status(word) for name, word in words.items()}
