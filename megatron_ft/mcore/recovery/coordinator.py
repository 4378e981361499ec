"""Trains through as many memberships as a run has: ranks are lost, leave and join, asked for or by a schedule."""

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
    """Train to the end of the run, or until this rank leaves permanently; then release everything.

    Args:
        trainer: built, or that of a joining rank, which waits for its first membership.

    Raises:
        MegatronFtError: what ``Trainer.run`` raises; RecoveryError where the survivors of a loss lack state;
            ControlError where the job ends; ConfigError where this run cannot lose nodes.
    """
    _check(trainer, history)
    worker, owes_save = trainer.context.worker, False
    # All groups of such a job use gloo: ``_check`` has refused other devices.
    if worker.can_survive:
        waits.install()
    if trainer.context.is_joining:
        owes_save = _form(trainer, worker.await_membership(), history)
    else:
        trainer.break_with(trainer.engine.groups.transports.hang_up)
    while True:
        scripted = history.next
        failure = _attempt(trainer, None if scripted is None else scripted.target.iteration + 1, owes_save=owes_save)
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
        owes_save = _form(trainer, following, history)


def _check(trainer: Trainer, history: ScriptedHistory) -> None:
    """Refuse a schedule or a device that cannot work.

    Raises:
        ConfigError: a change should have come already, or connections of this device cannot be broken.
    """
    launch, iteration = trainer.job.launch, trainer.engine.iteration
    if trainer.device.type != "cpu" and (launch.may_lose_nodes or launch.membership_schedule):
        why = launch.why_nodes_change or f"launch.membership_schedule={launch.membership_schedule}"
        raise ConfigError(f"{why}: must be left out on {trainer.device.type}: only gloo's ranks can be lost yet")
    if history.next is not None and history.next.target.iteration < iteration:
        reason = f"must begin after iteration {iteration}, which the run continues from with all nodes"
        raise ConfigError.of("launch.membership_schedule", launch.membership_schedule, reason)


def _leave(trainer: Trainer) -> None:
    """Release the run; other ranks may have left already."""
    trainer.teardown()
    dissolve_groups()


def _attempt(trainer: Trainer, before: int | None, *, owes_save: bool) -> str | None:
    """Train in the membership there is; the traceback of what broke it.

    Nothing of the exception is kept: its frames hold process groups, which are to be dissolved.

    Args:
        owes_save: a save was given up here when the membership before ended; one is made of the present state.
    """
    try:
        # One rank that has given a save up is enough: saving is collective.
        if trainer.context.generation > 0 and trainer.collectives.any(owes_save):
            trainer.save()
        trainer.run(before=before)
    except RuntimeError:  # of a collective, of a kernel: errors of this project's own are meant for everybody
        if not trainer.context.worker.can_survive:
            raise
        return traceback.format_exc()
    return None


def _survive(trainer: Trainer, failure: str) -> NextMembership:
    # First: others may wait for this rank in a collective, and report their positions only once they have left it.
    trainer.hang_up("this rank's iteration failed")
    try:
        position = position_of(trainer.engine, trainer.context.rank)
    except RecoveryError as error:
        raise RecoveryError(f"{error}:\n{failure}") from None
    return trainer.context.worker.survive(position, failure)


def _planned(trainer: Trainer) -> NextMembership | None:
    """The membership that begins at this boundary because nodes join or leave; None where this rank's node leaves.

    A death on the way makes it what begins after a loss.
    """
    worker, failure = trainer.context.worker, None
    try:
        trainer.checkpoints.finish()
        drain_experts(trainer, worker.awaited_change().leaving)
    except RuntimeError:  # of a collective: errors of this project's own are meant for everybody
        failure = traceback.format_exc()
    if failure is not None:
        return _survive(trainer, failure)
    return worker.change(position_of(trainer.engine, trainer.context.rank))


def _form(trainer: Trainer, following: NextMembership, history: ScriptedHistory) -> bool:
    """Continue in ``following``, or in the first after it that forms: ranks may be lost while they join each other.

    Returns:
        Whether a save has been given up.

    Raises:
        RankLost: this process lacks memory, or something that it imports; the others can continue without it.
    """
    while True:
        try:
            owes_save = reconfigure(trainer, following, store=history.store)
            history.formed()
            return owes_save
        # A RuntimeError is a collective's, as in ``_attempt``, unless ``_is_own``.
        except (RuntimeError, ImportError, MemoryError) as error:
            if not trainer.context.worker.can_survive:
                raise
            if _is_own(error):
                raise RankLost(f"this rank cannot form generation {following.generation}: {error!r}") from error
            # It failed while it took out its state, before it entered ``following``: it has nothing sound to continue.
            if trainer.context.generation != following.generation:
                raise
            failure = traceback.format_exc()
        trainer.hang_up("this membership did not form")
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
    """Whether an error comes of this process alone: no broken collective raises it."""
    is_refused = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)  # torch's, on CPUs
    return is_refused or isinstance(error, ImportError | MemoryError)
