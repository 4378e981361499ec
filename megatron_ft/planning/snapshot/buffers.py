"""Triple buffering of windows: the buffer for the next window, the same on every rank."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from megatron_ft.planning.commit import WindowReport

NUM_BUFFERS = 3
"""Buffers of each rank, in its node's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStates:
    """State of a rank's buffers that the snapshot server reports; it may lag behind the rank's messages."""

    replicated: Mapping[int, int] = field(default_factory=dict)
    """Start iteration of the replicated window in each buffer."""
    given_up: Mapping[int, int] = field(default_factory=dict)
    """Start iteration of the window in each buffer that some peer will never receive."""
    pinned: frozenset[int] = frozenset()
    """Buffers that are being written to storage: they must not be changed or reused."""
    knows_commits: bool = True
    """Whether the server has processed every commit; a commit that it has not processed may still pin a buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBuffers:
    """Windows of a rank by buffer: one committed, one being replicated, one being captured."""

    held: dict[int, int] = field(default_factory=dict)
    """Buffer of each window that is kept, by start iteration."""
    committed: int = -1
    """Start iteration of the newest committed window; -1 before the first."""

    def report(self, states: BufferStates) -> WindowReport:
        """Report the windows of this rank for the vote, whose result is the input of ``after_vote``."""
        held = sorted(self.held.items())
        # If all buffers are in use, the next window takes that of the oldest one, which the next commit releases.
        spare = self._unheld() or {held[0][1]}
        return WindowReport(
            replicated_windows=_bits(states.replicated.get(buffer) == start for start, buffer in held),
            given_up_windows=_bits(states.given_up.get(buffer) == start for start, buffer in held),
            has_free_buffer=int(states.knows_commits and not spare <= states.pinned),
        )

    def after_vote(self, vote: WindowReport) -> "WindowBuffers":
        """Return the windows after a vote.

        The newest window that every rank has replicated is committed, and older ones are released. A newer one that
        some rank has given up can never be committed and is released as well.
        """
        # Bits of the vote count the held windows. These change by votes and by iterations alone, so they are the same
        # on every rank; buffers are each rank's own.
        starts = sorted(self.held)
        replicated = [start for index, start in enumerate(starts) if vote.replicated_windows >> index & 1]
        after = self.after_commit(max(replicated, default=-1))
        for index, start in enumerate(starts):
            # The committed window stays: it is the state that a restart would use.
            if vote.given_up_windows >> index & 1 and start > after.committed:
                after = after.abandon(start)
        return after

    def after_commit(self, committed: int) -> "WindowBuffers":
        """Return the windows after the commit of the window that started at ``committed``; older ones are released."""
        # The committed window is still held, and every later vote names it again.
        if committed <= self.committed:
            return self
        held = {start: buffer for start, buffer in self.held.items() if start >= committed}
        return WindowBuffers(held=held, committed=committed)

    def free(self, pinned: Set[int] = frozenset()) -> int | None:
        """A buffer without a kept window that is not ``pinned``; None if there is none."""
        return min(self._unheld() - pinned, default=None)

    def begin(self, start_iteration: int, pinned: Set[int] = frozenset()) -> "WindowBuffers":
        """Return the windows with a new one in the free buffer."""
        buffer = self.free(pinned)
        assert buffer is not None, f"no buffer is free for the window of iteration {start_iteration}: {self.held}"
        return WindowBuffers(held={**self.held, start_iteration: buffer}, committed=self.committed)

    def abandon(self, start_iteration: int) -> "WindowBuffers":
        """Return the windows without one that will not be completed."""
        held = {start: buffer for start, buffer in self.held.items() if start != start_iteration}
        return WindowBuffers(held=held, committed=self.committed)

    def _unheld(self) -> frozenset[int]:
        return frozenset(range(NUM_BUFFERS)) - frozenset(self.held.values())


def _bits(flags: Iterable[bool]) -> int:
    return sum(flag << index for index, flag in enumerate(flags))
