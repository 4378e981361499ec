"""A membership schedule in one process: the next membership, and the wait of a rank for the one in which it joins.

All ranks meet at the store of generation 0, in the process of the job's first rank, which lives until the last
membership has begun.
"""

import contextlib
from collections import deque
from datetime import timedelta

import torch.distributed as dist

from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership_schedule import parse_membership_change
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.planning.recovery.scripted import scripted_memberships

_BEGINS, _FORMED, _NEVER = "begins", "formed", "never"
_ONE_WAIT = timedelta(hours=1)
"""Length of one wait; waits are repeated until there is an answer."""


class ScriptedHistory:
    """The memberships after generation 0; empty without a schedule.

    Args:
        context: of this rank in generation 0.
        store: of generation 0; this object keeps it alive. None on a rank that joins later.
    """

    def __init__(self, job: JobConfig, context: RankContext, store: dist.Store | None) -> None:
        changes = [parse_membership_change(text) for text in job.testing.membership_schedule]
        ahead = scripted_memberships(changes, job.launch.num_nodes, job.launch.ranks_per_node)
        self._ahead = deque(ahead)
        self._context = context
        self._newest: NextMembership | None = None
        self.store: dist.Store | None = dist.PrefixStore("history", store) if ahead and store is not None else None
        """Store where all memberships meet; None without a schedule."""

    @property
    def next(self) -> NextMembership | None:
        """Return the membership after the present one, if any."""
        return self._ahead[0] if self._ahead else None

    def begin(self) -> NextMembership:
        """Announce that all ranks of the present membership have reached the boundary before the next one; return that
        one."""
        self._newest = following = self._ahead.popleft()
        self._say(_BEGINS, following)
        return following

    def formed(self) -> None:
        """Record that the membership is formed."""
        if self._newest is not None:
            self._say(_FORMED, self._newest)

    def end(self) -> None:
        """End the run in the present membership, also for ranks that wait for a later one."""
        for following in self._ahead:
            self._say(_BEGINS, following, _NEVER)
        self._ahead.clear()

    def await_own(self) -> NextMembership | None:
        """Wait, however long, for the next membership that includes this process; None if there is none. The process
        with the store waits until the last membership is formed."""
        while self._ahead:
            if not self._serves and not any(map(self._is_of, self._ahead)):
                return None
            if self._heard(_BEGINS, self._ahead[0]) == _NEVER:
                return None
            self._newest = self._ahead.popleft()
            if self._is_of(self._newest):
                return self._newest
        if self._serves and self._newest is not None:
            self._heard(_FORMED, self._newest)
        return None

    @property
    def _serves(self) -> bool:
        return self._context.rank == 0

    def _is_of(self, membership: NextMembership) -> bool:
        return membership.rank_on(self._context.node, self._context.local_rank) is not None

    def _say(self, what: str, membership: NextMembership, word: str = "") -> None:
        # Every rank sets the same value: the first one wakes those that wait.
        if self.store is not None:
            self.store.set(_key(what, membership), word)

    def _heard(self, what: str, membership: NextMembership) -> str:
        assert self.store is not None, "no store: the schedule has no membership to wait for"
        key = _key(what, membership)
        while True:
            with contextlib.suppress(dist.DistStoreError):  # not yet
                self.store.wait([key], _ONE_WAIT)
                return self.store.get(key).decode()


def _key(what: str, membership: NextMembership) -> str:
    return f"{what}-{membership.generation}"
