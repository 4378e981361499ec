"""Ranks whose nodes leave and join by ``testing.membership_schedule``, without faults. Entry point: ``run_rank``.

A job of such ranks is the reference for a job with faults. Ranks stay in their processes and follow the schedule, which
every rank knows. So the controller sees one job without losses. All memberships (sets of ranks that train together)
connect through the store of the first membership, which rank 0 serves until the last membership has formed.
"""

import contextlib
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import MembershipChange, nodes_over_time
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.errors import ConfigError
from megatron_ft.mcore import rank_main
from megatron_ft.planning.recovery.layout import JobLayouts, MembershipLayout
from megatron_ft.planning.recovery.membership import NextMembership, Target
from megatron_ft.planning.state.declined import Declined

if TYPE_CHECKING:
    from megatron_ft.mcore.training.trainer import Trainer

_BEGINS, _FORMED, _NEVER = "begins", "formed", "never"
_ONE_WAIT = timedelta(hours=1)
"""Timeout of one wait for a key of torch's store. The wait is repeated until the key exists."""


def run_rank(config: JobConfig, context: RankContext) -> bool:
    """Train as rank ``context.rank`` of the job, through all memberships of ``testing.membership_schedule``. Return
    whether the run is complete.

    Raises:
        MegatronFtError: the rank failed. The process ends with the ``exit_code`` of the error.
    """
    device, transformer_impl = rank_main.prepare(config, context)
    # Importing the trainer imports Megatron, so the device must be prepared first.
    from megatron_ft.testing.scheduled_trainer import ScheduledTrainer, run_schedule

    trainer = ScheduledTrainer(config, context, device=device, transformer_impl=transformer_impl)
    schedule = MembershipSchedule(config, context, trainer.join_job())
    _check(trainer, schedule)
    is_complete = run_schedule(trainer, schedule)
    rank_main.report_unfired(context)
    return is_complete


def _check(trainer: "Trainer", schedule: "MembershipSchedule") -> None:
    key, texts = "testing.membership_schedule", trainer.job.testing.membership_schedule
    iteration = trainer.engine.iteration
    if trainer.device.type != "cpu":
        reason = f"must be empty with training.device={trainer.device.type}: only ranks on gloo (CPU) can leave"
        raise ConfigError.of(key, texts, reason)
    if schedule.next is not None and schedule.next.target.iteration < iteration:
        reason = f"all changes must be after iteration {iteration}, from which the run continues with all nodes"
        raise ConfigError.of(key, texts, reason)


def scheduled_memberships(changes: Sequence[MembershipChange], layouts: JobLayouts) -> tuple[NextMembership, ...]:
    """List the memberships that ``changes`` make after the first one, which has all nodes. None has a master address.

    Raises:
        ConfigError: a change leaves too few nodes for the layout.
    """
    nodes = list(nodes_over_time(layouts.num_nodes, changes))
    found = []
    for members, layout in zip(nodes, layouts.history(nodes[1:]), strict=True):
        if isinstance(layout, Declined):
            raise ConfigError.of(
                "testing.membership_schedule", f"nodes {list(members)}", f"must be enough to continue: {layout.reason}"
            )
        found.append(layout)
    return tuple(
        _following(generation, change, found[generation - 1], found[generation])
        for generation, change in enumerate(changes, 1)
    )


def _following(
    generation: int, change: MembershipChange, before: MembershipLayout, after: MembershipLayout
) -> NextMembership:
    # A node that is lost and joins in one change comes back without state: it counts as joining.
    staying = set(before.nodes) - set(change.lose)
    following = NextMembership(
        generation=generation,
        previous_ranks=tuple(
            before.rank_of(process) if node in staying else None
            for process, node in zip(after.processes, after.rank_nodes, strict=True)
        ),
        nodes=after.rank_nodes,
        local_ranks=after.local_ranks,
        members=after.nodes,
        target=Target(iteration=change.before_iteration - 1, vote=None),
        master_addr="",
        master_port=0,
        reason=f"scheduled: {change.summary()}",
    )
    following.validate()
    return following


class MembershipSchedule:
    """The scheduled memberships that follow the first membership (generation 0).

    Args:
        context: context of this rank in the first membership.
        store: torch's store of the first membership. It stays open as long as this object exists.
    """

    def __init__(self, job: JobConfig, context: RankContext, store: dist.Store) -> None:
        changes = [MembershipChange.parse(text) for text in job.testing.membership_schedule]
        self._ahead = deque(scheduled_memberships(changes, JobLayouts.of(job)))
        self._context = context
        self._newest: NextMembership | None = None
        self.store: dist.Store = dist.PrefixStore("history", store)
        """Store in which ranks of all memberships record which memberships have begun and which have formed."""

    @property
    def next(self) -> NextMembership | None:
        """The membership after the present membership. None if no other membership follows."""
        return self._ahead[0] if self._ahead else None

    def begin(self) -> NextMembership:
        """Record in the store that the next membership begins. Return the next membership."""
        self._newest = following = self._ahead.popleft()
        self._publish(_BEGINS, following)
        return following

    def formed(self) -> None:
        """Record in the store that the ranks of the newest membership have formed their process groups."""
        if self._newest is not None:
            self._publish(_FORMED, self._newest)

    def end(self) -> None:
        """Record in the store that the run ends in the present membership. This ends ``await_own`` on other ranks."""
        for following in self._ahead:
            self._publish(_BEGINS, following, _NEVER)
        self._ahead.clear()

    def await_own(self) -> NextMembership | None:
        """Wait for the next membership that contains this process's node, and return it. Return None if no later
        membership contains the node, or if the run ends before such a membership.

        The process that serves the store returns None only after the last membership has formed.
        """
        while self._ahead:
            if not self._serves and not any(map(self._is_member, self._ahead)):
                return None
            if self._receive(_BEGINS, self._ahead[0]) == _NEVER:
                return None
            self._newest = self._ahead.popleft()
            if self._is_member(self._newest):
                return self._newest
        if self._serves and self._newest is not None:
            self._receive(_FORMED, self._newest)
        return None

    @property
    def _serves(self) -> bool:
        return self._context.rank == 0

    def _is_member(self, membership: NextMembership) -> bool:
        return self._context.node in membership.members

    def _publish(self, what: str, membership: NextMembership, value: str = "") -> None:
        # Every rank sets the same value, so the first call is enough to end the waits of other ranks.
        self.store.set(_key(what, membership), value)

    def _receive(self, what: str, membership: NextMembership) -> str:
        key = _key(what, membership)
        while True:
            with contextlib.suppress(dist.DistStoreError):  # not yet
                self.store.wait([key], _ONE_WAIT)
                return self.store.get(key).decode()


def _key(what: str, membership: NextMembership) -> str:
    return f"{what}-{membership.generation}"
