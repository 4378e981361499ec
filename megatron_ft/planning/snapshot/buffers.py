"""Which buffer the next window is captured into: the triple buffer's rule, the same on every rank."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from megatron_ft.planning.commit import WindowReport

NUM_BUFFERS = 3
"""Of each rank, in its node's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStates:
    """What the keeper says of a rank's buffers. It may lag behind what the rank has told it."""

    replicated: Mapping[int, int] = field(default_factory=dict)
    """Buffer to the start iteration of the window in it that is replicated."""
    given_up: Mapping[int, int] = field(default_factory=dict)
    """Buffer to the start iteration of the window in it that a peer will never have."""
    pinned: frozenset[int] = frozenset()
    """Buffers that must not change, and may not be given to a window: storage reads them."""
    knows_commits: bool = True
    """Whether the keeper has taken in every commit it was told: one that it has not may pin a buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBuffers:
    """Windows and the buffers that hold them: one committed, one being captured, one being replicated in between."""

    held: dict[int, int] = field(default_factory=dict)
    """Start iteration of each window that is kept, to its buffer."""
    committed: int = -1
    """Start iteration of the newest window that the whole job has replicated; -1 before the first."""

    def report(self, states: BufferStates) -> WindowReport:
        """What this rank says of the windows held; ``after_vote`` reads what all say together."""
        held = sorted(self.held.items())
        # With every buffer held the next window gets that of the oldest one, for a commit lets that go.
        spare = self._unheld() or {held[0][1]}
        return WindowReport(
            replicated_windows=_bits(states.replicated.get(buffer) == start for start, buffer in held),
            given_up_windows=_bits(states.given_up.get(buffer) == start for start, buffer in held),
            has_free_buffer=int(states.knows_commits and not spare <= states.pinned),
        )

    def after_vote(self, vote: WindowReport) -> "WindowBuffers":
        """Once the job knows what every rank reported of the windows held here.

        The newest window that every rank has replicated is committed, and older ones are let go. A newer one that a
        rank has given up will never be committed, and is let go too.
        """
        starts = sorted(self.held)
        replicated = [start for index, start in enumerate(starts) if vote.replicated_windows >> index & 1]
        after = self.after_commit(max(replicated, default=-1))
        for index, start in enumerate(starts):
            if vote.given_up_windows >> index & 1 and start > after.committed:
                after = after.abandon(start)
        return after

    def after_commit(self, committed: int) -> "WindowBuffers":
        """Once the window that started at ``committed`` is the newest committed one: older ones are let go."""
        if committed <= self.committed:
            return self
        held = {start: buffer for start, buffer in self.held.items() if start >= committed}
        return WindowBuffers(held=held, committed=committed)

    def free(self, pinned: Set[int] = frozenset()) -> int | None:
        """A buffer that holds nothing that is needed and is not ``pinned``; None without."""
        return min(self._unheld() - pinned, default=None)

    def begin(self, start_iteration: int, pinned: Set[int] = frozenset()) -> "WindowBuffers":
        """With a new window in the free buffer."""
        buffer = self.free(pinned)
        assert buffer is not None, f"no buffer is free for the window of iteration {start_iteration}: {self.held}"
        return WindowBuffers(held={**self.held, start_iteration: buffer}, committed=self.committed)

    def abandon(self, start_iteration: int) -> "WindowBuffers":
        """Without a window that will not be completed."""
        held = {start: buffer for start, buffer in self.held.items() if start != start_iteration}
        return WindowBuffers(held=held, committed=self.committed)

    def _unheld(self) -> frozenset[int]:
        return frozenset(range(NUM_BUFFERS)) - frozenset(self.held.values())


def _bits(flags: Iterable[bool]) -> int:
    return sum(flag << index for index, flag in enumerate(flags))
