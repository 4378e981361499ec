"""Triple buffering of windows: decides which buffer of a rank the next window uses."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from megatron_ft.planning.commit import WindowReport

NUM_BUFFERS = 3
"""Number of buffers of each rank, in the memory of its node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStates:
    """Report of the snapshot server about a rank's buffers; it may lag behind the messages that the rank has sent."""

    replicated: Mapping[int, int] = field(default_factory=dict)
    """Start iteration of the replicated window in each buffer."""
    given_up: Mapping[int, int] = field(default_factory=dict)
    """Start iteration of the window in each buffer whose window at least one peer will never receive."""
    pinned: frozenset[int] = frozenset()
    """Buffers that are being written to storage: they must not be changed or reused."""
    knows_commits: bool = True
    """Whether the server has processed every commit; a commit that is not processed yet may still pin a buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBuffers:
    """Windows in a rank's buffers: at most one committed, one being replicated and one being captured."""

    held: dict[int, int] = field(default_factory=dict)
    """Number of the buffer of each window, by the window's start iteration."""
    committed: int = -1
    """Start iteration of the newest committed window; -1 before the first."""

    def report(self, states: BufferStates) -> WindowReport:
        """Return the report about this rank's windows for the vote, whose result is the input of ``after_vote``."""
        held = sorted(self.held.items())
        # If all buffers are in use, the next window gets the buffer of the oldest window after the next commit.
        spare = self._unheld() or {held[0][1]}
        return WindowReport(
            replicated_windows=_bits(states.replicated.get(buffer) == start for start, buffer in held),
            given_up_windows=_bits(states.given_up.get(buffer) == start for start, buffer in held),
            has_free_buffer=int(states.knows_commits and not spare <= states.pinned),
        )

    def after_vote(self, vote: WindowReport) -> "WindowBuffers":
        """Return the windows after a vote.

        The newest window that every rank has replicated is committed, and older windows are released. A newer window
        that any rank has given up can never be committed and is released as well.
        """
        # Each bit of the vote stands for a held window. Only votes and iterations change the held windows, so every
        # rank has the same ones; their buffers may differ between ranks.
        starts = sorted(self.held)
        replicated = [start for index, start in enumerate(starts) if vote.replicated_windows >> index & 1]
        after = self.after_commit(max(replicated, default=-1))
        for index, start in enumerate(starts):
            # The committed window stays: it is the state that a restart would use.
            if vote.given_up_windows >> index & 1 and start > after.committed:
                after = after.abandon(start)
        return after

    def after_commit(self, committed: int) -> "WindowBuffers":
        """Return the windows after the commit of the window that starts at ``committed``, without older windows."""
        # The committed window is still held, and every later vote reports it again.
        if committed <= self.committed:
            return self
        held = {start: buffer for start, buffer in self.held.items() if start >= committed}
        return WindowBuffers(held=held, committed=committed)

    def free(self, pinned: Set[int] = frozenset()) -> int | None:
        """Return a buffer that contains no held window and is not ``pinned``; None if there is none."""
        return min(self._unheld() - pinned, default=None)

    def begin(self, start_iteration: int, pinned: Set[int] = frozenset()) -> "WindowBuffers":
        """Return the windows with a new window of ``start_iteration`` in a free buffer."""
        buffer = self.free(pinned)
        assert buffer is not None, (
            f"no buffer is free for the window of iteration {start_iteration}; buffer of each window: {self.held}"
        )
        return WindowBuffers(held={**self.held, start_iteration: buffer}, committed=self.committed)

    def abandon(self, start_iteration: int) -> "WindowBuffers":
        """Return the windows without the window of ``start_iteration``, which will not be completed."""
        held = {start: buffer for start, buffer in self.held.items() if start != start_iteration}
        return WindowBuffers(held=held, committed=self.committed)

    def _unheld(self) -> frozenset[int]:
        return frozenset(range(NUM_BUFFERS)) - frozenset(self.held.values())


def _bits(flags: Iterable[bool]) -> int:
    return sum(flag << index for index, flag in enumerate(flags))
