"""Which buffer the next window is captured into: the triple buffer's rule, the same on every rank."""

from dataclasses import dataclass, field

NUM_BUFFERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBuffers:
    """Windows and the buffers that hold them: one committed, one being captured, one being replicated in between."""

    held: dict[int, int] = field(default_factory=dict)
    """Start iteration of each window that is kept, to its buffer."""
    committed: int = -1
    """Start iteration of the newest window that the whole job has replicated; -1 before the first."""

    def after_commit(self, committed: int) -> "WindowBuffers":
        """Once the job agrees that the window that started at ``committed`` is replicated: older ones are let go."""
        if committed <= self.committed:
            return self
        held = {start: buffer for start, buffer in self.held.items() if start >= committed}
        return WindowBuffers(held=held, committed=committed)

    def free(self) -> int | None:
        """A buffer that holds nothing that is needed; None while every one does."""
        taken = set(self.held.values())
        return next((buffer for buffer in range(NUM_BUFFERS) if buffer not in taken), None)

    def begin(self, start_iteration: int) -> "WindowBuffers":
        """With a new window in the free buffer."""
        buffer = self.free()
        assert buffer is not None, f"no buffer is free for the window of iteration {start_iteration}: {self.held}"
        return WindowBuffers(held={**self.held, start_iteration: buffer}, committed=self.committed)

    def abandon(self, start_iteration: int) -> "WindowBuffers":
        """Without a window that will not be completed."""
        held = {start: buffer for start, buffer in self.held.items() if start != start_iteration}
        return WindowBuffers(held=held, committed=self.committed)
