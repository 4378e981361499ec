"""Runs a rank through all memberships of a run, and handles failures and planned changes of nodes."""

import traceback

import torch

from megatron_ft.errors import ConfigError, RankLost, RecoveryError
from megatron_ft.mcore.groups import dissolve_groups
from megatron_ft.mcore.recovery.replicas import drain_experts, reconfigure
from megatron_ft.mcore.state.resolving import position_of
from megatron_ft.mcore.training.trainer import Trainer
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.planning.recovery.target import Position
from megatron_ft.runtime.transport import waits


def run_memberships(trainer: Trainer) -> None:
    """Train to the end of the run, or until this rank leaves permanently. Then release all resources.

    Args:
        trainer: a built trainer, or on a joining rank a trainer that is not built.

    Raises:
        RecoveryError: the ranks that survived a loss do not have all state.
        ControlError: the job ends.
        ConfigError: nodes cannot be lost with this device.
        MegatronFtError: any error of ``Trainer.run``.
    """
    _check(trainer)
    worker = trainer.context.worker
    # ``waits`` needs that all groups use gloo. ``_check`` has made sure of this.
    if worker.can_survive:
        waits.install()
    if trainer.context.is_joining:
        _form(trainer, worker.await_membership())
    else:
        trainer.break_with(trainer.engine.groups.transports.hang_up)
    while True:
        failure = _attempt(trainer)
        if failure is not None:
            following: NextMembership | None = _survive(trainer, failure)
        elif trainer.ended:
            return leave(trainer)
        else:
            following = _planned(trainer)
        if following is None:
            return leave(trainer)
        _form(trainer, following)


def _check(trainer: Trainer) -> None:
    """Raise ConfigError if the job may lose nodes and ranks cannot be lost with this device."""
    if trainer.device.type != "cpu" and trainer.job.may_lose_nodes:
        raise ConfigError(
            f"{trainer.job.why_nodes_change} cannot be used with training.device={trainer.device.type}: in this "
            "version, only jobs on CPUs can lose ranks; set training.device=cpu"
        )


def leave(trainer: Trainer) -> None:
    """Release all resources without communication, because other ranks may have left already."""
    trainer.teardown()
    dissolve_groups()


def _attempt(trainer: Trainer) -> str | None:
    """Train in the current membership. Return the traceback of the error that ended it, or None if it ended as planned.
    The exception itself is not returned, because its frames reference process groups that must be destroyed."""
    try:
        # If any rank has abandoned a save, all ranks save, because saving is collective.
        if trainer.context.generation > 0 and trainer.collectives.any(trainer.is_save_due):
            trainer.save()
            # Reset only here: if ranks are lost before the save has begun, it is still due in the next membership.
            trainer.is_save_due = False
        trainer.run()
    except RuntimeError:  # of a collective or a kernel; errors of this project end the job
        if not trainer.context.worker.can_survive:
            raise
        return traceback.format_exc()
    return None


def _survive(trainer: Trainer, failure: str) -> NextMembership:
    # First, because other ranks may wait for this rank in a collective, and can report positions only after that.
    trainer.hang_up("an iteration failed on this rank")
    try:
        position = position_of(trainer.engine, trainer.context.rank)
    except RecoveryError as error:
        raise RecoveryError(f"{error}:\n{failure}") from None
    return trainer.context.worker.survive(position, failure)


def _planned(trainer: Trainer) -> NextMembership | None:
    # Returns the membership that begins after this iteration because nodes join or leave; None if this rank's node
    # leaves. If a rank is lost meanwhile, returns the membership after that loss.
    worker, failure = trainer.context.worker, None
    try:
        trainer.checkpoints.finish()
        drain_experts(trainer, worker.awaited_change().leaving)
    except RuntimeError:  # of a collective; errors of this project end the job
        failure = traceback.format_exc()
    if failure is not None:
        return _survive(trainer, failure)
    return worker.change(position_of(trainer.engine, trainer.context.rank))


def _form(trainer: Trainer, following: NextMembership) -> None:
    """Continue in the membership ``following``. If ranks are lost while it is formed, continue in the next membership
    that can be formed. Raise RankLost if this process has too little memory, or if an import failed."""
    while True:
        try:
            return reconfigure(trainer, following)
        # As in ``_attempt``, a RuntimeError comes from a collective, unless ``_is_own`` returns true.
        except (RuntimeError, ImportError, MemoryError) as error:
            if not trainer.context.worker.can_survive:
                raise
            if _is_own(error):
                raise RankLost(
                    f"rank {trainer.context.rank} cannot continue in generation {following.generation}: {error!r}"
                ) from error
            # This rank failed before it entered ``following``, while it copied its state, so its state is unusable.
            if trainer.context.generation != following.generation:
                raise
            failure = traceback.format_exc()
        trainer.hang_up("this generation could not be formed")
        # This membership has committed nothing, so the rank is still at the target, and has no vote.
        position = Position(
            rank=trainer.context.rank,
            generation=following.generation,
            completed=following.target.iteration,
            contributed=following.target.iteration,
            vote=None,
            has_state=trainer.membership_start is None or trainer.membership_start.has_state,
        )
        following = trainer.context.worker.survive(position, failure)


def _is_own(error: BaseException) -> bool:
    # Returns whether only this process has caused the error. A failed collective never raises these errors.
    is_refused = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)  # torch on CPUs
    return is_refused or isinstance(error, ImportError | MemoryError)
