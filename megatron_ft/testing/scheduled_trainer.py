"""The training loop of ranks that change memberships by a schedule. Importing this module imports Megatron."""

from megatron_ft.mcore.recovery.replicas import ElasticTrainer
from megatron_ft.testing.scheduled_ranks import MembershipSchedule


class ScheduledTrainer(ElasticTrainer):
    """A trainer that also returns before the first iteration of the next scheduled membership."""

    before: int | None = None

    def membership_ends(self) -> bool:
        """Whether the next iteration belongs to another membership."""
        return self.engine.iteration + 1 == self.before or super().membership_ends()


def run_schedule(trainer: ScheduledTrainer, schedule: MembershipSchedule) -> None:
    """Train to the end of the run, or until this rank leaves permanently. Then release all resources."""
    trainer.break_with(trainer.engine.groups.transports.hang_up)
    while True:
        following = schedule.next
        trainer.before = None if following is None else following.target.iteration + 1
        trainer.run()
        if trainer.ended:
            schedule.end()
            return trainer.leave()
        # Before ranks leave: each has its share of the files to write.
        trainer.checkpoints.finish()
        following = schedule.begin()
        if following.new_rank(trainer.context.rank) is None:
            trainer.leave()
            if following.rank_on(trainer.context.node, trainer.context.local_rank) is None:
                following = schedule.await_own()
            if following is None:
                return None
            trainer = _without_state(trainer)
        trainer.reconfigure(following, store=schedule.store)
        schedule.formed()


def _without_state(trainer: ScheduledTrainer) -> ScheduledTrainer:
    impl = trainer.engine.transformer_impl
    return ScheduledTrainer(trainer.job, trainer.context, device=trainer.device, transformer_impl=impl)
