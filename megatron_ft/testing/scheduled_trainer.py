"""Training loop of ranks whose nodes leave and join by ``testing.membership_schedule``. Imports Megatron."""

from megatron_ft.mcore.recovery.replicas import ElasticTrainer
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.testing.scheduled_ranks import MembershipSchedule


class ScheduledTrainer(ElasticTrainer):
    """A trainer whose method ``run`` returns when the next scheduled membership begins, and at the end of the run."""

    before: int | None = None

    def membership_ends(self) -> bool:
        """Return whether the next iteration belongs to the next membership."""
        return self.engine.iteration + 1 == self.before or super().membership_ends()


def run_schedule(trainer: ScheduledTrainer, schedule: MembershipSchedule) -> bool:
    """Train until the job ends, or no later membership contains this rank. Then release all resources. Return whether
    the run is complete."""
    trainer.break_with(trainer.engine.groups.transports.hang_up)
    while True:
        following = schedule.next
        trainer.before = None if following is None else following.target.iteration + 1
        trainer.run()
        if trainer.ended:
            schedule.end()
            trainer.leave()
            return trainer.is_complete
        # Each rank writes a part of the checkpoint files, so the files must be complete before a rank leaves.
        trainer.checkpoints.finish()
        own = _enter(trainer, schedule, schedule.begin())
        if own is None:
            return False
        trainer, following = own
        trainer.reconfigure(following, store=schedule.store)
        schedule.formed()


def _enter(
    trainer: ScheduledTrainer, schedule: MembershipSchedule, beginning: NextMembership
) -> tuple[ScheduledTrainer, NextMembership] | None:
    """Wait for a membership in which this process has a rank. ``beginning`` is the first membership to check.

    Returns:
        A trainer and the membership, or None if no such membership follows. The trainer has no state if the node of
        this process has left or was lost meanwhile.
    """
    following: NextMembership | None = beginning
    node, local_rank = trainer.context.node, trainer.context.local_rank
    is_spare = False
    while following is not None:
        rank = following.rank_on(node, local_rank)
        if rank is not None and not is_spare and following.previous_ranks[rank] is None:
            trainer.leave()
            trainer = _without_state(trainer)
        if rank is not None:
            return trainer, following
        is_spare = node in following.members
        if is_spare:
            trainer.stand_by(following)
        else:
            trainer.leave()
            trainer = _without_state(trainer)
        following = schedule.await_own()
    if is_spare:
        trainer.leave()
    return None


def _without_state(trainer: ScheduledTrainer) -> ScheduledTrainer:
    impl = trainer.engine.transformer_impl
    return ScheduledTrainer(trainer.job, trainer.context, device=trainer.device, transformer_impl=impl)
