"""A scripted history in one process: which membership is next, and how a rank waits for one that it joins later.

All ranks meet at the store of generation 0, which lives in the process of the job's first rank for as long as a
membership is still to begin.
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
"""Waits are repeated until there is an answer."""


class ScriptedHistory:
    """The memberships that follow generation 0; empty where nothing is scripted.

    Args:
        context: of this rank in generation 0.
        store: of generation 0; this object keeps it alive. None of a rank that comes later.
    """

    def __init__(self, job: JobConfig, context: RankContext, store: dist.Store | None) -> None:
        changes = [parse_membership_change(text) for text in job.launch.membership_schedule]
        ahead = scripted_memberships(changes, job.launch.num_nodes, job.launch.ranks_per_node)
        self._ahead = deque(ahead)
        self._context = context
        self._newest: NextMembership | None = None
        self.store: dist.Store | None = dist.PrefixStore("history", store) if ahead and store is not None else None
        """Store where all memberships meet; None without a script."""

    @property
    def next(self) -> NextMembership | None:
        """The membership after the one there is, if any."""
        return self._ahead[0] if self._ahead else None

    def begin(self) -> NextMembership:
        """The boundary before the next membership is reached: all ranks of the one there is say so."""
        self._newest = following = self._ahead.popleft()
        self._say(_BEGINS, following)
        return following

    def formed(self) -> None:
        """All ranks of the membership have joined each other."""
        if self._newest is not None:
            self._say(_FORMED, self._newest)

    def end(self) -> None:
        """End the run in the present membership: a rank that waits for a later one will not get it."""
        for following in self._ahead:
            self._say(_BEGINS, following, _NEVER)
        self._ahead.clear()

    def await_own(self) -> NextMembership | None:
        """Wait, however long, for the next membership that this process is of; None where none ever comes.

        The process that has the store waits until the last one has formed.
        """
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
        assert self.store is not None, "there are memberships to wait for"
        key = _key(what, membership)
        while True:
            with contextlib.suppress(dist.DistStoreError):  # not yet
                self.store.wait([key], _ONE_WAIT)
                return self.store.get(key).decode()


def _key(what: str, membership: NextMembership) -> str:
    return f"{what}-{membership.generation}"
