"""Trains through all memberships of a run: waits for the next one, reconfigures, drains leaving nodes."""

import traceback

import torch

from megatron_ft.errors import ConfigError, RankLost, RecoveryError
from megatron_ft.mcore.groups import dissolve_groups
from megatron_ft.mcore.recovery.replicas import drain_experts, reconfigure
from megatron_ft.mcore.recovery.scripted import ScriptedHistory
from megatron_ft.mcore.state.resolving import position_of
from megatron_ft.mcore.training.trainer import Trainer
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.planning.recovery.target import Position
from megatron_ft.runtime.transport import waits


def run_memberships(trainer: Trainer, history: ScriptedHistory) -> None:
    """Train to the end of the run, or until this rank leaves permanently; then release all resources.

    Args:
        trainer: built; that of a joining rank is not, and waits for its first membership.

    Raises:
        MegatronFtError: as ``Trainer.run``. RecoveryError: the survivors of a loss lack state. ControlError: the job
            ends. ConfigError: this run cannot lose nodes.
    """
    _check(trainer, history)
    worker = trainer.context.worker
    # All groups of such a job use gloo: ``_check`` has refused other devices.
    if worker.can_survive:
        waits.install()
    if trainer.context.is_joining:
        _form(trainer, worker.await_membership(), history)
    else:
        trainer.break_with(trainer.engine.groups.transports.hang_up)
    while True:
        scripted = history.next
        failure = _attempt(trainer, None if scripted is None else scripted.target.iteration + 1)
        if failure is not None:
            following: NextMembership | None = _survive(trainer, failure)
        elif trainer.ended:
            history.end()
            return _leave(trainer)
        elif scripted is None:
            following = _planned(trainer)
        else:
            # Before ranks leave: each has its share of the files to write.
            trainer.checkpoints.finish()
            following = history.begin()
        if following is None:
            return _leave(trainer)
        if scripted is not None and following.new_rank(trainer.context.rank) is None:
            _leave(trainer)
            if following.rank_on(trainer.context.node, trainer.context.local_rank) is None:
                following = history.await_own()
            if following is None:
                return None
            trainer = trainer.anew()
        _form(trainer, following, history)


def _check(trainer: Trainer, history: ScriptedHistory) -> None:
    """Refuse an impossible schedule, or a device on which ranks cannot be lost.

    Raises:
        ConfigError: a scheduled change is in the past, or connections of this device cannot be broken.
    """
    job, iteration = trainer.job, trainer.engine.iteration
    schedule = job.testing.membership_schedule
    if trainer.device.type != "cpu" and (job.may_lose_nodes or schedule):
        why = job.why_nodes_change or f"testing.membership_schedule={schedule}"
        raise ConfigError(
            f"{why}: must not be set with training.device={trainer.device.type}: only ranks on gloo (CPU) can be "
            "lost in this version"
        )
    if history.next is not None and history.next.target.iteration < iteration:
        reason = f"must begin after iteration {iteration}, from which the run continues with all nodes"
        raise ConfigError.of("testing.membership_schedule", schedule, reason)


def _leave(trainer: Trainer) -> None:
    # Release all resources; other ranks may have left already.
    trainer.teardown()
    dissolve_groups()


def _attempt(trainer: Trainer, before: int | None) -> str | None:
    """Train in the present membership; return the traceback of the error that broke it.

    The exception itself is not kept, because its frames refer to process groups that must be destroyed.
    """
    try:
        # One rank that has abandoned a save is enough: saving is collective.
        if trainer.context.generation > 0 and trainer.collectives.any(trainer.is_save_due):
            trainer.save()
            # Only now: where ranks are lost before the save has begun, it is due in the next membership. One that has
            # begun is abandoned like any other.
            trainer.is_save_due = False
        trainer.run(before=before)
    except RuntimeError:  # of a collective, of a kernel: errors of this project's own are meant for everybody
        if not trainer.context.worker.can_survive:
            raise
        return traceback.format_exc()
    return None


def _survive(trainer: Trainer, failure: str) -> NextMembership:
    # First: others may wait for this rank in a collective, and report their positions only once they have left it.
    trainer.hang_up("an iteration failed on this rank")
    try:
        position = position_of(trainer.engine, trainer.context.rank)
    except RecoveryError as error:
        raise RecoveryError(f"{error}:\n{failure}") from None
    return trainer.context.worker.survive(position, failure)


def _planned(trainer: Trainer) -> NextMembership | None:
    # Return the membership that begins at this boundary because nodes join or leave; None if this rank's node leaves.
    # If a rank dies meanwhile, return the membership after that loss.
    worker, failure = trainer.context.worker, None
    try:
        trainer.checkpoints.finish()
        drain_experts(trainer, worker.awaited_change().leaving)
    except RuntimeError:  # of a collective: errors of this project's own are meant for everybody
        failure = traceback.format_exc()
    if failure is not None:
        return _survive(trainer, failure)
    return worker.change(position_of(trainer.engine, trainer.context.rank))


def _form(trainer: Trainer, following: NextMembership, history: ScriptedHistory) -> None:
    """Continue in ``following``, or, if ranks are lost while it is formed, in the first later membership that can be
    formed.

    Raises:
        RankLost: this process lacks memory, or an import failed; the others can continue without it.
    """
    while True:
        try:
            reconfigure(trainer, following, store=history.store)
            history.formed()
            return
        # A RuntimeError is a collective's, as in ``_attempt``, unless ``_is_own``.
        except (RuntimeError, ImportError, MemoryError) as error:
            if not trainer.context.worker.can_survive:
                raise
            if _is_own(error):
                raise RankLost(f"this rank cannot join generation {following.generation}: {error!r}") from error
            # It failed while it took out its state, before it entered ``following``: it has nothing sound to continue.
            if trainer.context.generation != following.generation:
                raise
            failure = traceback.format_exc()
        trainer.hang_up("this generation could not be formed")
        # Nothing was committed in this membership: the rank is where it began, without a vote of its own.
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
    # Whether an error is caused by this process alone; a broken collective never raises it.
    is_refused = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)  # torch's, on CPUs
    return is_refused or isinstance(error, ImportError | MemoryError)
