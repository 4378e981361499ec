"""Runs a rank through all memberships of a run, and handles failures and planned changes of nodes."""

import traceback
from collections.abc import Callable

import torch

from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.errors import ConfigError, RankLost, RecoveryError
from megatron_ft.mcore.recovery.replicas import ElasticTrainer
from megatron_ft.mcore.state.rank_status import position_of
from megatron_ft.planning.recovery.membership import NextMembership, Position
from megatron_ft.runtime.transport import abort


class Coordinator:
    """Trains one rank in all memberships of a run.

    Args:
        make_trainer: creates the trainer of the rank from its context.
        context: context of this rank when this process starts.
    """

    def __init__(self, make_trainer: Callable[[RankContext], ElasticTrainer], context: RankContext) -> None:
        self.trainer = make_trainer(context)

    def run(self) -> None:
        """Train to the end of the run, or until this rank leaves permanently. Then release all resources.

        The trainer must already be built, except on a joining rank.

        Raises:
            RecoveryError: after a loss, the remaining ranks together lack a part of the state.
            ControlError: the job ends or restarts its ranks, or the node of this rank does not join.
            ConfigError: the job may lose nodes, but a job on this device cannot continue after a loss.
            MegatronFtError: any error of ``Trainer.run``.
        """
        self._check()
        worker = self.trainer.context.worker
        # ``abort.install`` requires that all groups use gloo. ``_check`` has ensured this.
        if worker.can_survive:
            abort.install()
        if self.trainer.context.is_joining:
            self.trainer.prebuild()
            stays = self._form(worker.await_membership())
        else:
            self.trainer.break_with(self.trainer.engine.groups.transports.hang_up)
            stays = True
        while stays:
            failure = self._attempt()
            if failure is not None:
                following: NextMembership | None = self._survive(failure)
            elif self.trainer.ended:
                break
            else:
                following = self._planned()
            stays = following is not None and self._form(following)
        self.trainer.leave()

    def _check(self) -> None:
        """Raise ConfigError if the job may lose nodes, but a job on this device cannot continue after a loss."""
        if self.trainer.device.type != "cpu" and self.trainer.job.may_lose_nodes:
            why, device = self.trainer.job.why_nodes_change, self.trainer.device.type
            raise ConfigError(
                f"{why} cannot be used with training.device={device}: in this version, only jobs on "
                "CPUs can continue after a rank is lost; set training.device=cpu"
            )

    def _attempt(self) -> str | None:
        """Train in the current membership. Return None if it ended as planned, otherwise the traceback of the error.
        The exception itself is not returned, because its frames reference process groups that must be destroyed."""
        try:
            self.trainer.repeat_abandoned_save()
            self.trainer.run()
        except RuntimeError:  # from a collective or a kernel; errors of this project have other classes and end the job
            if not self.trainer.context.worker.can_survive:
                raise
            return traceback.format_exc()
        return None

    def _survive(self, failure: str) -> NextMembership:
        # Break connections first. Until then, other ranks may wait in a collective, and cannot report positions.
        self.trainer.hang_up("an iteration failed on this rank")
        try:
            position = position_of(self.trainer.engine, self.trainer.context.rank)
        except RecoveryError as error:
            raise RecoveryError(f"{error}:\n{failure}") from None
        return self.trainer.context.worker.survive(position, failure)

    def _planned(self) -> NextMembership | None:
        # Returns the membership that begins after this iteration because nodes join or leave; None if this rank's node
        # leaves. If a rank is lost meanwhile, returns the membership after that loss.
        worker, failure = self.trainer.context.worker, None
        try:
            self.trainer.checkpoints.finish()
            self.trainer.drain_experts(worker.awaited_change().leaving)
        except RuntimeError:  # from a collective; errors of this project have other classes and end the job
            failure = traceback.format_exc()
        if failure is not None:
            return self._survive(failure)
        return worker.change(position_of(self.trainer.engine, self.trainer.context.rank))

    def _form(self, following: NextMembership) -> bool:
        """Form the membership ``following``. If ranks are lost meanwhile, form a later membership without them. Return
        False if this process is a hot spare (has no rank) and its node leaves the job. Raise RankLost if this process
        has too little memory, or if an import failed."""
        context = self.trainer.context
        while True:
            if following.rank_on(context.node, context.local_rank) is None:
                self.trainer.stand_by(following)
                awaited = context.worker.stand_by()
                if awaited is None:
                    return False
                following = awaited
                continue
            try:
                self.trainer.reconfigure(following)
                return True
            # As in ``_attempt``, a RuntimeError comes from a collective, unless ``_is_own`` returns true.
            except (RuntimeError, ImportError, MemoryError) as error:
                if not self.trainer.context.worker.can_survive:
                    raise
                if _is_own(error):
                    rank = self.trainer.context.rank
                    raise RankLost(
                        f"rank {rank} cannot continue in generation {following.generation}: {error!r}"
                    ) from error
                # If this rank failed before it entered ``following``, its state may be incomplete.
                if self.trainer.context.generation != following.generation:
                    raise
                failure = traceback.format_exc()
            self.trainer.hang_up("this generation could not be formed")
            # This membership has committed no iteration. So this rank still has the state after the target's iteration,
            # and knows no vote of this membership.
            beginning = self.trainer.membership_start
            position = Position(
                rank=self.trainer.context.rank,
                generation=following.generation,
                completed=following.target.iteration,
                contributed=following.target.iteration,
                vote=None,
                has_state=beginning is None or beginning.has_state,
                is_formed=beginning is None or beginning.is_formed,
            )
            following = self.trainer.context.worker.survive(position, failure)


def _is_own(error: BaseException) -> bool:
    # Returns whether this process alone has caused the error. Failed collectives never raise such errors.
    is_refused = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)  # torch on CPUs
    return is_refused or isinstance(error, ImportError | MemoryError)
