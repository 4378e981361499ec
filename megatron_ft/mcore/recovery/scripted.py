"""Carries out the membership changes that ``testing.membership_schedule`` lists, without a controller.

All ranks use the store of generation 0 to announce memberships and to wait for them. The store is in the process of the
job's rank 0, which runs until the last membership is formed.
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
"""Time limit of one wait. Waits are repeated without limit."""


class ScriptedHistory:
    """The scheduled memberships after generation 0. Without a schedule, there are none.

    Args:
        context: context of this rank in generation 0.
        store: store of generation 0, which this object keeps open. None on a rank that joins later.
    """

    def __init__(self, job: JobConfig, context: RankContext, store: dist.Store | None) -> None:
        changes = [parse_membership_change(text) for text in job.testing.membership_schedule]
        ahead = scripted_memberships(changes, job.launch.num_nodes, job.launch.ranks_per_node)
        self._ahead = deque(ahead)
        self._context = context
        self._newest: NextMembership | None = None
        self.store: dist.Store | None = dist.PrefixStore("history", store) if ahead and store is not None else None
        """Store that all memberships use; None without a schedule."""

    @property
    def next(self) -> NextMembership | None:
        """The scheduled membership after the current one; None if there is none."""
        return self._ahead[0] if self._ahead else None

    def begin(self) -> NextMembership:
        """Announce the next membership, after all ranks have finished the last iteration of the current one. Return
        it."""
        self._newest = following = self._ahead.popleft()
        self._say(_BEGINS, following)
        return following

    def formed(self) -> None:
        """Announce that the current membership is formed."""
        if self._newest is not None:
            self._say(_FORMED, self._newest)

    def end(self) -> None:
        """Announce that the run ends in the current membership, so that no rank waits for a later one."""
        for following in self._ahead:
            self._say(_BEGINS, following, _NEVER)
        self._ahead.clear()

    def await_own(self) -> NextMembership | None:
        """Wait without limit for the next membership that includes this process, and return it. Return None if there is
        none. Before that, the process with the store waits until the last membership is formed."""
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
        # All ranks set the same value. The first one ends the waits of other ranks.
        if self.store is not None:
            self.store.set(_key(what, membership), word)

    def _heard(self, what: str, membership: NextMembership) -> str:
        assert self.store is not None, "there is no store, because no membership is scheduled"
        key = _key(what, membership)
        while True:
            with contextlib.suppress(dist.DistStoreError):  # the wait has reached its time limit
                self.store.wait([key], _ONE_WAIT)
                return self.store.get(key).decode()


def _key(what: str, membership: NextMembership) -> str:
    return f"{what}-{membership.generation}"
