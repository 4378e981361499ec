"""What committed windows have cost one rank, each since the one before."""

from dataclasses import dataclass, field

from megatron_ft.events import WindowCommitted
from megatron_ft.snapshot.capture.capture import CaptureFigures
from megatron_ft.snapshot.server.client import PERSISTED_BYTES, REPLICATED_BYTES, Arena


@dataclass(slots=True)
class _Counter:
    """A sum that somebody else keeps, and how much of it has not been told yet."""

    seen: float = 0
    untold: float = 0

    def look(self, value: float) -> None:
        """It stands at ``value`` now."""
        self.seen, self.untold = value, self.untold + value - self.seen

    def tell(self) -> float:
        """What it has risen by since the last call."""
        told, self.untold = self.untold, 0
        return told


@dataclass(slots=True)
class SnapshotStats:
    """Tells sums that only rise apart, window by window, wherever they begin anew."""

    _stalled_seconds: _Counter = field(default_factory=_Counter)
    _captured_bytes: _Counter = field(default_factory=_Counter)
    _replicated_bytes: _Counter = field(default_factory=_Counter)
    _persisted_bytes: _Counter = field(default_factory=_Counter)
    _arena: Arena | None = None

    def end_captures(self, figures: CaptureFigures) -> None:
        """The next figures of captures begin at 0."""
        self._look(figures)
        self._stalled_seconds.seen = self._captured_bytes.seen = 0

    def watch(self, arena: Arena) -> None:
        """The keeper's sums are in ``arena``: what it did before belongs to another process, or to memory given up."""
        if arena is not self._arena:
            self._arena = arena
            self._replicated_bytes.seen = arena.status(REPLICATED_BYTES)
            self._persisted_bytes.seen = arena.status(PERSISTED_BYTES)

    def record(
        self, iteration: int, *, start_iteration: int, num_iterations: int, figures: CaptureFigures
    ) -> WindowCommitted:
        """The vote of ``iteration`` has committed a window."""
        self._look(figures)
        return WindowCommitted(
            iteration=iteration,
            start_iteration=start_iteration,
            num_iterations=num_iterations,
            stalled_seconds=self._stalled_seconds.tell(),
            captured_bytes=int(self._captured_bytes.tell()),
            replicated_bytes=int(self._replicated_bytes.tell()),
            persisted_bytes=int(self._persisted_bytes.tell()),
        )

    def _look(self, figures: CaptureFigures) -> None:
        self._stalled_seconds.look(figures.stalled_seconds)
        self._captured_bytes.look(figures.num_bytes)
        if self._arena is not None:
            self._replicated_bytes.look(self._arena.status(REPLICATED_BYTES))
            self._persisted_bytes.look(self._arena.status(PERSISTED_BYTES))
